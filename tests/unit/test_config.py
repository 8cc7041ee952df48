"""The config: bases, presets, defaults and fingerprints, and files that must say the same."""

import copy
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from demix.config.adaptation import FactorSweep
from demix.config.config import Config
from demix.config.reference import editor_schema, reference
from demix.config.training import (
    TRAINING_PRESETS,
    RateSchedule,
    TrainingRecipe,
    TrainingSection,
    Updates,
    fingerprinted,
    taken,
)
from demix.files import fingerprint, replacing
from demix.run.check import completed_run, load_run
from demix.settings import names_of, settings_from
from demix.train.adapt import Adaptation
from demix.train.stage import Training
from support.configs import small
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
        (STAGE | {"architecture": []}, "--settings.architecture"),
        (STAGE | {"clip": "1"}, "--settings.clip"),
    ],
)
def test_settings_of_a_stage_are_refused_by_their_key(given: str | dict, subject: str) -> None:
    with refused(subject):
        settings_from(Training, given)
    assert settings_from(Training, STAGE).learning_rate == 1


def test_files_appear_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_text("old")
    with pytest.raises(ZeroDivisionError), replacing(target) as temporary:
        temporary.write_text(f"half {1 // 0}")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]
    with replacing(target) as temporary:
        temporary.write_text("new")
    assert target.read_text() == "new"
    (tmp_path / "blocker").write_text("")
    with refused("blocker/file"), replacing(tmp_path / "blocker" / "file"):
        pass


def test_a_model_entry_takes_every_key_of_training() -> None:
    values = {"learning_rate": 1e-3, "precision": "fp16", "sweep": None, "replicas": {}, "compile": True}
    values |= {"optimizer": {"kind": "muon"}, "learning_rate_schedule": {"kind": "wsd"}, "z_loss": 1e-4}
    values |= {"dropout": 0.1}
    values = completed_run(small()).config.values["training"] | values
    # Only entries whose experts are routed take `trained`.
    keys = {*names_of(TrainingSection)} - {"preset", "trained"}
    models = {f"with_{key}": {"kind": "demix", key: values[key]} for key in keys}
    found = completed_run(small(models=models)).config.values["models"]
    for key in keys:
        value = found[f"with_{key}"][key]
        assert value == values[key] or value.items() > values[key].items(), "with the defaults of a section"


def test_a_preset_is_its_values_and_keys_beside_it_come_first() -> None:
    config = copy.deepcopy(SAMPLE) | {"architecture": {"layers": 1, "width": 8, "heads": 1, "context": 16}}
    plain = {key: value for key, value in config["training"].items() if key != "preset"}
    recipe = {"preset": "paper", "learning_rate": 2e-3, "architecture": {"preset": "paper"}}
    modern = {
        "training": plain | {"preset": "modern", "clip": 7.0},
        "adaptation": {"preset": "modern", "model": "demix"},
    }
    modern["architecture"] = config["architecture"] | {"preset": "modern", "inner": 24}
    modern["models"] = {"dense_paper": {"kind": "dense"} | recipe, "seeded": {"kind": "demix", **BRANCH}}
    run = completed_run(config | modern)
    values, names = run.config.values, TRAINING_PRESETS["modern"].keys() - {"clip", "z_loss"}
    assert {key: values["training"][key] for key in names}.items() >= {"warmup": 0.04, "weight_decay": 0.0}.items()
    assert values["training"]["clip"] == 7.0
    assert values["adaptation"]["clip"] == TRAINING_PRESETS["modern"]["clip"]
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
    above = {"base": "whole.yaml", "training": {"preset": "paper"}, "adaptation": {"preset": None}}
    found = Config.complete(above, tmp_path)
    plain = {key: value for key, value in SAMPLE["training"].items() if key != "preset"}
    paper = Config.complete(copy.deepcopy(SAMPLE) | {"training": plain})
    assert {"optimizer", "learning_rate_schedule"} <= values["training"].keys()
    assert taken(TrainingRecipe, found.training) == taken(TrainingRecipe, paper.training)
    assert not {"optimizer", "learning_rate_schedule", "z_loss", "preset"} & found.values["training"].keys()
    assert "preset" not in found.values["adaptation"]
    assert found.values["adaptation"] == values["adaptation"], "no preset, so that those of the base stay"


def test_rows_of_models_beside_those_of_every_run() -> None:
    config = copy.deepcopy(SAMPLE) | {"models": {"demix_small": {"kind": "demix"}, "domain_token": None}}
    config["adaptation"]["model"] = "demix"
    rows = completed_run(config).config.values["models"]
    assert rows == {
        "demix": {},
        "dense": {},
        "dense_unbalanced": {},
        "domain_token": None,
        "demix_small": {"kind": "demix"},
    }
    assert list(rows) == ["demix", "dense", "dense_unbalanced", "domain_token", "demix_small"]


def test_a_fingerprint_leaves_out_what_only_time_and_memory_depend_on() -> None:
    left_out = {"checkpoint_every", "keep_checkpoints", "micro_sequences", "compile", "checkpoint_activations"}
    left_out |= {"shard_optimizer"}
    training = Training(seed=1, architecture={}, tokens=9, sequences=1, learning_rate=1e-3, threads=1)
    adaptation = Adaptation(seed=1, threads=1, tokens=9, passes=2)
    other = {"micro_sequences": 2, "precision": "bf16", "architecture": {"layers": 1}, "compile": True}
    other |= {
        "checkpoint_activations": True,
        "shard_optimizer": True,
        "warmup": 0.5,
        "sweep": FactorSweep(factors=(0.1,)),
    }
    other |= {"optimizer": Updates(kind="muon"), "learning_rate_schedule": RateSchedule(kind="wsd"), "z_loss": 0.1}
    other |= {"learning_rate": 0.5, "trained": "routers", "dropout": 0.1}
    for given in (training, adaptation):
        assert left_out < set(names_of(type(given)))
        for key in names_of(type(given)):
            changed = replace(given, **{key: other.get(key) or getattr(given, key) * 2 or 1})
            assert changed != given
            same = fingerprint(fingerprinted(changed)) == fingerprint(fingerprinted(given))
            assert same == (key in left_out), key


def test_the_lock_file_has_a_version_of_each_requirement_within_its_bounds() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    lock = (REPOSITORY / "requirements.lock").read_text()
    locked = dict(re.findall(r"^([\w.-]+)(?:\[.*\])?==(\S+) \\\n    --hash=sha256:[0-9a-f]{64}", lock, re.MULTILINE))
    assert len(locked) == len(re.findall(r"==", lock)), "a package has no hash"
    for text in project["dependencies"] + project["optional-dependencies"]["dev"]:
        requirement = Requirement(text)
        assert locked[canonicalize_name(requirement.name)] in requirement.specifier, text


def test_environment_yml_takes_what_pyproject_says() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    conda = yaml.safe_load((REPOSITORY / "environment.yml").read_text())
    python, _, pip = conda["dependencies"]
    assert python == f"python{project['requires-python']}"
    assert pip["pip"] == ["-e .[dev]"]
    for requirement in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        assert "==" in requirement or (">=" in requirement and "<" in requirement), requirement


def test_the_image_has_the_locked_packages_and_their_python() -> None:
    image, lock = ((REPOSITORY / name).read_text() for name in ("Dockerfile", "requirements.lock"))
    python = re.search(r"for Python ([\d.]+) on Linux", lock)[1]
    assert f"\nFROM python:{python}-slim" in image
    assert "--require-hashes" in image
