"""JSON and JSON lines with a visible seal (a checksum), which is checked when the files are read.

The last key of an object is `seal`: the sha256 of the canonical JSON of all other keys. JSON lines end in a line
`{"rows": n, "seal": …}`, whose seal is the seal of the list of all rows.

Canonical JSON has sorted keys, no white space and escapes for all characters that are not ASCII. Its numbers are
written as by Python's `repr`, NaN and infinities as `NaN` and `Infinity`. A file therefore stays valid if white space,
line ends, the order of keys or the spelling of a string or number (`1e-5`, `0.00001`) changes. An integer and a float
are different values: if `1.0` becomes `1`, the seal is wrong.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from demix.errors import DemixError
from demix.files.atomic import REMAKE, write_text
from demix.files.digests import opened
from demix.files.kinds import HEAD, TEXT, check_kind

SEAL = "seal"
# The largest tokenizers have about 20 MiB. No file of demix has more than ten levels of lists and objects.
MAX_BYTES = 64 << 20
MAX_LEVELS = 100
_MAKE = "run the stage that makes it"
# Cures for a file that other software wrote, instead of those for demix's own files.
_ELSEWHERE = {REMAKE: "fix it, or download it again", _MAKE: "put it there, or fix the path"}
UNKNOWN = "is damaged, of another version of demix, or not written by it"


def digest(value: Any) -> str:
    """The hexadecimal sha256 of the canonical JSON of a value that `json.loads` could return."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def without_nan(value: Any) -> Any:
    """`value` with None instead of NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: str | Path, value: Mapping[str, Any], *, sort_keys: bool = True) -> None:
    """Write `value` as indented JSON with its seal, completely or not at all.

    Raises ValueError for NaN, infinities, and the key `seal`.
    """
    # The seal is computed from the value as it will be read: keys become strings, tuples become lists.
    plain = json.loads(json.dumps(value, sort_keys=sort_keys, allow_nan=False))
    if SEAL in plain:
        raise ValueError(f"{path}: the key {SEAL} is in use")
    write_text(path, json.dumps(plain | {SEAL: digest(plain)}, indent=2) + "\n")


def read_json(path: str | Path, most_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The object in `path` without its seal.

    Raises DemixError if the file is missing, damaged, not a regular file or larger than `most_bytes`, and if its seal
    is missing or wrong. Access to a missing key of the object, or of an object in it, also raises DemixError.
    """
    value = read_unsealed(path, most_bytes)
    seal = value.pop(SEAL, None)
    if seal is None:
        raise DemixError(path, f"{UNKNOWN} (it has no seal)", REMAKE)
    _check(path, value, seal)
    return value


def read_unsealed(path: str | Path, most_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The object in `path`, which other software may have written; a seal is not checked.

    Raises DemixError if the file is not a JSON object, for example a pointer of Git LFS.
    """
    try:
        (value,) = _objects(path, lines=False, most_bytes=most_bytes)
    except DemixError as error:
        raise error.but(cure=_ELSEWHERE.get(error.cure)) from None
    return value


def write_json_lines(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write `rows` as JSON lines, completely or not at all. NaN is allowed.

    A last line holds the number of rows and the seal.
    """
    plain = [json.loads(json.dumps(row)) for row in rows]
    lines = [*plain, {"rows": len(plain), SEAL: digest(plain)}]
    write_text(path, "".join(json.dumps(line) + "\n" for line in lines))


def read_json_lines(path: str | Path) -> list[dict[str, Any]]:
    """The rows in `path` without the line that seals them.

    Raises DemixError if a row is missing, damaged or added.
    """
    rows = _objects(path, lines=True)
    end = rows.pop() if rows else {}
    if set(end) != {"rows", SEAL}:
        raise DemixError(path, f"{UNKNOWN} (its last line is not a checksum)", REMAKE)
    if end["rows"] != len(rows):
        raise DemixError(path, f"is damaged (it holds only {len(rows)} of {end['rows']} rows)", REMAKE)
    _check(path, rows, end[SEAL])
    return rows


def _objects(path: str | Path, *, lines: bool, most_bytes: int = -1) -> list[dict[str, Any]]:
    """The JSON object in a file; with `lines`, the object in each line that is not blank."""
    try:
        with opened(path) as stream:
            content = stream.read(most_bytes)
            if stream.read(1):
                raise DemixError(path, f"has more than {most_bytes:,} bytes", REMAKE)
        check_kind(path, content[:HEAD], TEXT)
        # On Windows, UTF-8 files may begin with a byte order mark.
        text = content.decode("utf-8-sig")
        parts = [line for line in text.split("\n") if line.strip()] if lines else [text]
        values = [json.loads(part, object_pairs_hook=partial(_Object, path)) for part in parts]
        if is_deep(values, MAX_LEVELS):
            raise ValueError(f"it has more than {MAX_LEVELS} levels")
    except FileNotFoundError:
        raise DemixError(path, "is missing", _MAKE) from None
    except (ValueError, RecursionError) as error:
        raise DemixError(path, f"is damaged ({error})", REMAKE) from None
    if not all(isinstance(value, dict) for value in values):
        raise DemixError(path, f"is damaged ({'a line' if lines else 'it'} is not a JSON object)", REMAKE)
    return values


def is_deep(values: Iterable[Any], levels: int) -> bool:
    """Whether `values` have more than `levels` levels of lists and objects, so that recursive functions could fail."""
    values = [*values]
    while values and levels:
        values = [inner for each in values for inner in _inside(each)]
        levels -= 1
    return bool(values)


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


class _MissingError(DemixError, KeyError):
    """An object lacks a key. Code that can handle this catches KeyError."""

    __str__ = Exception.__str__


class _Object(dict[str, Any]):
    """A JSON object of the file `path`."""

    def __init__(self, path: str | Path, pairs: list[tuple[str, Any]]):
        super().__init__(pairs)
        self._path = path
        if len(self) < len(pairs):
            raise ValueError("a key occurs twice in an object")

    def __missing__(self, key: str) -> Any:
        raise _MissingError(self._path, f"{UNKNOWN} (it has no {key})", REMAKE)


def _check(path: str | Path, value: Any, seal: Any) -> None:
    if digest(value) != seal:
        raise DemixError(path, "is damaged (its values changed: they do not match the seal written with them)", REMAKE)
