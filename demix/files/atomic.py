"""Files and folders that appear completely or not at all."""

import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from demix.errors import DemixError

REMAKE = "delete it and rerun the stage that makes it"


@contextmanager
def replacing(path: str | Path, *, directory: bool = False) -> Iterator[Path]:
    """Yield a temporary name beside `path`; on success fsync it and rename it to `path`.

    On any exception the temporary file (or directory) is removed and `path` stays as it was.
    """
    path = Path(path)
    node = os.uname().nodename
    temporary = path.with_name(f".{path.name}.{node}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path, node)
        if directory:
            # A killed process with the same process id may have left this folder.
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
        yield temporary
        for written in [*temporary.rglob("*"), temporary] if directory else [temporary]:
            fsync(written)
        if directory and path.exists():
            shutil.rmtree(path)
        os.replace(temporary, path)
        fsync(path.parent)
    except OSError as error:
        if error.errno is None or isinstance(error, DemixError):
            raise
        raise cannot_be_written(path, error) from error
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        elif temporary.exists():
            temporary.unlink()


@contextmanager
def scratch(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path` for use while `path` is made. The folder is removed at the end.

    Raises DemixError that names `path` if the folder cannot be made or written to, as on a full disk.
    """
    path = Path(path)
    node = os.uname().nodename
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path, node)
        with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.{node}.{os.getpid()}.") as name:
            yield Path(name)
    except OSError as error:
        # An error about a file elsewhere already names that file.
        elsewhere = error.filename is not None and Path(error.filename).parent.parent != path.parent
        if error.errno is None or elsewhere:
            raise
        raise cannot_be_written(path, error) from error


def _remove_leftovers(path: Path, node: str) -> None:
    """Remove temporary files of `path` that killed processes of this node have left."""
    before = f".{path.name}.{node}."
    for leftover in path.parent.glob(f"{glob.escape(before)}*"):
        pid = leftover.name.removeprefix(before).partition(".")[0]
        if pid.isdigit() and not is_alive(int(pid)):
            shutil.rmtree(leftover, ignore_errors=True) if leftover.is_dir() else leftover.unlink(missing_ok=True)


def cannot_be_written(path: Path, error: OSError) -> DemixError:
    """The DemixError for an `error` in writing `path`."""
    # The strerror of Arrow's errors is several sentences long.
    reason = str(error) if error.errno is None else os.strerror(error.errno)
    cause = f"cannot be written ({reason})"
    return DemixError(path, cause, "free space or mend its permissions, then rerun")


def refuse_used(output: Path) -> None:
    """Raise DemixError unless a new directory can be made at `output`: it is missing, or an empty folder."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise DemixError(output, "exists and is not empty", "name a new folder")


def fsync(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_made(path: Path) -> bool:
    """Whether the file `path` is there. Raises DemixError for an empty file, a folder, a dangling link and the like."""
    if path.is_file() and path.stat().st_size:
        return True
    for place in (path, *path.parents):
        if os.path.lexists(place):
            if place == path:
                raise DemixError(path, "is empty" if path.is_file() else "is no file", REMAKE)
            if not place.is_dir():
                raise DemixError(place, "is no folder", REMAKE)
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
