"""What a first user gets wrong: each command ends in one line that says what is there."""

import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from demix.data.tokenizer import Tokenizer
from demix.errors import nearest
from demix.run.check import load_run
from support.cli import demix, said
from support.models import write_model
from support.synthetic_run import build_run

SAMPLE = Path(__file__).parents[2] / "config" / "sample.yaml"


def line(*arguments: object) -> str:
    told = said([str(argument) for argument in arguments]) or ""
    assert told.startswith("demix: error: ")
    assert "\n" not in told
    return told


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with one model and a folder of a score table."""
    folder = build_run(tmp_path_factory.mktemp("results") / "letters", novel=(), retrained=(), steps=1).path
    write_model(folder / "models" / "mine")
    table = folder / "scores" / "mine" / "law.test"
    table.mkdir(parents=True)
    for name in ("tokens", "law", "news"):
        (table / f"{name}.parquet").touch()
    return folder


@pytest.mark.parametrize(
    ("words", "known"),
    [
        ("summary {run}s", "{run}"),
        ("sql {run}s count(*)", "{run}"),
        ("compare {run} {run}s", "{run}"),
        ("generate {run}/models/min --prompt a", "{run}/models/mine"),
        ("eval {run}/models/min a", "{run}/models/mine"),
        ("playground {run}/models/min", "{run}/models/mine"),
        ("serve {run}/models/min --port 0", "{run}/models/mine"),
        ("experts list {run}/models/min", "{run}/models/mine"),
        ("merge {run}/models/min --weights law=1 --output a", "{run}/models/mine"),
        ("experts remove {run}/models/mine lwa", "law"),
        ("merge {run}/models/mine --weights nesw=1 --output a", "news"),
        ("mix {run}/scores/mine/law.test --experts nesw", "news"),
        ("mix {run}/scores/mine/lwa.test", "{run}/scores/mine/law.test"),
        ("config {config}", "fantasy"),
    ],
)
def test_an_unknown_name_is_told_the_nearest(words: str, known: str, run: Path, tmp_path: Path) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text(f"base: {SAMPLE}\nremoval: {{replacement: fantsy}}\n")
    assert f"; did you mean {known.format(run=run)}? known are " in line(*words.format(run=run, config=config).split())


def test_of_many_names_the_nearest_are_told() -> None:
    names = [*(f"cbtm_{number}" for number in range(20)), "dense", "demix"]
    told = nearest("demx", names, "")
    assert told.startswith("did you mean demix? known are demix, dense, cbtm_")
    assert told.endswith(" and 17 more")
    assert told.count(", ") == 4
    assert nearest("demx", names[-5:], "").endswith("known are cbtm_17, cbtm_18, cbtm_19, dense, demix")


def test_a_folder_that_is_no_score_table(run: Path) -> None:
    for place in (Path("/"), run, run / "none"):
        assert "is no folder of a score table; " in line("mix", place, "--methods", "average")
    told = line("mix", run / "scores" / "mine" / "law.test", "--experts", "tokens")
    assert "--experts tokens: is no expert in " in told


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a", None, "holds no file; name a folder with files of text"),
        ("a.txt", "one text\n".encode("utf-16"), "is UTF-16 or no text, not UTF-8; convert it: iconv -f UTF-16 -t"),
        ("a.txt", "one text\n".encode("utf-16-le"), "is UTF-16 or no text, not UTF-8; convert it: iconv -f UTF-16 -t"),
        ("a.jsonl", '{"text": "a"}\n'.encode("utf-16"), "is UTF-16 or no text"),
        (
            "a.txt",
            "Große Höhe, äußere Übel\n".encode("latin-1"),
            "is not UTF-8; convert it, from Latin-1 by iconv -f LATIN1",
        ),
        ("a.jsonl", b'{"body": "a"}\n', "has no field 'text'; fields are 'body': name the text's as source.text or --"),
        ("a.csv", b"body\na\n", "name the text's as source.text or --field"),
    ],
)
def test_a_text_that_cannot_be_read(name: str, content: bytes | None, told: str, tokens: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(tokens / "tokenizer.json")
    write_model(tmp_path / "mine", ("law",), tokenizer.sha256, tokenizer.vocab_size)
    text = tmp_path / name
    if content is None:
        text.mkdir()
    else:
        text.write_bytes(content)
    words = ("eval", tmp_path / "mine", text, "--tokenizer", tokens / "tokenizer.json")
    assert told in line(*words)
    if "--" in told and name.endswith("jsonl"):
        assert demix(*words, "--field", "body").exit_code == 0


def test_the_name_of_a_run_is_told_in_words(tmp_path: Path) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text(f"base: {SAMPLE}\nrun: my run\n")
    told = "is 'my run'; allowed is string of at most 100 letters, digits, dots, _ and -, the first a letter or digit"
    assert line("config", config).endswith(told)


def test_an_empty_list_of_novel_domains_is_none(tmp_path: Path) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text(f"base: {SAMPLE}\ndomains:\n  novel:\nremoval: {{retrain_without: []}}\n")
    assert load_run(config).novel == ()


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_a_port_in_use_is_told_before_the_server_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = ("make", "-o", ".venv/installed", "ui", f"PORT={port}")
        done = subprocess.run(command, cwd=SAMPLE.parents[1], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode
    cure = f"choose another: make ui PORT={port + 1}"
    assert done.stderr.splitlines()[0] == f"demix: error: PORT {port}: is in use; {cure}"
    assert "MLflow starts" not in done.stdout
