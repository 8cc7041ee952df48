"""The first page of a run: what it says of the run, and where its links lead."""

import re
from pathlib import Path

import pytest

from demix.errors import DemixError
from demix.report import write_report
from demix.report.items import all_items
from demix.report.stages import STAGES, drawing
from support.configs import changed
from support.synthetic_run import build_run
from support.titles import titles

REPOSITORY = Path(__file__).parents[2]


def test_the_first_page_leads_to_all_and_says_what_the_run_took(tmp_path: Path) -> None:
    run = build_run(tmp_path)
    for job, seconds in (("train/demix", 3600.0), ("train/dense", 65.0), ("score/demix/law", 30.0), ("report", 9999.0)):
        path = run.path / "benchmarks" / f"{job}.tsv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"s\tcpu_time\tmax_rss\n{seconds}\t{2 * seconds}\t300.25\n")
    write_report(changed(run.run, training={"ranks": 2}), run.path / "report")
    page = (run.path / "report" / "index.html").read_text()

    links = re.findall(r'href="([^"]+)"', page)
    there = [link.partition("#")[0] for link in links if not link.startswith("cards/")]
    assert all((run.path / "report" / link).is_file() for link in there)
    # A claim leads to its row.
    claims = re.findall(r'href="claims.html#(\w+)"', page)
    assert claims
    assert set(claims) == set(re.findall(r'<tbody id="(\w+)"', (run.path / "report" / "claims.html").read_text()))
    made = {path.relative_to(run.path / "report").as_posix() for path in (run.path / "report").rglob("*.*")}
    assert made - set(there) == {"index.html", "claims.md"}
    assert "cards/demix.html" in links
    # An entry and the page to which it leads have the same name; the first page has that of the run.
    entries = dict(re.findall(r'<li><a href="[a-z]+/([a-z0-9_]+)[.]html">(?:<img[^>]+>)?([^<]+)</a>', page))
    named = titles(run.path / "report") | {"index": all_items()["index"].heading}
    assert entries.items() <= named.items()
    assert named == {name: " ".join(all_items()[name].heading.split()) for name in named}
    assert entries.keys() | {"index", "claims"} == named.keys()

    rows = dict(re.findall(r'<th scope="row">([^<]+)</th>(.*?)</tr>', page))
    cells = re.findall("<td>(.*?)</td>", rows["train"])
    assert cells[:3] == ["2", "1:01:05", "2:02:10"]
    assert cells[4] == "300 MiB"
    steps = sum(path.read_text().count("tokens_per_second") for path in (run.path / "metrics").glob("*.jsonl"))
    hours, minutes, seconds = map(int, cells[3].split(":"))
    assert abs(3600 * hours + 60 * minutes + seconds - 2 * steps * 8192 / 11000) < 1
    assert re.findall("<td>(.*?)</td>", rows["score"])[:2] == ["1", "0:00:30"]
    assert "2:46:39" not in page, "what ends after the page"

    known = "3 have other pieces in train (code 1 of 2, law 1 of 2, news 1 of 2)"
    assert f'<p class="remark">Of 6 test documents of the 3 training domains, {known}' in page
    assert re.search(r">DEMix \(tempered\)</th><td[^>]*>112.04</td><td[^>]*>−21.7</td>", page)
    assert re.search(r'<summary><span class="verdict shown">shown</span> \d+</summary>', page)


def test_a_run_by_hand_has_no_record_of_jobs(tmp_path: Path) -> None:
    run = build_run(tmp_path)
    write_report(run.run, run.path / "report")
    assert "no record of its jobs" in (run.path / "report" / "index.html").read_text()


def test_a_damaged_record_of_a_job_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    run = build_run(tmp_path / "run")
    path = run.path / "benchmarks" / "tokenizer.tsv"
    path.parent.mkdir()
    path.write_text("s\tcpu_time\tmax_rss\n1.5\t")
    with pytest.raises(DemixError, match=r"tokenizer\.tsv: is damaged"):
        write_report(run.run, tmp_path / "report")
    assert not (tmp_path / "report").exists()


def test_each_rule_of_the_workflow_belongs_to_one_stage_and_the_drawing_shows_all() -> None:
    text = "".join(path.read_text() for path in (REPOSITORY / "workflow" / "rules").glob("*.smk"))
    rules = set(re.findall(r"^ *rule (\w+):", text, re.MULTILINE))
    staged = [rule for stage in STAGES for rule in stage.rules]
    assert sorted(staged) == sorted(
        rules
        | {"train", "join", "adapt", "adapt-dense", "score", "cluster_shards", "average", "route", "merge_routed"}
        | {"fewshot"}
    )
    assert (REPOSITORY / "docs" / "pipeline.svg").read_text() == drawing()
    assert all(f">{stage.name}</text>" in drawing() for stage in STAGES)
