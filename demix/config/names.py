"""Names in the paths of a run's files: of domains, tasks, clusterings and entries of `models`."""

import re
from typing import Annotated

from pydantic import AfterValidator

from demix.settings import Text

# The pattern of a run's name, and the pattern in words.
# Names of folders, experiments and jobs hold it; a file system allows 255 bytes.
NAME = "^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
NAMED = "of at most 100 letters, digits, dots, _ and -, the first a letter or digit"
# Names of files are made of two names and more, and have at most 255 bytes.
LONGEST = 64
# What ends in 20 times the same, Snakemake treats as the name of a file that is made of itself without end.
REPEATED = re.compile(r"(.+?)\1{19,}$")


def refuse_name(name: str) -> None:
    """Raise ValueError of a cause and a cure for a name too long for files, or that Snakemake treats as a loop."""
    if len(name) > LONGEST:
        raise ValueError(f"has a name of {len(name)} characters", f"use at most {LONGEST}, as names of files hold it")
    if found := REPEATED.search(name):
        cause = f"has a name that ends in {found[1]!r} over and over, which Snakemake treats as a loop"
        raise ValueError(cause, "use another name")


def _entry_name(name: str) -> str:
    """A name below a key. Raises ValueError of a cause and a cure for one that a path cannot hold."""
    if not re.fullmatch("[a-z][a-z0-9_]*", name):
        raise ValueError("is not a usable name", "use lower-case letters, digits and _, and begin with a letter")
    refuse_name(name)
    return name


# Of an entry of `models`, a clustering or a task.
EntryName = Annotated[Text, AfterValidator(_entry_name)]
