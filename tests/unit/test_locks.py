"""Locks: one that cannot be taken for want of a file is an error, and a locked temporary file is a live process's."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from demix.errors import DemixError
from demix.files import exclusive, is_alive, replacing, write_text


def test_a_lock_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.mkdir()
    with pytest.raises(IsADirectoryError) as refused, exclusive(lock, "trains this run"):
        pytest.fail("the work began without a lock")
    assert refused.value.filename == str(lock)


def test_who_has_patience_gets_the_lock_when_its_holder_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock, refused, got = fcntl.flock, threading.Event(), threading.Event()

    def watched(descriptor: int, operation: int) -> None:
        try:
            flock(descriptor, operation)
        except OSError:
            refused.set()
            raise

    def wait() -> None:
        with exclusive(tmp_path / "lock", "trains this run", patience=60):
            got.set()

    with exclusive(tmp_path / "lock", "trains this run"):
        monkeypatch.setattr(fcntl, "flock", watched)
        waiting = threading.Thread(target=wait)
        waiting.start()
        assert refused.wait(60)
        assert not got.is_set()
    waiting.join(60)
    assert got.is_set()


def test_a_held_lock_names_its_holder_and_what_it_does(tmp_path: Path) -> None:
    folder = tmp_path / "which" / "is new"
    with (
        exclusive(folder / "lock", "trains this run"),
        pytest.raises(DemixError, match=f"{os.uname().nodename} {os.getpid()}.* trains this run") as told,
        exclusive(folder / "lock", "trains this run"),
    ):
        pytest.fail("two hold one lock")
    assert told.value.subject == str(folder)


def without_locks(descriptor: int, operation: int) -> None:
    """What `fcntl.flock` does on a file system without locks."""
    raise OSError(errno.ENOSYS, "Function not implemented")


def test_where_nothing_can_be_locked_or_written_the_work_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It warns, and leaves no other lock behind, which nothing would release when the process is killed."""
    monkeypatch.setattr(fcntl, "flock", without_locks)
    (tmp_path / "full").symlink_to("/dev/full")
    for name in ("lock", "full"):
        with exclusive(tmp_path / name, "trains this run"):
            assert sorted(os.listdir(tmp_path)) == ["full", "lock"]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2


@pytest.mark.parametrize("directory", [False, True])
def test_a_file_is_on_disk_before_it_has_its_name_and_the_name_is_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: bool
) -> None:
    done, fsync, replace = [], os.fsync, os.replace

    def synced(descriptor: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def renamed(source: Path, target: Path) -> None:
        done.append("renamed")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    with replacing(tmp_path / "folder" / "made", directory=directory) as temporary:
        if directory:
            (temporary / "inner").mkdir(parents=True)
        (temporary / "inner" / "file" if directory else temporary).write_text("whole")
    assert done == [*(["inner", "file"] if directory else []), "made", "renamed", "folder"]


def test_a_process_that_may_not_be_signalled_is_alive(monkeypatch: pytest.MonkeyPatch, dead: int) -> None:
    assert is_alive(os.getpid())
    assert not is_alive(dead)

    def refuse(pid: int, number: int) -> None:
        assert number == 0, "which sends no signal"
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    assert is_alive(1)


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


KILLED = """import os, sys; from demix.files import replacing
with replacing(sys.argv[1]) as half: half.touch(); os._exit(0)"""


@pytest.mark.parametrize("locks", [True, False])
def test_what_a_killed_writer_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool) -> None:
    killed = subprocess.Popen([sys.executable, "-c", KILLED, tmp_path / "file"])
    killed.wait()
    left = [*tmp_path.glob(".file.*.partial")]
    left += [tmp_path / left[0].name.replace(f".{killed.pid}.", f".{os.getpid()}.")]
    shutil.copytree(*left)
    if not locks:
        monkeypatch.setattr(fcntl, "flock", without_locks)
    write_text(tmp_path / "file", "whole")
    # Without locks only the process id can tell.
    assert set(tmp_path.iterdir()) == {tmp_path / "file", *left[1:]} - (set(left) if locks else set())


@pytest.mark.parametrize("removed", [True, False])
def test_a_folder_that_another_process_takes_for_a_leftover_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: bool
) -> None:
    flock, seen, open_files = fcntl.flock, [], len(os.listdir("/proc/self/fd"))

    def raced(descriptor: int, operation: int) -> None:
        seen.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        if len(seen) == 1 and not removed:
            raise BlockingIOError
        if len(seen) == 1:
            seen[0].rmdir()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", raced)
    write_text(tmp_path / "file", "whole")
    assert {*tmp_path.iterdir()} == {tmp_path / "file", *(() if removed else seen[:1])}
    assert len(seen) == 2
    assert len(os.listdir("/proc/self/fd")) == open_files
