"""Personal data planted in texts, metadata, ids and file names: none in anything that is made after anonymize."""

import copy
import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from demix.data.shards import TokenShard
from demix.data.tokenizer import Tokenizer
from demix.files import read_json
from support.breaking import Note, demix
from support.disturbed import REPOSITORY, TINY, printed, snakemake

# One of each category, in a form that is surely one.
PLANTED = {
    "EMAIL": "zoe.quine+home@mail.example.org",
    "DART": "0123456789-0123456789abcdef0123456789abcdef0123456789abcdef01234",
    "FB_USERID": "@[100012345678:2048:Zoe Quine]",
    "PHONE_NUMBER": "+44 20 7946 0958",
    "CREDIT_CARD_NUMBER": "4111 1111 1111 1111",
    "SSN": "219-09-9998",
    "USER": "@zoequine_77",
}
# What of each may be seen nowhere.
TRACES = ("zoe.quine", "mail.example", "0123456789abcdef0123", "100012345678", "7946", "1111", "09-9998", "zoequine_77")
FILE = "zoe.quine@mail.example.org +44 20 7946 0958.jsonl"


def plant(folder: Path, documents: int) -> Path:
    """A source whose every document holds all of it, in its text, its metadata and its id; so does the file's name."""
    place = folder / "private"
    place.mkdir(parents=True)
    lines = []
    for number in range(documents):
        said = " and ".join(PLANTED.values())
        words = " ".join(f"word{(number * 7 + each) % 97}" for each in range(60))
        row = {
            "id": f"{PLANTED['EMAIL']}/{number}",
            "text": f"{words}\nWrite to {said} today.\n{words[::-1]}",
            "author": {"name": PLANTED["USER"], PLANTED["EMAIL"]: [PLANTED["PHONE_NUMBER"], 4111111111111111]},
            "title": f"Call {PLANTED['PHONE_NUMBER']}",
        }
        lines.append(json.dumps(row))
    (place / FILE).write_text("\n".join(lines) + "\n")
    return place


SOURCE = {"kind": "files", "id": "id", "metadata": ["author", "title"]}


def content(path: Path, tokenizer: Path | None) -> str:
    """All text that a file holds, decoded."""
    if path.suffix == ".parquet":
        table = pq.read_table(path)
        texts = [str(table.schema)]
        texts += [
            str(row) for name in table.column_names if _is_text(table[name].type) for row in table[name].to_pylist()
        ]
        return "\n".join(texts)
    if path.suffix == ".arrow" and tokenizer and ".documents" not in path.name:
        shard = TokenShard.open(path)
        return Tokenizer.load(tokenizer).decode(np.asarray(shard.read(0, len(shard))))
    return path.read_bytes().decode("utf-8", "replace")


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def is_in(trace: str, text: str) -> bool:
    """Whether a text holds a trace: one of digits alone where no other digit is beside it, as in digests."""
    return trace in text if not trace.isdigit() else bool(re.search(rf"(?<![0-9a-f.]){trace}(?![0-9a-f])", text))


def leaks(folder: Path, skip: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """Files below `folder` that hold a trace, or whose name does."""
    tokenizer = next(iter(folder.rglob("tokenizer.json")), None)
    found = []
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or path.is_symlink() or name.startswith(skip):
            continue
        text = content(path, tokenizer)
        # Hexadecimal digests, weights and numbers are full of digits: those traces count where no digit is beside them.
        found += [
            (name, trace)
            for trace in TRACES
            if trace in name
            or re.search(
                rf"(?<![0-9a-f.]){re.escape(trace)}(?![0-9a-f])" if trace.isdigit() else re.escape(trace), text
            )
        ]
    return found


def test_nothing_is_left_after_anonymize(tmp_path: Path, note: Note) -> None:
    private = plant(tmp_path, 30)
    run = tmp_path / "run"
    raw, documents = tmp_path / "raw/d/0000.parquet", run / "documents/d/0000.parquet"
    settings = json.dumps(SOURCE | {"path": f"{private}/*.jsonl"})
    splitting = {"training": True, "seed": 1, "near_duplicates": None, "metadata": True}
    splitting["words"] = {"train": None, "dev": 200, "test": 200}
    said = []
    with note.timed("personal data in text, metadata, ids, file name", "none after anonymize, nor in what was said"):
        for arguments in (
            ("download", "d", "--settings", settings, "--output", raw),
            ("anonymize", raw, "--output", documents, "--counts", documents.with_suffix(".json")),
            ("deduplicate", documents, "--output", run / "owners.parquet"),
            ("split", "d", documents, "--owners", run / "owners.parquet", "--settings", json.dumps(splitting),
             "--output", run / "corpus"),
            ("tokenizer", run / "corpus/train.parquet", "--settings",
             '{"kind": "bpe", "vocab_size": 400, "words": 100000}', "--output", run / "tokenizer.json"),
            ("tokenize", run / "corpus/train.parquet", "--tokenizer", run / "tokenizer.json", "--output",
             run / "tokens"),
        ):  # fmt: skip
            done = demix(*arguments)
            assert done.returncode == 0, done.stderr
            said.append(done.stdout + done.stderr)
        assert leaks(tmp_path / "raw"), "the search finds what is there"
        assert leaks(run) == []
    assert [trace for trace in TRACES if trace in "".join(said)] == []
    counts = read_json(documents.with_suffix(".json"))["replacements"]
    assert all(counts[category] >= 30 for category in PLANTED), counts


BROKEN = {
    "no field": ('{"id": 1, "body": "zoe.quine"}', "has no field 'text'"),
    "no text": ('{"id": 1, "text": {"zoe.quine": "zoequine_77"}}', "not text"),
    "no JSON": ('{"id": 1, "text": "zoe.quine', "is not"),
    "no object": ('["zoe.quine@mail.example.org"]', "is not"),
    "a number": ('{"id": 1, "text": 4111111111111111}', "not text"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_errors_quote_no_text(name: str, tmp_path: Path, note: Note) -> None:
    line, message = BROKEN[name]
    (tmp_path / "a.jsonl").write_text(line + "\n")
    settings = json.dumps({"kind": "files", "path": str(tmp_path / "a.jsonl")})
    with note.timed("personal data in a bad line", "the error quotes none of it"):
        done = demix("download", "d", "--settings", settings, "--output", tmp_path / "raw/0000.parquet")
    assert done.returncode == 1
    assert message in done.stderr
    assert [trace for trace in TRACES if trace in done.stderr] == []


@pytest.mark.faults
def test_a_whole_run_on_planted_data(tmp_path: Path, note: Note) -> None:
    """Snakemake's own records name its input files, which it must: there alone the file's name may be."""
    private = plant(tmp_path, 400)
    config = copy.deepcopy(TINY)
    # A domain that is trained on, audited and removed.
    config["domains"]["training"]["licenses"]["source"] = SOURCE | {"path": f"{private}/*.jsonl"}
    with note.timed("personal data in a whole run", "none in artefacts, logs, MLflow, report"):
        (tmp_path / "resources").symlink_to(REPOSITORY / "resources")
        assert snakemake(tmp_path, config, profile="default").wait() == 0, printed(tmp_path)
        assert leaks(tmp_path / "results") == []
    assert not list((tmp_path / "results").rglob("raw/*/*.parquet"))
    inputs = [line for line in printed(tmp_path).splitlines() if any(trace in line for trace in TRACES)]
    assert all(line.strip().startswith(("input:", "reason:")) for line in inputs), inputs
