"""The tables of a plan by stage, against sums of its other tables and numbers worked by hand."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import zstandard

from demix.data.outline import outline
from demix.plan.cost import plan_training
from demix.plan.domains import plan_domains
from demix.plan.flops import HARDWARE
from demix.plan.jobs import ScoringCosts, plan_jobs
from demix.plan.stages import WORD_BYTES, plan_stages, saving_hours, stages_table, sync_seconds, sync_table
from demix.run.check import load_run
from demix.run.run import Run
from demix.run.scoring import scoring_jobs
from support.cli import demix
from support.configs import changed

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(path for path in (ROOT / "config").glob("*.yaml"))
PAPER, SAMPLE = (load_run(ROOT / "config" / f"{name}.yaml") for name in ("paper-1.3b", "sample"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("hardware", ["a100", "cpu"])
def test_stages_add_up_to_the_other_tables(path: Path, hardware: str) -> None:
    config = load_run(path)
    stages = {stage.name: stage for stage in plan_stages(config, hardware)}
    plans, jobs = plan_training(config, None, HARDWARE[hardware]), plan_jobs(config, hardware)
    trained = sum(stages[name].hours for name in ("train", "try learning rates", "adapt"))
    units = HARDWARE[hardware].units
    assert trained == pytest.approx(units * sum(plan.rank_hours for plan in plans))
    scored = stages["score"], stages["score what was adapted"]
    counted = stages["score n-grams"]
    assert counted.jobs == len(config.config.evaluation.ngrams or ())
    assert trained + sum(stage.hours for stage in scored) == pytest.approx(units * sum(job.rank_hours for job in jobs))
    assert sum(stage.written for stage in (*scored, counted)) == sum(job.disk for job in jobs)
    assert sum(stage.jobs for stage in scored) == sum(
        job.count for job in jobs if job.name in ("score", "score what was adapted")
    )
    data = [stages[name] for name in ("anonymize", "split", "tokenize")]
    assert sum(stage.written for stage in data) == pytest.approx(sum(plan.kept or 0 for plan in plan_domains(config)))
    assert stages["write checkpoints"].written == sum(plan.saved for plan in plans)
    assert sync_table(config, hardware).row_count <= len(plans)
    assert stages_table(config, hardware).row_count <= len(stages)


def test_hours_of_the_data_stage_are_those_worked_by_hand() -> None:
    stages = {stage.name: stage for stage in plan_stages(PAPER, "a100")}
    # Words read: what a source gives, else the budgets. Reddit has the most, 27.5G in 24 files, 25.02G of them kept.
    read = sum(plan.passing for plan in plan_domains(PAPER)) / 2.6
    assert stages["anonymize"].hours == pytest.approx(read * 6.4 / 6e6 / 3600)
    assert stages["anonymize"].longest == pytest.approx(27.5e9 / 24 * 6.4 / 6e6 / 3600)
    assert stages["split"].longest == pytest.approx(27.5e9 * 6.4 / 12e6 / 3600)
    assert stages["tokenize"].longest == pytest.approx(25.02e9 * 6.4 / 30e6 / 3600)
    assert stages["download"].network == pytest.approx(2.6 * read)
    assert stages["download"].longest == pytest.approx(2.6 * read / 125e6 / 3600)
    # 641M documents of seven domains, and as many comments of 200 bytes as 27.5G words make.
    documents = 30607716 + 671113 + 6700000 + 1829537 + 8013769 + 13813701 + 571540000 + 27.5e9 * 6.4 / 200
    assert stages["deduplicate"].hours == pytest.approx(documents / 400e3 / 3600)
    assert stages["evaluate"].hours == pytest.approx(sum(job.disk for job in plan_jobs(PAPER, "a100")) / 10e6 / 3600)


def test_what_no_setting_bounds_has_no_hours() -> None:
    stages = {stage.name: stage for stage in plan_stages(SAMPLE, "cpu")}
    assert {stages[name].hours for name in ("anonymize", "deduplicate", "split", "tokenize")} == {None}
    assert "left out" in stages_table(SAMPLE, "cpu").caption
    assert "left out" not in stages_table(PAPER, "a100").caption
    assert {sync_seconds(SAMPLE, plan, HARDWARE["cpu"]) for plan in plan_training(SAMPLE, 1, HARDWARE["cpu"])} == {None}


def test_gradients_and_checkpoints_of_sixteen_ranks() -> None:
    plans = {plan.name: plan for plan in plan_training(PAPER, 16, HARDWARE["h100"])}
    demix, dense = plans["demix"], plans["dense"]
    # 78 buckets of the 2.03 GB that are shared by 16 ranks on two nodes, 123 of an expert's 3.22 GB by two of a node.
    hop = (2 * 9.6e-6 + 14 * 3.4e-6) / 16
    shared = 30 * 78 * hop + 2 * 15 / 16 * 4 * demix.shared / 370e9
    own = 2 * 123 * 3.4e-6 + 4 * demix.expert / 370e9
    assert sync_seconds(PAPER, demix, HARDWARE["h100"]) == pytest.approx(shared + own)
    assert sync_seconds(PAPER, dense, HARDWARE["h100"]) == pytest.approx(
        30 * (78 + 123) * hop + 2 * 15 / 16 * 4 * (demix.shared + demix.expert) / 370e9
    )
    assert saving_hours(demix) == pytest.approx(49 * 83.43e9 * (1 / 2e9 + 1 / 1.8e9) / 3600, rel=1e-3)
    # Nodes of another size: 16 ranks are in one node, or in four.
    whole, four = (
        {stage.name: stage for stage in plan_stages(changed(PAPER, cluster={"ranks_per_node": ranks}), "h100", 16)}
        for ranks in (16, 4)
    )
    adapted = [plan for name, plan in plans.items() if "-dapt-" in name]
    assert whole["train"].network == whole["adapt"].network == 0
    assert four["adapt"].network == pytest.approx(sum(2 * 15 / 16 * plan.synced * plan.steps for plan in adapted))


def test_the_steps_of_a_seed_phase_are_sent_once_and_a_rules_jobs_share_its_hours() -> None:
    # Gradients alone: test_muon.py counts what Muon sends.
    config = changed(SAMPLE, training={"optimizer": None}, cluster={"launch": "slurm", "ranks_per_node": 4})
    plans = plan_training(config, 8, HARDWARE["a100"])
    (seeded,) = (plan for plan in plans if plan.begin)
    trained = [plan for plan in plans if "-dapt-" not in plan.name]
    sent = {plan.name: 2 * 7 / 8 * 4 * plan.shared for plan in trained if plan.experts == 8}
    sent |= {plan.name: 2 * 7 / 8 * 4 * (plan.shared + plan.expert) for plan in trained if plan.experts == 1}
    stages = {stage.name: stage for stage in plan_stages(config, "a100", 8)}
    every = sum(sent[plan.name] * plan.steps for plan in trained)
    assert stages["train"].network == pytest.approx(every - seeded.begin * sent[seeded.name])
    for name, added in {"score": False, "score what was adapted": True}.items():
        jobs = [job for job in scoring_jobs(config) if job.added == added]
        longest = max(ScoringCosts(config, HARDWARE["a100"]).of_job(job)[0] / job.jobs for job in jobs)
        assert stages[name].longest == pytest.approx(longest)
    assert max(job.jobs for job in scoring_jobs(config)) == 8


def test_a_word_has_as_many_bytes_as_in_the_sample() -> None:
    words = size = 0
    for path in (ROOT / "resources" / "sample").glob("*.jsonl.zst"):
        with zstandard.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                text = json.loads(line)["text"]
                words, size = words + len(text.split()), size + len(text.encode())
    assert size / words == pytest.approx(WORD_BYTES, rel=0.01)


@pytest.mark.parametrize("novel", [[], ["d.txt"]], ids=["without novel", "with novel"])
def test_what_init_prints_can_be_planned(novel: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without novel domains, no rule that scores them has jobs."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt", "c.txt", *novel):
        Path(name).write_text(f"The mill of {name} stood by the river.\n\n" * 1500)
    Path("mine.yaml").write_text(outline("mine", ["a.txt", "b.txt", "c.txt"], novel, None, None))
    config = load_run("mine.yaml")
    stages = {stage.name: stage.jobs for stage in plan_stages(config, "cpu")}
    assert (stages["score"], stages["score what was adapted"]) == ((4, 1) if novel else (2, 0))
    assert min(job.jobs for job in scoring_jobs(config)) == 1
    assert {"score_others", "score_demix"} & {job.rule for job in scoring_jobs(config)} == (
        {"score_others", "score_demix"} if novel else set()
    )
    done = demix("plan", "mine.yaml", "--details")
    assert (done.exit_code, done.stderr) == (0, "")
    shown = done.stdout.splitlines()
    assert re.fullmatch(r"mine takes about \d+ (seconds|minutes) on \d+ cores and [\d.]+MB of disk", shown[0])
    assert re.fullmatch(
        rf"mine takes 0\.\d+ core-hours \(cpu\) of training and scoring, at most 0\.\d GB of disk plus the text of "
        rf"{3 + len(novel)} domains, 0\.\d+ hours on 2 cores",
        next(line for line in shown if "core-hours (cpu)" in line),
    )
    assert [line.strip().split(" of mine")[0] for line in shown if re.search(r"^ +[A-Z][a-z ]+ of mine", line)] == [
        "Data stage",
        "Training",
        "Memory and time",
        "Gradients and checkpoints",
        "Jobs",
        "Stages",
    ]
    jobs = {cells[1].strip(): cells[2].strip() for line in shown if len(cells := line.split("│")) == 7}
    assert jobs["demix"] == jobs["dense"] == "1"
    assert ("demix-dapt-d" in jobs, "score what was adapted" in jobs) == (bool(novel), bool(novel))


def many(domains: int) -> Run:
    """The sample with so many novel domains."""
    wiki = SAMPLE.config.values["domains"]["novel"]["wiki"]
    novel = {f"n{number}": wiki for number in range(domains)}
    return changed(SAMPLE, domains={"novel": novel}, removal={"retrain_without": []})


def test_a_plan_takes_as_much_more_work_as_there_are_more_domains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in calls of Python functions, which are the same on every machine."""

    def calls(run: Run) -> int:
        number = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal number
            number += event == "call"

        sys.setprofile(count)
        try:
            for plan in (plan_jobs, plan_stages, sync_table):
                plan(run, "cpu")
        finally:
            sys.setprofile(None)
        return number

    few, more = calls(many(20)), calls(many(120))
    assert more < 7 * few
