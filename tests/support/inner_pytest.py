"""pytest in a process of its own, for tests of how the tests themselves are run."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).parents[1] / "conftest.py"


def pytest_on(folder: Path, *options: str, shell: str = 'exec "$@"') -> subprocess.CompletedProcess[str]:
    """How pytest ends on the tests in `folder`, started by the command `shell`, with no options but `options`."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *options]
    # CI hands its own options to all of its tests.
    environment = {key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"}
    return subprocess.run(
        ["sh", "-c", shell, "sh", *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def with_conftest(folder: Path, tests: str) -> None:
    """Write `tests` into `folder`, beside the conftest.py of our tests."""
    shutil.copy(CONFTEST, folder)
    (folder / "test_some.py").write_text(tests)
