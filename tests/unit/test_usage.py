"""Time and memory that a job of the workflow notes beside its log."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from demix.launch.parents import VARIABLE

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("config", "variable", "noted"),
    [("config/sample.yaml", True, True), ("none.yaml", True, False), ("config/sample.yaml", False, False)],
    ids=["job", "failed job", "by hand"],
)
def test_a_job_that_ends_well_notes_what_it_used(tmp_path: Path, config: str, variable: bool, noted: bool) -> None:
    log = tmp_path / "logs" / "results" / "a" / "logs" / "sweep" / "demix.0.001.log"
    log.parent.mkdir(parents=True)
    environment = {key: value for key, value in os.environ.items() if key != VARIABLE}
    environment |= {VARIABLE: str(os.getpid())} if variable else {}
    # What the process that starts it has in memory is not the job's.
    held = bytes(1) * (600 << 20)
    with open(log, "wb") as stream:
        done = subprocess.run(
            [sys.executable, "-m", "demix", "config", str(REPOSITORY / config)],
            stdout=subprocess.DEVNULL, stderr=stream, env=environment, check=False,
        )  # fmt: skip
    del held
    assert (done.returncode == 0) == (config == "config/sample.yaml")
    output = tmp_path / "logs" / "results" / "a" / "benchmarks" / "sweep" / "demix.0.001.tsv"
    assert output.exists() == noted
    if noted:
        with open(output, newline="") as stream:
            (row,) = csv.DictReader(stream, delimiter="\t")
        assert 0.1 < float(row["cpu_time"]) < 60
        assert float(row["cpu_time"]) / 2 < float(row["s"]) < 600
        assert 20 < float(row["max_rss"]) < 400
