"""Hashes of files and settings, and random seeds derived from names."""

import hashlib
import json
from pathlib import Path


def sha256_file(path: str | Path) -> str:
    """The hexadecimal sha256 of a file's bytes."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def seed_for(seed: int, *names: object) -> int:
    """A 63-bit seed that depends only on the run's `seed` and on `names`, never on order, time or `hash()`."""
    digest = hashlib.sha256("\0".join([str(seed), *map(str, names)]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def fingerprint(description: object) -> str:
    """16 hexadecimal digits of a description's sha256, as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:16]
