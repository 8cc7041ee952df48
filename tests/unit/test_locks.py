"""Locks: one that cannot be taken for want of a file is an error, and a locked temporary file is a live process's."""

import errno
import fcntl
import os
import subprocess
from pathlib import Path

import pytest

from demix.files import exclusive, replacing, write_text


def test_a_lock_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.mkdir()
    with pytest.raises(IsADirectoryError) as refused, exclusive(lock, "trains this run"):
        pytest.fail("the work began without a lock")
    assert refused.value.filename == str(lock)


@pytest.fixture
def dead() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_the_file_of_a_writer_in_another_container_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead: int
) -> None:
    """Its process id means nothing here, or another process."""
    for pid in (dead, os.getpid()):
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        with replacing(tmp_path / "file") as theirs:
            theirs.write_text("theirs")
            monkeypatch.undo()
            write_text(tmp_path / "file", "ours")
            assert (tmp_path / "file").read_text() == "ours"
        assert [path.read_text() for path in tmp_path.iterdir()] == ["theirs"]


def without_locks(descriptor: int, operation: int) -> None:
    """What `fcntl.flock` does on a file system without locks."""
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.mark.parametrize("locks", [True, False])
def test_what_a_killed_writer_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead: int, locks: bool
) -> None:
    left = [tmp_path / f".file.{os.uname().nodename}.{pid}.x.partial" for pid in (dead, os.getpid())]
    for folder in left:
        folder.mkdir()
        (folder / "file").write_text("half")
    if not locks:
        monkeypatch.setattr(fcntl, "flock", without_locks)
    write_text(tmp_path / "file", "whole")
    # Without locks only the process id can tell.
    assert set(tmp_path.iterdir()) == {tmp_path / "file", *left[1:]} - (set(left) if locks else set())
