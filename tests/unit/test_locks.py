"""Files and folders that appear whole or not at all; locks, and what a killed process left."""

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
from demix.files import atomic, exclusive, is_alive, replacing, write_text
from support.errors import refused


def test_a_lock_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.mkdir()
    with pytest.raises(IsADirectoryError) as told, exclusive(lock, "trains this run"):
        pytest.fail("the work began without a lock")
    assert told.value.filename == str(lock)


def test_who_has_patience_gets_the_lock_when_its_holder_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock, asked, got = fcntl.flock, threading.Event(), threading.Event()

    def watched(descriptor: int, operation: int) -> None:
        try:
            flock(descriptor, operation)
        except OSError:
            asked.set()
            raise

    def wait() -> None:
        with exclusive(tmp_path / "lock", "trains this run", patience=60):
            got.set()

    with exclusive(tmp_path / "lock", "trains this run"):
        monkeypatch.setattr(fcntl, "flock", watched)
        waiting = threading.Thread(target=wait)
        waiting.start()
        assert asked.wait(60)
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


@pytest.mark.parametrize("directory", [False, True])
def test_what_fails_leaves_the_old_and_nothing_else(directory: bool, tmp_path: Path) -> None:
    place = tmp_path / "new" / "folder" / "made"

    def make(text: str, error: Exception | None = None) -> None:
        with atomic.replacing(str(place), directory=directory) as temporary:
            (temporary / "inside" if directory else temporary).write_text(text, encoding="utf-8")
            if error is not None:
                raise error

    for text in ("first é", "second"):
        make(text)
    with refused("folder/made"):
        make("third", OSError(errno.ENOSPC, "No space left"))
    with refused("other"):
        make("third", DemixError("other", "is wrong", "mend it"))
    with pytest.raises(OSError, match="of the library"):
        make("third", OSError("of the library"))
    assert (place / "inside" if directory else place).read_text() == "second"
    assert [path.name for path in place.parent.iterdir()] == ["made"]


def test_a_scratch_folder_goes_and_its_errors_name_what_is_made(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left")
    with refused("made"), atomic.scratch(str(tmp_path / "made")) as folder:
        (folder / "spilled").mkdir()
        raise full
    other = OSError(errno.ENOENT, "missing", str(tmp_path / "else" / "where" / "x"))
    with pytest.raises(OSError, match="else/where"), atomic.scratch(tmp_path / "made"):
        raise other
    with pytest.raises(OSError, match="of the library"), atomic.scratch(tmp_path / "made"):
        raise OSError("of the library")
    with refused("made"), atomic.scratch(tmp_path / "made") as folder:
        raise OSError(errno.ENOSPC, "No space left", str(folder / "spilled"))
    assert not list(tmp_path.iterdir())


def test_a_new_directory_takes_no_place_that_is_used(tmp_path: Path) -> None:
    for unused in (tmp_path / "missing", tmp_path):
        atomic.refuse_used(unused)
    (tmp_path / "file").touch()
    for used in (tmp_path, tmp_path / "file"):
        with refused(used):
            atomic.refuse_used(used)


@pytest.mark.parametrize("links", [True, False])
def test_a_second_name_or_a_copy(links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one").write_text("text")
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(errno.EPERM, "no links")))
    atomic.linked(tmp_path / "one", tmp_path / "two")
    assert (tmp_path / "two").read_text() == "text"
    assert (tmp_path / "two").samefile(tmp_path / "one") == links


PLACES = {
    "made": (lambda path: path.write_text("x"), ""),
    "missing": (lambda _: None, ""),
    "empty": (lambda path: path.touch(), "folder/file"),
    "a folder": (lambda path: path.mkdir(), "folder/file"),
    "a link to nothing": (lambda path: path.symlink_to("nowhere"), "folder/file"),
    "below a file": (lambda path: (path.parent.rmdir(), path.parent.touch()), "folder"),
    "below a link to nothing": (lambda path: (path.parent.rmdir(), path.parent.symlink_to("nowhere")), "folder"),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_file_is_made_or_missing_or_refused(name: str, tmp_path: Path) -> None:
    make, subject = PLACES[name]
    (tmp_path / "folder").mkdir()
    make(tmp_path / "folder" / "file")
    if subject:
        with refused(tmp_path / subject):
            atomic.is_made(tmp_path / "folder" / "file")
    else:
        assert atomic.is_made(tmp_path / "folder" / "file") == (name == "made")
