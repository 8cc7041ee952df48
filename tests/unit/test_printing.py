"""Commands: what they import before their work begins, and where their text goes."""

import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from demix.commands.stages import run_command
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


def test_a_printed_command_runs_nothing_that_a_file_holds(frozen: Run, tmp_path: Path) -> None:
    """The line is pasted into a shell. The address of the store is not printed, which anybody may have written."""
    run = copied(frozen, tmp_path / "a $(touch made) 'b'").folder
    written_by_hand(run, tracking={"uri": "http://x\x1b[2J`a`\n$(b)"})
    lines = demix("summary", run).output.splitlines()
    page = next(line for line in lines if line.startswith("One page"))
    assert shlex.split(page.partition(": ")[2])[:3] == ["snakemake", "--configfile", str(run / "config.json")]
    assert "\x1b" not in "".join(lines)
    assert "$(URI)" not in MAKEFILE.read_text()


def test_an_interrupted_rank_is_not_taken_for_a_finished_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("demix.train.sweep.read_trial", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(SystemExit, match="130"):
        run_command(["choose-rate", "a.jsonl", "--output", "a.json"])


def test_no_module_of_data_mixing_or_report_loads_torch() -> None:
    """All of the data stage and of mixing is importable without torch, and nothing but tracking loads mlflow."""
    light = "run.check data.sources data.anonymize data.corpus data.tokenizer data.shards data.examples"
    light += " commands.main evaluate.domain evaluate.classification report report.items.pages"
    names = ", ".join(f"demix.{name}" for name in light.split())
    code = f"import sys, {names}; print([name for name in ('torch', 'mlflow', 'transformers') if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
