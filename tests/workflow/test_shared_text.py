"""Two runs of the same text at once, by the workflow: one makes the text, and each is whole without the other."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from demix.files import check_sealed
from support.dry_run import REPOSITORY, jobs_by_rule, ran

pytestmark = pytest.mark.workflow

TEXT = ("documents", "corpus", "tokens")
JOBS = {"read": 3, "deduplicate": 1, "split": 2, "tokenizer": 1, "tokenize": 2}


def test_two_runs_at_once_make_their_text_once(tmp_path: Path) -> None:
    tiny = yaml.safe_load((Path(__file__).parent / "tiny.yaml").read_text())
    config = {key: tiny[key] for key in ("tokenizer", "architecture", "training", "evaluation")}
    domains = {name: tiny["domains"]["training"][name] for name in ("scripture", "licenses")}
    (tmp_path / "one.yaml").write_text(yaml.safe_dump({"run": "one", "domains": {"training": domains}} | config))
    # Learning rates differ, text does not.
    (tmp_path / "two.yaml").write_text("{base: one.yaml, run: two, training: {learning_rate: 1.0e-3}}")
    (tmp_path / "resources").symlink_to(REPOSITORY / "resources")

    def run(name: str, *arguments: str) -> str:
        return ran(tmp_path, f"{name}.yaml", "--until", "tokenize", *arguments)

    assert jobs_by_rule(run("two", "-n", "--quiet", "rules")) == JOBS
    with ThreadPoolExecutor() as pool:
        list(pool.map(run, ("one", "two")))
    one, two = tmp_path / "results" / "one", tmp_path / "results" / "two"
    files = [path.relative_to(one) for place in TEXT for path in sorted((one / place).rglob("*.*"))]
    files.append(Path("tokenizer.json"))
    assert len(files) == 6 + 1 + 8 + 18 + 1
    assert [file for file in files if not (one / file).samefile(two / file)] == []
    times = {file: (one / file).stat().st_mtime_ns for file in files}
    run("two", "--touch")
    assert {file: (one / file).stat().st_mtime_ns for file in files} == times
    assert [jobs_by_rule(run(name, "-n", "--quiet", "rules")) for name in ("one", "two")] == [{}, {}]
    shutil.rmtree(one)
    assert jobs_by_rule(run("two", "-n", "--quiet", "rules")) == {}
    for file in files:
        check_sealed(two / file)
