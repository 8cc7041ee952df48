"""Suites that join a finished run: their texts are read and scored, and nothing else changes."""

import shutil
from pathlib import Path

import pandas as pd
import pytest
import yaml

from demix.files import read_json, read_parquet, sha256_file
from demix.plan.jobs import plan_jobs
from demix.run.check import load_run
from support.documented import assert_documented
from support.dry_run import dry_run, jobs_by_rule, ran
from support.once import once, run_with_progress

pytestmark = pytest.mark.workflow
TINY = yaml.safe_load((Path(__file__).parent / "tiny.yaml").read_text())
SOURCES = {
    name: {"source": {"kind": "files", "path": [f"resources/sample/{file}.jsonl.zst" for file in files]}}
    | {"words": {"test": 1500}}
    for name, files in {"songs": ["novels"], "known": ["licenses", "packages"]}.items()
}
WITH = TINY | {"evaluation": TINY["evaluation"] | {"suites": {"paloma": SOURCES}}}


def test_suites_join_a_finished_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("suites") / "copy"
    shutil.copytree(once(tmp_path_factory, "tiny", run_with_progress), folder, symlinks=True)
    run, config = folder / "results" / "tiny", folder / "config.yaml"
    kept = [*run.rglob("*.safetensors"), *run.glob("scores/**/*.parquet"), *run.glob("*s.parquet")]
    before = {path: sha256_file(path) for path in kept}
    config.write_text(yaml.safe_dump(TINY, sort_keys=False))
    assert jobs_by_rule(ran(folder, config, "-n", "--quiet", "rules")) == {}
    config.write_text(yaml.safe_dump(WITH, sort_keys=False))
    jobs = jobs_by_rule(ran(folder, config, "-n", "--quiet", "rules"))
    own = dict.fromkeys(("read", "hold_out", "tokenize_suite", "score_suites", "evaluate"), 2)
    last = dict.fromkeys(("suites", "run_config", "report", "track"), 1)
    assert jobs == own | last | ({"card": 1} if "card" in jobs else {})
    ran(folder, config)
    assert {path: sha256_file(path) for path in kept} == before
    rows = pd.read_parquet(run / "suites.parquet")
    assert {*rows["domain"]} == {"paloma_songs", "paloma_known"}
    assert {*rows["kind"]} == {"suite"}
    assert {"dense", "naive", "average", "uniform", "updating"} <= {*rows["method"]}
    assert rows["bits_per_byte"].gt(0).all()
    assert not {"cached", "fitted"} & {*rows["method"]}
    assert not {"paloma_songs", "paloma_known"} & {*pd.read_parquet(run / "results.parquet")["domain"]}
    assert sorted(path.name for path in (run / "tokens" / "paloma_songs").iterdir()) == [
        "test.arrow", "test.documents.arrow", "test.json",
    ]  # fmt: skip
    # What a training domain holds is left out.
    trained = {*read_parquet(run / "corpus" / "owners.parquet")["id"].to_pylist()}
    assert not trained & {*read_parquet(run / "corpus" / "paloma_known" / "test.parquet")["id"].to_pylist()}
    assert read_json(run / "corpus" / "paloma_known" / "card.json")["duplicates"]["across"] > 0
    assert "paloma: songs" in (run / "report" / "tables" / "suites.md").read_text()
    assert_documented(run)


def test_the_plan_counts_the_jobs_of_suites(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(WITH, sort_keys=False))
    counted: dict[str, int] = {}
    for jobs in plan_jobs(load_run(config), "cpu"):
        for rule, count in jobs.rules.items():
            counted[rule] = counted.get(rule, 0) + count
    found = jobs_by_rule(dry_run(tmp_path, config, "--quiet", "rules"))
    assert {rule: count for rule, count in counted.items() if count} == found
