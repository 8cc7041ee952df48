"""Progress: a bar on a terminal that is gone at the end, lines of the log elsewhere."""

import json
import logging
import os
import pty
import re
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from snakemake_interface_logger_plugins.common import LogEvent

import snakemake_logger_plugin_demix as logger
from demix import progress as module
from demix.launch.job import Places, TrainingJob
from demix.launch.progress import progress_line, seconds_left, speed
from demix.progress import followed, progress
from support.disturbed import until
from support.dry_run import ENVIRONMENT


def test_a_line_of_the_log_now_and_then(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    # `demix evaluate`, run in this process by another test, makes the package quiet.
    caplog.set_level(logging.INFO, logger="demix")
    seconds = count()
    # A clock of the module's own: other threads look at the real one.
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    assert list(followed(range(50), "news: documents", 50)) == list(range(50))
    with progress("https://a.example: MB", done=2) as advance:
        for _ in range(12):
            advance(0.5, "0.5 MB/s")
    assert caplog.messages == [
        "news: documents 11/50  0:39 left",
        "news: documents 22/50  0:28 left",
        "news: documents 33/50  0:17 left",
        "news: documents 44/50  0:06 left",
        "https://a.example: MB 8  0.5 MB/s",
    ]


def test_the_time_left_is_by_the_seconds_that_the_last_updates_took() -> None:
    first, last = {"step": 7, "tokens": 900}, {"step": 8, "tokens": 1000}
    updates = [first | {"tokens_per_second": 100.0}, last | {"tokens_per_second": 25.0}]
    # Two updates of 100 tokens took 1 and 4 seconds.
    assert speed(updates) == 40
    assert seconds_left(updates, 12) == 10


def test_a_job_says_its_training_and_its_step(tmp_path: Path) -> None:
    place = tmp_path / "results" / "tiny" / "checkpoints" / "btm" / "licenses"
    (place / "0123").mkdir(parents=True)
    line = {"tokens": 32, "loss": 5.0, "tokens_per_second": 64.0, "learning_rate": 1e-3}
    (place / "0123" / "metrics.jsonl").write_text("".join(json.dumps(line | {"step": n}) + "\n" for n in (1, 2)))
    job = TrainingJob((), "", Places(None, None, place), 1, 1, 12)
    assert job.label == "btm/licenses"
    shown = {"JobState": "RUNNING", "StartTime": "2026-01-01T00:00:00", "NodeList": "n1"}
    assert "  step 2/12  " in progress_line(job, "7", shown)


SCRIPT = """
import logging, sys
from demix.commands.main import main
from demix.progress import followed
for outer in followed("ab", "[bold]outer", 2):
    for inner in followed("xy", "inner", 2):
        print("said", outer, inner, file=sys.stderr)
settings = '{"kind": "bpe", "vocab_size": 300, "words": 9}'
sys.argv = ["demix", "tokenizer", sys.argv[1], "--settings", settings, "--output", "x"]
main()
"""


def on_a_terminal(command: list[str], folder: Path) -> tuple[int, str]:
    """Exit status of a command, and what a terminal is sent."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen(command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    sent = b""
    # A terminal whose other end is closed is at an error, not at its end.
    try:
        while data := os.read(ours, 1 << 16):
            sent += data
    except OSError:
        pass
    os.close(ours)
    return process.wait(), sent.decode()


def test_on_a_terminal_bars_come_and_go_and_the_error_is_last(tmp_path: Path) -> None:
    status, sent = on_a_terminal([sys.executable, "-c", SCRIPT, str(tmp_path / "none.parquet")], tmp_path)
    assert status == 1
    assert "[bold]outer" in sent
    assert "inner" in sent
    assert re.findall(r"said \w \w", sent) == ["said a x", "said a y", "said b x", "said b y"]
    # No bar is drawn again after the error.
    assert re.split(r"\r|\n|\x1b\[2K", sent.rstrip())[-1].startswith("demix: error: ")


def emit(handler: logger.LogHandler, event: LogEvent | None = None, **values: object) -> None:
    handler.emit(logging.makeLogRecord(({"event": event} if event else {}) | values))


def test_a_dry_run_has_its_table_of_jobs_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Snakemake sends it before the jobs and after them."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    handler = logger.LogHandler(SimpleNamespace(dryrun=True), None)
    for _ in range(2):
        emit(handler, LogEvent.RUN_INFO, stats={"report": 1, "total": 1}, msg="report 1")
    assert "".join(capsys.readouterr()).count("report 1") == 1


SNAKEFILE = """
rule all:
    input: "b.txt"
rule make:
    output: "a.txt"
    shell: "touch begun; until [ -e go ]; do sleep 0.1; done; touch {output}"
rule after:
    input: "a.txt"
    output: "b.txt"
    shell: "touch {output}"
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("group", [False, True], ids=["snakemake", "group"])
def test_after_a_signal_a_run_says_at_once_and_at_its_end_how_it_stands(
    tmp_path: Path, number: signal.Signals, group: bool
) -> None:
    (tmp_path / "Snakefile").write_text(SNAKEFILE)
    command = ["snakemake", "--logger", "demix", "--cores", "1", "--keep-going"]
    with open(tmp_path / "said", "w") as said:
        process = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stderr=said, start_new_session=True)
    until((tmp_path / "begun").exists)
    (os.killpg if group else os.kill)(process.pid, number)
    until(lambda: "waiting for make" in (tmp_path / "said").read_text())
    (tmp_path / "go").touch()
    assert process.wait() == 1
    assert "of 3 jobs are done" in (tmp_path / "said").read_text().splitlines()[1]
    assert not (tmp_path / "b.txt").exists()
