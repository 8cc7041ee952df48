"""Tasks of the standard harness that join a finished run: no model is trained or scored again."""

import shutil
from pathlib import Path

import pandas as pd
import pytest
import yaml

from demix.files import sha256_file
from support.documented import assert_documented
from support.dry_run import jobs_by_rule, ran
from support.harness_tasks import write_tasks
from support.once import once, run_with_progress

pytest.importorskip("lm_eval", reason="lm-eval is not installed")
pytestmark = pytest.mark.workflow
TINY = yaml.safe_load((Path(__file__).parent / "tiny.yaml").read_text())
SECTION = {"tasks": ["choice", "rolling"], "include_path": "tasks", "models": ["demix", "dense"], "limit": 2}
LAST = {"run_config": 1, "classify": 1, "report": 1, "track": 1}


def test_tasks_join_a_finished_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("harness") / "copy"
    shutil.copytree(once(tmp_path_factory, "tiny", run_with_progress), folder, symlinks=True)
    run, config = folder / "results" / "tiny", folder / "config.yaml"
    weights = {path: sha256_file(path) for path in (run / "models").rglob("*.safetensors")}
    write_tasks(folder)
    config.write_text(yaml.safe_dump(TINY, sort_keys=False))
    assert jobs_by_rule(ran(folder, config, "-n", "--quiet", "rules")) == {}
    config.write_text(yaml.safe_dump(TINY | {"lm_eval": SECTION}, sort_keys=False))
    jobs = jobs_by_rule(ran(folder, config, "-n", "--quiet", "rules"))
    own = {"harness_documents": 1, "contamination": 3, "harness": 2}
    assert jobs == own | LAST | ({"card": 1} if "card" in jobs else {})
    ran(folder, config)
    assert all(sha256_file(path) == sha256 for path, sha256 in weights.items())
    rows = pd.read_parquet(run / "tasks.parquet")
    assert set(zip(rows["model"], rows["routing"], strict=True)) == {("demix", "tempered"), ("dense", "dense")}
    assert "choice, acc" in (run / "report" / "tables" / "harness.md").read_text()
    assert_documented(run)
    # A further rule of weights is asked of the models; to be offline changes nothing.
    config.write_text(yaml.safe_dump(TINY | {"lm_eval": SECTION | {"offline": False}}, sort_keys=False))
    assert {*jobs_by_rule(ran(folder, config, "-n", "--quiet", "rules"))} <= {"run_config", "report", "card", "track"}
    config.write_text(yaml.safe_dump(TINY | {"lm_eval": SECTION | {"weights": ["history"]}}, sort_keys=False))
    jobs = jobs_by_rule(ran(folder, config, "-n", "--quiet", "rules"))
    assert (jobs["harness"], jobs.get("harness_documents", 0)) == (2, 0)
