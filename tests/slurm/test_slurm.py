"""The workflow on a real SLURM of two nodes: the same numbers as on one machine, and a job that is queued again."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pandas as pd
import pytest

from demix.files import read_json
from support.disturbed import (
    SITE,
    SIX,
    Trained,
    config_with,
    copy_run,
    losses_of,
    printed,
    ranks_of,
    snakemake,
    starts_of,
    step_of,
    until,
)
from support.dry_run import ENVIRONMENT
from support.warm import warm

pytestmark = pytest.mark.slurm
RUN = Path("results", "tiny")


# Some forty jobs, each a new process on two busy cores: slow machines need more than the usual 15 minutes.
@pytest.mark.timeout(3600)
def test_the_workflow_gives_the_numbers_of_one_machine(slurm: None, prepared: Path, tmp_path: Path) -> None:
    models = {"seeded": {"kind": "demix", "parent": "dense", "seed_tokens": 6000}}
    models |= {"dense_unbalanced": None, "domain_token": None}
    config = config_with(training=SIX, cluster=SITE, models=models)
    # The training domains have been read, the novel ones are read here.
    for place in (copy_run(prepared, tmp_path) / RUN).iterdir():
        if place.name in ("documents", "corpus", "tokens"):
            for novel in config["domains"]["novel"]:
                shutil.rmtree(place / novel)
        elif place.is_dir():
            shutil.rmtree(place)
        elif place.name != "tokenizer.json":
            place.unlink()
    started = time.strftime("%Y-%m-%dT%H:%M:%S")
    targets = [str(RUN / name) for name in ("results.parquet", "audit.parquet", "corpus/overlap.parquet")]
    assert snakemake(tmp_path, config, *targets, environment=warm(ENVIRONMENT)).wait() == 0, printed(tmp_path)
    ours, theirs = (pd.read_parquet(folder / RUN / "results.parquet") for folder in (tmp_path, prepared))
    # The row with a seed phase began with the state that the job of the dense training kept.
    branch = read_json(tmp_path / RUN / "models" / "seeded" / "model.json")
    assert (branch["parent"]["step"], branch["tokens_seed"]) == (15, 5760)
    assert not (tmp_path / RUN / "checkpoints" / "dense-step-00000015").exists(), "trained again for its state"
    theirs = theirs[~theirs["model"].isin(["dense_unbalanced", "domain_token"])].reset_index(drop=True)
    assert set(ours["model"]) == set(theirs["model"]) | {"seeded"}
    ours = ours[ours["model"] != "seeded"].reset_index(drop=True)
    keys = [name for name, kind in ours.dtypes.items() if kind.kind not in "f"]
    pd.testing.assert_frame_equal(ours[keys], theirs[keys])
    pd.testing.assert_series_equal(ours["perplexity"], theirs["perplexity"], rtol=1e-3)

    # Two nodes; adaptations at the same time; scores as arrays.
    rows = accounted(tmp_path, started)
    trained = [row for row in rows if row["JobName"].startswith("demix-demix-") and "dapt" not in row["JobName"]]
    assert {row["NNodes"] for row in trained} == {"2"}
    adapted = [row for row in rows if "demix-dapt" in row["JobName"]]
    assert len(adapted) == 2
    assert max(row["Start"] for row in adapted) < min(row["End"] for row in adapted), "one after the other"
    assert len({row["JobID"].split("_")[0] for row in rows if "_" in row["JobID"]}) >= 2, "no arrays"


def accounted(folder: Path, since: str) -> list[dict[str, str]]:
    """The jobs of snakemake's run in `folder` and those that it started, as the accounting has them since a time."""
    from demix.launch.job import Places, TrainingJob

    run = re.search(r"SLURM run ID: (\S+)", printed(folder))[1]
    checkpoints = (folder / RUN / "checkpoints").iterdir()
    names = [run, *(TrainingJob((), "", Places(None, None, path), 8, 1, 0).name for path in checkpoints)]
    head = "JobID,JobName,Start,End,NNodes,State"
    command = ["sacct", "-X", "-n", "-P", "--name", ",".join(names), "-S", since, "-o", head]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [dict(zip(head.split(","), line.split("|"), strict=True)) for line in lines]


def test_experts_that_are_whole_models_train_at_the_same_time_and_a_killed_one_goes_on_alone(
    slurm: None, prepared: Path, tmp_path: Path
) -> None:
    folder = copy_run(prepared, tmp_path / "run")
    experts = ("parliament", "scripture", "licenses")
    btm = {"kind": "branched", "parent": "dense", "seed_tokens": 1920, "schedule": "restart"}
    # The branches are much longer than the dense model that they begin with.
    models = {"btm": btm | {"tokens": 1000 * 384, "checkpoint_every": 20}}
    config = config_with(training={"precision": "fp64"}, cluster=SITE, models=models)
    process = snakemake(folder, config, str(RUN / "models/btm/model.json"))
    places = {name: folder / RUN / "checkpoints" / "btm" / name for name in experts}
    until(lambda: step_of(places["licenses"]) > 45)
    for pid in ranks_of(places["licenses"]):
        os.kill(pid, signal.SIGKILL)
    assert process.wait() == 0, printed(folder)

    starts = {name: starts_of(place) for name, place in places.items()}
    assert {name: len(rows) for name, rows in starts.items()} == {"parliament": 1, "scripture": 1, "licenses": 2}
    first = [rows[0] for rows in starts.values()]
    assert max(start for start, _ in first) < min(end for _, end in first), "one after the other"

    # On one machine, undisturbed: the same losses.
    alone = tmp_path / "alone"
    shutil.copytree(folder, alone, symlinks=True, ignore=shutil.ignore_patterns("btm", "btm.jsonl", "printed.log"))
    rerun = snakemake(alone, config, str(RUN / "branches/btm/licenses/model.json"), profile="default")
    assert rerun.wait() == 0, printed(alone)
    ours, theirs = (losses_of(place / RUN / "metrics/btm/licenses.jsonl") for place in (folder, alone))
    assert len(ours) > 900
    assert ours == pytest.approx(theirs, rel=1e-12, abs=0)


def test_a_job_that_is_queued_again_goes_on(training, undisturbed: list[float]) -> None:
    disturbed: Trained = training()
    process = disturbed.start_and_wait()
    subprocess.run(["scontrol", "requeue", disturbed.job()], check=True)
    assert process.wait() == 0, printed(disturbed.folder)
    assert disturbed.losses() == pytest.approx(undisturbed, rel=1e-12, abs=0)
    assert len(disturbed.starts()) == 2
