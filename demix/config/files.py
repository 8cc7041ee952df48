"""The files that a source names by a path, a glob or a folder, and which files of a folder or an archive are data."""

import os
from collections import Counter
from glob import glob
from pathlib import PurePosixPath

from demix.errors import DemixError

FORMATS = (".jsonl", ".ndjson", ".json", ".txt", ".csv")
COMPRESSIONS = {".gz": "gzip", ".tgz": "gzip", ".zst": "zstd"}
# The maximum number of endings that a log line lists.
MAX_LISTED = 5
# JSON files that describe the data next to them. The Hugging Face hub and its libraries write them; datatrove's: LOGS.
DESCRIPTIONS, LOGS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"), "logs"


def suffixes(name: str) -> list[str]:
    """The suffixes of a file's name that give its format and its compression."""
    found = [suffix.lower() for suffix in PurePosixPath(name).suffixes[-2:]]
    if found[-1:] == [".tgz"]:
        return [".tar", ".tgz"]
    return found if found[-1:] and found[-1] in COMPRESSIONS else found[-1:]


def readable(name: str) -> bool:
    """Whether a file with this name has a known format."""
    found = suffixes(name)
    return found == [".parquet"] or found[:1] in ([".zip"], [".tar"]) or bool({*found[:1]} & {*FORMATS})


def hidden(path: str) -> bool:
    """Whether a path in a folder or archive has a component that begins with `.` or `_`, such as `__MACOSX` or `.git`.

    As in other tools, such files are not data.
    """
    return any(step.startswith((".", "_")) for step in PurePosixPath(path).parts)


def is_data(path: str, others: Counter[str]) -> bool:
    """Whether a file is data, by its path in the folder, archive or bucket that is read.

    Data have a known format and are not a description of the data next to them. The endings of other files are added
    to `others`, unless they are `hidden`.
    """
    *folders, name = PurePosixPath(path).parts
    if hidden(path):
        return False
    described = name in DESCRIPTIONS or (LOGS in folders and name.lower().endswith(".json"))
    if readable(name) and not described:
        return True
    others[PurePosixPath(name).suffix.lower() or "without an ending"] += 1
    return False


def files_at(path: str, others: Counter[str]) -> list[str]:
    """The files that a path names, unordered: the file itself, the data files of a folder, or the files of a glob.

    The endings of the other files of a folder are added to `others`. Links to folders are not followed. Raises
    DemixError for a folder that cannot be listed.
    """
    if not os.path.isdir(path):
        return [path] if os.path.lexists(path) else glob(path, recursive=True)
    found = list[str]()
    for folder, below, names in os.walk(path, onerror=_unlisted):
        below[:] = [name for name in below if not hidden(name)]
        others["links to folders"] += sum(os.path.islink(os.path.join(folder, name)) for name in below)
        files = [os.path.join(folder, name) for name in names]
        found += (file for file in files if is_data(file[len(path) :].lstrip("/"), others))
    return found


def _unlisted(error: OSError) -> None:
    raise DemixError(error.filename, f"cannot be listed ({error.strerror})", "fix its permissions") from None


def left_out(others: Counter[str]) -> str:
    """A description of the files that are not read; empty if there are none."""
    shown = [f"{number:,} {ending}" for ending, number in (+others).most_common(MAX_LISTED)]
    more = ["…"] if len(+others) > MAX_LISTED else []
    return f"files that are not read because they are not data: {', '.join([*shown, *more])}" if shown else ""
