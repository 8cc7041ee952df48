"""Disks that are full or may not be written, real ones: small tmpfs mounted for the test (root only)."""

import hashlib
import json
import subprocess
from pathlib import Path

import pyarrow as pa

from demix.data.dedup import mark_duplicates
from demix.files import database, read_parquet, sha256_file, write_parquet
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


def _download(source: Path, output: Path) -> list[str]:
    return ["download", "d", "--settings", json.dumps({"path": str(source)}), "--output", str(output)]


def test_a_full_disk_leaves_nothing_and_a_rerun_is_clean(tmp_path, mounted):
    disk = mounted("size=2m")
    source = _noise(tmp_path / "a.jsonl", 8)
    output = disk / "raw" / "d" / "0000.parquet"
    assert str(output) in str(said(_download(source, output)))
    assert [path for path in disk.rglob("*") if path.is_file()] == []
    subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
    assert said(_download(source, output)) is None
    good = tmp_path / "raw" / "d" / "0000.parquet"
    assert said(_download(source, good)) is None
    assert sha256_file(output) == sha256_file(good)


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


def test_a_disk_mounted_read_only(tmp_path, mounted):
    disk = mounted("size=2m")
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    error = said(_download(_noise(tmp_path / "a.jsonl", 1), disk / "raw" / "d" / "0000.parquet"))
    assert f"{disk}/raw/d" in str(error)
