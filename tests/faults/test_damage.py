"""A file that was cut short, one bit of which flipped, or that another took the place of is found by who reads it."""

import json
import math
import random
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from demix.files import (
    read_json,
    read_json_lines,
    read_parquet,
    sha256_file,
    write_json,
    write_json_lines,
    write_parquet,
)
from support.breaking import command, json_value, run_tiny
from support.cli import said
from support.disturbed import printed
from support.errors import refused

RUN = "results/tiny"
SCORE = f'score {RUN}/models {RUN}/tokens/fantasy/|"model": "dense"'
# By what each command holds, files of each kind that it reads.
READERS = {
    "split licenses": ("documents/licenses/0000.parquet", "documents/licenses/0000.json", "corpus/owners.parquet"),
    "deduplicate ": ("documents/licenses/0000.parquet",),
    "tokenizer ": ("corpus/licenses/train.parquet",),
    "tokenize |licenses/dev": ("corpus/licenses/dev.parquet", "tokenizer.json"),
    "train dense |models/dense ": [f"tokens/licenses/train.{kind}" for kind in ("arrow", "documents.arrow", "json")],
    "overlap ": ("tokens/fantasy/test.arrow",),
    SCORE: ("tokens/fantasy/test.arrow", "models/dense/model.json", "models/dense/shared.safetensors"),
    f'score {RUN}/models {RUN}/tokens/fantasy/|"model": "demix"': [
        f"models/demix/experts/licenses.{kind}" for kind in ("safetensors", "json")
    ],
    "adapt |fantasy/dev|--scores": ("tokens/fantasy/dev.arrow", "scores/demix/fantasy.dev/licenses.parquet"),
    "evaluate fantasy": (
        "tokenizer.json",
        "scores/demix/fantasy.test/licenses.parquet",
        "scores/demix/fantasy.test/tokens.parquet",
    ),
    f"join {RUN}/evaluations/parliament.parquet": ("evaluations/fantasy.parquet",),
    "join |parliament.priors": ("evaluations/fantasy.priors.parquet",),
    "join |parliament.differences": ("evaluations/fantasy.differences.parquet",),
    "join |parliament.posteriors": ("evaluations/fantasy.posteriors.parquet",),
    "join |audit": ("evaluations/licenses.audit.parquet",),
    "audit licenses": ("tokens/licenses/train.arrow", "evaluations/licenses.priors.parquet"),
    "report ": (
        *(f"{name}.parquet" for name in ("results", "priors", "differences", "posteriors", "corpus/overlap")),
        "config.json",
        "metrics/dense.jsonl",
    ),
    "track ": ("results.parquet", "metrics/dense.jsonl", "corpus/licenses/card.json"),
}
READ = [(name, words) for words, names in READERS.items() for name in names]


def cut(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content))]


def flip(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def is_same_json(path: Path, whole: bytes) -> bool:
    """Whether a JSON file holds the value of the bytes `whole`, seal included, whatever its own bytes are."""
    lines = path.suffix == ".jsonl"
    return path.suffix in (".json", ".jsonl") and json_value(path.read_bytes(), lines) == json_value(whole, lines)


DAMAGES = (cut, flip)
Times = Callable[[int, int], int]


@pytest.mark.faults
@pytest.mark.parametrize(("name", "reader"), READ)
def test_every_artefact_is_checked_by_who_reads_it(
    name: str, reader: str, copied: Path, times: Times, chance: random.Random
) -> None:
    path, arguments = Path(RUN, name), command(copied, reader)
    whole = path.read_bytes()
    for damage in DAMAGES:
        for number in range(times(2, 20)):
            path.write_bytes(damage(whole, chance))
            # Columns that are whole stay as they are, and weights are not read.
            for column in Path(RUN, "scores").glob("*/fantasy.*/*.parquet") if arguments[0] == "score" else ():
                column.unlink()
            line = said(arguments)
            if is_same_json(path, whole):
                assert line is None
            else:
                assert line is not None, (damage, number)
                assert str(path) in line


@pytest.mark.faults
def test_raw_text_is_checked_when_it_is_anonymized(copied: Path, times: Times, chance: random.Random) -> None:
    raw = Path(RUN, "raw/licenses/0000.parquet")
    source = {"path": "resources/sample/licenses.jsonl.zst"}
    assert said(["download", "licenses", "--settings", json.dumps(source), "--output", str(raw)]) is None
    anonymize = ["anonymize", str(raw), "--output", "documents.parquet", "--counts", "counts.json"]
    whole = raw.read_bytes()
    for damage in DAMAGES:
        for _ in range(times(2, 20)):
            raw.write_bytes(damage(whole, chance))
            assert str(raw) in str(said(anonymize))


def write_object(path: Path) -> None:
    write_json(path, {"architecture": {"heads": 2}, "steps": 12, "loss": 1.25e-9, "name": "ü"})


def write_lines(path: Path) -> None:
    write_json_lines(path, [{"step": n, "loss": 2.5e-7 / n, "é": math.nan} for n in (1, 2, 4)])


@pytest.mark.parametrize(
    ("name", "make", "read", "may_change"),
    [
        # The case of an exponent, and of the escapes of ü and é.
        ("a.json", write_object, read_json, {"e", "f", "c"}),
        ("a.jsonl", write_lines, read_json_lines, {"e"}),
    ],
)
def test_a_bit_of_a_json_file_may_flip_only_where_its_value_stays(
    name: str, make: Callable, read: Callable, may_change: set[str], tmp_path: Path
) -> None:
    """Every bit, and every length."""
    path = tmp_path / name
    make(path)
    whole = path.read_bytes()
    before, same = repr(read(path)), set()
    for place, bit in product(range(len(whole)), range(8)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
        if is_same_json(path, whole):
            assert repr(read(path)) == before
            same.add(chr(whole[place]))
        else:
            with refused(name):
                read(path)
    assert same == may_change
    for length in range(len(whole) - 1):
        path.write_bytes(whole[:length])
        with refused(name):
            read(path)
    path.write_bytes(whole[:-1])
    assert repr(read(path)) == before


def test_no_bit_of_a_sealed_parquet_file_may_flip(tmp_path: Path, times: Times, chance: random.Random) -> None:
    """Every byte that Parquet's page checksums leave out, too: one bit of each, and all lengths but the whole."""
    path = tmp_path / "a.parquet"
    columns = {"domain": ["news", "law"] * 300, "nll": np.linspace(0, 9, 600), "text": ["ab" * 40] * 600}
    table = pa.table(columns).replace_schema_metadata({"tokens_sha256": "0" * 64})
    write_parquet(table, path, row_group_size=250)
    whole, before = path.read_bytes(), read_parquet(path)
    places = chance.sample(range(len(whole)), min(times(400, 4000), len(whole)))
    lengths = chance.sample(range(len(whole)), min(times(100, 1000), len(whole)))
    flipped = (whole[:at] + bytes([whole[at] ^ 1 << chance.randrange(8)]) + whole[at + 1 :] for at in places)
    for content in (*flipped, *(whole[:length] for length in lengths)):
        path.write_bytes(content)
        with refused("a.parquet"):
            read_parquet(path)
    path.write_bytes(whole)
    assert read_parquet(path) == before


def test_texts_that_quote_a_seal_and_files_without_one_are_no_damage(tmp_path: Path) -> None:
    for text in ("demix~", "demix~digest~", "digest~", f"demix~digest~\x18@{'0' * 64}x", " \t" * 64):
        pq.write_table(pa.table({"text": [text]}), tmp_path / "theirs.parquet")
        write_parquet(pa.table({"text": [text]}), tmp_path / "ours.parquet")
        write_json(tmp_path / "a.json", {text: text})
        assert read_parquet(tmp_path / "ours.parquet")["text"].to_pylist() == [text]
        assert read_json(tmp_path / "a.json") == {text: text}
        if "\x18" not in text:
            assert read_parquet(tmp_path / "theirs.parquet")["text"].to_pylist() == [text]


# A file of each kind; what was made of it stays.
REBUILT = (
    "documents/licenses/0000.parquet",
    "corpus/owners.parquet",
    "corpus/licenses/dev.parquet",
    "tokenizer.json",
    "tokens/licenses/train.arrow",
    "tokens/licenses/train.json",
    "scores/demix/fantasy.test/licenses.parquet",
    "evaluations/fantasy.parquet",
    "priors.parquet",
    "results.parquet",
)


@pytest.mark.faults
@pytest.mark.parametrize("name", REBUILT)
def test_a_rerun_rebuilds_just_the_file_that_was_deleted(name: str, finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder, symlinks=True)
    run = folder / RUN
    files = [path for kind in ("models", "metrics", "scores") for path in (run / kind).rglob("*") if path.is_file()]
    # The workflow knows a column of scores by the manifest of its job, which scores both splits of a domain under all
    # experts in one pass, and leaves the columns that are whole.
    known = run / "scores" / "demix" / "fantasy.json" if name.startswith("scores/") else run / name
    job = (run / name).parent.with_suffix("")
    others = [path for path in files if path != known and path.parent.with_suffix("") != job]
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in others if path != run / name}
    sha256 = sha256_file(run / name)
    for path in {run / name, known}:
        path.unlink()
    assert run_tiny(folder, str(known.relative_to(folder))).wait() == 0, printed(folder)
    assert sha256_file(run / name) == sha256
    assert run_tiny(folder).wait() == 0, printed(folder)
    assert [path for path, was in before.items() if (path.stat().st_mtime_ns, path.stat().st_ino) != was] == []
    assert [path for path in files if sha256_file(path) != sha256_file(finished / path.relative_to(folder))] == []
