"""Whatever happens to a training job, the run ends with the losses of one that nothing happened to."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.disturbed import Trained, printed, until

pytestmark = [pytest.mark.slurm, pytest.mark.campaign]

PLACE = Path("/var/tmp/demix-slurm")
Make = Callable[..., Trained]


def assert_as_undisturbed(training: Trained, undisturbed: list[float]) -> None:
    # gloo may add in another order: one float64 in thousands has been seen to differ in its last bit.
    assert training.losses() == pytest.approx(undisturbed, rel=1e-12, abs=0)
    training.assert_one_at_a_time()


def ranks_of(training: Trained) -> list[int]:
    """The process numbers of the ranks of its job."""
    found = subprocess.run(
        ["pgrep", "-f", f"submitit.core._submit {training.checkpoints / 'jobs'}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    pids = [int(pid) for pid in found.stdout.split()]
    return [pid for pid in pids if b"srun" not in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]]


def test_cancelled(training: Make, undisturbed: list[float]) -> None:
    disturbed = training()
    process = disturbed.start()
    until(lambda: disturbed.step() > 45)
    subprocess.run(["scancel", disturbed.job()], check=True)
    assert process.wait() != 0
    assert "was cancelled; rerun: training goes on from the last checkpoint" in printed(disturbed.folder)
    assert disturbed.start().wait() == 0, printed(disturbed.folder)
    assert_as_undisturbed(disturbed, undisturbed)


def test_preempted(training: Make, undisturbed: list[float]) -> None:
    disturbed = training()
    process = disturbed.start()
    until(lambda: disturbed.step() > 45)
    urgent = ["sbatch", "-p", "high", "-N2", "--exclusive", "--wait", "-o", "/dev/null", "--wrap", "true"]
    subprocess.run(urgent, check=True)
    assert process.wait() == 0, printed(disturbed.folder)
    assert "queued again once" in printed(disturbed.folder)
    assert_as_undisturbed(disturbed, undisturbed)


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
    assert "queued again" in printed(disturbed.folder)
    assert_as_undisturbed(disturbed, long)


def test_a_bound_on_requeues(training: Make) -> None:
    disturbed = training(requeues=0)
    process = disturbed.start()
    until(lambda: disturbed.step() > 45)
    subprocess.run(["scontrol", "requeue", disturbed.job()], check=True)
    assert process.wait() != 0
    assert "was queued again 1 times; raise cluster.requeues" in printed(disturbed.folder)


def test_a_killed_rank(training: Make, undisturbed: list[float]) -> None:
    disturbed = training()
    process = disturbed.start()
    until(lambda: disturbed.step() > 45)
    os.kill(ranks_of(disturbed)[2], signal.SIGKILL)
    # The same run submits it again.
    assert process.wait() == 0, printed(disturbed.folder)
    assert re.search(r"rank \d of 4 on n[12]: ended first \(Killed\); see .*_log.err", printed(disturbed.folder))
    assert_as_undisturbed(disturbed, undisturbed)


@pytest.mark.parametrize("late", [False, True], ids=["while it runs", "when it has finished"])
def test_a_killed_snakemake(training: Make, undisturbed: list[float], late: bool) -> None:
    disturbed = training()
    process = disturbed.start()
    until(lambda: disturbed.step() > 45)
    process.kill()
    process.wait()
    if late:
        until(lambda: list(disturbed.checkpoints.glob("finished-*/done.json")))
    assert disturbed.start().wait() == 0, printed(disturbed.folder)
    assert_as_undisturbed(disturbed, undisturbed)
    assert len(disturbed.runs()) == 1, "submitted twice"


@pytest.mark.parametrize("then", ["leave", "cancel"])
def test_interrupted(training: Make, undisturbed: list[float], then: str) -> None:
    disturbed = training(on_interrupt=then)
    process = disturbed.start()
    until(lambda: disturbed.step() > 45)
    # As Ctrl-C: to the whole group.
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait() != 0
    said = {"leave": "was left running (SIGINT); rerun to wait for it", "cancel": "was cancelled (SIGINT)"}[then]
    assert said in printed(disturbed.folder)
    assert disturbed.start().wait() == 0, printed(disturbed.folder)
    assert_as_undisturbed(disturbed, undisturbed)
    assert len(disturbed.runs()) == {"leave": 1, "cancel": 2}[then]


def test_without_accounting_for_a_minute(training: Make, undisturbed: list[float]) -> None:
    disturbed = training()
    process = disturbed.start()
    until(lambda: disturbed.step() > 45)
    subprocess.run(["pkill", "-x", "slurmdbd"], check=True)
    try:
        begun = time.monotonic()
        # The outage has to last, whatever the run does meanwhile.
        until(lambda: time.monotonic() - begun > 60)
    finally:
        bring_up()
    assert process.wait() == 0, printed(disturbed.folder)
    assert_as_undisturbed(disturbed, undisturbed)
    assert len(disturbed.runs()) == 1


def test_a_node_that_disappears(training: Make, long: list[float]) -> None:
    disturbed = lengthened(training())
    process = disturbed.start()
    until(lambda: disturbed.step() > 45)
    os.kill(int((PLACE / "run" / "slurmd.n2.pid").read_text()), signal.SIGKILL)
    try:
        until(lambda: "queued again" in printed(disturbed.folder), 180)
    finally:
        bring_up()
    assert process.wait() == 0, printed(disturbed.folder)
    assert_as_undisturbed(disturbed, long)


def bring_up() -> None:
    subprocess.run(["bash", str(Path(__file__).parent / "up.sh"), str(PLACE)], check=True, stdout=subprocess.DEVNULL)
