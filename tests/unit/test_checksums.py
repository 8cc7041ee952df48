"""Snakemake's checksums of files, with each file read once."""

import asyncio
import hashlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from snakemake import io

from demix.launch.checksums import read_once


def test_a_file_is_read_again_only_after_it_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    file_digest = hashlib.file_digest

    def noted(opened: Any, *given: Any) -> Any:
        read.append(opened.name)
        return file_digest(opened, *given)

    monkeypatch.setattr(hashlib, "file_digest", noted)
    monkeypatch.setattr(io._IOFile, "checksum", io._IOFile.checksum)
    read_once()
    path = tmp_path / "weights"
    file = io.IOFile(str(path))
    file.rule = SimpleNamespace(workflow=SimpleNamespace(iocache=SimpleNamespace(active=False)))

    def checksum(threshold: int = 100) -> str | None:
        found: str | None = asyncio.run(file.checksum(threshold))
        return found

    def sha256(text: str) -> str:
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"

    path.write_text("one")
    assert [checksum(), checksum()] == 2 * [sha256("one")]
    assert len(read) == 1
    # Larger than Snakemake is to read.
    assert checksum(threshold=2) is None
    assert len(read) == 1
    before = path.stat()
    path.write_text("two")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert [checksum(), checksum()] == 2 * [sha256("two")]
    assert len(read) == 2
    # As all files of a run come into place, with the time of the file before.
    new = tmp_path / "new"
    new.write_text("six")
    os.utime(new, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    new.rename(path)
    assert checksum() == sha256("six")
    assert len(read) == 3
    path.unlink()
    assert checksum() is None
