"""The workflow on a real SLURM of two nodes: the same numbers as on one machine, and a job that is queued again."""

import json
import re
import shutil
import subprocess
import time
from pathlib import Path

import pandas as pd
import pytest

from demix.files import read_json, read_json_lines
from support.disturbed import ENVIRONMENT, FOUR, SITE, Trained, config_with, printed, snakemake, until

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
    assert snakemake(tmp_path, config, *targets).wait() == 0, printed(tmp_path)
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
    from demix.config.check import complete, site_of

    return site_of(complete(config_with(cluster=cluster)), "train")


def test_a_job_that_is_queued_again_goes_on(training, undisturbed: list[float]) -> None:
    disturbed: Trained = training()
    process = disturbed.start()
    until(lambda: disturbed.step() > 45)
    subprocess.run(["scontrol", "requeue", disturbed.job()], check=True)
    assert process.wait() == 0, printed(disturbed.folder)
    assert disturbed.losses() == pytest.approx(undisturbed, rel=1e-12, abs=0)
    shown = printed(disturbed.folder)
    assert "queued again once" in shown
    assert re.search(r"^demix: job \d+ running on n\[1-2\]  step \d+/240  loss \d", shown, re.MULTILINE)
    disturbed.assert_one_at_a_time()
    assert len(disturbed.runs()) == 2
    shutil.rmtree(disturbed.folder)
