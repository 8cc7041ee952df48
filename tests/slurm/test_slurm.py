"""The workflow on a real SLURM of two nodes: the same numbers as on one machine, and a job that is queued again."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pandas as pd
import pytest

from demix.files import read_json, read_json_lines
from demix.run.check import completed_run
from demix.settings import written
from support.disturbed import ENVIRONMENT, FOUR, SITE, Trained, config_with, printed, snakemake, until
from support.warm import warm

pytestmark = pytest.mark.slurm


def test_the_workflow_gives_the_numbers_of_one_machine(slurm: None, prepared: Path, tmp_path: Path) -> None:
    models = {"seeded": {"kind": "demix", "parent": "dense", "seed_tokens": 6000}}
    models |= {"dense_unbalanced": None, "domain_token": None}
    config = config_with(training=FOUR, cluster=SITE, models=models)
    # The training domains have been read, the novel ones are read here.
    shutil.copytree(prepared, tmp_path, symlinks=True, dirs_exist_ok=True)
    (tmp_path / "printed.log").unlink()
    for place in (tmp_path / "results" / "tiny").iterdir():
        if place.name in ("documents", "corpus", "tokens"):
            for novel in config["domains"]["novel"]:
                shutil.rmtree(place / novel)
        elif place.is_dir():
            shutil.rmtree(place)
        elif place.name != "tokenizer.json":
            place.unlink()
    started = time.strftime("%Y-%m-%dT%H:%M:%S")
    targets = [f"results/tiny/{name}" for name in ("results.parquet", "audit.parquet", "corpus/overlap.parquet")]
    assert snakemake(tmp_path, config, *targets, environment=warm(ENVIRONMENT)).wait() == 0, printed(tmp_path)
    ours, theirs = (pd.read_parquet(folder / "results/tiny/results.parquet") for folder in (tmp_path, prepared))
    # The row with a seed phase began with the state that the job of the dense training kept.
    branch = read_json(tmp_path / "results/tiny/models/seeded/model.json")
    assert (branch["parent"]["step"], branch["tokens_seed"]) == (15, 5760)
    assert "training it again" not in (tmp_path / "results/tiny/logs/seed/dense.00000015.log").read_text()
    theirs = theirs[~theirs["model"].isin(["dense_unbalanced", "domain_token"])].reset_index(drop=True)
    assert set(ours["model"]) == set(theirs["model"]) | {"seeded"}
    ours = ours[ours["model"] != "seeded"].reset_index(drop=True)
    keys = [name for name, kind in ours.dtypes.items() if kind.kind not in "f"]
    pd.testing.assert_frame_equal(ours[keys], theirs[keys])
    pd.testing.assert_series_equal(ours["perplexity"], theirs["perplexity"], rtol=1e-3)

    # Two nodes; adaptations at the same time; scores as arrays.
    rows = accounted(tmp_path, started)
    trained = [row for row in rows if row["JobName"].startswith("demix-demix-") and "dapt" not in row["JobName"]]
    assert [(row["NNodes"], row["NTasks"]) for row in trained if row["NTasks"]] == []
    assert {row["NNodes"] for row in trained} == {"2"}
    adapted = [row for row in rows if "demix-dapt" in row["JobName"]]
    assert len(adapted) == 2
    assert max(row["Start"] for row in adapted) < min(row["End"] for row in adapted), "one after the other"
    assert len({row["JobID"].split("_")[0] for row in rows if "_" in row["JobID"]}) >= 2, "no arrays"


def test_experts_that_are_whole_models_train_at_the_same_time_and_a_killed_one_goes_on_alone(
    slurm: None, prepared: Path, tmp_path: Path
) -> None:
    shutil.copytree(prepared, tmp_path / "run", symlinks=True)
    folder = tmp_path / "run"
    (folder / "printed.log").unlink()
    experts = ("parliament", "scripture", "licenses")
    btm = {"kind": "branched", "parent": "dense", "seed_tokens": 1920, "schedule": "restart"}
    # The branches are much longer than the dense model that they begin with.
    models = {"btm": btm | {"tokens": 1000 * 384, "checkpoint_every": 20}}
    config = config_with(training={"precision": "fp64"}, cluster=SITE, models=models)
    process = snakemake(folder, config, "results/tiny/models/btm/model.json")
    places = {name: folder / "results" / "tiny" / "checkpoints" / "btm" / name for name in experts}
    until(lambda: step_of(places["licenses"]) > 45)
    command = ["pgrep", "-f", f"submitit.core._submit {places['licenses'] / 'jobs'}"]
    for pid in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split():
        if b"srun" not in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]:
            os.kill(int(pid), signal.SIGKILL)
    assert process.wait() == 0, printed(folder)
    assert re.search(r"^btm/licenses: job \d+ running on n\d  step \d+/\d+  loss \d", printed(folder), re.MULTILINE)

    starts = {name: starts_of(place) for name, place in places.items()}
    assert {name: len(rows) for name, rows in starts.items()} == {"parliament": 1, "scripture": 1, "licenses": 2}
    first = [rows[0] for rows in starts.values()]
    assert max(start for start, _ in first) < min(end for _, end in first), "one after the other"

    # On one machine, undisturbed: the same losses.
    alone = tmp_path / "alone"
    left_out = shutil.ignore_patterns("btm", "btm.jsonl", "printed.log")
    shutil.copytree(folder, alone, symlinks=True, ignore=left_out)
    rerun = snakemake(alone, config, "results/tiny/branches/btm/licenses/model.json", profile="default")
    assert rerun.wait() == 0, printed(alone)
    ours, theirs = (
        [row["loss"] for row in read_json_lines(place / "results/tiny/metrics/btm/licenses.jsonl") if "loss" in row]
        for place in (folder, alone)
    )
    assert len(ours) > 900
    assert ours == pytest.approx(theirs, rel=1e-12, abs=0)


def step_of(checkpoints: Path) -> int:
    """The last step that a running training has recorded."""
    lines = [line for path in checkpoints.glob("*/metrics.jsonl") for line in path.read_text().splitlines()]
    return json.loads(lines[-1])["step"] if lines else 0


def starts_of(checkpoints: Path) -> list[tuple[str, str]]:
    """(start, end) of every SLURM job of a training, in order, as the accounting has them."""
    from demix.launch.job import TrainingJob

    name = TrainingJob((), "", {}, 1, 1, checkpoints, 0).name
    command = ["sacct", "-X", "-D", "-n", "-P", "--name", name, "-S", "now-3hours", "-o", "Start,End,State"]

    def ended() -> list[list[str]]:
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        rows = [line.split("|") for line in lines]
        return [] if any("RUNNING" in state for *_, state in rows) else rows

    return sorted((start, end) for start, end, _ in until(ended))


def test_a_config_of_ones_own_that_drops_the_profiles_is_refused(slurm: None, prepared: Path, tmp_path: Path) -> None:
    (tmp_path / "resources").symlink_to(prepared / "resources")
    assert snakemake(tmp_path, config_with(cluster=SITE), "--config", "run=other").wait() != 0
    assert "config key cluster.launch: is local where jobs go to SLURM" in printed(tmp_path)
    assert not (tmp_path / "results").exists()


def test_an_address_that_no_compute_node_reaches_ends_the_run_at_once(
    slurm: None, prepared: Path, tmp_path: Path
) -> None:
    (tmp_path / "resources").symlink_to(prepared / "resources")
    config = config_with(cluster=SITE)
    config["domains"]["training"]["licenses"]["source"] = {"kind": "url", "path": "http://127.0.0.1:9/a.txt"}
    assert snakemake(tmp_path, config).wait() != 0
    assert "http://127.0.0.1:9/a.txt: does not answer a compute node (" in printed(tmp_path)
    assert not (tmp_path / "results").exists()
    config["cluster"] = SITE | {"partition": "none-such"}
    assert snakemake(tmp_path, config).wait() != 0
    assert "config key cluster.partition: is 'none-such', which this cluster does not have; known are " in printed(
        tmp_path
    )


def accounted(folder: Path, since: str) -> list[dict[str, str]]:
    """The jobs of snakemake's run in `folder` and those that it started, as the accounting has them since a time."""
    from demix.launch.job import TrainingJob

    run = re.search(r"SLURM run ID: (\S+)", printed(folder))[1]
    checkpoints = (folder / "results" / "tiny" / "checkpoints").iterdir()
    names = [run, *(TrainingJob((), "", {}, 8, 1, path, 0).name for path in checkpoints)]
    head = "JobID,JobName,Start,End,NNodes,NTasks,State"
    command = ["sacct", "-X", "-n", "-P", "--name", ",".join(names), "-S", since, "-o", head]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [dict(zip(head.split(","), line.split("|"), strict=True)) for line in lines]


def test_two_nodes_give_the_losses_of_one_process(slurm: None, prepared: Path, tmp_path: Path) -> None:
    """In float64, to 1e-9: what differs is the order of sums."""
    config = read_json(prepared / "results/tiny/config.json")
    kept = {key: config["training"][key] for key in ("sequences", "learning_rate", "warmup", "clip", "weight_decay")}
    more = {"tokens": 384 * 12, "precision": "fp64", "seed": 1, "threads": 1, "checkpoint_every": 100}
    settings = json.dumps(kept | more | {"architecture": config["architecture"]})
    shards = [prepared / f"results/tiny/tokens/{domain}/train.arrow" for domain in config["domains"]["training"]]
    losses = {}
    for launch, options in (
        ("local", []),
        ("slurm", ["--ranks", "8", "--replicas", "parliament=3,scripture=3,licenses=2"]),
    ):
        place = tmp_path / launch
        command = [
            "demix", "train", "demix", *map(str, shards), "--settings", settings, "--output", str(place / "model"),
            "--metrics", str(place / "metrics.jsonl"), "--checkpoints", str(place / "checkpoints"), *options,
            "--cluster", json.dumps(completed(SITE | {"ranks_per_node": 4}) | {"launch": launch}),
        ]  # fmt: skip
        subprocess.run(command, check=True, env=ENVIRONMENT, cwd=tmp_path, capture_output=True)
        losses[launch] = [row["loss"] for row in read_json_lines(place / "metrics.jsonl")]
    assert len(losses["slurm"]) == 12
    assert losses["slurm"] == pytest.approx(losses["local"], rel=0, abs=1e-9)


def completed(cluster: dict) -> dict:
    return written(completed_run(config_with(cluster=cluster)).config.cluster.of("train"))


def test_a_job_that_is_queued_again_goes_on(training, undisturbed: list[float]) -> None:
    disturbed: Trained = training()
    process = disturbed.start()
    until(lambda: disturbed.step() > 45)
    subprocess.run(["scontrol", "requeue", disturbed.job()], check=True)
    assert process.wait() == 0, printed(disturbed.folder)
    assert disturbed.losses() == pytest.approx(undisturbed, rel=1e-12, abs=0)
    shown = printed(disturbed.folder)
    assert "queued again once" in shown
    running = r"^demix: job \d+ running on n\[1-2\](, queued again once)?  step \d+/240  loss \d"
    assert re.search(running, shown, re.MULTILINE)
    disturbed.assert_one_at_a_time()
    assert len(disturbed.runs()) == 2
    shutil.rmtree(disturbed.folder)
