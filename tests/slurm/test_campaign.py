"""Whatever happens to a training job, the run ends with the losses of one that nothing happened to."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.disturbed import Trained, printed, ranks_of, until

pytestmark = [pytest.mark.slurm, pytest.mark.campaign]

PLACE = Path("/var/tmp/demix-slurm")
Make = Callable[..., Trained]


def assert_as_undisturbed(training: Trained, undisturbed: list[float], starts: int) -> None:
    """The training has the losses of the undisturbed one, and started so often."""
    # gloo may add in another order: one float64 in thousands has been seen to differ in its last bit.
    assert training.losses() == pytest.approx(undisturbed, rel=1e-12, abs=0)
    assert len(training.starts()) == starts


def cancel(training: Trained, _: subprocess.Popen) -> None:
    subprocess.run(["scancel", training.job()], check=True)


def preempt(_: Trained) -> None:
    urgent = ["sbatch", "-p", "high", "-N2", "--exclusive", "--wait", "-o", "/dev/null", "--wrap", "true"]
    subprocess.run(urgent, check=True)


def kill_a_rank(training: Trained) -> None:
    os.kill(ranks_of(training.checkpoints)[2], signal.SIGKILL)


def end_accounting_for_a_minute(_: Trained) -> None:
    subprocess.run(["pkill", "-x", "slurmdbd"], check=True)
    try:
        begun = time.monotonic()
        # The outage has to last, whatever the run does meanwhile.
        until(lambda: time.monotonic() - begun > 60)
    finally:
        bring_up()


@pytest.mark.parametrize(("disturb", "starts"), [(preempt, 2), (kill_a_rank, 2), (end_accounting_for_a_minute, 1)])
def test_a_run_goes_on_by_itself(
    disturb: Callable[[Trained], None], starts: int, training: Make, undisturbed: list[float]
) -> None:
    disturbed = training()
    process = disturbed.start_and_wait()
    disturb(disturbed)
    assert process.wait() == 0, printed(disturbed.folder)
    assert_as_undisturbed(disturbed, undisturbed, starts)


def kill_snakemake(_: Trained, process: subprocess.Popen) -> None:
    process.kill()


def interrupt(_: Trained, process: subprocess.Popen) -> None:
    """As Ctrl-C: to the whole group."""
    os.killpg(process.pid, signal.SIGINT)


def kill_snakemake_late(training: Trained, process: subprocess.Popen) -> None:
    kill_snakemake(training, process)
    until(lambda: list(training.checkpoints.glob("finished-*/done.json")))


@pytest.mark.parametrize(
    ("disturb", "starts"),
    [(cancel, 2), (kill_snakemake, 1), (kill_snakemake_late, 1), (interrupt, 1)],
    ids=["cancelled", "killed", "killed, and the job has finished", "interrupted"],
)
def test_the_next_snakemake_goes_on(
    disturb: Callable[[Trained, subprocess.Popen], None], starts: int, training: Make, undisturbed: list[float]
) -> None:
    disturbed = training()
    process = disturbed.start_and_wait()
    disturb(disturbed, process)
    assert process.wait() != 0
    assert disturbed.start().wait() == 0, printed(disturbed.folder)
    assert_as_undisturbed(disturbed, undisturbed, starts)


@pytest.fixture(scope="module")
def long(slurm: None, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a training of some minutes that nobody disturbs."""
    training = lengthened(Trained(prepared, tmp_path_factory.mktemp("long") / "run"))
    assert training.start().wait() == 0, printed(training.folder)
    return training.losses()


def lengthened(training: Trained) -> Trained:
    training.config["training"] |= {"tokens": 6 * training.config["training"]["tokens"], "checkpoint_every": 500}
    return training


def test_a_time_limit_of_a_minute(training: Make, long: list[float]) -> None:
    # SLURM looks every 30 s: with more grace it may signal before ranks that start slowly have trained a step.
    disturbed = lengthened(training(minutes=1, grace_seconds=5))
    assert disturbed.start().wait() == 0, printed(disturbed.folder)
    assert disturbed.losses() == pytest.approx(long, rel=1e-12, abs=0)
    assert len(disturbed.starts()) > 1


def test_a_node_that_disappears(training: Make, long: list[float]) -> None:
    disturbed = lengthened(training())
    process = disturbed.start_and_wait()
    os.kill(int((PLACE / "run" / "slurmd.n2.pid").read_text()), signal.SIGKILL)
    try:
        until(lambda: len(attempts(disturbed)) > 1, 180)
    finally:
        bring_up()
    assert process.wait() == 0, printed(disturbed.folder)
    assert_as_undisturbed(disturbed, long, 2)


def attempts(training: Trained) -> list[str]:
    """The lines of the accounting about the training's job, one of each time that it was queued."""
    command = ["sacct", "-X", "-D", "-n", "-P", "-j", training.job(), "-o", "JobID,State"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def bring_up() -> None:
    subprocess.run(["bash", str(Path(__file__).parent / "up.sh"), str(PLACE)], check=True, stdout=subprocess.DEVNULL)
