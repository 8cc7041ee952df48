"""What is checked before the first job of a run, with commands of SLURM that are scripts and a real server."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from demix.data.ready import CLIENTS, check_here, check_site
from demix.run.check import load_run
from demix.run.run import Run
from support.configs import changed
from support.errors import refused
from support.server import serving

SAMPLE = load_run(Path(__file__).parents[2] / "config" / "sample.yaml")
Commands = Callable[..., Path]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Makes scripts that take the place of SLURM's commands, silent by default; beside them only bash is found."""
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "bash").symlink_to("/bin/bash")

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
        domains["novel"]["wiki"]["source"] = source or {"kind": "url", "path": [address]}
    return changed(SAMPLE, cluster=cluster, domains=domains)


def test_the_commands_and_the_controller_are_there(commands):
    with refused(", ".join(CLIENTS)):
        check_site(config(), [])
    (commands() / "squeue").unlink()
    with refused("squeue"):
        check_site(config(), [])
    commands(sbatch="", sinfo="echo 'slurm_load_partitions: Unable to contact slurm controller' >&2; exit 1")
    with refused("sinfo"):
        check_site(config(), [])


def test_partitions_are_those_of_the_cluster(commands):
    commands(sbatch="", sinfo="printf 'CLUSTER: ci\\ngpu\\nWelcome to ci\\ncpu\\ngpu\\n'")
    assert check_site(config(partition="gpu,cpu", stages={"score": {"partition": "cpu"}}), ["wiki"]) is None
    for wrong in ("cpu,gpus", "ci"):
        with refused("cluster.partition"):
            check_site(config(partition=wrong), [])
    with refused("cluster.stages.score.partition"):
        check_site(config(stages={"score": {"partition": "short"}}), [])


def test_an_address_is_asked_for_where_downloads_run_here(commands, server, nobody):
    commands(sbatch="", sinfo="")
    login = {"downloads": "login", "setup": ["echo modules are loaded"]}
    # A server under load, as the download itself takes it.
    assert check_site(config(f"{server}/503/a.txt", **login), ["code", "wiki"]) is None
    with refused(f"{server}/403/a.txt"):
        check_site(config(f"{server}/403/a.txt", **login), ["wiki"])
    assert check_site(config(f"{nobody}/a.txt", **login), ["code"]) is None, "nothing is downloaded for wiki"
    # The lines that a job begins with count: here they name a proxy that nobody runs.
    proxied = login | {"setup": [f"export http_proxy={nobody} no_proxy="]}
    with refused(f"{server}/200/a.txt"):
        check_site(config(f"{server}/200/a.txt", **proxied), ["wiki"])


def test_one_machine_asks_for_addresses_of_text_that_no_other_run_has(nobody, tmp_path):
    source = {"kind": "url", "path": f"{nobody}/a.txt", "sha256": {"a.txt": "0" * 64}}
    run = replace(config(source=source), folder=tmp_path / "results" / "mine")
    moving = replace(config(f"{nobody}/a.txt", setup=["echo modules are loaded"]), folder=run.folder)
    assert check_here(moving, ["code"]) is None, "nothing is downloaded for wiki"
    for owner, one in (("mine", run), ("other", moving)):
        note = tmp_path / "results" / owner / ".made" / "documents.wiki.0.parquet.json"
        note.parent.mkdir(parents=True)
        note.touch()
        with refused(f"{nobody}/a.txt"):
            check_here(one, ["wiki"])
    assert check_here(run, ["wiki"]) is None


def test_an_address_is_asked_for_by_a_compute_node(commands, server, nobody, monkeypatch):
    folder = commands(
        sbatch="",
        sinfo="echo gpu",
        srun='echo "$@" > "$0.asked"; while [[ $1 == --* ]]; do shift; done; exec "$@"',
    )
    assert check_site(config(f"{server}/200/a.txt", partition="gpu", qos="short"), ["wiki"]) is None
    asked = (folder / "srun.asked").read_text().split()
    assert {"--immediate=30", "--partition=gpu", "--qos=short", "--mem=4000M", "--time=5"} <= set(asked)
    given = {"ENDPOINT_URL": nobody, "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "MAX_ATTEMPTS": "1"}
    for name, value in given.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    stored = {"kind": "store", "path": "s3://corpus/a.jsonl"}
    for run, subject in ((config(f"{nobody}/a.txt"), f"{nobody}/a.txt"), (config(source=stored), stored["path"])):
        with refused(subject) as caught:
            check_site(run, ["wiki"])
        assert "cluster.downloads: login" in caught.value.cure
    commands(srun="echo 'srun: error: Requested nodes are busy' >&2; exit 1")
    assert str(check_site(config(f"{nobody}/a.txt"), ["wiki"])).endswith("srun: error: Requested nodes are busy")


def test_a_data_set_of_the_hub_is_its_endpoint(commands, server, nobody, monkeypatch):
    commands(sbatch="", sinfo="")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    source = {"kind": "hub", "path": "owner/name", "revision": "0" * 40, "data_files": ["*.parquet"]}
    of_hub = config(source=source, downloads="login")
    # Which pages an endpoint has is its own affair.
    monkeypatch.setenv("HF_ENDPOINT", f"{server}/404")
    assert check_site(of_hub, ["wiki"]) is None
    monkeypatch.setenv("HF_ENDPOINT", nobody)
    with refused(nobody):
        check_site(of_hub, ["wiki"])
    of_hub = changed(of_hub, cluster={"setup": [f"export HF_ENDPOINT={server}/200"]})
    assert check_site(of_hub, ["wiki"]) is None
