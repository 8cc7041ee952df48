"""A source that domains share, read by snakemake: its jobs, and what a change reads and makes again."""

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from demix.files import sha256_file
from demix.plan.jobs import plan_jobs
from demix.run.check import load_run
from support.dry_run import dry_run, jobs_by_rule, ran

pytestmark = pytest.mark.workflow
CONFIG = yaml.safe_load((Path(__file__).parent / "tiny.yaml").read_text())
NAMES = ("parliament", "scripture", "licenses", "fantasy", "fortunes")


def config_of(names: tuple[str, ...], **changes: Any) -> dict[str, Any]:
    """The tiny config, whose domains are `names` of one source of local files."""
    config = copy.deepcopy(CONFIG)
    source = {"kind": "files", "path": "texts", "parts": 2} | changes
    config["sources"] = {"corpus": {"source": source, "by": "meta.set"}}
    for domains in config["domains"].values():
        for name in domains:
            domains[name] = {"from": "corpus", "value": name.upper(), "words": {"dev": 20, "test": 20}}
        for name in {*domains} - {*names}:
            del domains[name]
    return config


def written(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    return "config.yaml"


def documents(names: tuple[str, ...]) -> list[str]:
    return [f"results/tiny/documents/{name}/{part:04d}.json" for name in names for part in range(2)]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the texts of a source."""
    (tmp_path / "texts").mkdir()
    for number in range(3):
        rows = [{"text": f"{name} {number} {row}", "meta": {"set": name.upper()}} for row in range(9) for name in NAMES]
        text = "".join(json.dumps(row) + "\n" for row in [*rows, {"text": "of none", "meta": {"set": "rest"}}])
        (tmp_path / "texts" / f"{number}.jsonl").write_text(text)
    return tmp_path


def test_the_plan_counts_the_jobs_that_divide_a_source(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(place, config_of(NAMES))
    monkeypatch.chdir(place)
    counted = sum((Counter(jobs.rules) for jobs in plan_jobs(load_run(path), "cpu")), Counter[str]())
    planned = jobs_by_rule(dry_run(place, Path(path), "--quiet", "rules"))
    assert +counted == planned
    assert (planned["divide"], planned["read"], planned["source_card"]) == (2, 10, 1)


def test_a_domain_more_reads_the_source_and_makes_no_other_text_again(place: Path) -> None:
    before, wanted = NAMES[:4], [*documents(NAMES[:4]), "results/tiny/sources/corpus/card.json"]
    ran(place, written(place, config_of(before)), *wanted)
    run = place / "results" / "tiny"
    assert not [*run.glob("raw/*/*")], "raw text is removed"
    parts = {path: (path.stat().st_mtime_ns, sha256_file(path)) for path in run.glob("documents/*/*.parquet")}
    assert len(parts) == 8
    # A job that reads a source says how much of it the job took.
    assert not [log for log in run.glob("logs/read/*.log") if "took" in log.read_text()]
    card = json.loads((run / "sources" / "corpus" / "card.json").read_text())
    assert (card["documents"], card["domains"]) == (138, dict.fromkeys(before, 27))
    assert card["untaken"] == {"FORTUNES": 27, "rest": 3}

    def planned(config: dict[str, Any], names: tuple[str, ...]) -> dict[str, int]:
        asked = [*documents(names), "results/tiny/sources/corpus/card.json"]
        return jobs_by_rule(dry_run(place, Path(written(place, config)), *asked, "--quiet", "rules"))

    assert planned(config_of(before), before) == {}
    changed = config_of(before)
    changed["domains"]["training"]["scripture"]["value"] = "rest"
    assert planned(changed, before) == {"read": 2, "source_card": 1}
    assert planned(config_of(before, where={"text": "x"}), before) == {"divide": 2, "read": 8, "source_card": 1}
    # What a domain had that is left out is counted among the documents of none.
    assert planned(config_of(before[1:]), before[1:]) == {"source_card": 1}
    more = config_of(NAMES)
    assert planned(more, NAMES) == {"read": 2, "source_card": 1}
    ran(place, written(place, more), *documents(NAMES), "results/tiny/sources/corpus/card.json")
    assert {path: (path.stat().st_mtime_ns, sha256_file(path)) for path in parts} == parts
    assert sorted(log.name for log in run.glob("logs/read/*.log") if "took" in log.read_text()) == [
        "fortunes.0000.log",
        "fortunes.0001.log",
    ]
    assert not [*run.glob("raw/*/*")]
    assert json.loads((run / "sources" / "corpus" / "card.json").read_text())["untaken"] == {"rest": 3}
    assert planned(more, NAMES) == {}
    (place / "texts" / "0.jsonl").write_text((place / "texts" / "1.jsonl").read_text())
    assert planned(more, NAMES) == {"divide": 1, "read": 5, "source_card": 1}, "of the part whose file has changed"
