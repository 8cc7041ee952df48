"""What a first user gets wrong: each command ends in one line, which names what is at fault."""

import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from demix.config.config import Config
from demix.data.tokenizer import Tokenizer
from demix.files import write_json
from demix.run.check import load_run
from demix.run.run import FORMAT, write_run_config
from support.cli import refusal, said
from support.configs import small
from support.models import write_model

REPOSITORY = Path(__file__).parents[2]
SAMPLE = REPOSITORY / "config" / "sample.yaml"
MODEL, ENCODER = "results/letters/models/mine", "results/letters/tokenizer.json"
CONFIG = """\
run: mine
seed: 1
domains:
  training:
    law: {source: {path: texts/law.txt}, words: {dev: 100}}
    news: {source: {path: texts/*.csv}}
architecture: {layers: 1, width: 8, heads: 1, context: 16}
training: {tokens: 4000, sequences: 2, learning_rate: 1.0e-3}
"""


@pytest.fixture(scope="module", autouse=True)
def place(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory: configs, the runs `letters` and `old`, a model of `letters`, and texts."""
    folder = tmp_path_factory.mktemp("errors")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run = Path("results/letters")
        write_run_config(run / "config.json", Config.complete(small(run="letters")))
        shutil.copy(tokens / "tokenizer.json", run)
        encoder = Tokenizer.load(run / "tokenizer.json")
        write_model(Path(MODEL), ("law", "news"), encoder.sha256, encoder.vocab_size)
        shutil.copytree(MODEL, "damaged")
        damaged = Path("damaged/shared.safetensors")
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
        write_model(Path("foreign"), ("law",), "0" * 64, encoder.vocab_size)
        write_json(Path("results/old/config.json"), {"run": "old", "format": FORMAT - 1})
        Path("mine.yaml").write_text(CONFIG)
        Path("empty").mkdir()
        Path("latin.txt").write_bytes("Große Höhe, äußere Übel\n".encode("latin-1"))
        yield folder


# What is at fault, by the command that says so.
SUBJECTS = {
    "config mine.yaml": "mine.yaml",
    "config missing.yaml": "missing.yaml",
    "summary results/old": "results/old/config.json",
    f"experts remove {MODEL} lwa": f"{MODEL}/experts/lwa.json",
    f"generate damaged --tokenizer {ENCODER} --prompt a": "damaged/shared.safetensors",
    f"generate foreign --tokenizer {ENCODER} --prompt a": ENCODER,
    f"eval {MODEL} empty": "empty",
    f"eval {MODEL} latin.txt": "latin.txt",
}


@pytest.mark.parametrize("words", SUBJECTS)
def test_the_line_of_a_command_names_what_is_at_fault(words: str) -> None:
    refusal(*words.split(), of=SUBJECTS[words])


@pytest.mark.parametrize(
    ("words", "known"),
    [
        ("sql results/lettres count(*)", "results/letters"),
        (f"experts remove {MODEL} lwa", "law"),
        ("eval results/letters/models/min a", MODEL),
        ("serve results/letters/models/min --port 0", MODEL),
        (f"merge {MODEL} --weights nesw=1 --output a", "news"),
        ("config fantasy.yaml", "fantasy"),
    ],
)
def test_an_unknown_name_comes_with_the_nearest_known_one(words: str, known: str) -> None:
    Path("fantasy.yaml").write_text(f"base: {SAMPLE}\nremoval: {{retrain_without: [novels], replacement: fantsy}}\n")
    assert known in str(said(words.split())).rpartition("; ")[2]


SCORING = """{"dev_blocks": 1, "test_tokens": null, "precision": "fp32", "threads": 1,
    "models": [{"model": "none", "experts": ["a"], "domains": ["a"], "splits": ["test"]}]}"""
SCORED = ("a/test.arrow", "--output", "out", "--manifest", "out.json")
TRAINED = ("--settings", "{}", "--output", "out", "--metrics", "m", "--checkpoints", "c")


@pytest.mark.parametrize(
    ("arguments", "subject"),
    [
        (("tokenizer", "a.parquet", "--output", "out", "--settings", '{"vocab_size": "300"}'), "--settings.vocab_size"),
        (("tokenizer", "a.parquet", "--output", "out", "--settings", '{"a":' * 100_000), "--settings"),
        (("tokenize", "a.parquet", "--tokenizer", "missing.json", "--output", "out"), "missing.json"),
        (("track", "results", "--uri", "postgresql://me:hidden@host/demix"), "--uri"),
        (("train", "sparse", "a", *TRAINED), "--settings.tokens"),
        (("adapt", "a", "b", *TRAINED), "--settings.tokens"),
        (("score", "models", *SCORED, "--settings", SCORING), "a/test.json"),
        (("score", "models", *SCORED, "--settings", SCORING.replace("32", "8")), "--settings.precision"),
        (("export", "nomodel", "--expert", "a", "--tokenizer", "t", "--output", "out"), "nomodel"),
        (("report", "nowhere", "--output", "out"), "nowhere/config.json"),
        (("join", "missing.parquet", "--output", "out"), "missing.parquet"),
    ],
)
def test_bad_input_ends_in_one_line_and_leaves_nothing(
    arguments: tuple[str, ...],
    subject: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    line = refusal(*arguments, of=subject)
    assert "hidden" not in line
    assert capsys.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_a_process_ends_with_that_line_and_status_1() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "demix", "config", "missing.yaml"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("demix: error: missing.yaml: ")
    assert done.stderr.count("\n") == 1


def test_an_empty_list_of_novel_domains_is_none() -> None:
    values = yaml.safe_load(CONFIG)
    values["domains"]["novel"] = None
    Path("none.yaml").write_text(yaml.safe_dump(values))
    assert load_run("none.yaml").novel == ()


@pytest.mark.full
@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_a_port_in_use_is_refused_before_the_server_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = ("make", "-o", ".venv/installed", "ui", f"PORT={port}")
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode
    assert done.stderr.startswith(f"demix: error: PORT {port}: ")
