"""The config: defaults, wrong keys named with the nearest right one, and files that must say the same."""

import copy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from demix.config.check import complete, load_config, reference
from demix.errors import DemixError
from demix.files import replacing
from demix.settings import settings_from
from demix.train.stage import Training
from support.cli import said

REPOSITORY = Path(__file__).parents[2]
SAMPLE = yaml.safe_load((REPOSITORY / "config" / "sample.yaml").read_text())


@pytest.mark.parametrize("path", sorted((REPOSITORY / "config").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configs_are_valid(path: Path) -> None:
    config = load_config(path)
    assert len(config["domains"]["training"]) == len(config["domains"]["novel"]) == 8
    assert config["evaluation"]["decay"] == 0.3
    assert config["training"]["warmup"] == 0.08
    assert complete(copy.deepcopy(config)) == config, "a completed config is complete"


NOVELS = SAMPLE["domains"]["training"]["novels"]
WRONG = {
    "unknown key": ("evalution", {}, r"key evalution: is not known; did you mean evaluation\?"),
    "unknown key below": ("training.learning_rat", 1, r"learning_rat: is not known; did you mean learning_rate\?"),
    "wrong type": ("seed", "one", r"key seed: is 'one'; allowed is integer"),
    "a number as text": ("training.learning_rate", "1e-3", r"learning_rate: is '1e-3'; allowed is number"),
    "negative budget": ("domains.training.novels.words.dev", -5, r"words\.dev: is -5; allowed is minimum 1"),
    "unknown source kind": ("domains.training.novels.source.kind", "ftp", r"source\.kind: is 'ftp'; allowed is one of"),
    "missing source": ("domains.training.novels", {}, r"novels\.source: is missing"),
    "domain in both lists": ("domains.novel.novels", NOVELS, r"is a training domain too"),
    "unusable domain name": ("domains.novel.a/b", NOVELS, r"a/b: is not a usable domain name"),
    "reserved domain name": ("domains.novel.tokens", NOVELS, r"reserved"),
    "name with a newline": ("domains.novel.ab\n", NOVELS, r"not a usable domain name"),
    "removed domain unknown": ("removal.retrain_without", ["licences"], r"licences is no .*; did you mean licenses\?"),
    "no replacement": ("removal.replacement", None, r"removal\.replacement: is None, which is no novel domain"),
    "unknown weights": ("evaluation.weights", ["last"], r"evaluation\.weights\.0: is 'last'"),
    "heads": ("architecture.heads", 3, r"architecture\.heads: 3 does not divide the width 128"),
    "run name": ("run", "../elsewhere", r"key run: is '\.\./elsewhere'"),
    "a float for a count": ("training.tokens", 1.0e6, r"training\.tokens: is 1000000\.0; allowed is integer"),
    "not a number": ("training.learning_rate", float("nan"), r"learning_rate: is nan; allowed is number"),
    "a yes for a number": ("seed", True, r"key seed: is True; allowed is integer"),
    "weights without history": ("evaluation.weights", ["released"], r"evaluation\.weights: lacks history"),
    "a password": ("tracking.uri", "postgresql://me:secret@host/db", r"tracking\.uri: holds a password"),
    "a sweep below a step": ("training.sweep", {"learning_rates": [1e-3], "tokens": 9}, r"sweep\.tokens: is 9, less"),
    "a sweep of nothing": ("training.sweep", {"learning_rates": [], "tokens": 9999}, r"sweep\.learning_rates: is \[\]"),
    "a decay above one": ("evaluation.decay", 1.5, r"evaluation\.decay: is 1\.5; allowed is maximum 1"),
}  # fmt: skip


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
        place = place[part]
    place[last] = value
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    with pytest.raises(DemixError, match=message):
        load_config(file)
    assert_one_line(["config", str(file)], capsys)


def test_config_reference_is_that_of_the_schema() -> None:
    assert (REPOSITORY / "config" / "README.md").read_text() == reference()


def test_environment_yml_equals_pyproject() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    conda = yaml.safe_load((REPOSITORY / "environment.yml").read_text())
    python, _, pip = conda["dependencies"]
    assert python == f"python{project['requires-python']}"
    assert pip["pip"] == [*project["dependencies"], *project["optional-dependencies"]["dev"], "-e ."]
    for requirement in pip["pip"][:-1]:
        assert "==" in requirement or (">=" in requirement and "<" in requirement), requirement


def test_stages_import_no_more_than_they_need() -> None:
    """The data stage and mixing start without torch, and nothing but tracking loads mlflow."""
    light = "demix.commands.main, demix.config.check, demix.data.sources, demix.data.anonymize, demix.data.corpus"
    light += ", demix.data.tokenizer, demix.data.shards, demix.evaluate.domain, demix.report, demix.report.tables"
    code = f"import sys, {light}; print([name for name in ('torch', 'mlflow', 'transformers') if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_settings_of_a_stage_are_checked() -> None:
    with pytest.raises(DemixError, match=r"--settings\.speed: is not a known setting"):
        settings_from(Training, '{"speed": 1}')
    with pytest.raises(DemixError, match=r"--settings\.seed: is missing"):
        settings_from(Training, "{}")
    with pytest.raises(DemixError, match="is not JSON"):
        settings_from(Training, "{")
    good = {
        "seed": 1, "architecture": {}, "tokens": 10, "sequences": 1, "learning_rate": 1, "warmup": 0.1, "clip": 1.0,
        "weight_decay": 0.1, "precision": "fp32", "threads": 1, "checkpoint_every": 5,
    }  # fmt: skip
    assert settings_from(Training, good).learning_rate == 1
    for key, wrong in (("tokens", "10"), ("tokens", 1e3), ("seed", True), ("architecture", []), ("clip", "1")):
        with pytest.raises(DemixError, match=rf"--settings\.{key}: is "):
            settings_from(Training, good | {key: wrong})


@pytest.mark.parametrize(
    "arguments",
    [
        ["split", "a", "a.parquet", "--owners", "a", "--output", "out", "--settings", "{bad"],
        ["split", "a", "a.parquet", "--owners", "a", "--output", "out", "--settings", "{}"],
        ["tokenizer", "a.parquet", "--output", "out", "--settings", '{"vocab_size": 300}'],
        ["tokenizer", "a.parquet", "--output", "out", "--settings", '{"kind": "word", "vocab_size": 300, "words": 1}'],
        ["tokenize", "a.parquet", "--tokenizer", "missing.json", "--output", "out"],
        ["track", "results", "--output", "out", "--settings", "[]"],
        ["train", "sparse", "a", "--settings", "{}", "--output", "out", "--metrics", "m", "--checkpoints", "c"],
        ["adapt-dense", "a", "b", "--settings", "{}", "--output", "out", "--metrics", "m", "--checkpoints", "c"],
        ["score", "nomodel", "a", "--experts", "a", "--output", "out",
         "--settings", '{"dev_blocks": 1, "test_tokens": null, "precision": "fp32", "threads": 1}'],
        ["score", "nomodel", "a", "--experts", "a", "--output", "out",
         "--settings", '{"dev_blocks": 1, "test_tokens": null, "precision": "fp8", "threads": 1}'],
        ["export", "nomodel", "--expert", "a", "--tokenizer", "t", "--output", "out"],
        ["summary", "nowhere"],
        ["report", "nowhere", "--output", "out"],
        ["join", "missing.parquet", "--output", "out"],
        ["config", "missing.yaml"],
        ["config"],
    ],
    ids=lambda arguments: " ".join(arguments)[:40],
)  # fmt: skip
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
