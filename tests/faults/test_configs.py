"""Configs with a mistake of every kind: refused before any work, with the key, the value and what is allowed."""

import copy
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from demix.config.config import Config
from demix.errors import DemixError
from demix.run.check import completed_run, load_run
from demix.settings import resolved, schema_of
from support.breaking import Note
from support.disturbed import REPOSITORY, TINY, printed, snakemake

Place = tuple[str, ...]
Mutation = tuple[dict, str, str, str]
BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


def given() -> dict:
    """A completed config with every section and source option that has a default."""
    return load_run(REPOSITORY / "config" / "sample.yaml").config.values


def leaves(part: dict, schema: dict, config: dict, place: Place = ()) -> list[tuple[Place, dict]]:
    """Every key of `config` that the schema names, with the schema's part for it."""
    found = []
    for name, child in part.get("properties", {}).items():
        if name not in config:
            continue
        child = resolved(schema, child)
        # What may be null too.
        choices = [choice for choice in child.get("anyOf", ()) if choice.get("type") != "null"]
        if len(choices) == 1 and choices[0].get("type") in ("integer", "number"):
            (child,) = choices
        found.append(((*place, name), child))
        if isinstance(config[name], dict):
            found += leaves(child, schema, config[name], (*place, name))
            if isinstance(more := child.get("additionalProperties"), dict) and "$ref" in more:
                domain = resolved(schema, more)
                for key, value in list(config[name].items())[:2]:
                    if isinstance(value, dict):
                        found += leaves(domain, schema, value, (*place, name, key))
    return found


def put(config: dict, place: Place, value: object) -> dict:
    config = copy.deepcopy(config)
    inside = config
    for name in place[:-1]:
        inside = inside[name]
    inside[place[-1]] = value
    return config


def unknown_key(chance: random.Random) -> Mutation:
    config, schema = given(), schema_of(Config)
    place, _ = chance.choice([leaf for leaf in leaves(schema, schema, config) if len(leaf[0][-1]) > 5])
    *above, name = place
    at = chance.randrange(1, len(name) - 1)
    wrong = chance.choice([name[:at] + name[at + 1 :], name[:at] + name[at] + name[at:], name + "s"])
    inside = config
    for key in above:
        inside = inside[key]
    inside[wrong] = inside.pop(name)
    return config, ".".join([*above, wrong]), "is not known", f"did you mean {name}?"


def wrong_type(chance: random.Random) -> Mutation:
    config, schema = given(), schema_of(Config)
    typed = [leaf for leaf in leaves(schema, schema, config) if isinstance(leaf[1].get("type"), str)]
    place, part = chance.choice(typed)
    wrong = chance.choice({
        "integer": ["ten", 1.5, True, [1]], "number": ["1e-3", [0.1], True, {}], "string": [7, ["a"], {}, True],
        "boolean": ["yes", 1, []], "array": ["a", 3, {}], "object": [[], "a", 3],
    }[part["type"]])  # fmt: skip
    return put(config, place, wrong), ".".join(place), f"is {wrong!r}", "allowed is"


def out_of_range(chance: random.Random) -> Mutation:
    config, schema = given(), schema_of(Config)
    bounded = [leaf for leaf in leaves(schema, schema, config) if "enum" in leaf[1] or set(BOUNDS) & leaf[1].keys()]
    place, part = chance.choice(bounded)
    if "enum" in part:
        wrong = "of no kind"
    else:
        bound = chance.choice([name for name in BOUNDS if name in part])
        wrong = part[bound] + (-1 if "inimum" in bound else 1)
    return put(config, place, wrong), ".".join(place), f"is {wrong!r}", "allowed is"


def in_both_lists(chance: random.Random) -> Mutation:
    config = given()
    name = chance.choice(list(config["domains"]["training"]))
    config["domains"]["novel"][name] = config["domains"]["training"][name]
    return config, f"domains.novel.{name}", "is a training domain too", "name the domain in one list only"


def negative_budget(chance: random.Random) -> Mutation:
    config = given()
    kind = chance.choice(["training", "novel"])
    place = ("domains", kind, chance.choice(list(config["domains"][kind])), "words", chance.choice(["dev", "test"]))
    wrong = -chance.randrange(1, 10**6)
    return put(config, place, wrong), ".".join(place), f"is {wrong}", "allowed is integer ≥ 1"


MUTATIONS = (unknown_key, wrong_type, out_of_range, in_both_lists, negative_budget)


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_mutated_configs_are_refused(
    mutate: Callable[[random.Random], Mutation],
    times: Callable[[int, int], int],
    chance: random.Random,
    note: Note,
) -> None:
    for _ in range(times(6, 20)):
        config, key, cause, cure = mutate(chance)
        with (
            note.timed(f"config: {mutate.__name__.replace('_', ' ')}", "refused: key, value, what is allowed"),
            pytest.raises(DemixError) as error,
        ):
            completed_run(config)
        assert error.value.subject == f"config key {key}"
        assert cause in error.value.cause
        assert cure in error.value.cure
        # "allowed is" alone would say nothing.
        assert re.fullmatch(r".*[a-z0-9?)].*", error.value.cure.removeprefix("allowed is "))


@pytest.mark.faults
@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_snakemake_does_nothing_with_a_mutated_config(
    mutate: Callable[[random.Random], Mutation], tmp_path: Path, chance: random.Random, note: Note
) -> None:
    config, key, cause, cure = mutate(chance)
    assert set(config) >= set(TINY) - {"removal"}
    with note.timed(f"config, by snakemake: {mutate.__name__.replace('_', ' ')}", "refused, nothing made"):
        assert snakemake(tmp_path, config, profile="default").wait() == 1
    shown = " ".join(printed(tmp_path).split())
    assert f"config key {key}: {cause}" in shown
    assert cure in shown
    assert not (tmp_path / "results").exists()
