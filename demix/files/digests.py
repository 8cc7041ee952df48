"""Hashes of files and settings, and random seeds derived from names."""

import hashlib
import json
import os
import shutil
import stat
from io import BufferedReader
from pathlib import Path

from demix.errors import DemixError
from demix.files.atomic import REMAKE, replacing


def opened(path: str | Path) -> BufferedReader:
    """Open the bytes of a regular file. Raises DemixError for a folder, and for a pipe or device, which could block."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DemixError(path, "is not a regular file", "put the file itself there")
    return open(descriptor, "rb")


def check_inside(path: Path, folder: Path) -> None:
    """Raise DemixError if the file `path` in a `folder` from elsewhere is a link to a file outside the folder.

    Files of a snapshot in the hub's cache are allowed: they are links to blobs next to the snapshots.
    """
    # Unlike Path.resolve, this does not fail on circular links.
    target, root = (Path(os.path.realpath(place)) for place in (path, folder))
    caches = [place.parent / "blobs" for place in root.parents if place.name == "snapshots"]
    if os.path.lexists(path) and not path.exists():
        raise DemixError(path, "is a broken link", "replace the link by the file")
    if not target.is_relative_to(root) and target.parent not in caches:
        raise DemixError(path, f"is a link to {target}, which is outside its folder", "replace the link by the file")


def sha256_file(path: str | Path) -> str:
    """The hexadecimal sha256 of a regular file's bytes."""
    with opened(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def check_sha256(path: Path, sha256: str) -> None:
    """Raise DemixError if the file `path` does not have the given sha256. The file is never in memory as a whole."""
    try:
        found = sha256_file(path)
    except FileNotFoundError:
        raise DemixError(path, "is missing", "run the stage that makes it") from None
    if found != sha256:
        raise DemixError(path, "differs from its recorded sha256", REMAKE)


def copy_checked(source: Path, path: Path, sha256: str) -> None:
    """Copy the file `source` to `path`, completely or not at all. Raises DemixError if it has another sha256."""
    with replacing(path) as temporary:
        shutil.copyfile(source, temporary)
        # The file may have changed since it was checked.
        check_sha256(temporary, sha256)


def seed_for(seed: int, *names: object) -> int:
    """A 63-bit seed that depends only on the run's `seed` and on `names`, never on order, time or `hash()`."""
    digest = hashlib.sha256("\0".join([str(seed), *map(str, names)]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def fingerprint(description: object) -> str:
    """16 hexadecimal digits of the sha256 of a description, which is written as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:16]
