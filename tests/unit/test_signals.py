"""Ctrl-C in tests, where the shell that started them ignores it."""

from pathlib import Path

from support.inner_pytest import pytest_on, with_conftest

ASKING = """
import signal

def test_ctrl_c_is_heard(): assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""
IGNORED = "trap '' INT; exec \"$@\""


def test_a_background_job_of_a_shell_hears_ctrl_c(tmp_path: Path) -> None:
    """Such a job begins with SIGINT ignored, as here."""
    with_conftest(tmp_path, ASKING)
    done = pytest_on(tmp_path, shell=IGNORED)
    assert done.returncode == 0, done.stdout
    (tmp_path / "conftest.py").unlink()
    without = pytest_on(tmp_path, shell=IGNORED)
    assert without.returncode == 1, "else this test would say nothing of the handler"
