"""Where printed text goes: a full disk, a closed stream, a reader who left; and names that a shell would run."""

import subprocess
import sys

import pytest

FULL = "demix: error: standard output: cannot be written (No space left on device); "


@pytest.mark.parametrize(
    ("words", "end", "status", "told"),
    [
        ("config --reference", "> /dev/full", 1, FULL),
        ("config --help", "> /dev/full", 1, FULL),
        ("config /nowhere.yaml", "> /dev/full", 1, "demix: error: /nowhere.yaml: does not exist; "),
        ("config config/sample.yaml", ">&- 2>&- <&-", 0, ""),
        ("config --reference", "| true; exit ${PIPESTATUS[0]}", 1, ""),
    ],
)
def test_text_that_cannot_be_printed_is_one_line(words: str, end: str, status: int, told: str) -> None:
    line = f"{sys.executable} -m demix {words} {end}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.startswith(told)
    assert done.stderr.count("\n") == bool(told), done.stderr
