"""Every key of a config with a wrong value of every kind: refused before any work, by the key."""

import copy
import random
from collections.abc import Callable, Iterator

import pytest

from demix.config.config import Config
from demix.run.check import completed_run, load_run
from demix.settings import resolved
from support.dry_run import REPOSITORY
from support.errors import refused

Keys = tuple[str, ...]
BOUNDS = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}
WRONG = {
    "integer": ["ten", 1.5, True, [1]],
    "number": ["a tenth", [0.1], True, {}],
    "string": [7, ["a"], {}, True],
    "boolean": ["yes", 1, []],
    "array": ["a", 3, {}],
    "object": [[], "a", 3],
}


@pytest.fixture(scope="module")
def config() -> dict:
    """A completed config with every section and source option that has a default."""
    return load_run(REPOSITORY / "config" / "sample.yaml").config.values


def leaves(part: dict, schema: dict, config: dict, place: Keys = ()) -> Iterator[tuple[Keys, dict]]:
    """Every key of `config` that the schema names, with the schema's part for it."""
    for name, child in part.get("properties", {}).items():
        if name not in config:
            continue
        child = resolved(schema, child)
        # What may be null too.
        choices = [choice for choice in child.get("anyOf", ()) if choice.get("type") != "null"]
        if len(choices) == 1 and choices[0].get("type") in ("integer", "number"):
            (child,) = choices
        yield (*place, name), child
        if isinstance(config[name], dict):
            yield from leaves(child, schema, config[name], (*place, name))
            if isinstance(more := child.get("additionalProperties"), dict) and "$ref" in more:
                domain = resolved(schema, more)
                for key, value in list(config[name].items())[:2]:
                    if isinstance(value, dict):
                        yield from leaves(domain, schema, value, (*place, name, key))


def wrong_values(config: dict) -> Iterator[tuple[Keys, object]]:
    """Every key with every value that its schema does not allow: of another type, beyond a bound, of no kind."""
    schema = Config.model_json_schema()
    for place, part in leaves(schema, schema, config):
        yield from ((place, value) for value in WRONG.get(part.get("type"), ()))
        yield from ((place, part[name] + more) for name, more in BOUNDS.items() if name in part)
        if "enum" in part:
            yield place, "of no kind"


def unknown_keys(config: dict, chance: random.Random) -> Iterator[tuple[Keys, Keys]]:
    """Every key, and the key that a slip of the hand makes of it."""
    for (*above, name), _ in leaves(Config.model_json_schema(), Config.model_json_schema(), config):
        at = chance.randrange(1, len(name))
        yield (*above, name), (*above, chance.choice([name[:at] + name[at - 1 :], name + "x"]))


def above(config: dict, place: Keys) -> dict:
    """The part of a config that holds a key."""
    for name in place[:-1]:
        config = config[name]
    return config


Times = Callable[[int, int], int]


def test_wrong_values_are_refused_by_their_key(config: dict, times: Times, chance: random.Random) -> None:
    cases = [*wrong_values(config)]
    assert len(cases) > 300
    for place, value in chance.sample(cases, min(times(100, 10_000), len(cases))):
        made = copy.deepcopy(config)
        above(made, place)[place[-1]] = value
        with refused(f"config key {'.'.join(place)}"):
            completed_run(made)


def test_unknown_keys_are_refused_by_their_name(config: dict, times: Times, chance: random.Random) -> None:
    cases = [*unknown_keys(config, chance)]
    for place, wrong in chance.sample(cases, min(times(40, 10_000), len(cases))):
        made = copy.deepcopy(config)
        above(made, place)[wrong[-1]] = above(made, place).pop(place[-1])
        with refused(f"config key {'.'.join(wrong)}"):
            completed_run(made)
