"""JSON and JSON lines with a digest, which is checked when they are read."""

import json
from pathlib import Path
from typing import Any

from demix.errors import DemixError
from demix.files.atomic import REMAKE, replacing
from demix.files.seals import sealed_text, unsealed_text


def write_sealed(path: str | Path, text: str) -> None:
    """Write JSON or JSON lines, whole or not at all, with a digest that `read_sealed` checks (`demix.files.seals`)."""
    with replacing(path) as temporary:
        temporary.write_bytes(sealed_text(text))


def read_sealed(path: str | Path) -> str:
    """The text in `path` without its seal; DemixError where the file is missing or not as it was written.

    JSON lines must have their seal: nothing else tells that the last of them are there.
    """
    path = Path(path)
    try:
        return unsealed_text(path.read_bytes(), required=path.suffix == ".jsonl").decode()
    except FileNotFoundError:
        raise DemixError(path, "is missing", "run the stage that makes it") from None
    except ValueError as error:
        raise DemixError(path, f"is damaged ({error})", REMAKE) from None


def write_json(path: str | Path, value: Any, *, sort_keys: bool = True) -> None:
    """Write `value` as indented JSON with its seal; NaN is refused."""
    write_sealed(path, json.dumps(value, indent=2, sort_keys=sort_keys, allow_nan=False) + "\n")


def read_json(path: str | Path) -> Any:
    """The JSON value in `path`, its seal verified."""
    text = read_sealed(path)
    try:
        return json.loads(text)
    except ValueError as error:
        raise DemixError(path, f"is not valid JSON ({error})", REMAKE) from None
