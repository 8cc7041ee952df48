"""How the cases of this folder run `demix` and snakemake, and note how a fault ended."""

import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.disturbed import REPOSITORY, TINY, printed, snakemake


@dataclass
class Note:
    """Notes how faults ended: with an error that names what it should, or with a recovery."""

    rows: list[dict]

    def add(self, fault: str, outcome: str, seconds: float) -> None:
        self.rows.append({"fault": fault, "outcome": outcome, "seconds": seconds})

    @contextmanager
    def timed(self, fault: str, outcome: str) -> Iterator[None]:
        """Notes `outcome` with the seconds that the block took, or that it failed."""
        start = time.monotonic()
        try:
            yield
        except BaseException:
            self.add(fault, "FAILED", time.monotonic() - start)
            raise
        self.add(fault, outcome, time.monotonic() - start)


def json_value(content: bytes, lines: bool = False) -> str | None:
    """The JSON value of a file, or those of its lines, as text that tells 1 from 1.0; None where it is no JSON."""
    try:
        parts = [line for line in content.decode().split("\n") if line.strip()] if lines else [content.decode()]
        return repr([json.loads(part) for part in parts])
    except (ValueError, RecursionError):
        return None


def run_tiny(folder: Path, *arguments: str, config: dict = TINY) -> subprocess.Popen:
    """Start snakemake on the tiny config in `folder`, in a session of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "resources").exists():
        (folder / "resources").symlink_to(REPOSITORY / "resources")
    return snakemake(folder, config, *arguments, profile="default")


def commands(folder: Path) -> dict[str, list[str]]:
    """The arguments of each `demix` command that the run in `folder` printed, by the words it begins with."""
    found = {}
    for line in re.findall(r"^Shell command: (.*)$", printed(folder), re.MULTILINE):
        for part in line.strip("()").split(" && "):
            words = shlex.split(part.split(" 2> ")[0].rstrip(")"))
            if words[:1] == ["demix"]:
                found[" ".join(words[1:])] = words[1:]
    return found


def command(folder: Path, begin: str, *containing: str) -> list[str]:
    """The only command of the run that begins so and holds all of these texts."""
    found = [
        words
        for text, words in commands(folder).items()
        if text.startswith(begin) and all(part in text for part in containing)
    ]
    assert len(found) == 1, (begin, containing, [" ".join(words)[:120] for words in found])
    return found[0]


def demix(*arguments: object, before: tuple[str, ...] = (), **more: object) -> subprocess.CompletedProcess:
    """Run `demix` in a process of its own, behind the words `before`."""
    line = [*before, sys.executable, "-m", "demix", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, check=False, **more)


def told(done: subprocess.CompletedProcess) -> str:
    """The line in which a command said what is wrong; an assertion that it is in the common form."""
    lines = [line for line in done.stderr.splitlines() if line]
    assert done.returncode == 1, done.stderr
    assert lines[-1].startswith("demix: error: "), done.stderr
    assert lines[-1].count("; "), "cause and cure"
    assert "Traceback" not in done.stderr
    return lines[-1]
