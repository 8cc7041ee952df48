"""What is checked before the first job of a run, with commands of SLURM that are scripts and a real server."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from demix.data.ready import CLIENTS, check_downloads, check_site
from demix.run.check import load_run
from demix.run.run import Run
from support.configs import changed
from support.errors import refused
from support.server import serving

SAMPLE = load_run(Path(__file__).parents[2] / "config" / "sample.yaml")
Commands = Callable[..., Path]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Makes scripts in place of SLURM's commands, silent by default; no other command is found."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def make(**scripts: str) -> Path:
        for name, script in (dict.fromkeys(CLIENTS, "") | scripts).items():
            (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
            (tmp_path / name).chmod(0o755)
        return tmp_path

    return make


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server that answers /<status>/… with this status."""
    with serving(lambda handler, number: handler.send(b"", int(handler.path.split("/")[1]))) as site:
        yield site.address


def config(address: str = "", source: dict[str, Any] | None = None, **cluster: Any) -> Run:
    """The sample's run, with this cluster, and with another source of `wiki`, such as an address."""
    domains = SAMPLE.config.values["domains"]
    if address or source:
        domains["novel"]["wiki"]["source"] = source or {"path": [address]}
    return changed(SAMPLE, cluster=cluster, domains=domains)


def test_the_commands_and_the_controller_are_there(commands):
    with refused(", ".join(CLIENTS)):
        check_site(config())
    (commands() / "squeue").unlink()
    with refused("squeue"):
        check_site(config())
    commands(sbatch="", sinfo="echo 'slurm_load_partitions: Unable to contact slurm controller' >&2; exit 1")
    with refused("sinfo"):
        check_site(config())


def test_partitions_are_those_of_the_cluster(commands):
    commands(sbatch="", sinfo="printf 'CLUSTER: ci\\ngpu\\nWelcome to ci\\ncpu\\ngpu\\n'")
    check_site(config(partition="gpu,cpu", stages={"score": {"partition": "cpu"}}))
    for wrong in ("cpu,gpus", "ci"):
        with refused("cluster.partition"):
            check_site(config(partition=wrong))
    with refused("cluster.stages.score.partition"):
        check_site(config(stages={"score": {"partition": "short"}}))


def test_addresses_of_text_that_no_other_run_has_are_asked_for(server, nobody, tmp_path):
    source = {"path": f"{nobody}/a.txt", "sha256": {"a.txt": "0" * 64}}
    run = replace(config(source=source), folder=tmp_path / "results" / "mine")
    moving = replace(config(f"{nobody}/a.txt"), folder=run.folder)
    check_downloads(moving, ["code"])
    check_downloads(config(f"{server}/503/a.txt"), ["code", "wiki"])
    for owner, one in (("mine", run), ("other", moving)):
        note = tmp_path / "results" / owner / ".made" / "documents.wiki.0.parquet.json"
        note.parent.mkdir(parents=True)
        note.touch()
        with refused(f"{nobody}/a.txt"):
            check_downloads(one, ["wiki"])
    check_downloads(run, ["wiki"])
    # Lines that a job begins with may name a proxy.
    check_downloads(config(f"{nobody}/a.txt", setup=["module load proxy"]), ["wiki"])


def test_a_data_set_of_the_hub_is_its_endpoint(server, nobody, monkeypatch):
    source = {"path": "hf://owner/name", "revision": "0" * 40, "data_files": ["*.parquet"]}
    # Which pages an endpoint has is its own affair.
    monkeypatch.setenv("HF_ENDPOINT", f"{server}/404")
    check_downloads(config(source=source), ["wiki"])
    monkeypatch.setenv("HF_ENDPOINT", nobody)
    with refused(nobody):
        check_downloads(config(source=source), ["wiki"])
