"""Which files a source names, by a path, a glob or a folder, and which of a folder or an archive are its data."""

import os
from collections import Counter
from glob import glob
from pathlib import PurePosixPath

from demix.errors import DemixError

FORMATS = (".jsonl", ".ndjson", ".json", ".txt", ".csv")
COMPRESSIONS = {".gz": "gzip", ".tgz": "gzip", ".zst": "zstd"}
# The endings that a line names.
MAX_LISTED = 5
# JSON about the data next to it, which the Hugging Face hub and its libraries write; that of datatrove is in LOGS.
DESCRIPTIONS, LOGS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"), "logs"


def suffixes(name: str) -> list[str]:
    """The format of a file and its compression, by its name."""
    found = [suffix.lower() for suffix in PurePosixPath(name).suffixes[-2:]]
    if found[-1:] == [".tgz"]:
        return [".tar", ".tgz"]
    return found if found[-1:] and found[-1] in COMPRESSIONS else found[-1:]


def readable(name: str) -> bool:
    """Whether a file of this name is of a known format."""
    found = suffixes(name)
    return found == [".parquet"] or found[:1] in ([".zip"], [".tar"]) or bool({*found[:1]} & {*FORMATS})


def hidden(path: str) -> bool:
    """Whether a path in a folder or archive has a step that begins with `.` or `_`, such as `__MACOSX` or `.git`.

    As for other tools, what is there is not data.
    """
    return any(step.startswith((".", "_")) for step in PurePosixPath(path).parts)


def is_data(path: str, others: Counter[str]) -> bool:
    """Whether a file is data, by its path in the folder, archive or bucket that is to be read.

    It is of a known format, and not a description of the data next to it. If it is not such a file and not `hidden`,
    its ending is added to `others`.
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
    """The files that a path names, in no order: the file itself, those of a folder that are data, or those of a glob.

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
    """The files that are not read, in words; empty if there are none."""
    shown = [f"{number:,} {ending}" for ending, number in (+others).most_common(MAX_LISTED)]
    more = ["…"] if len(+others) > MAX_LISTED else []
    return f"files that are not read, since they are not data: {', '.join([*shown, *more])}" if shown else ""
