"""Configs as people write them: made by `demix init`, checked by `demix config`, which names the line at fault."""

import io
import json
import logging
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
import zstandard
from rich.console import Console

import snakemake_logger_plugin_demix as display
from demix.config.keys import read_keys
from demix.data.init import outline
from demix.run.check import completed_run, load_run
from support.cli import demix, refusal, succeeds

REPOSITORY = Path(__file__).parents[2]
TWO = """run: mine
domains:
  training:
    law:
      source: {path: mine/law.txt}
    news:
      source:
        path: [mine/*.csv, mine/news.txt]
architecture: {layers: 1, width: 8, heads: 1, context: 16}
training: {tokens: 4000, sequences: 2, learning_rate: 1.0e-3}
"""


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the text of nine domains, in as many formats."""
    monkeypatch.chdir(tmp_path)
    pieces = [" ".join(f"w{number}x{place}" for place in range(30)) for number in range(60)]
    records = [{"title": f"the page {number}", "body": piece} for number, piece in enumerate(pieces)]
    lines = "".join(json.dumps(record) + "\n" for record in records).encode()
    Path("Büro [1].txt").write_text(" ".join(pieces))
    Path("büro 1.txt").write_text(" ".join(pieces))
    Path("2024.jsonl.zst").write_bytes(zstandard.compress(lines))
    Path("tokens.csv").write_text("id,text\n" + "".join(f"{number},{piece}\n" for number, piece in enumerate(pieces)))
    pq.write_table(pa.table({"n": range(60), "text": pieces}), "a.parquet")
    Path("b.json").write_text(json.dumps([{"id": number, "text": piece} for number, piece in enumerate(pieces)]))
    with tarfile.open("c.tar.gz", "w:gz") as archive:
        for number, piece in enumerate(pieces):
            entry = tarfile.TarInfo(f"{number}.txt")
            entry.size = len(piece)
            archive.addfile(entry, io.BytesIO(piece.encode()))
    for name in ("letters/1.txt", "letters/old/2.txt", "letters/notes.md", "more/1.txt", "src/a.py"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(" ".join(pieces))
    return tmp_path


def test_init_writes_a_valid_config_of_any_files(texts: Path) -> None:
    given = [
        "Büro [1].txt",
        "büro 1.txt",
        "2024.jsonl.zst",
        "tokens.csv",
        "a.parquet",
        "b.json",
        "c.tar.gz",
        "letters/",
        "src/*.py",
    ]
    words = ("init", *given, "--novel", "more/*.txt", "--field", "body")
    done = demix(*words)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == demix(*words).stdout
    (texts / "mine.yaml").write_text(done.stdout)
    run = load_run(texts / "mine.yaml")
    assert {run.learning_rate_factor(one) for one in run.planned if one.kind.has_experts} == {1.0}
    assert {run.learning_rate_factor(one) for one in run.planned if not one.kind.has_experts} == {0.1}
    config = run.config.values
    sources = {
        name: {
            key: value for key, value in domain["source"].items() if key in ("path", "text", "json", "document_words")
        }
        for domains in config["domains"].values()
        for name, domain in domains.items()
    }
    usual = {"text": "text", "json": "lines", "document_words": None}
    assert sources == {
        "buro_1": usual | {"path": "Büro [1].txt", "document_words": 50},
        "buro_1_2": usual | {"path": "büro 1.txt", "document_words": 50},
        "2024": usual | {"path": "2024.jsonl.zst", "text": "body"},
        "tokens_text": usual | {"path": "tokens.csv"},
        "a": usual | {"path": "a.parquet"},
        "b": usual | {"path": "b.json", "json": "values"},
        "c": usual | {"path": "c.tar.gz"},
        "letters": usual | {"path": "letters/", "document_words": 50},
        "src": usual | {"path": "src/*.py", "document_words": 50},
        "more": usual | {"path": "more/*.txt", "document_words": 50},
    }
    assert list(config["domains"]["novel"]) == ["more"]
    assert {one["words"]["dev"] for one in config["domains"]["training"].values()} == {180}
    assert re.search(r" letters: .* 1 document; left out: 1 .*: 1 \.md$", done.stdout, re.MULTILINE)
    succeeds("config", "mine.yaml")
    first, schema = done.stdout.splitlines()[0].split("$schema=")
    assert first == "# yaml-language-server: "
    assert Path(schema).samefile(REPOSITORY / "workflow" / "schemas" / "config.schema.yaml")


@pytest.mark.parametrize(
    ("domains", "words", "layers", "updates", "rate"),
    [(3, 2_000, 2, 520, 4e-3), (10, 2_000, 2, 156, 8e-3), (2, 120_000, 3, 3906, 8e-3), (10, 21_000, 3, 781, 8e-3)],
)
def test_the_rate_follows_from_size_and_updates(domains, words, layers, updates, rate, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [f"{chr(97 + number)}.txt" for number in range(domains)]
    for name in names:
        lines = (f"The mill number {number} of {name} stood by a river." for number in range(words // 10))
        Path(name).write_text("\n".join(lines))
    Path("mine.yaml").write_text(outline("mine", names, []))
    succeeds("config", "mine.yaml", "--values")
    run = completed_run({"base": "mine.yaml"}, tmp_path)
    assert run.architecture.layers == layers
    assert {model.updates for model in run.own} == {updates}
    assert run.config.training.learning_rate == rate


# Texts, and the names of their domains: without a letter, too long, over and over, taken.
NAMES = {
    "ArXiv": "arxiv",
    "arxiv": "arxiv_2",
    "Москва": "domain_3",
    "ha" * 40: "domain_4",
    "a name of a domain, longer than what files can hold by 1": "a_name_of_a_domain_longer_than_what_files_can_hold_by",
    "z: #": "z",
}


def test_domains_have_new_names_that_files_can_hold(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        Path(f"{name}.txt").write_text(f"some words of the text {name} " * 300)
    Path("mine.yaml").write_text(demix("init", *(f"{name}.txt" for name in NAMES)).stdout)
    domains = load_run("mine.yaml").config.domains.training
    assert {domain.source.path: name for name, domain in domains.items()} == {f"{k}.txt": v for k, v in NAMES.items()}


@pytest.mark.parametrize(
    ("words", "subject"),
    [
        (["büro 1.txt"], "training domains"),
        (["büro 1.txt", "little.txt"], "little.txt"),
        (["büro 1.txt", "nothere.txt"], "nothere.txt"),
        (["büro 1.txt", "büro 1.txt"], "büro 1.txt"),
        (["büro 1.txt", "empty"], "empty"),
        (["büro 1.txt", "two.jsonl"], "two.jsonl"),
        (["büro 1.txt", "two.jsonl", "--field", "answer"], "two.jsonl"),
        (["büro 1.txt", "utf16.txt"], "utf16.txt"),
        (["büro 1.txt", "latin.txt"], "latin.txt"),
        (["büro 1.txt", "a.parquet", "--run", "../mine"], "--run ../mine"),
    ],
)
def test_init_refuses_texts_that_are_no_domains(words: list[str], subject: str, texts: Path) -> None:
    (texts / "little.txt").write_text("two words")
    (texts / "empty").mkdir()
    (texts / "two.jsonl").write_text('{"question": "what is that", "answer": "a question"}\n')
    (texts / "utf16.txt").write_text("one text\n" * 2000, encoding="utf-16")
    (texts / "latin.txt").write_text("été déjà vu\n" * 2000, encoding="latin-1")
    refusal("init", *words, of=subject)


@pytest.mark.parametrize(
    ("old", "new", "subject"),
    [
        ("run: mine", "run: mine\nrun: other", "mine.yaml, line 2"),
        ("path: [", "paths: [", "mine.yaml, line 8, config key domains.training.news.source.paths"),
        (", learning_rate: 1.0e-3", "", "mine.yaml, line 10, config key training.learning_rate"),
        ("1.0e-3", "1e", "mine.yaml, line 10, config key training.learning_rate"),
        ("1.0e-3", "1.0e-3, ranks: 3", "mine.yaml, line 10, config key training.ranks"),
        ("run: mine", "run: mine\nevaluation: {weights: [a]}", "mine.yaml, line 2, config key evaluation.weights.0"),
        ("run: mine", "base: below.yaml", "below.yaml, line 12"),
    ],
)
def test_config_names_line(old: str, new: str, subject: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("below.yaml").write_text(TWO + "seed: 1\nseed: 2\n")
    Path("mine.yaml").write_text(TWO.replace(old, new, 1))
    refusal("config", "mine.yaml", of=subject)


def test_what_yaml_and_snakemake_read_is_not_refused(tmp_path: Path) -> None:
    tabs, merged = tmp_path / "tabs.json", tmp_path / "merged.yaml"
    tabs.write_text(json.dumps(yaml.safe_load(TWO), indent="\t"))
    assert read_keys(tabs)[0] == yaml.safe_load(TWO)
    merged.write_text("a: &a {b: 1}\nc: &c {d: 2}\ne:\n  <<: *a\n  <<: *c\n")
    assert read_keys(merged)[0] == yaml.safe_load(merged.read_text())


def test_config_prints_every_value() -> None:
    sample = REPOSITORY / "config" / "sample.yaml"
    assert yaml.safe_load(demix("config", "--values", sample).stdout) == load_run(sample).config.values


@pytest.mark.full
@pytest.mark.parametrize("chosen", [[], ["--logger", "demix"]])
def test_a_missing_config_is_one_line_of_snakemake(chosen: list[str]) -> None:
    command = [Path(sys.executable).parent / "snakemake", "--configfile", "no.yaml", *chosen]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()[1:]
    assert line.startswith("error: --configfile: ")


def test_the_display_shows_warnings() -> None:
    handler = display.LogHandler(SimpleNamespace(dryrun=False), None)
    handler.console = Console(file=io.StringIO(), width=200)
    handler.emit(logging.makeLogRecord({"msg": "law: left out: 1 documents", "levelno": logging.WARNING}))
    handler.emit(logging.makeLogRecord({"msg": "rule law", "levelno": logging.INFO}))
    assert handler.console.file.getvalue().splitlines() == ["law: left out: 1 documents"]
