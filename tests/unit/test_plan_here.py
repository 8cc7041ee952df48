"""The line of a plan for this machine, against runs that were measured."""

import re
from contextlib import chdir
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml

from demix.data.outline import outline
from demix.plan.here import here_line, seconds_here
from demix.plan.jobs import jobs_table, runs_here
from demix.plan.stages import sync_table
from demix.run.check import completed_run, load_run
from demix.run.run import Run
from support.cli import demix
from support.configs import changed

CONFIGS = Path(__file__).parents[2] / "config"
# Seconds on two cores (AMD EPYC). The sample: `make demo`, 12:39 on one machine, 16 to 19 minutes on slower ones.
# Families: `make families` on idle cores. Own: `snakemake --configfile mine.yaml`, by its seconds of processors, on two
# cores that are busy for 95% of the time; on cores that were shared it took 145 s.
MEASURED = {"sample": (759, 960, 1140), "families": (1200,), "own": (95 / 2 / 0.95,)}
# Seconds of processors of the same runs: all jobs of `make demo` with snakemake's 8%, and all of the two others.
SPENT = {"sample": 1460 * 1.08, "families": 2208, "own": 95}


@cache
def own() -> str:
    """What `demix init` prints for three files of 19,600 words each."""
    with TemporaryDirectory() as folder, chdir(folder):
        for name in "abc":
            Path(f"{name}.txt").write_text(f"The mill of {name} stood by the river.\n" * 2450)
        return outline("mine", ["a.txt", "b.txt", "c.txt"], [])


def config_of(name: str) -> Run:
    return completed_run(yaml.safe_load(own())) if name == "own" else load_run(CONFIGS / f"{name}.yaml")


@pytest.mark.parametrize("name", MEASURED)
def test_the_time_is_true_within_a_factor_of_two(name: str) -> None:
    config = config_of(name)
    expected = seconds_here(config, 2)
    assert all(0.5 < expected / seconds < 2 for seconds in MEASURED[name])
    assert 0.5 < seconds_here(config, 1) / SPENT[name] < 2


def test_more_cores_shorten_a_run_down_to_its_longest_jobs() -> None:
    config = config_of("sample")
    one, two, sixteen, many = (seconds_here(config, cores) for cores in (1, 2, 16, 1000))
    assert one / 2 < two < one / 1.8
    # The model that branches waits for its parent, and the experts of novel domains for their model.
    assert 150 < many <= sixteen < two / 3


def test_on_a_laptop_one_line_comes_first_and_tables_on_request() -> None:
    file = CONFIGS / "sample.yaml"
    (line,) = demix("plan", file).stdout.splitlines()
    assert line == f"{here_line(load_run(file))}; --details prints tables of it"
    assert line.startswith("sample takes about ")
    shown = demix("plan", file, "--details").stdout
    assert shown.startswith(f"{here_line(load_run(file))}\n")
    assert "Jobs of sample" in shown
    assert "Stages of sample on cpu" in shown
    (total,) = (row for row in shown.splitlines() if row.startswith("sample takes 0."))
    assert "plus the text of 16 domains" in total
    assert "spares" in shown.splitlines()[-1]


def test_what_a_cluster_gives_is_shown_where_there_is_one() -> None:
    def heads(**given: Any) -> list[str]:
        hardware = given.pop("hardware", "cpu")
        return [str(column.header) for column in jobs_table(changed(config_of("own"), **given), hardware).columns]

    slurm = {"cluster": {"launch": "slurm"}}
    assert heads() == ["stage", "jobs", "ranks\na job", "cores\na job", "core-hours\n(cpu)"]
    assert heads(hardware="a100") == [*heads()[:-1], "GPU-hours\n(a100)"]
    assert heads(**slurm)[-1] == "where"
    assert len(heads(**slurm)) == len(heads(**slurm, hardware="a100")) == 10
    # The paper's sizes say what a cluster gives a job, and profiles/slurm says that it is SLURM.
    paper = load_run(CONFIGS / "paper-125m.yaml")
    assert not paper.submitted
    assert len(jobs_table(paper, "a100").columns) == 10
    assert runs_here(config_of("own"))
    assert not runs_here(changed(config_of("own"), **slurm))
    assert not runs_here(paper)


@pytest.mark.parametrize("hardware", ["cpu", "a100"])
def test_a_plan_of_one_machine_has_no_nodes(hardware: str) -> None:
    shown = demix("plan", CONFIGS / "sample.yaml", "--details", "--hardware", hardware).stdout
    assert not re.search(r"\bnodes?\b|default partition|limit", shown)
    (total,) = (row for row in shown.splitlines() if "of training and scoring" in row)
    assert total.endswith(" on 2 cores" if hardware == "cpu" else " on 1 GPU")
    on_slurm = changed(config_of("sample"), cluster={"launch": "slurm"})
    heads = [str(column.header) for column in sync_table(on_slurm, hardware).columns]
    assert heads[:4] == ["model", "nodes", "given a rank\na step", "out of a node\na step"]


def test_the_disk_counts_text_of_local_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many bytes as the words of the files come to; what nobody knows is said."""
    monkeypatch.chdir(tmp_path)
    for name in "abc":
        Path(f"{name}.txt").write_text("a river " * 4_000_000)
    line = here_line(config_of("own"))
    # 96 MB are 15 million words: 2 × 2.6 bytes of documents and splits, 3 of tokens. 27 MB are there without text.
    assert line.endswith(" cores and 150MB of disk")
    keys = config_of("own").config.values
    keys["domains"]["training"]["b"]["source"] |= {"kind": "url", "path": ["https://example.org/b.txt"]}
    assert here_line(completed_run(keys)).endswith("MB of disk, and what the text of 1 domain adds")
