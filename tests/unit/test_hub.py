"""Data sets of the Hugging Face hub, read from a local folder through the real `datasets`."""

import gzip
import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from demix.data.sources import Source, download
from demix.errors import DemixError


@pytest.fixture(autouse=True)
def no_network(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf")))


@pytest.fixture
def folder(tmp_path):
    """A data set of three Parquet files of five rows, three JSON-lines files, and a loader script that must not run."""
    (tmp_path / "set" / "data").mkdir(parents=True)
    for file in range(3):
        rows = [
            {"text": f"text {file} {row}", "language": "en" if row else "de", "more": {"parts": [f"{file}", f"{row}"]}}
            for row in range(5)
        ]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "set" / "data" / f"{file}.parquet")
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        (tmp_path / "set" / "data" / f"{file}.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "set" / "set.py").write_text("raise SystemExit('ran')")
    return tmp_path / "set"


def _texts(folder, part=0, **options):
    output = folder.parent / "raw" / f"{part}.parquet"
    options = {"data_files": ("data/*.parquet",)} | options
    download(Source("hub", str(folder), **options), "d", output, part)
    return pq.read_table(output)["text"].to_pylist()


@pytest.mark.parametrize("files", ["data/*.parquet", "data/*.jsonl.gz"])
def test_all_rows_are_read_in_order(folder, files):
    expected = [f"text {file} {row}" for file in range(3) for row in range(5)]
    assert _texts(folder, data_files=(files,)) == expected
    nested = _texts(folder, data_files=(files,), text="more.parts[]", where={"language": "de"})
    assert nested == ["0\n0", "1\n0", "2\n0"]


def test_files_may_differ_in_fields_that_nobody_asked_for(folder):
    """A change of a nested field's shape, and what only some readers take for the end of a line."""
    lines = [
        b'{"text": "a\xe2\x80\xa8b", "meta": {"x": 1}}',
        b'{"text": "b", "meta": "none"}',
        b'{"text": "c", "meta": [{"y": {}}], "more": null}',
    ]
    for number, line in enumerate(lines):
        (folder / "data" / f"odd{number}.jsonl.gz").write_bytes(gzip.compress(line + b"\n\n"))
    assert _texts(folder, data_files=("data/odd*.jsonl.gz",)) == ["a\u2028b", "b", "c"]
    (folder / "data" / "odd1.jsonl.gz").write_bytes(gzip.compress(b'{"text": \n'))
    with pytest.raises(DemixError, match="line 3: is not valid JSON"):
        _texts(folder, data_files=("data/odd*.jsonl.gz",))


@pytest.mark.parametrize("files", ["data/*.parquet", "data/1.parquet"])
def test_parts_hold_each_row_once(folder, files):
    whole = _texts(folder, data_files=(files,))
    parts = [_texts(folder, part, data_files=(files,), parts=2) for part in range(2)]
    assert sorted(parts[0] + parts[1]) == whole
    assert all(parts)


def test_a_word_budget_stops_reading(folder):
    assert len(_texts(folder, words=10)) == 4
    (folder / "data" / "2.parquet").write_bytes(b"never read")
    assert len(_texts(folder, words=10)) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_files": ("none/*.parquet",)}, "cannot be read"),
        ({"data_files": ("data/0.doc",)}, "source.data_files: name files .doc"),
        ({"text": "body"}, "has no field 'body'; fields are"),
        ({"where": {"language": "fr"}}, "d.source.where: keeps none of 15 documents"),
        ({"instructions": "ask X", "data_files": ("none/*.parquet",)}, "; ask X"),
    ],
)
def test_what_is_missing_is_told_in_a_line(folder, options, message):
    with pytest.raises(DemixError) as caught:
        _texts(folder, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (folder.parent / "raw" / "0.parquet").exists()


def test_a_damaged_file(folder):
    data = (folder / "data" / "1.parquet").read_bytes()
    (folder / "data" / "1.parquet").write_bytes(data[:-50])
    with pytest.raises(DemixError, match="cannot be read"):
        _texts(folder)


def test_a_data_set_that_is_out_of_reach(folder):
    """In a process of its own: the library reads HF_HUB_OFFLINE once, when it is imported."""
    code = """
from demix.data.sources import Source, download
from pathlib import Path
download(Source("hub", "demix/none", revision="main", data_files=("*.parquet",)), "d", Path("raw/0.parquet"))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert "DemixError: data set demix/none: cannot be read (OfflineModeIsEnabled" in done.stderr
