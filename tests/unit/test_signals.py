"""Ctrl-C in tests, where the shell that started them ignores it."""

import shutil
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
ASKING = """
import signal

def test_ctrl_c_is_heard(): assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""


def test_a_background_job_of_a_shell_hears_ctrl_c(tmp_path: Path) -> None:
    """Such a job begins with SIGINT ignored, as here."""
    shutil.copy(TESTS / "conftest.py", tmp_path)
    (tmp_path / "test_some.py").write_text(ASKING)
    command = [
        "sh",
        "-c",
        "trap '' INT; exec \"$@\"",
        "sh",
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-q",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    (tmp_path / "conftest.py").unlink()
    without = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert without.returncode == 1, "else this test would say nothing of the handler"
