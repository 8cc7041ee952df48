"""What `demix init` chooses by the amount of text, and by a field."""

import gzip
import json
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
import zstandard

from demix.data.divide import Division, divide
from demix.data.outline import hint, outline
from demix.files import read_json
from demix.run.check import completed_run
from demix.run.rules import RunRules
from demix.settings import settings_from
from support.cli import demix, refusal


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
    done = demix("config", "mine.yaml", "--values")
    assert done.exit_code == 0, done.output
    run = completed_run({"base": "mine.yaml"}, tmp_path)
    assert run.architecture.layers == layers
    assert {model.updates for model in run.own} == {updates}
    assert run.config.training.learning_rate == rate


# Values of a field, and the names of their domains: of two alike, without a letter, too long, taken, over and over.
VALUES: dict[Any, str] = {
    "ArXiv": "arxiv",
    "arxiv": "arxiv_2",
    "Gutenberg (PG-19)": "gutenberg_pg_19",
    "Москва": "domain_4",
    "tokens": "tokens_text",
    "ha" * 40: "domain_6",
    "a name of a domain, longer than what files can hold by 1": "a_name_of_a_domain_longer_than_what_files_can_hold_by",
    "a\nb": "a_b",
    "null": "null",
    7: "7",
    "\u2028z\x85: #": "z",
    True: "true",
    1.5: "1_5",
    "pile": "pile",
    "novel": "novel",
}


def write_corpus(path: Path, values: Iterable[Any], documents: int = 60, words: int = 40) -> None:
    rows = [
        {"text": " ".join(f"w{number}x{place}of{name}" for place in range(words)), "n": number, "meta": {"set": value}}
        for number in range(documents)
        for name, value in enumerate(values)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_bytes(zstandard.compress(lines) if path.suffix == ".zst" else gzip.compress(lines))


def test_each_value_of_a_field_is_a_domain(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_corpus(Path("pile.jsonl.gz"), [*VALUES, "7", None, " "])
    Path("novel.txt").write_text("some words of a text " * 400)
    done = demix("init", "pile.jsonl.gz", "--by", "meta.set", "--novel", "novel.txt")
    assert (done.exit_code, done.stderr) == (0, "")
    assert re.search(r"#.* 120 documents", done.stdout), "those without a text or a number there"
    Path("mine.yaml").write_text(done.stdout)
    assert demix("config", "mine.yaml").exit_code == 0
    run = completed_run({"base": "mine.yaml"}, tmp_path)
    assert {domain.value: name for name, domain in run.config.domains.training.items()} == VALUES
    assert [*run.config.domains.novel] == ["novel_16"]
    assert run.config.domains.training["7"].words.dev == 480, "the text '7' and the number are one value"
    assert run.config.domains.training["arxiv"].words.dev == 240
    shared = run.config.sources["pile"]
    assert (shared.by, shared.source.path, shared.source.piece_words) == ("meta.set", "pile.jsonl.gz", None)
    division = settings_from(Division, RunRules(run).sharing("pile", **RunRules(run).division("pile")))
    divide("pile", division, tmp_path / "raw", tmp_path / "counts.json")
    counts = read_json(tmp_path / "counts.json")
    assert counts["taken"] == {name: {str(value): 60 * (1 + (value == 7))} for value, name in VALUES.items()}
    assert counts["untaken"] == {" ": 60}


def test_a_value_with_too_little_text_is_no_domain(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_corpus(Path("a.parquet"), ["law", "news"], documents=30)
    write_corpus(Path("b.parquet"), [f"rare\n{number}" for number in range(7)], documents=2)
    done = demix("init", "a.parquet", "b.parquet", "--by", "meta.set")
    assert re.search(r"#.* rare 0 80, rare 1 80", done.stdout), "a comment names them with their words"
    Path("mine.yaml").write_text(done.stdout)
    run = completed_run({"base": "mine.yaml"}, tmp_path)
    assert [*run.domains] == ["law", "news"]
    source = run.config.sources["a"].source
    assert (source.path, source.piece_words) == (("a.parquet", "b.parquet"), 50), "30 documents are cut"


def test_of_a_large_corpus_all_files_are_read_in_part(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("demix.data.outline.MOST_OF_CORPUS", 3000)
    Path("corpus").mkdir()
    for name in ("law", "news"):
        write_corpus(Path("corpus", f"{name}.jsonl.zst"), [name])
    done = demix("init", "corpus", "--by", "meta.set")
    assert re.findall(r"(\w+):  # at least 1,520 words in 38 documents", done.stdout) == ["law", "news"]


def test_a_field_that_parts_records_is_named(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    write_corpus(Path("my pile.jsonl.gz"), ["law", "news", "code"])
    Path("letters.txt").write_text("some words of a text " * 400)
    command = "demix init 'my pile.jsonl.gz' --by meta.set"
    with caplog.at_level("INFO"):
        done = demix("init", "letters.txt", "my pile.jsonl.gz")
    assert [*yaml.safe_load(done.stdout)["domains"]["training"]] == ["letters", "my_pile"]
    assert command in caplog.text
    assert command in refusal("init", "my pile.jsonl.gz", of="training domains")
    assert demix(*shlex.split(command)[1:]).exit_code == 0


@pytest.mark.parametrize(
    "values", [["law"], [f"v{number}" for number in range(51)], ["law", "x" * 61], ["law", "news", None, None]]
)
def test_other_fields_are_not_named(values, tmp_path):
    write_corpus(tmp_path / "a.jsonl.gz", values)
    assert hint([str(tmp_path / "a.jsonl.gz")]) == ""


@pytest.mark.parametrize("by", ["n", "none", "meta"])
def test_a_field_that_parts_nothing_is_refused(by, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_corpus(Path("a.jsonl.gz"), ["law", "news", "code"])
    refusal("init", "a.jsonl.gz", "--by", by, of=f"--by {by}")
