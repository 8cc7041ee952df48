"""The waiting for a SLURM job, with commands in the place of SLURM's that print what they are told to."""

import os
from pathlib import Path

import pytest

from demix.errors import DemixError
from demix.files import read_json, write_json
from demix.launch import controller, slurm
from demix.launch.job import Cluster, Places, TrainingJob
from demix.launch.progress import MishapError
from demix.settings import settings_from
from demix.train.state import tell_done
from support.errors import refused

# Each call takes the next line of a file, the last one again and again; one that begins with ! is an error. Who asks
# without end has no answer in the end. @ stands for the last argument.
COMMAND = """#!/bin/sh
n=$(($(cat "$0.calls" 2> /dev/null || echo 0) + 1))
echo $n > "$0.calls"
[ $n -gt 99 ] && exit 1
[ $n -gt $(wc -l < "$0.lines") ] && n='$'
for last; do :; done
line=$(sed -n "${n}s/@/$last/;${n}p" "$0.lines")
case "$line" in !*) echo "${line#!}" | tr ';' '\\n' >&2; exit 1;; *) echo "$line" | tr ';' '\\n';; esac
"""


class Fake:
    """A command of SLURM by the name of the file `path`."""

    def __init__(self, path: Path):
        self.path = path
        path.write_text(COMMAND)
        path.chmod(0o755)
        self.prints("")

    def prints(self, *lines: str) -> None:
        self.path.with_name(f"{self.path.name}.calls").unlink(missing_ok=True)
        self.path.with_name(f"{self.path.name}.lines").write_text("".join(f"{line}\n" for line in lines))

    @property
    def calls(self) -> int:
        return int(self.path.with_name(f"{self.path.name}.calls").read_text())


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Fake]:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "SECONDS_BETWEEN_POLLS", 0.0)
    monkeypatch.setattr(controller, "SECONDS_BETWEEN_POLLS", 0.0)
    monkeypatch.setattr(controller, "MAX_SILENCE", 5.0)
    return {name: Fake(folder / name) for name in ("squeue", "scontrol")}


@pytest.fixture
def job(tmp_path: Path) -> TrainingJob:
    checkpoints = tmp_path / "run" / "checkpoints" / "demix"
    checkpoints.mkdir(parents=True)
    places = Places(tmp_path / "run" / "models" / "demix", tmp_path / "run" / "metrics.json", checkpoints)
    return TrainingJob(("train", "demix"), "ours", places, 2, 1, 10)


def finish(job: TrainingJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the results that the job would leave."""
    model = job.finished / "output"
    for name in ("shared", "experts/law", "vocabulary"):
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / f"{name}.safetensors").write_text(f"the weights of {name}")
    for path in (model / "experts" / "law.json", model / "model.json", model / "tokenizer.json"):
        write_json(path, {"of": path.stem})
    write_json(job.finished / "metrics", {"step": 10})
    monkeypatch.setenv("DEMIX_DONE", str(job.finished / "done.json"))
    tell_done()


def test_a_job_is_found_by_its_fingerprint(job: TrainingJob, commands: dict[str, Fake]) -> None:
    assert slurm.find(job) is None
    commands["squeue"].prints("demix-job 7 RUNNING ours")
    assert slurm.find(job) == "7"
    commands["squeue"].prints(
        "Welcome to ci;CLUSTER: ci;7 jobs may run;3 JOBS wait;demix-job 7 RUNNING ours;7 RUN;;-- 2 lines --"
    )
    assert slurm.find(job) == "7"
    commands["squeue"].prints("demix-job 7 PENDING theirs")
    with refused("job 7"):
        slurm.find(job)
    # A second job of this name would wait for the first.
    commands["squeue"].prints("demix-job 7 RUNNING ours;demix-job 8 PENDING theirs")
    with refused("job 8"):
        slurm.find(job)


def test_a_fingerprint_that_the_site_has_changed_is_that_of_the_record(
    job: TrainingJob, commands: dict[str, Fake]
) -> None:
    commands["squeue"].prints("demix-job 7 RUNNING (null)")
    with refused("job 7"):
        slurm.find(job)
    write_json(job.jobs / "job.json", {"job": "7", "fingerprint": "ours"})
    assert slurm.find(job) == "7"
    write_json(job.jobs / "job.json", {"job": "7", "fingerprint": "theirs"})
    commands["squeue"].prints("demix-job 7 RUNNING ours")
    with refused("job 7"):
        slurm.find(job)


IN_A_JOB = {"SLURM_JOB_ID": "5", "SLURM_NTASKS": "9", "SLURM_CPUS_PER_TASK": "9", "SRUN_DEBUG": "3"}
OF_THE_SITE = {"SLURM_CONF": "/site/slurm.conf", "SBATCH_RESERVATION": "course", "SBATCH_ACCOUNT": "mine"}


@pytest.mark.parametrize("around", [{}, IN_A_JOB])
def test_what_names_the_site_and_the_user_reaches_sbatch(
    job: TrainingJob, commands: dict[str, Fake], monkeypatch: pytest.MonkeyPatch, around: dict[str, str]
) -> None:
    sbatch = Fake(commands["squeue"].path.with_name("sbatch"))
    Fake(sbatch.path.with_name("srun"))
    said = (
        f"cat {sbatch.path}.lines | tr ';' '\\n'; env > {sbatch.path}.env; printf '%s\\n' \"$@\" > {sbatch.path}.words"
    )
    sbatch.path.write_text(f"#!/bin/sh\n{said}\n")
    sbatch.prints("Job 12 of the day;sbatch: job 3 is near its limit;Submitted batch job 4711 on cluster ci")
    for name in [name for name in os.environ if name.startswith(("SLURM", "SBATCH"))]:
        monkeypatch.delenv(name)
    for name, value in (OF_THE_SITE | around).items():
        monkeypatch.setenv(name, value)
    cluster = Cluster(gpus=1, gpu_type="a100", partition="gpu", sbatch={"wckey": "ours", "exclude": "n[1-2]"})
    cluster = cluster.replace(account="lab", qos="long", setup=["module load cuda"], memory_mb=8000, ranks_per_node=1)
    assert slurm.submit(job, cluster, print) == "4711"
    lines = sbatch.path.with_name("sbatch.env").read_text().splitlines()
    found = dict(line.split("=", 1) for line in lines if line.startswith(("SLURM_", "SBATCH_", "SRUN_")))
    assert found == OF_THE_SITE
    assert os.environ.items() >= around.items()
    # On the command line they win over the user's variables.
    words = sbatch.path.with_name("sbatch.words").read_text().splitlines()
    wanted = {"--wckey=ours", "--exclude=n[1-2]", "--gpus-per-node=a100:1", "--partition=gpu", "--comment=ours"}
    wanted |= {"--nodes=2", "--ntasks-per-node=1", "--mem=8000M", "--time=720", "--signal=USR2@120", "--requeue"}
    assert wanted | {"--account=lab", "--qos=long"} < {*words}
    assert "module load cuda" in Path(words[-1]).read_text().splitlines()
    assert slurm.submit(job, Cluster(), print) == "4711"
    assert "wckey" not in sbatch.path.with_name("sbatch.words").read_text()
    sbatch.prints("Queue full. You have job 12 and job 13.")
    with refused("sbatch"):
        slurm.submit(job, cluster, print)


def test_options_that_demix_sets_itself_are_refused() -> None:
    for wrong in ({"job-name": "mine"}, {"exclude; rm": "x"}, {"-x": "n1"}, {"exclusive": False}):
        with pytest.raises(DemixError):
            settings_from(Cluster, {"sbatch": wrong})


def test_an_ending_job_is_waited_for(job: TrainingJob, commands: dict[str, Fake]) -> None:
    commands["squeue"].prints("demix-job 7 COMPLETING ours", "demix-job 7 COMPLETING ours", "")
    assert slurm.find(job) is None
    assert commands["squeue"].calls == 3


def test_a_controller_that_does_not_answer_is_asked_again(commands: dict[str, Fake]) -> None:
    commands["scontrol"].prints("!Unable to contact slurm controller", "JobId=7 JobState=RUNNING Comment=a=b")
    assert controller.show("7") == {"JobId": "7", "JobState": "RUNNING", "Comment": "a=b"}
    commands["scontrol"].prints("!slurm_load_jobs error: Invalid job id specified;(maintenance on Monday)")
    assert controller.show("7") == {}
    # A site says more, and an answer may be cut.
    others = "Quota=9%;JobId=6 JobState=FAILED;ArrayJobId=7 JobState=PENDING;{};JobId=71 JobState=COMPLETED"
    commands["scontrol"].prints(*map(others.format, ("JobId=7 JobState=", "JobId=7 JobName=a JobState=RUNNING")))
    assert controller.show("7") == {"JobId": "7", "JobName": "a", "JobState": "RUNNING"}


def test_a_cut_or_missing_file_is_no_result(job: TrainingJob, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not slurm.is_finished(job)
    finish(job, monkeypatch)
    assert slurm.is_finished(job)
    weights = job.finished / "output" / "shared.safetensors"
    whole = weights.read_text()
    weights.write_text(whole[:-1])
    assert not slurm.is_finished(job)
    weights.unlink()
    assert not slurm.is_finished(job)
    weights.write_text(whole)
    assert slurm.is_finished(job)
    (job.finished / "done.json").write_text("{}")
    assert not slurm.is_finished(job)


def test_what_describes_a_file_arrives_after_it_and_the_models_description_last(
    job: TrainingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(job, monkeypatch)
    arrived: list[str] = []
    replace = os.replace

    def renamed(source: Path, target: Path) -> None:
        arrived.append(Path(target).name)
        replace(source, target)

    monkeypatch.setattr(os, "replace", renamed)
    slurm.remove_collected(job.checkpoints.parent)
    slurm.collect(job)
    weights = ["law.safetensors", "shared.safetensors", "vocabulary.safetensors"]
    assert arrived == [*weights, "law.json", "tokenizer.json", "model.json", "metrics.json"]
    model = job.places.output
    assert (model / "experts" / "law.safetensors").read_text() == "the weights of experts/law"
    assert read_json(model / "model.json") == {"of": "model"}
    assert read_json(job.places.metrics) == {"step": 10}
    slurm.remove_collected(job.checkpoints.parent)
    assert not job.finished.exists()


def test_a_final_state_counts_after_polls_in_a_row(
    job: TrainingJob, commands: dict[str, Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "POLLS", 3)
    monkeypatch.setattr(slurm, "POLLS_FOR_RESULTS", 5)
    failed = "JobId=7 JobState=FAILED"
    commands["scontrol"].prints(failed, failed, "JobId=@ JobState=PENDING Reason=Priority", failed)
    with pytest.raises(MishapError):
        slurm._wait(job, "7")
    assert commands["scontrol"].calls == 6
    # Results may be seen late.
    for last in ("JobId=@ JobState=COMPLETED", "!Invalid job id specified"):
        commands["scontrol"].prints("JobId=@ JobState=RUNNING", last)
        with pytest.raises(MishapError):
            slurm._wait(job, "7")
        assert commands["scontrol"].calls == 6
    finish(job, monkeypatch)
    commands["scontrol"].prints("JobId=@ JobState=RUNNING", "JobId=@ JobState=COMPLETED")
    slurm._wait(job, "7")
    assert commands["scontrol"].calls == 3


def test_a_job_that_breaks_down_is_submitted_again_as_often_as_allowed(
    job: TrainingJob, commands: dict[str, Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "POLLS", 2)
    submitted: list[str] = []

    def submit(*arguments: object) -> str:
        submitted.append(str(len(submitted)))
        if len(submitted) == 4:
            finish(job, monkeypatch)
        return submitted[-1]

    monkeypatch.setattr(slurm, "submit", submit)
    commands["scontrol"].prints("JobId=@ JobState=NODE_FAIL")
    with pytest.raises(MishapError):
        slurm.run(job, Cluster(), print)
    assert len(submitted) == 3
    slurm.run(job, Cluster(), print)
    assert len(submitted) == 4
    assert (job.places.output / "model.json").exists()
    # What is finished is collected and not done again.
    slurm.run(job, Cluster(), print)
    assert len(submitted) == 4
