"""`demix plan`, and the configs of the paper's four sizes."""

import copy
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from demix.config import load_config
from demix.plan import plan_domain, plan_table

REPOSITORY = Path(__file__).parents[2]
PAPER = {path.stem: load_config(path) for path in sorted((REPOSITORY / "config").glob("paper-*.yaml"))}
DAGGERS = {"webtext", "realnews", "reddit", "reviews", "breaking_news", "contracts", "tweets", "yelp"}


def test_the_papers_domains_and_budgets():
    assert PAPER.keys() == {"paper-125m", "paper-350m", "paper-760m", "paper-1.3b"}
    config = PAPER["paper-125m"]
    assert all(other["domains"] == config["domains"] for other in PAPER.values())
    assert sum(domain["words"]["train"] for domain in config["domains"]["training"].values()) == 73_800_000_000
    domains = config["domains"]["training"] | config["domains"]["novel"]
    assert {name for name, domain in domains.items() if domain["anonymize"]} == DAGGERS
    assert all(domain["licence"] for domain in domains.values())
    for name, domain in domains.items():
        words = domain["words"]
        assert (domain["source"]["words"] or 10**12) > sum(words.values()), name


@pytest.mark.parametrize(("name", "gpus", "steps"), [
    ("paper-125m", 32, 300_000), ("paper-350m", 64, 120_000), ("paper-760m", 128, 65_000), ("paper-1.3b", 128, 50_000),
])  # fmt: skip
def test_the_papers_updates(name, gpus, steps):
    training = PAPER[name]["training"]
    sequences = 2 * 8 * gpus
    assert training["sequences"] == sequences / 8
    assert training["tokens"] == steps * sequences * 1024
    assert (training["learning_rate"], training["clip"], training["warmup"]) == (5e-4, 0.1, 0.08)


def test_the_plan_of_a_domain():
    config = copy.deepcopy(PAPER["paper-125m"])
    plan = plan_domain("reddit", config["domains"]["training"]["reddit"], 2)
    assert (plan.documents, plan.words, plan.jobs) == (None, 25_020_000_000, 50)
    assert plan.kept == 27_500_000_000 * 2.6 + 25_020_000_000 * (2.6 + 3)
    assert plan.passing == 27_500_000_000 * 2.6
    wide = plan_domain("reddit", config["domains"]["training"]["reddit"], 4)
    assert wide.kept - plan.kept == 25_020_000_000 * 3
    config["domains"]["training"]["1b"]["words"]["train"] = None
    plan = plan_domain("1b", config["domains"]["training"]["1b"], 2)
    assert (plan.words, plan.kept, plan.jobs) == (None, None, 10)


def test_local_parquet_is_counted(tmp_path):
    for number in range(2):
        pq.write_table(pa.table({"text": ["a"] * 5}), tmp_path / f"{number}.parquet")
    domain = copy.deepcopy(PAPER["paper-125m"]["domains"]["novel"]["tweets"])
    domain["source"] = {"kind": "files", "path": f"{tmp_path}/*.parquet"}
    assert plan_domain("d", domain, 2).documents == 10
    (tmp_path / "2.parquet").write_bytes(b"")
    assert plan_domain("d", domain, 2).documents is None


def test_totals_say_what_they_leave_out():
    footers = [column.footer for column in plan_table(copy.deepcopy(PAPER["paper-125m"])).columns]
    assert footers[4:9] == ["641M+", "77.9G", "476", "650GB", "214GB"]
    sample = load_config(REPOSITORY / "config" / "sample.yaml")
    assert [column.footer for column in plan_table(sample).columns][4:9] == ["?", "all", "66", "?", "?"]


def test_the_command_prints_every_domain_and_the_totals():
    command = [sys.executable, "-m", "demix.cli", "plan", str(REPOSITORY / "config" / "paper-125m.yaml")]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for name in PAPER["paper-125m"]["domains"]["training"] | PAPER["paper-125m"]["domains"]["novel"]:
        assert f" {name} " in shown
    assert "25.0G" in shown
    assert "77.9G" in shown


def test_what_a_source_needs_is_asked_for(tmp_path):
    from demix.errors import DemixError

    config = yaml.safe_load((REPOSITORY / "config" / "paper-125m.yaml").read_text())
    novel = config["domains"]["novel"]
    for domain, change, message in (
        ("contracts", {"parts": 2}, r"contracts\.source\.parts: is 2 for 1 addresses; give at most one"),
        ("contracts", {"path": "data/x.zip"}, r"contracts\.source\.path: is no address"),
        ("github", {"data_files": []}, r"github\.source\.data_files: is missing"),
        ("github", {"revision": None}, r"github\.source\.revision: is missing; pin a commit"),
        ("github", {"bytes": {"a": 1}}, r"github\.source\.sha256: is for files and addresses; pin a commit"),
        ("github", {"where": {"license": None}}, r"github\.source\.where\.license: is None"),
        ("github", {"sha256": {"a": "xyz"}}, r"github\.source\.sha256\.a: is 'xyz'"),
        ("github", {"kind": "s3"}, r"github\.source\.kind: is 's3'; allowed is one of"),
    ):
        changed = copy.deepcopy(config)
        changed["domains"]["novel"][domain]["source"] = novel[domain]["source"] | change
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(changed))
        with pytest.raises(DemixError, match=message):
            load_config(tmp_path / "config.yaml")
