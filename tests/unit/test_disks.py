"""Disks that are full or may not be written, real ones: small tmpfs mounted for the test (root only)."""

import hashlib
import json
import subprocess
from pathlib import Path

import pyarrow as pa

from demix.data.corpus import mark_duplicates
from demix.files import database, read_parquet, write_parquet
from support.cli import said
from support.errors import refused
from support.server import serving_folder


def _noise(path: Path, megabytes: int) -> Path:
    """JSON lines that do not compress."""
    with open(path, "w") as file:
        for number in range(megabytes * 1000):
            text = "".join(hashlib.sha512(f"{number}.{i}".encode()).hexdigest() for i in range(8))
            file.write(json.dumps({"text": text}) + "\n")
    return path


def test_a_disk_that_is_full_of_spilled_rows(tmp_path, mounted, monkeypatch):
    hashes = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(600_000)]
    documents = tmp_path / "documents.parquet"
    write_parquet(pa.table({"id": hashes}), documents)
    disk = mounted("size=4m")
    monkeypatch.setattr(database, "MEMORY_MB", 48)
    with refused("owners.parquet"):
        mark_duplicates({"a": [documents]}, disk / "owners.parquet")
    assert list(disk.iterdir()) == []
    mark_duplicates({"a": [documents], "b": [documents]}, tmp_path / "owners.parquet")
    owners = read_parquet(tmp_path / "owners.parquet")
    assert owners["id"].to_pylist() == sorted(hashes)
    assert owners["domain"].to_pylist() == [
        min("ab", key=lambda domain: hashlib.sha256(f"{domain}|{text}".encode()).digest()) for text in sorted(hashes)
    ]


def test_a_disk_that_fills_up_while_fetching(tmp_path, mounted):
    """What was fetched stays, for the rerun to go on from, but not under the final name."""
    disk = mounted("size=2m")
    _noise(tmp_path / "a.jsonl", 4)
    with serving_folder(tmp_path) as address:
        settings = json.dumps({"path": f"{address}/a.jsonl"})
        output = disk / "d" / "0000.parquet"
        command = ["download", "d", "--settings", settings, "--output", str(output)]
        assert "a.jsonl" in str(said(command))
        assert not [path for path in disk.rglob("a.jsonl") if path.is_file()]
        assert not output.exists()
        subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
        assert said(command) is None
        assert [*output.parent.iterdir()] == [output]
