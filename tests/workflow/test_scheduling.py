"""How often snakemake looks for jobs to start."""

import re
from pathlib import Path

import pytest

from support.dry_run import REPOSITORY, ran

pytestmark = pytest.mark.workflow


def test_snakemake_looks_at_the_ready_jobs_once_for_each_that_ends(tmp_path: Path) -> None:
    """Each look reads the size of every file that a ready job takes: thousands in a run of many domains."""
    (tmp_path / "resources").symlink_to(REPOSITORY / "resources")
    shown = ran(tmp_path, Path(__file__).parent / "tiny.yaml", "--verbose", "--until", "anonymize")
    ended = len(re.findall(r"^Finished jobid", shown, re.MULTILINE))
    assert ended == 12
    assert len(re.findall(r"^Ready jobs: ", shown, re.MULTILINE)) <= ended
