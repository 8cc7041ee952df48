"""A real SLURM of two nodes on this machine, and training jobs on it that can be disturbed."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.disturbed import Trained, printed
from support.dry_run import ENVIRONMENT
from support.once import tiny_run

HERE = Path(__file__).parent
PLACE = "/var/tmp/demix-slurm"


@pytest.fixture(scope="session")
def slurm() -> Iterator[None]:
    """SLURM is up."""
    missing = [name for name in ("slurmctld", "slurmdbd", "munged", "mariadbd") if shutil.which(name) is None]
    if missing or os.getuid():
        pytest.skip("needs root and SLURM: apt-get install slurm-wlm slurmdbd mariadb-server munge")
    up = subprocess.run(["bash", str(HERE / "up.sh"), PLACE], check=False, stdout=subprocess.DEVNULL)
    assert up.returncode == 0
    with pytest.MonkeyPatch.context() as patch:
        for environment in (os.environ, ENVIRONMENT):
            patch.setitem(environment, "SLURM_CONF", f"{PLACE}/etc/slurm.conf")
            patch.setitem(environment, "PATH", f"{PLACE}/bin{os.pathsep}{environment['PATH']}")
        yield
    subprocess.run(["bash", str(HERE / "down.sh"), PLACE], check=True)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished local run of the tiny config; not to be written to."""
    return tiny_run(tmp_path_factory)


@pytest.fixture(scope="session")
def undisturbed(slurm: None, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a training that nobody disturbs."""
    training = Trained(prepared, tmp_path_factory.mktemp("undisturbed") / "run")
    assert training.start().wait() == 0, printed(training.folder)
    assert len(training.starts()) == 1
    return training.losses()


@pytest.fixture
def training(slurm: None, prepared: Path, tmp_path: Path) -> Iterator[Callable[..., Trained]]:
    """Makes a training; what it leaves running is ended."""
    started: list[Trained] = []

    def make(**cluster: object) -> Trained:
        started.append(Trained(prepared, tmp_path / f"run{len(started)}", **cluster))
        return started[-1]

    yield make
    for one in started:
        with_it = subprocess.run(["pgrep", "-f", str(one.folder)], capture_output=True, text=True, check=False)
        for pid in with_it.stdout.split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        # The names of all runs of a session stay: their folders would fill the disk.
        shutil.rmtree(one.folder)
    subprocess.run(["scancel", "--user", "root"], check=True)
