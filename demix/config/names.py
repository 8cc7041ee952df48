"""Names in the paths of a run's files: of domains, tasks, clusterings and entries of `models`."""

import re
from typing import Annotated

from pydantic import AfterValidator

from demix.settings import Text

# The pattern of a run's name, and the pattern in words.
# It is part of the names of folders, experiments and jobs; a file system allows 255 bytes.
NAME = "^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
NAMED = "of at most 100 letters, digits, dots, _ and -, the first a letter or digit"
# A file's name consists of two or more such names, and has at most 255 bytes.
LONGEST = 64
# If a name ends in 20 repetitions of the same characters, Snakemake assumes an infinite recursion of its rules.
REPEATED = re.compile(r"(.+?)\1{19,}$")


def refuse_name(name: str) -> None:
    """Raise ValueError(cause, cure) if a name is too long for files, or Snakemake would treat it as a recursion."""
    if len(name) > LONGEST:
        raise ValueError(f"has a name of {len(name)} characters", f"use at most {LONGEST}, for the names of files")
    if found := REPEATED.search(name):
        cause = f"has a name that repeats {found[1]!r} at its end, which Snakemake treats as a recursion"
        raise ValueError(cause, "use another name")


def _entry_name(name: str) -> str:
    """`name`, the name of a key's item. Raises ValueError(cause, cure) if a path cannot hold it."""
    if not re.fullmatch("[a-z][a-z0-9_]*", name):
        raise ValueError("is not a usable name", "use lower-case letters, digits and _, and begin with a letter")
    refuse_name(name)
    return name


# The name of an entry of `models`, a clustering or a task.
EntryName = Annotated[Text, AfterValidator(_entry_name)]
