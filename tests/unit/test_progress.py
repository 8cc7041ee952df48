"""Progress: a bar on a terminal that is gone at the end, lines of the log elsewhere."""

import logging
import os
import pty
import re
import subprocess
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from demix import progress as module
from demix.progress import followed, progress
from support.tokens import SAMPLE


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


def screen(sent: str) -> list[str]:
    """The lines that are left on a screen which was sent so much."""
    lines, row = [""], 0
    for part in re.split(r"(\x1b\[[0-9;?]*[A-Za-z]|\r|\n)", sent):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif re.fullmatch(r"\x1b\[(\d*)A", part):
            row = max(0, row - int(part[2:-1] or 1))
        elif part == "\x1b[2K":
            lines[row] = ""
        elif not part.startswith("\x1b") and part != "\r":
            lines[row] += part
    return [line.rstrip() for line in lines if line.strip()]


def test_on_a_terminal_bars_come_and_go_and_the_error_is_last(tmp_path: Path) -> None:
    status, sent = on_a_terminal([sys.executable, "-c", SCRIPT, str(tmp_path / "none.parquet")], tmp_path)
    assert status == 1
    assert "[bold]outer" in sent
    assert "inner" in sent
    shown = screen(sent)
    assert [line for line in shown if line.startswith("said")] == ["said a x", "said a y", "said b x", "said b y"]
    assert not [line for line in shown if "outer" in line or "inner" in line], shown
    assert shown[-1].startswith("demix: error: "), shown


def test_a_stage_by_hand_shows_how_far_it_is(tmp_path: Path) -> None:
    source = f'{{"kind": "files", "path": "{SAMPLE / "fortunes.jsonl.zst"}"}}'
    command = [
        sys.executable,
        "-m",
        "demix",
        "download",
        "fortunes",
        "--settings",
        source,
        "--output",
        "raw.parquet",
    ]
    status, sent = on_a_terminal(command, tmp_path)
    assert status == 0
    assert "fortunes: documents" in sent
    left = screen(sent)
    assert len(left) == 1, left
    assert re.fullmatch(r"fortunes: took (\d+) of \1 documents", left[0])
