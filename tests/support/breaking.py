"""The commands of a finished run, and processes that run `demix` on what was broken."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

from support.disturbed import printed, snakemake
from support.dry_run import TINY


def json_value(content: bytes, lines: bool = False) -> str | None:
    """The JSON value of a file, or those of its lines, as text that tells 1 from 1.0; None where it is no JSON."""
    try:
        parts = [line for line in content.decode().split("\n") if line.strip()] if lines else [content.decode()]
        return repr([json.loads(part) for part in parts])
    except (ValueError, RecursionError):
        return None


def run_tiny(folder: Path, *arguments: str, config: dict = TINY) -> subprocess.Popen:
    """Start snakemake on the tiny config or another in `folder`, in a session of its own."""
    return snakemake(folder, config, *arguments, profile="default")


def commands(folder: Path) -> list[list[str]]:
    """The arguments of each `demix` command that the run in `folder` printed."""
    found = {}
    for line in re.findall(r"^Shell command: (.*)$", printed(folder), re.MULTILINE):
        for part in line.strip("()").split(" && "):
            words = shlex.split(part.split(" 2> ")[0].rstrip(")"))
            if words[:1] == ["demix"]:
                found[" ".join(words)] = words[1:]
    return [*found.values()]


def command(folder: Path, words: str) -> list[str]:
    """The only command of the run that begins with the first of `words` and holds the others, which | separates."""
    begin, *more = words.split("|")
    texts = [(" ".join(one), one) for one in commands(folder)]
    found = [one for text, one in texts if text.startswith(begin) and all(part in text for part in more)]
    assert len(found) == 1, (words, [" ".join(one)[:120] for one in found])
    return found[0]


def demix(*arguments: object, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    """Run `demix` in a process of its own, behind the words `before`."""
    line = [*before, sys.executable, "-m", "demix", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def refused(done: subprocess.CompletedProcess) -> str:
    """The one line in which a command said what is wrong."""
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    line = done.stderr.rstrip().splitlines()[-1]
    assert line.startswith("demix: error: "), done.stderr
    return line
