"""The config: bases, presets, defaults, fingerprints, files that must say the same, and what is refused by its key."""

import copy
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, strategies
from jsonschema import Draft202012Validator
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from snakemake.io import PeriodicityDetector

from demix.config.adaptation import FactorSweep
from demix.config.config import Config
from demix.config.keys import read_keys
from demix.config.names import refuse_name
from demix.config.reference import editor_schema, reference
from demix.config.training import (
    TRAINING_PRESETS,
    OptimizerSettings,
    RateSchedule,
    TrainingRecipe,
    fingerprinted,
    selected,
)
from demix.files import fingerprint
from demix.run.check import completed_run, load_run
from demix.run.systems import trained_systems
from demix.settings import names_of, settings_from
from demix.train.adapt import Adaptation
from demix.train.stage import Training
from support.configs import TEXT, domains, small, small_run
from support.errors import refused

REPOSITORY = Path(__file__).parents[2]
SAMPLE = yaml.safe_load((REPOSITORY / "config" / "sample.yaml").read_text())


BRANCH = {"parent": "dense", "seed_tokens": 300_000}
STAGE = {"seed": 1, "architecture": {}, "tokens": 10, "sequences": 1, "learning_rate": 1, "threads": 1}
SCHEMA = REPOSITORY / "workflow" / "schemas" / "config.schema.yaml"


@pytest.mark.parametrize("path", sorted((REPOSITORY / "config").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configs_are_valid_and_complete(path: Path) -> None:
    values = load_run(path).config.values
    assert completed_run(values).config.values == values
    assert list(Draft202012Validator(yaml.safe_load(SCHEMA.read_text())).iter_errors(values)) == []


def test_config_reference_and_schema_are_those_of_the_declarations() -> None:
    assert (REPOSITORY / "config" / "README.md").read_text() == reference()
    assert SCHEMA.read_text() == editor_schema()
    validator = Draft202012Validator(yaml.safe_load(SCHEMA.read_text()))
    assert len(list(validator.iter_errors(SAMPLE | {"seed": "one", "evalution": {}}))) == 2


def test_what_stands_in_a_base_is_merged_and_what_names_it_wins(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "first.yaml").write_text(yaml.safe_dump(SAMPLE | {"seed": 5, "threads": 3}, sort_keys=False))
    (tmp_path / "below" / "second.yaml").write_text("base: first.yaml\nseed: 6\nevaluation: {decay: 0.5}\n")
    mine = tmp_path / "mine.yaml"
    own = {"training": {"weight_decay": 0.2}, "domains": {"novel": {"wiki": {"licence": "x"}}}}
    mine.write_text(yaml.safe_dump({"base": "below/second.yaml", "run": "mine"} | own))
    config, sample = load_run(mine).config.values, completed_run(copy.deepcopy(SAMPLE)).config.values
    assert "base" not in config
    assert (config["run"], config["seed"], config["threads"]) == ("mine", 6, 3)
    assert config["evaluation"] == sample["evaluation"] | {"decay": 0.5}
    assert config["training"] == sample["training"] | {"weight_decay": 0.2}
    assert list(config["domains"]["novel"]) == list(SAMPLE["domains"]["novel"])
    assert config["domains"]["novel"]["wiki"] == sample["domains"]["novel"]["wiki"] | {"licence": "x"}
    for base in ("none.yaml", "mine.yaml", "[a]"):
        mine.write_text(f"base: {base}\n")
        with refused("base"):
            load_run(mine)


@pytest.mark.parametrize(
    ("given", "subject"),
    [
        ("{", "--settings"),
        ("{}", "--settings.tokens"),
        (STAGE | {"speed": 1}, "--settings.speed"),
        (STAGE | {"tokens": "10"}, "--settings.tokens"),
        (STAGE | {"tokens": 1e3}, "--settings.tokens"),
        (STAGE | {"seed": True}, "--settings.seed"),
    ],
)
def test_settings_of_a_stage_are_refused_by_their_key(given: str | dict, subject: str) -> None:
    with refused(subject):
        settings_from(Training, given)
    assert settings_from(Training, STAGE).learning_rate == 1


def test_a_preset_is_its_values_and_keys_beside_it_come_first() -> None:
    sizes = {"layers": 1, "width": 8, "heads": 1, "context": 16}
    config = copy.deepcopy(SAMPLE) | {"architecture": sizes, "evaluation": {}}
    # Its systems mix models that this config does not have.
    config["evaluation"] = {key: value for key, value in config["evaluation"].items() if key != "systems"}
    plain = {key: value for key, value in config["training"].items() if key != "preset"}
    recipe = {"preset": "paper", "learning_rate": 2e-3, "architecture": {"preset": "paper"}}
    modern = {"training": plain | {"preset": "modern", "clip": 7.0}, "adaptation": {"model": "demix"}}
    modern["architecture"] = config["architecture"] | {"preset": "modern", "inner": 24}
    modern["models"] = {"dense_paper": {"kind": "dense"} | recipe, "seeded": {"kind": "demix", **BRANCH}}
    run = completed_run(config | modern)
    values, names = run.config.values, TRAINING_PRESETS["modern"].keys() - {"clip"}
    assert {key: values["training"][key] for key in names}.items() >= {"warmup": 0.04, "weight_decay": 0.0}.items()
    assert values["training"]["clip"] == 7.0
    assert (
        run.rows["seeded"].settings.optimizer == run.rows["dense"].settings.optimizer == run.config.training.optimizer
    )
    assert run.rows["seeded"].architecture.norm == "rms"
    # A row with the paper's recipe is as it would be in a run that has this recipe throughout.
    alone = {"models": {}, "adaptation": {"model": "demix"}}
    paper = completed_run(config | {"training": plain | {"learning_rate": 2e-3}} | alone).rows["dense"]
    found = run.rows["dense_paper"]
    assert found.architecture == paper.architecture
    recipes = [fingerprinted(row.settings) | {"architecture": None} for row in (found, paper)]
    assert recipes[0] == recipes[1]


def test_a_preset_stands_above_the_keys_of_the_base(tmp_path: Path) -> None:
    """Also where the base spells all keys, as what `--values` prints does; a preset of the paper is none."""
    values = completed_run(copy.deepcopy(SAMPLE)).config.values
    (tmp_path / "whole.yaml").write_text(yaml.safe_dump(values))
    above = {"base": "whole.yaml", "training": {"preset": "paper"}}
    found = Config.complete(above, tmp_path)
    plain = {key: value for key, value in SAMPLE["training"].items() if key != "preset"}
    paper = Config.complete(copy.deepcopy(SAMPLE) | {"training": plain})
    assert {"optimizer", "learning_rate_schedule"} <= values["training"].keys()
    assert selected(TrainingRecipe, found.training) == selected(TrainingRecipe, paper.training)
    assert not {"optimizer", "learning_rate_schedule", "preset"} & found.values["training"].keys()


def test_a_fingerprint_leaves_out_what_only_time_and_memory_depend_on() -> None:
    left_out = {"checkpoint_every", "micro_sequences", "compile", "checkpoint_activations", "shard_optimizer"}
    training = Training(seed=1, architecture={}, tokens=9, sequences=1, learning_rate=1e-3, threads=1)
    adaptation = Adaptation(seed=1, threads=1, tokens=9, passes=2, learning_rate_factor=1.0)
    other = {"micro_sequences": 2, "precision": "bf16", "architecture": {"layers": 1}, "compile": True}
    other |= {"checkpoint_activations": True, "shard_optimizer": True, "warmup": 0.5, "dropout": 0.1}
    other |= {"sweep": FactorSweep(factors=(0.1,)), "optimizer": OptimizerSettings(kind="muon")}
    other |= {"learning_rate_schedule": RateSchedule(kind="wsd"), "learning_rate": 0.5, "trained": "routers"}
    for settings in (training, adaptation):
        if settings is adaptation:
            other |= {"trained": "feedforwards"}
        assert left_out < set(names_of(type(settings)))
        for key in names_of(type(settings)):
            changed = settings.replace(**{key: other.get(key) or getattr(settings, key) * 2 or 1})
            assert changed != settings
            same = fingerprint(fingerprinted(changed)) == fingerprint(fingerprinted(settings))
            assert same == (key in left_out), key


def test_lock_file_and_environment_follow_the_requirements() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    lock = (REPOSITORY / "requirements.lock").read_text()
    locked = dict(re.findall(r"^([\w.-]+)(?:\[.*\])?==(\S+) \\\n    --hash=sha256:[0-9a-f]{64}", lock, re.MULTILINE))
    assert len(locked) == len(re.findall(r"==", lock)), "a package has no hash"
    python, _, pip = yaml.safe_load((REPOSITORY / "environment.yml").read_text())["dependencies"]
    assert (python, pip["pip"]) == (f"python{project['requires-python']}", ["-e .[dev]"])
    for text in project["dependencies"] + project["optional-dependencies"]["dev"]:
        assert "==" in text or (">=" in text and "<" in text), text
        requirement = Requirement(text)
        assert locked[canonicalize_name(requirement.name)] in requirement.specifier, text


NAN = float("nan")
LONG = "a_name_of_" + "0123456789" * 6
BTM = {"kind": "branched", "averages": True}
SEED = {"kind": "demix", "parent": "dense", "seed_tokens": 500}
BRANCHED = SEED | {"kind": "branched"}
HUB = {"path": "hf://owner/name", "data_files": ["*.parquet"], "revision": "main"}
FOREIGN = {"alibi": {"kind": "dense", "architecture": {"position": "alibi"}}}
SWEEP = {"learning_rates": [0.5], "tokens": 500}
NGRAMS = {"evaluation": {"ngrams": [3]}}
LAW = {"retrain_without": ["law"], "replacement": "songs"}


def text(**keys: Any) -> dict[str, Any]:
    """A training domain `law` with these keys."""
    return {"domains": {"training": {"law": TEXT | keys, "news": TEXT}}}


def source(**keys: Any) -> dict[str, Any]:
    """A training domain `law` whose source has these keys."""
    return text(source=TEXT["source"] | keys)


def row(**keys: Any) -> dict[str, Any]:
    """A model entry `mine` with these keys."""
    return {"models": {"mine": keys}}


def task(**keys: Any) -> dict[str, Any]:
    return {"tasks": {"t": keys}}


def suite(**keys: Any) -> dict[str, Any]:
    """A perplexity suite `a` whose text `b` has these keys."""
    return {"evaluation": {"suites": {"a": {"b": TEXT | keys}}}}


def harness(**keys: Any) -> dict[str, Any]:
    return {"lm_eval": {"tasks": ["a"]} | keys}


VALUES = [
    ({"run": "../elsewhere"}, "run"),
    ({"training": {"learning_rate": NAN}}, "training.learning_rate"),
    ({"training": {"tokens": 9}}, "training.tokens"),
    ({"training": {"ranks": 3}}, "training.ranks"),
    ({"training": {"sweep": {"learning_rates": [1e-3], "tokens": 9}}}, "training.sweep.tokens"),
    ({"architecture": {"heads": 3}}, "architecture.heads"),
    ({"tracking": {"uri": "postgresql://me:secret@host/db"}}, "tracking.uri"),
    ({"training": {"optimizer": {"kind": "lion"}}}, "training.optimizer.kind"),
    ({"training": {"optimizer": {"matrices": 2.0}}}, "training.optimizer.kind"),
    ({"training": {"optimizer": {"kind": "muon", "beta1": 1.0}}}, "training.optimizer.beta1"),
    ({"training": {"learning_rate_schedule": {"kind": "cosine", "share": 0.5}}}, "learning_rate_schedule.share"),
    ({"training": {"learning_rate_schedule": {"kind": "wsd", "stretch": 1.1}}}, "learning_rate_schedule.stretch"),
    ({"training": {"dropout": 1.0}}, "training.dropout"),
    ({"cluster": {"minutes": 2, "grace_seconds": 120}}, "cluster.grace_seconds"),
    ({"evaluation": {"weights": ["last"]}}, "evaluation.weights.0"),
    ({"evaluation": {"weights": ["switching(2)"]}}, "evaluation.weights.0"),
    ({"evaluation": {"weights": ["released"]}}, "evaluation.weights"),
    ({"evaluation": {"weights": ["history", "cluster"]}}, "evaluation.weights"),
    ({"adaptation": {"model": "dense"}}, "adaptation.model"),
    ({"adaptation": {"dense": "dense_unbalanced"}, "models": {"dense_unbalanced": None}}, "adaptation.dense"),
]
DOMAINS = [
    ({"domains": {"training": {"law": {}, "news": TEXT}}}, "domains.training.law.source"),
    ({"domains": {"training": {"law": None}}}, "domains.training"),
    ({"domains": domains(("law",), ("law",))}, "domains.novel.law"),
    ({"domains": domains(("law",), ("tokens",))}, "domains.novel.tokens"),
    ({"domains": domains(("law",), ("ab\n",))}, "domains.novel.ab\n"),
    ({"domains": domains(("law",), (LONG,))}, f"domains.novel.{LONG}"),
    (source(path="ftp://host/a.jsonl"), "domains.training.law.source.path"),
    (source(path=["https://host/a.jsonl"], parts=2), "domains.training.law.source.parts"),
    (source(path="hf://owner/name", revision="0" * 40), "domains.training.law.source.data_files"),
    (text(source=HUB), "domains.training.law.source.revision"),
    (text(source=HUB | {"revision": None}), "domains.training.law.source.revision"),
    (text(source=HUB | {"revision": "0" * 40, "sha256": {"a": "0" * 64}}), "domains.training.law.source.sha256"),
    (source(where={"license": None}), "domains.training.law.source.where.license"),
    (
        {"domains": {"training": {"law": None, "news": TEXT}}, "removal": {"retrain_without": ["law"]}},
        "removal.retrain_without",
    ),
    ({"removal": LAW | {"replacement": "wiki"}}, "removal.replacement"),
    ({"domains": domains(("law",)), "removal": {"retrain_without": ["law"]}}, "removal.replacement"),
]
MODELS = [
    ({"models": {"Demix-small": {}}}, "models.Demix-small"),
    ({"models": {"x" * 20: {"kind": "dense"}}}, f"models.{'x' * 20}"),
    ({"models": {"demix": None}}, "models.demix"),
    ({"models": {"dense": {"kind": "demix"}}}, "models.dense.kind"),
    (row(), "models.mine.kind"),
    (row(kind="demix", learning_rat=1), "models.mine.learning_rat"),
    (row(kind="demix", trained="routers", parent="a/b"), "models.mine.trained"),
    (row(kind="demix", parent="a/b", sweep=SWEEP), "models.mine.sweep"),
    (row(kind="demix", parent="dense"), "models.mine.seed_tokens"),
    (row(kind="demix", seed_tokens=5), "models.mine.parent"),
    (row(**SEED | {"parent": "old"}), "models.mine.parent"),
    (row(**SEED | {"parent": "dense_unbalanced"}), "models.mine.parent"),
    (row(**SEED | {"parent": "a/b"}), "models.mine.parent"),
    (row(**SEED | {"kind": "dense"}), "models.mine.parent"),
    (row(**SEED | {"seed_tokens": 1001}), "models.mine.seed_tokens"),
    (row(**SEED | {"dropout": 0.1}), "models.mine.dropout"),
    (row(**SEED | {"kind": "anchored"}), "models.mine.weight_decay"),
    (
        row(**SEED | {"kind": "anchored", "weight_decay": 0.0}) | {"adaptation": {"model": "mine"}},
        "adaptation.model",
    ),
    (
        {"models": FOREIGN | {"mine": SEED | {"parent": "alibi", "architecture": {"preset": "paper"}}}},
        "models.mine.architecture",
    ),
    (row(**BRANCHED | {"data": "k3"}), "models.mine.data"),
    (row(**BRANCHED | {"data": "by"}) | {"clusterings": {"by": {"method": "metadata"}}}, "models.mine.data"),
    (row(**BRANCHED | {"data": "k2"}) | {"clusterings": {"k2": {"clusters": 3}}}, "models.mine.data"),
    (row(**BRANCHED | {"data": "k2"}) | {"clusterings": {"k2": {}}}, "clusterings.k2.clusters"),
    ({"models": {"demix": {"data": "k2"}}}, "models.demix.data"),
    ({"domains": domains(("law", "news"), ("c01",))}, "clusterings.k2"),
]
OTHER_TEXT = [
    (task(), "tasks.t.test"),
    (task(test={"path": "a"}, template="{label}: {text}"), "tasks.t.template"),
    (task(test={"path": "a"}, seeds=[1, 2]), "tasks.t.seeds"),
    (task(test={"path": "a"}, labels={"a": "b", "c": "b"}), "tasks.t.labels"),
    (task(test={"path": "a"}, labels={"a": "b"}), "tasks.t.labels"),
    (task(test={"path": "a"}, labels={str(number): "x" for number in range(100_000)}), "tasks.t.labels"),
    (task(test={"path": "a"}, shots=1, calibrated=True), "tasks.t.calibrated"),
    (task(test={"path": "https://me:word@there/x.jsonl"}), "tasks.t.test.path"),
    (task(test=HUB), "tasks.t.test.revision"),
    ({"tasks": {"X y": {"test": {"path": "a"}}}}, "tasks.X y"),
    (suite(words={"train": 9}), "evaluation.suites.a.b"),
    (suite(near_duplicates=0.5), "evaluation.suites.a.b"),
    (suite(source=HUB), "evaluation.suites.a.b.source.revision"),
    (suite(source={"path": "ftp://x"}), "evaluation.suites.a.b.source.path"),
    ({"evaluation": {"suites": {"a": {"b": {}}}}}, "evaluation.suites.a.b.source"),
    ({"evaluation": {"suites": {"A": {"b": TEXT}}}}, "evaluation.suites.A"),
    ({"evaluation": {"suites": {"a": {"b_c": TEXT}, "a_b": {"c": TEXT}}}}, "evaluation.suites.a_b.c"),
    ({"evaluation": {"ngrams": [3, 3]}}, "evaluation.ngrams"),
    (NGRAMS | {"training": {"tokens": 10**9}}, "evaluation.ngrams"),
    (NGRAMS | {"models": {"ngram3": {"kind": "dense"}}}, "models.ngram3"),
    (harness(tasks=[]), "lm_eval.tasks"),
    (harness(models=["domain_token"]), "lm_eval.models"),
    (harness(weights=["best"]), "lm_eval.weights.0"),
    (harness(weights=["cluster"]), "lm_eval.weights"),
    (harness(include_path="."), "lm_eval.include_path: ."),
]


@pytest.mark.parametrize(
    ("sections", "subject"),
    [pytest.param(*case, id=ascii(case[1])) for case in (*VALUES, *DOMAINS, *MODELS, *OTHER_TEXT)],
)
def test_a_config_is_refused_by_its_key(sections: dict[str, Any], subject: str) -> None:
    with refused(subject):
        completed_run(small(**{"clusterings": {"k2": {"clusters": 2}}} | sections))


def test_a_number_that_yaml_reads_as_text_is_that_number() -> None:
    rate = yaml.safe_load("learning_rate: 1e-3")
    assert rate == {"learning_rate": "1e-3"}
    found = Config.complete(copy.deepcopy(SAMPLE) | {"training": SAMPLE["training"] | rate}).values
    assert found["training"]["learning_rate"] == 1e-3


def test_a_key_that_is_no_text_is_refused() -> None:
    with refused("None"):
        completed_run({None: None})


def test_two_escapes_of_json_are_one_character_and_half_of_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"run": "🄯"}))
    assert read_keys(path)[0] == {"run": "🄯"}
    path.write_text(json.dumps({"run": "\ud83c"}))
    with refused(path):
        read_keys(path)


def test_names_and_values_that_only_resemble_refused_ones_are_accepted() -> None:
    names = ("dense_seed3", "without_news", "btm__posterior", "others", "ab" * 8 + "c" * 19)
    rows = {name: {"kind": "dense"} for name in names} | {"btm": BTM}
    rows |= {"same": SEED | {"dropout": None, "optimizer": None}}
    rows |= {"flat": SEED | {"kind": "anchored", "weight_decay": 0.0}}
    rows |= {"again": SEED | {"parent": "alibi"}, **FOREIGN}
    run = completed_run(small(seeds=[1, 2], models=rows))
    assert run.rows.keys() >= {*rows}
    assert run.rows["again"].architecture == run.rows["alibi"].architecture


@given(strategies.text("ab_", min_size=1, max_size=4), strategies.integers(1, 60), strategies.text("ab_", max_size=4))
def test_a_name_that_snakemake_takes_for_a_loop_is_refused(part: str, number: int, before: str) -> None:
    name = (before + part * number)[:64]
    if PeriodicityDetector().is_periodic(name) is None:
        refuse_name(name)
    else:
        with pytest.raises(ValueError):  # noqa: PT011
            refuse_name(name)


ALIKE = {"kind": "demix", "learning_rate": 5e-4}


def labels(**models: Any) -> dict[str, str]:
    run = small_run(models=models)
    return {name: row.label for name, row in run.rows.items() if name in models}


def test_a_model_without_a_label_has_the_name_of_its_entry() -> None:
    assert labels(one=ALIKE, two=ALIKE | {"label": "Mine"}) == {"one": "one", "two": "Mine"}
    # The paper's names are those of the paper's models, of runs without them, too.
    assert labels(dense_unbalanced=None, dense={}, branched={}) == {"dense": "Dense (Balanced)", "branched": "BTM"}


@pytest.mark.parametrize(
    ("models", "subject"),
    [
        ({"two": ALIKE | {"label": "DEMix"}}, "two"),
        ({"one": ALIKE | {"label": "Mine"}, "two": ALIKE | {"label": "Mine"}}, "one"),
        ({"dense": {"label": "Mine"}}, "dense"),
        *(
            ({"one": ALIKE | {"label": label}}, "one")
            for label in ("DEMix (cached prior)", "[red]", "<b>", "a|b", "", "two\nlines", "x" * 61)
        ),
    ],
)
def test_a_label_of_another_or_with_markup_is_refused(models: dict[str, Any], subject: str) -> None:
    with refused(f"config key models.{subject}.label"):
        labels(**models)


def test_a_label_changes_neither_training_nor_names() -> None:
    one, other = (small_run(models={"x": {"kind": "demix", "tokens": 500} | more}) for more in ({}, {"label": "Mine"}))
    assert one.rows["x"].settings == other.rows["x"].settings
    assert [model.name for model in one.planned] == [model.name for model in other.planned]
    assert "Mine (naive)" in {system.label for system in trained_systems(other)}
