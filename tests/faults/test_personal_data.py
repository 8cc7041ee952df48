"""Personal data planted in texts, other fields and file names: none in anything that is made after anonymize."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from demix.data.shards import TokenShard
from demix.data.tokenizer import Tokenizer
from demix.files import read_json
from support.breaking import demix, refused, run_tiny
from support.disturbed import printed
from support.dry_run import TINY, changed

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
TRACES = ("zoe.quine", "mail.example", "9abcdef0123", "100012345678", "7946 0958", "1111 1111", "09-9998", "zoequine")
FILE = "zoe.quine@mail.example.org +44 20 7946 0958.jsonl"


def plant(folder: Path, documents: int) -> Path:
    """A source whose every document holds all of it, in its text and other fields; so does the file's name."""
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


def content(path: Path, tokenizer: Path | None) -> str:
    """All text that a file holds, decoded."""
    if path.suffix == ".parquet":
        table = pq.read_table(path)
        columns = [column for column in table.columns if column.type in (pa.string(), pa.large_string())]
        return "\n".join([str(table.schema), *(str(row) for column in columns for row in column.to_pylist())])
    if path.suffix == ".arrow" and tokenizer and ".documents" not in path.name:
        shard = TokenShard.open(path)
        return Tokenizer.load(tokenizer).decode(np.asarray(shard.read(0, len(shard))))
    return path.read_bytes().decode("utf-8", "replace")


def traces(text: str) -> list[str]:
    """The traces that a text holds."""
    return [trace for trace in TRACES if trace in text]


def leaks(folder: Path) -> list[tuple[str, list[str]]]:
    """Files below `folder` that hold a trace, or whose name does."""
    tokenizer = next(iter(folder.rglob("tokenizer.json")), None)
    files = {path: path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    found = [(name, traces(f"{name}\n{content(path, tokenizer)}")) for path, name in files.items()]
    return [(name, some) for name, some in found if some]


BROKEN = {
    "no field": '{"id": 1, "body": "zoe.quine"}',
    "no text": '{"id": 1, "text": {"zoe.quine": "zoequine_77"}}',
    "no JSON": '{"id": 1, "text": "zoe.quine',
    "no object": '["zoe.quine@mail.example.org"]',
    "a number": '{"id": 1, "text": 4111111111111111}',
}


@pytest.mark.parametrize("name", BROKEN)
def test_errors_quote_no_text(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(BROKEN[name] + "\n")
    settings = json.dumps({"path": str(tmp_path / "a.jsonl")})
    done = demix("download", "d", "--settings", settings, "--output", tmp_path / "raw/0000.parquet")
    assert "a.jsonl" in refused(done)
    assert traces(done.stderr) == []


def test_a_whole_run_on_planted_data(tmp_path: Path) -> None:
    """Snakemake's own records name its input files, which it must: there alone the file's name may be."""
    private = plant(tmp_path, 400)
    # A domain that is trained on, audited and removed.
    config = changed(TINY, {"domains.training.licenses.source": {"path": f"{private}/*.jsonl"}})
    assert run_tiny(tmp_path, config=config).wait() == 0, printed(tmp_path)
    assert leaks(private), "the search finds what is there"
    assert leaks(tmp_path / "results") == []
    (counts,) = (read_json(path)["replacements"] for path in (tmp_path / "results").rglob("documents/licenses/*.json"))
    assert all(counts[category] >= 400 for category in PLANTED), counts
    assert not list((tmp_path / "results").rglob("raw/*/*.parquet"))
    inputs = [line for line in printed(tmp_path).splitlines() if any(trace in line for trace in TRACES)]
    assert all(line.strip().startswith(("input:", "reason:")) for line in inputs), inputs
