"""Files and folders that appear completely or not at all."""

import enum
import fcntl
import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import mkdtemp

from demix.errors import DemixError

REMAKE = "delete it and rerun the stage that makes it"


@contextmanager
def replacing(path: str | Path, *, directory: bool = False) -> Iterator[Path]:
    """Yield a temporary name on the same disk; on success, fsync the file and rename it to `path`.

    On any exception the temporary file (or directory) is removed and `path` stays as it was.
    """
    path = Path(path)
    try:
        with _reserved(path) as folder:
            temporary = folder / path.name
            if directory:
                temporary.mkdir()
            yield temporary
            for written in [*temporary.rglob("*"), temporary]:
                fsync(written)
            if directory and path.exists():
                shutil.rmtree(path)
            os.replace(temporary, path)
            fsync(path.parent)
    except OSError as error:
        if error.errno is None:
            raise
        raise cannot_be_written(path, error) from error


@contextmanager
def scratch(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder next to `path` for use while `path` is written. The folder is removed at the end.

    Raises DemixError that names `path` if the folder cannot be made or written to, as on a full disk.
    """
    path = Path(path)
    try:
        with _reserved(path) as folder:
            yield folder
    except OSError as error:
        # An error about a file elsewhere already names that file.
        elsewhere = error.filename is not None and Path(error.filename).parent.parent != path.parent
        if error.errno is None or elsewhere:
            raise
        raise cannot_be_written(path, error) from error


@contextmanager
def _reserved(path: Path) -> Iterator[Path]:
    """Yield a new, locked folder next to `path`. Remove it at the end, and also the folders of killed processes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path)
    while True:
        folder = Path(mkdtemp(dir=path.parent, prefix=f"{_before(path)}{os.getpid()}.", suffix=".partial"))
        with _locked(folder) as found:
            # Before the new folder was locked, another process may have removed it as a leftover.
            if found is _Lock.BUSY or not folder.exists():
                continue
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            return


def remove_leftovers(path: Path) -> None:
    """Remove folders next to `path` that belong to killed processes of this node.

    A lock marks the folder of a live process, even if that process is not visible, as in a container.
    """
    before = _before(path)
    for leftover in path.parent.glob(f"{glob.escape(before)}*"):
        pid = leftover.name.removeprefix(before).partition(".")[0]
        if pid.isdigit():
            with _locked(leftover) as found:
                if found is _Lock.HELD or (found is _Lock.NONE and not is_alive(int(pid))):
                    shutil.rmtree(leftover, ignore_errors=True)


def _before(path: Path) -> str:
    """The prefix of the names of this node's temporary folders next to `path`."""
    return f".{path.name}.{os.uname().nodename}."


class _Lock(enum.Enum):
    """Whether this process has the lock of a file or folder."""

    HELD = "this process holds it"
    BUSY = "another process holds it, or has removed the file"
    NONE = "the file system has no locks"


@contextmanager
def _locked(path: Path) -> Iterator[_Lock]:
    """Try to lock a file or folder until the end of the block, or of this process."""
    with ExitStack() as stack:
        try:
            descriptor = os.open(path, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = _Lock.HELD
        except (BlockingIOError, FileNotFoundError):
            found = _Lock.BUSY
        except OSError:
            found = _Lock.NONE
        yield found


def cannot_be_written(path: Path, error: OSError) -> DemixError:
    """The DemixError for an `error` in writing `path`."""
    # The strerror of Arrow's errors consists of several sentences.
    reason = str(error) if error.errno is None else os.strerror(error.errno)
    cause = f"cannot be written ({reason})"
    return DemixError(path, cause, "free space or fix its permissions, then rerun")


def refuse_used(output: Path) -> None:
    """Raise DemixError if `output` exists, unless it is an empty folder."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise DemixError(output, "exists and is not empty", "name a new folder")


def linked(source: Path, target: Path) -> None:
    """Make `target` a hard link to the file `source`, or a copy if the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def fsync(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_made(path: Path) -> bool:
    """Whether the file `path` exists. Raises DemixError for an empty file, a folder, a dangling link and so on."""
    if path.is_file() and path.stat().st_size:
        return True
    for place in (path, *path.parents):
        if os.path.lexists(place):
            if place == path:
                raise DemixError(path, "is empty" if path.is_file() else "is not a file", REMAKE)
            if not place.is_dir():
                raise DemixError(place, "is not a folder", REMAKE)
            break
    return False


def write_text(path: str | Path, text: str) -> None:
    """Write `text` as UTF-8, completely or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def is_alive(pid: int) -> bool:
    """Whether this node has a process with the number `pid`."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
