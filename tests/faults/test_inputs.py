"""Inputs that got through once: each is a row of a table, and ends in one line with exit status 1, within its seconds.

A row has a name, what makes its files in the working folder, the command's arguments, and what the line says.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from support.breaking import Note
from support.cli import said
from support.disturbed import TINY

LINE = '{"text": "some words"}\n'


@dataclass(frozen=True)
class Attack:
    name: str
    make: Callable[[], object]
    command: list[str]
    line: str


def source(name: str, content: str | Callable[[Path], object], line: str, **keys: object) -> Attack:
    """A file as the source of a domain."""

    def make() -> None:
        path = Path(name)
        path.write_text(content) if isinstance(content, str) else content(path)

    settings = {"kind": "files", "path": name} | keys
    command = ["download", "d", "--settings", json.dumps(settings), "--output", "raw.parquet"]
    title = f"{name}: {line}" + f" ({', '.join(keys)})" * bool(keys)
    return Attack(title, make, command, line)


def config(line: str, text: str) -> Attack:
    """A config file."""
    return Attack(f"config: {line}", lambda: Path("c.yaml").write_text(text), ["config", "c.yaml"], line)


def table(path: Path, *columns: list, names: list[str], **how: object) -> None:
    pq.write_table(pa.Table.from_arrays([pa.array(column) for column in columns], names), path, **how)


def one_value_for_each_row(path: Path) -> None:
    indices = pa.array([0] * 20_000, pa.int32())
    column = pa.DictionaryArray.from_arrays(indices, pa.array(["x" * (1 << 20)]))
    how = {"dictionary_pagesize_limit": 1 << 30, "compression": "zstd", "write_statistics": False}
    pq.write_table(pa.table({"text": column}), path, **how)
    assert path.stat().st_size < 2000


def beyond_9999(path: Path) -> None:
    table(path, ["a"], pa.array([1 << 50], pa.timestamp("ms")), names=["text", "when"])


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


def domain(**keys: object) -> str:
    """The tiny config with keys of a source."""
    config = json.loads(json.dumps(TINY))
    config["domains"]["novel"]["fantasy"]["source"] |= keys
    return yaml.safe_dump(config)


MERGES = "a0: &a0 {" + ", ".join(f"k{n}: 1" for n in range(10)) + "}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 11)
)  # fmt: skip

ATTACKS = [
    source("twice.jsonl", '{"text": "one", "text": "two"}\n', "the key 'text' stands twice"),
    source("inside.jsonl", '{"text": "one", "m": {"a": 1, "a": 2}}\n', "the key 'a' stands twice"),
    source("twice.csv", "text,text\none,two\n", "has two columns 'text'"),
    source("twice.parquet", lambda path: table(path, ["a"], ["b"], names=["text", "text"]), "has two columns 'text'"),
    source("bomb.parquet", one_value_for_each_row, "expands to over 200 times its"),
    source("late.parquet", beyond_9999, "holds a value", metadata=["when"]),
    source("pipe.jsonl", os.mkfifo, "is a pipe or a device"),
    source("link.jsonl", lambda path: path.symlink_to("nowhere"), "is a link to nowhere, which is missing"),
    source("deep.jsonl", f'{{"text": {nested(900)}}}\n', "is nested deeper than 100 levels"),
    source("meta.jsonl", f'{{"text": "a", "m": {nested(900)}}}\n', "is nested deeper than 100 levels", metadata=["m"]),
    source("digits.jsonl", f'{{"text": "a", "n": {"9" * 4000}}}\n', "keeps none of 1", where={"n": {"max": 5}}),
    source("number.jsonl", LINE, "where", where={"n": int("9" * 4000)}),
    source("range.jsonl", LINE, "where", where={"n": {"min": int("9" * 4000)}}),
    config("merges more than 100000 keys", MERGES),
    config("config key base", 'base: "a\\0b"\n'),
    config("where", domain(where={"n": {"max": int("9" * 4000)}})),
]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_an_input_ends_in_one_line(attack: Attack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, note: Note) -> None:
    monkeypatch.chdir(tmp_path)
    attack.make()
    with note.timed("hostile input", "one line"):
        line = said(attack.command)
        assert line is not None, "the input got through"
        assert line.startswith("demix: error: ")
        assert "\n" not in line
        assert attack.line in line
    assert not Path("raw.parquet").exists()
