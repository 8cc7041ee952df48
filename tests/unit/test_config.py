"""The config: defaults, wrong keys named with the nearest right one, and files that must say the same."""

import copy
import re
import subprocess
import sys
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
from demix.errors import DemixError
from demix.files import fingerprint, replacing
from demix.run.check import completed_run, load_run
from demix.settings import names_of, settings_from
from demix.train.adapt import Adaptation
from demix.train.stage import Training
from support.cli import said

REPOSITORY = Path(__file__).parents[2]
SAMPLE = yaml.safe_load((REPOSITORY / "config" / "sample.yaml").read_text())


@pytest.mark.parametrize("path", sorted((REPOSITORY / "config").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configs_are_valid(path: Path) -> None:
    config = load_run(path).config
    assert len(config.domains.training) == 8
    fewer = {"families": 4, "families-tasks": 4, "variants": 2, "one-gpu": 2}
    assert len(config.domains.novel) == fewer.get(path.stem, 8), "null leaves out a domain of the base"
    assert config.evaluation.decay == 0.3
    modern = path.stem in ("sample", "families", "families-tasks", "one-gpu")
    warmup = 0.048 if path.stem == "roberta" else TRAINING_PRESETS["modern" if modern else "paper"]["warmup"]
    assert config.training.warmup == warmup
    assert completed_run(config.values).config.values == config.values, "a completed config is complete"


BRANCH = {"parent": "dense", "seed_tokens": 300_000}
NOVELS = SAMPLE["domains"]["training"]["novels"]
WRONG = {
    "unknown key": ("evalution", {}, r"key evalution: is not known; did you mean evaluation\?"),
    "unknown key below": ("training.learning_rat", 1, r"learning_rat: is not known; did you mean learning_rate\?"),
    "wrong type": ("seed", "one", r"key seed: is 'one'; allowed is integer"),
    "a number as text": ("training.learning_rate", "1e-3", r"learning_rate: is '1e-3'; allowed is number"),
    "negative budget": ("domains.training.novels.words.dev", -5, r"words\.dev: is -5; allowed is integer ≥ 1"),
    "unknown source kind": ("domains.training.novels.source.kind", "ftp", r"source\.kind: is 'ftp'; allowed is one of"),
    "missing source": ("domains.training.novels", {}, r"novels\.source: is missing"),
    "domain in both lists": ("domains.novel.novels", NOVELS, r"is a training domain too"),
    "unusable domain name": ("domains.novel.a/b", NOVELS, r"a/b: is not a usable domain name"),
    "reserved domain name": ("domains.novel.tokens", NOVELS, r"reserved"),
    "name with a newline": ("domains.novel.ab\n", NOVELS, r"not a usable domain name"),
    "removed domain unknown": ("removal.retrain_without", ["licences"], r"licences is no .*; did you mean licenses\?"),
    "replacement unknown": ("removal.replacement", "songs", r"removal\.replacement: is 'songs', which is no novel"),
    "unknown weights": ("evaluation.weights", ["last"], r"evaluation\.weights\.0: is not known; use one of history"),
    "wrong parameters": ("evaluation.weights", ["switching(2)"], r"weights\.0: has alpha 2; use switching\(alpha\)"),
    "no time beside the grace": (
        "cluster",
        {"minutes": 2, "grace_seconds": 120},
        r"key cluster\.grace_seconds: is 120, .* none of the 2 minutes",
    ),
    "heads": ("architecture.heads", 3, r"architecture\.heads: 3 does not divide the width 128"),
    "run name": ("run", "../elsewhere", r"key run: is '\.\./elsewhere'"),
    "a float for a count": ("training.tokens", 1.0e6, r"training\.tokens: is 1000000\.0; allowed is integer"),
    "not a number": ("training.learning_rate", float("nan"), r"learning_rate: is nan; allowed is number"),
    "a yes for a number": ("seed", True, r"key seed: is True; allowed is integer"),
    "weights without history": ("evaluation.weights", ["released"], r"evaluation\.weights: lacks history"),
    "a password": ("tracking.uri", "postgresql://me:secret@host/db", r"tracking\.uri: holds a password"),
    "a sweep below a step": ("training.sweep", {"learning_rates": [1e-3], "tokens": 9}, r"sweep\.tokens: is 9, less"),
    "a sweep of nothing": ("training.sweep", {"learning_rates": [], "tokens": 9999}, r"sweep\.learning_rates: is \[\]"),
    "another rate than the seed's": (
        "models.mine",
        {"kind": "demix", "parent": "dense", "seed_tokens": 300000, "learning_rate": 1e-3},
        r"models\.mine\.learning_rate: is 0\.001 where its parent dense has 0\.008; leave it, or the row's preset, out",
    ),
    "a seed below a step": (
        "models.mine",
        {"kind": "demix", "parent": "dense", "seed_tokens": 9},
        r"models\.mine\.seed_tokens: is 9, less than the 2048 tokens of one step; raise it, or give 0",
    ),
    "a decay above one": ("evaluation.decay", 1.5, r"evaluation\.decay: is 1\.5; allowed is number > 0 ≤ 1"),
}


def assert_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """`demix` with these arguments ends in the line of an error, and prints nothing else."""
    line = said(arguments)
    assert line is not None
    assert line.startswith("demix: error: ")
    assert "\n" not in line
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", WRONG)
def test_wrong_configs_are_refused_with_key_and_cure(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key, value, message = WRONG[name]
    config = copy.deepcopy(SAMPLE)
    *path, last = key.split(".")
    place = config
    for part in path:
        place = place.setdefault(part, {})
    place[last] = value
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    with pytest.raises(DemixError, match=message):
        load_run(file)
    assert_one_line(["config", str(file)], capsys)


def test_config_reference_and_schema_are_those_of_the_declarations() -> None:
    assert (REPOSITORY / "config" / "README.md").read_text() == reference()
    path = REPOSITORY / "workflow" / "schemas" / "config.schema.yaml"
    assert path.read_text() == editor_schema()
    validator = Draft202012Validator(yaml.safe_load(path.read_text()))
    for shipped in (REPOSITORY / "config").glob("*.yaml"):
        assert list(validator.iter_errors(load_run(shipped).config.values)) == []
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
    for base, message in (
        ("none.yaml", "config key base: .*none.yaml does not exist; give a path relative to the file"),
        ("mine.yaml", "config key base: mine.yaml is based on itself"),
        ("[a]", r"config key base: is \['a'\]"),
    ):
        mine.write_text(f"base: {base}\n")
        with pytest.raises(DemixError, match=message):
            load_run(mine)


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


def test_the_image_installs_what_contributing_says() -> None:
    image, steps = ((REPOSITORY / name).read_text() for name in ("Dockerfile", "CONTRIBUTING.md"))
    said = re.findall(r"^pip install (--(?:require-hashes|no-deps) .*?)(?: && .*)?$", steps, re.MULTILINE)
    assert len(said) == 2
    found = re.findall(r"^RUN pip install --no-cache-dir (.*)$", image.replace(" \\\n   ", ""), re.MULTILINE)
    assert found == said
    python = re.search(r"for Python ([\d.]+) on Linux", (REPOSITORY / "requirements.lock").read_text())[1]
    assert f"\nFROM python:{python}-slim" in image


def test_settings_of_a_stage_are_checked() -> None:
    with pytest.raises(DemixError, match=r"--settings\.speed: is not known; did you mean seed\?"):
        settings_from(Training, '{"speed": 1}')
    with pytest.raises(DemixError, match=r"--settings\.tokens: is missing"):
        settings_from(Training, "{}")
    with pytest.raises(DemixError, match="is not JSON"):
        settings_from(Training, "{")
    good = {
        "seed": 1,
        "architecture": {},
        "tokens": 10,
        "sequences": 1,
        "learning_rate": 1,
        "warmup": 0.1,
        "clip": 1.0,
        "weight_decay": 0.1,
        "precision": "fp32",
        "threads": 1,
        "checkpoint_every": 5,
    }
    assert settings_from(Training, good).learning_rate == 1
    for key, wrong in (("tokens", "10"), ("tokens", 1e3), ("seed", True), ("architecture", []), ("clip", "1")):
        with pytest.raises(DemixError, match=rf"--settings\.{key}: is "):
            settings_from(Training, good | {key: wrong})


@pytest.mark.parametrize(
    "arguments",
    [
        ["split", "a", "a.parquet", "--owners", "a", "--output", "out", "--settings", "{bad"],
        ["split", "a", "a.parquet", "--owners", "a", "--output", "out", "--settings", "{}"],
        ["tokenizer", "a.parquet", "--output", "out", "--settings", '{"vocab_size": "300"}'],
        ["tokenizer", "a.parquet", "--output", "out", "--settings", '{"kind": "word", "vocab_size": 300, "words": 1}'],
        ["tokenize", "a.parquet", "--tokenizer", "missing.json", "--output", "out"],
        ["track", "results", "--uri", "postgresql://me:hidden@host/demix"],
        ["train", "sparse", "a", "--settings", "{}", "--output", "out", "--metrics", "m", "--checkpoints", "c"],
        ["adapt-dense", "a", "b", "--settings", "{}", "--output", "out", "--metrics", "m", "--checkpoints", "c"],
        [
            "score",
            "nomodel",
            "a",
            "--experts",
            "a",
            "--output",
            "out",
            "--settings",
            '{"dev_blocks": 1, "test_tokens": null, "precision": "fp32", "threads": 1}',
        ],
        [
            "score",
            "nomodel",
            "a",
            "--experts",
            "a",
            "--output",
            "out",
            "--settings",
            '{"dev_blocks": 1, "test_tokens": null, "precision": "fp8", "threads": 1}',
        ],
        ["export", "nomodel", "--expert", "a", "--tokenizer", "t", "--output", "out"],
        ["summary", "nowhere"],
        ["report", "nowhere", "--output", "out"],
        ["join", "missing.parquet", "--output", "out"],
        ["config", "missing.yaml"],
        ["config"],
    ],
    ids=lambda arguments: " ".join(arguments)[:40],
)
def test_bad_input_ends_in_one_line(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_one_line(arguments, capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["summary", "nowhere"], ["config", "missing.yaml"]], ids=" ".join)
def test_a_process_of_its_own_ends_with_that_line_and_status_1(arguments: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "demix", *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("demix: error: ")
    assert done.stderr.count("\n") == 1


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
    with pytest.raises(DemixError, match=r"blocker.*cannot be written"), replacing(tmp_path / "blocker" / "file"):
        pass


def test_a_row_of_models_takes_every_key_of_training() -> None:
    """One key at a time, those that say how a training is computed and kept among them."""
    values = {"learning_rate": 1e-3, "precision": "fp16", "sweep": None, "replicas": {}, "compile": True}
    values |= {"optimizer": {"kind": "muon"}, "learning_rate_schedule": {"kind": "wsd"}, "z_loss": 1e-4}
    values |= {"dropout": 0.1}
    values = completed_run(copy.deepcopy(SAMPLE)).config.values["training"] | values
    # Only rows whose experts are routed take `trained`.
    for key in {*names_of(TrainingSection)} - {"preset", "trained"}:
        config, value = copy.deepcopy(SAMPLE), values[key]
        config["models"] = {"demix": {key: value}, "dense": {}}
        config["adaptation"]["model"] = "demix"
        (found,) = completed_run(config).config.values["models"]["demix"].items()
        assert found[0] == key
        assert found[1] == value or found[1].items() > value.items(), "with the defaults of a section"


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
    for section, value in (("training", plain | {"preset": "papers"}), ("models", {"dense": {"preset": 3}})):
        with pytest.raises(DemixError, match=r"preset: is ('papers'|3); allowed is one of modern, paper"):
            completed_run(config | {section: value})


def test_a_branch_has_the_options_of_its_parent_however_they_are_named() -> None:
    config = copy.deepcopy(SAMPLE)
    config["adaptation"]["model"] = "demix"
    config["models"] = {"other": {"kind": "dense", "architecture": {"preset": "paper", "position": "alibi"}}}
    mine = {"kind": "demix", "parent": "other", "seed_tokens": 300_000, "architecture": {"preset": "paper"}}
    told = r"models\.mine\.architecture: has other options than its parent other; leave it out"
    with pytest.raises(DemixError, match=told):
        completed_run(config | {"models": config["models"] | {"mine": mine}})
    mine["architecture"] |= {"position": "alibi"}
    run = completed_run(config | {"models": config["models"] | {"mine": mine}})
    assert run.rows["mine"].architecture == run.rows["other"].architecture


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
    for wrong, message in (
        ({"Demix-small": {}}, r"models\.Demix-small: is not a usable name of a model; use lower-case"),
        ({"demix": {"learning_rat": 1}}, r"models\.demix\.learning_rat: is not known; did you mean learning_rate\?"),
        ({"small": {"kind": "sparse"}}, r"models\.small\.kind: is 'sparse'; allowed is one of demix, dense"),
        ({"demix": {"tokens": None}}, r"models\.demix\.tokens: is None; allowed is integer ≥ 1"),
    ):
        with pytest.raises(DemixError, match=message):
            completed_run(copy.deepcopy(SAMPLE) | {"models": wrong})


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


def test_a_key_that_is_no_text_is_refused() -> None:
    with pytest.raises(DemixError, match="config key None: is no name of a setting"):
        completed_run({None: None})


def test_the_split_of_earlier_numbers_differs_from_the_samples_in_nothing_else() -> None:
    paths = (REPOSITORY / "config" / "sample.yaml", REPOSITORY / "tests" / "workflow" / "facts16.yaml")
    sample, kept = (load_run(path).config.values for path in paths)
    for kind in ("training", "novel"):
        for name, domain in sample["domains"][kind].items():
            assert domain["source"]["piece_words"], name
            assert domain["near_duplicates"] == 0.5, name
            whole = domain | {"near_duplicates": None, "source": domain["source"] | {"piece_words": None}}
            assert kept["domains"][kind][name] == whole
    assert list(kept["domains"]["training"]) == list(sample["domains"]["training"])
