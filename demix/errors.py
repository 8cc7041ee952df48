"""Errors for bad input: one line that names the subject, the cause and the cure."""

import difflib
import re
from collections.abc import Iterable

# An error may quote a value or a name of any length.
MAX_CHARACTERS = 4000
# The maximum number of known names that a message lists.
MAX_NAMES = 5
_USER = re.compile(r"(?<=://)[^/\s'\"]*@")
_QUERY = re.compile(r"[?#][^\s?'\"<>]*=[^\s'\"<>]*")


def masked(text: str) -> str:
    """`text` without the users, passwords and queries of the addresses in it, which may be secret."""
    return _QUERY.sub("?***", _USER.sub("***@", text))


class DemixError(Exception):
    """Bad input or an unusable environment, reported in one line.

    `subject` is the file, config key or option at fault, `cause` what is wrong with it and `cure`
    what the user can do. The command line prints the line and exits with status 1. The line shows no credentials.
    """

    def __init__(self, subject: object, cause: str, cure: str):
        self.subject, self.cause, self.cure = str(subject), cause, cure
        line = masked(" ".join(f"{subject}: {cause}; {cure}".split()))
        super().__init__(printable(line if len(line) <= MAX_CHARACTERS else f"{line[:MAX_CHARACTERS]} …"))

    def but(self, subject: object = None, cure: str | None = None) -> "DemixError":
        """This error with another subject or cure, if one is given."""
        return DemixError(subject or self.subject, self.cause, cure or self.cure)


class StoppedError(DemixError):
    """A signal ended training; the state is saved, and the same command resumes from it."""


def nearest(name: object, names: Iterable[object], otherwise: str) -> str:
    """The cure for an unknown name: a similar name, if there is one, and up to five known names; else `otherwise`."""
    known = list(map(str, names))
    near = difflib.get_close_matches(str(name), known, n=1)
    if len(known) > MAX_NAMES:
        listed = ", ".join(difflib.get_close_matches(str(name), known, n=MAX_NAMES, cutoff=0.0))
        listed += f" and {len(known) - MAX_NAMES} more"
    else:
        listed = ", ".join(known)
    return (f"did you mean {near[0]}? " if near else "") + f"known are {listed}" if known else otherwise


def printable(text: str) -> str:
    r"""`text` with escapes such as `\x1b` for all characters that could control a terminal, except line ends."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
