"""Runs side by side, over the files of a real run."""

import shutil
from pathlib import Path

import pytest

from demix.report.compare import compare
from demix.report.compared import as_markdown
from demix.run.kept import read_run_config
from support.configs import with_keys
from support.once import once, run_with_progress

pytestmark = pytest.mark.workflow


def test_a_copy_differs_in_nothing_but_what_its_config_says(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = once(tmp_path_factory, "tiny", run_with_progress) / "results" / "tiny"
    copy = shutil.copytree(run, tmp_path / "copy")
    with_keys(copy, read_run_config(run).values | {"run": "copy", "threads": 2})
    found = compare([run, copy])
    assert found.settings.index.tolist() == ["threads"]
    rows = found.systems[found.systems["run"] == "copy"]
    assert (rows["change"] == 0).all()
    assert {"DEMix (cached prior)", "DEMix, all experts (cached)", "+ Domain Token"} <= set(rows["system"])
    # Score tables are read back to the numbers of results.parquet, whatever there is to resample.
    assert set(rows["why"]) <= {"", "under 400 tokens"}
    assert (found.curves.groupby("model")["loss"].nunique() == 1).all()
    assert "DEMix (cached prior)" in as_markdown(found)
