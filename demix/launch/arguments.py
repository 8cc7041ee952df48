"""Command lines of any length: Linux passes some 2 MB of arguments to a process, and a rule may name more inputs."""

import os
from pathlib import Path

# A function of bash, which has no such limit, in place of the command. Beyond so many characters the arguments go
# through a pipe, which bash names /dev/fd/<number>.
SHELL_FUNCTION = (
    'demix() { local all="$*"; if ((${#all} < 1000000)); then command demix "$@"; '
    "else command demix @<(printf '%s\\0' \"$@\"); fi; }"
)


def expanded(arguments: list[str]) -> list[str]:
    """The arguments of a command: those given, or for @FILE alone those in the file, each ended by a null character."""
    if len(arguments) != 1 or not arguments[0].startswith("@"):
        return arguments
    return os.fsdecode(Path(arguments[0][1:]).read_bytes()).split("\0")[:-1]
