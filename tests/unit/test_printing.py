"""Where printed text goes: a full disk, a closed stream, a reader who left; and names that a shell would run."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from demix.commands.training import run_command
from demix.run.run import Run
from support.cli import demix
from support.configs import written_by_hand
from support.frozen import copied

MAKEFILE = Path(__file__).parents[2] / "Makefile"


@pytest.mark.parametrize(
    ("words", "end", "status", "subject"),
    [
        ("config --reference", "> /dev/full", 1, "standard output"),
        ("config --help", "> /dev/full", 1, "standard output"),
        ("config /nowhere.yaml", "> /dev/full", 1, "/nowhere.yaml"),
        ("config config/sample.yaml", ">&- 2>&- <&-", 0, ""),
        ("config --reference", "| true; exit ${PIPESTATUS[0]}", 1, ""),
    ],
)
def test_text_that_cannot_be_printed_is_one_line(words: str, end: str, status: int, subject: str) -> None:
    line = f"{sys.executable} -m demix {words} {end}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.startswith(f"demix: error: {subject}: " * bool(subject))
    assert done.stderr.count("\n") == bool(subject), done.stderr


def test_the_version_is_that_of_the_package() -> None:
    text = (MAKEFILE.parent / "pyproject.toml").read_text()
    assert demix("--version").output == f"demix {tomllib.loads(text)['project']['version']}\n"


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
@pytest.mark.parametrize("text", ["$(shell touch made)", "';touch made;'", '`touch made` $$ ${HOME} a#b \\ "c" %2F'])
def test_a_printed_command_runs_nothing_that_a_file_holds(frozen: Run, text: str, tmp_path: Path) -> None:
    """The line is pasted into a shell; a make with the Makefile's variables says what it got."""
    run = copied(frozen, tmp_path / "a $(touch made) 'b'").folder
    written_by_hand(run, tracking={"uri": f"sqlite:///{text}"})
    lines = demix("summary", run).output.splitlines()
    page, ui = (next(line for line in lines if line.startswith(begin)) for begin in ("One page", "Runs and curves"))
    variables = [line for line in MAKEFILE.read_text().splitlines() if line.startswith(("URI", "export URI"))]
    recipe = ["ui:", "\t@printf '%s' \"$$URI\""]
    (tmp_path / "Makefile").write_text("\n".join([*variables, *recipe, ""]))
    # A make above this one would have the inner make say which folder it enters.
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    }
    command = ui.partition(": ")[2]
    got = subprocess.run(command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert got.stdout == f"sqlite:///{text}"
    words = shlex.split(page.partition(": ")[2])
    assert words[:3] == ["snakemake", "--configfile", str(run / "config.json")]
    assert "$(URI)" not in MAKEFILE.read_text()
    assert not list(tmp_path.glob("**/made"))
    written_by_hand(run, tracking={"uri": "http://x\x1b[2J`a`\n$(b)"})
    assert "\x1b" not in demix("summary", run).output


def test_an_interrupted_rank_is_not_taken_for_a_finished_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("demix.train.sweep.choose_rate", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(SystemExit, match="130"):
        run_command(["choose-rate", "a.jsonl", "--output", "a.json"])
