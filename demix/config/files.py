"""Which local files a source names: by a path, a glob or a folder."""

import os
from glob import glob
from pathlib import PurePosixPath

FORMATS = (".jsonl", ".json", ".txt", ".csv")
COMPRESSIONS = {".gz": "gzip", ".tgz": "gzip", ".zst": "zstd"}


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


def files_at(path: str) -> list[str]:
    """The files that a path or a glob names, in no order; of a folder all below it that are of a known format.

    As in other tools, what begins with `.` or `_` in a folder is none of its data. Links to folders are not followed.
    """
    if not os.path.isdir(path):
        return glob(path, recursive=True)
    found = list[str]()
    for folder, below, names in os.walk(path):
        below[:] = [name for name in below if not name.startswith((".", "_"))]
        found += (os.path.join(folder, name) for name in names if readable(name) and not name.startswith((".", "_")))
    return found
