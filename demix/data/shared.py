"""Text that several runs prepare in the same way: one run writes it, and the others hard-link it.

A run records the files that a text job wrote, its inputs, and the digests of the files. Before a job of another run
writes the same files, it looks at these records. The records are in the folders of the runs and contain no text.
Nothing outlives the runs that use it, and each run is complete without the others.
"""

import fnmatch
import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from demix.errors import DemixError
from demix.files import REMAKE, fsync, linked, read_json, scratch, sha256_file, write_json

RESULTS, NOTES = "results", ".made"
# The libraries that choose bytes of the text and of its tokens.
_LIBRARIES = ("datasets", "duckdb", "gigatoken", "phonenumbers", "pyarrow", "regex", "tokenizers")

_log = logging.getLogger(__name__)


def made_once(
    output: Path,
    files: Sequence[Path],
    inputs: Sequence[Path],
    settings: Mapping[str, Any],
    make: Callable[[], object],
    *,
    passing: bool = False,
) -> None:
    """Write `files` by `make`, or use the files of another run with the same inputs.

    `output` is the file or folder that identifies the job. If it is not below `results/<run>/`, `make` is simply
    called. Names of `files` may be globs. The files must depend only on `output`, the bytes of `inputs`, their paths
    without the run's name, `settings` (JSON), and the code of `demix.data` and `demix.files`.

    A reused file is a hard link with the time of the first run, or a copy if the file system has no hard links. Files
    older than `inputs` are not used, as Snakemake does not accept them. Inputs that are `passing` are removed after
    the job, so they get the time of the files instead.
    """
    # If inputs are missing, `make` raises the error.
    if output.parts[:1] != (RESULTS,) or len(output.parts) < 3 or not all(path.is_file() for path in inputs):
        make()
        return
    run = Path(*output.parts[:2])
    note = run / NOTES / f"{'.'.join(output.parts[2:])}.json"
    note.unlink(missing_ok=True)
    before = [_stamp(path) for path in inputs]
    read = {_within(run, path): sha256_file(path) for path in inputs}
    # Everything that determines the bytes of the files.
    said = {"output": str(output.relative_to(run)), "inputs": read, "settings": settings, "code": _code()}
    key = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
    newest = 0 if passing else max((path.stat().st_mtime_ns for path in inputs), default=0)
    for other in sorted(run.parent.glob(f"*/{NOTES}/{note.name}")):
        if digests := _reused(other, key, run, files, newest):
            write_json(note, {"key": key, "files": digests})
            oldest = min((run / name).stat().st_mtime_ns for name in digests)
            for path in inputs if passing else ():
                os.utime(path, ns=(oldest, oldest))
            return
    make()
    if before != [_stamp(path) for path in inputs]:
        _log.warning("%s: its inputs changed while it was made, so no other run uses it", output)
    else:
        write_json(note, {"key": key, "files": {_within(run, one): sha256_file(one) for one in _found(files)}})


@cache
def _code() -> str:
    """A digest of the code that prepares text, and the versions of Python and of the libraries that it uses."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    used = [*(package / "data").glob("*.*"), *(package / "files").glob("*.py"), package / "config" / "files.py"]
    for path in sorted(filter(Path.is_file, used)):
        digest.update(f"{path.name} {sha256_file(path)}\n".encode())
    return " ".join([digest.hexdigest(), sys.version.split()[0], *map(version, _LIBRARIES)])


def _stamp(path: Path) -> tuple[int, int, int]:
    """Values that change if the bytes of a file change: inode, size and time."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _within(run: Path, path: Path) -> str:
    """The path of a file in the folder of the run; of another file, such as a source, its path."""
    return str(path.relative_to(run) if path.is_relative_to(run) else path)


def _found(files: Sequence[Path]) -> list[Path]:
    return [found for path in files for found in sorted(path.parent.glob(path.name))]


def _reused(note: Path, key: str, run: Path, files: Sequence[Path], newest: int) -> dict[str, str]:
    """Link the files that another run recorded to their paths; returns their digests.

    Returns nothing if the files differ, are older than `newest` (ns) or are incomplete. No failure here ends the job,
    which can write the files itself.
    """
    owner = note.parents[1]
    try:
        said = read_json(note)
        if said["key"] != key:
            return {}
        digests: dict[str, str] = said["files"]
        with scratch(run / NOTES / note.name) as folder:
            ready = {run / name: folder / str(number) for number, name in enumerate(digests)}
            for (name, digest), (path, temporary) in zip(digests.items(), ready.items(), strict=True):
                if not any(path.parent == each.parent and fnmatch.fnmatch(path.name, each.name) for each in files):
                    raise DemixError(note, f"names {name}, which is not a file of this job", REMAKE)
                if (owner / name).stat().st_mtime_ns < newest:
                    return {}
                linked(owner / name, temporary)
                # The link is checked, so that no other file can replace the one that was read.
                if sha256_file(temporary) != digest:
                    raise DemixError(owner / name, "is damaged: it differs from its recorded sha256", REMAKE)
                fsync(temporary)
            for path in _found(files):
                path.unlink()
            for path, temporary in ready.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                os.replace(temporary, path)
            for parent in {path.parent for path in ready}:
                fsync(parent)
    except (DemixError, OSError) as error:
        _log.warning("%s: not used for %s, which makes its own file: %s", owner, run, error)
        return {}
    _log.info("%s: reused from %s, which has the same inputs", ", ".join(digests), owner)
    return digests
