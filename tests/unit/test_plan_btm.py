"""The plan of experts that are whole models: jobs, FLOPs, bytes sent, disk."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from demix.config.architecture import Architecture
from demix.config.counts import training_flops_per_token
from demix.plan.cost import plan_training, training_tables
from demix.plan.flops import HARDWARE
from demix.plan.jobs import ScoringCosts, in_one_line, plan_jobs, write_sbatch_files
from demix.run.check import completed_run, load_run
from demix.run.models import rule_of
from demix.run.run import Run
from demix.run.scoring import scoring_jobs

REPOSITORY = Path(__file__).parents[2]
PAPER = load_run(REPOSITORY / "config" / "cbtm-1.3b.yaml")
TINY = yaml.safe_load((REPOSITORY / "tests" / "workflow" / "tiny.yaml").read_text())
BTM = {"kind": "branched", "parent": "dense", "seed_tokens": 6000}


def tiny(**rows: Any) -> Run:
    return completed_run(TINY | {"models": rows})


def test_the_papers_flops_whatever_the_number_of_experts() -> None:
    """F_ELM(T, k) = 96·l·h²·T/k·(1 + s/6h + V/16lh), appendix A.2: 1.998 ZFLOPs for 24 × 2,048 on 168B tokens."""
    sizes = Architecture(layers=24, width=2048, heads=32, context=2048)
    for k in (1, 2, 4, 8, 16, 32, 64, 128):
        expert = training_flops_per_token(sizes, 50_272, 2048) * 167_772_160_000 / k
        assert k * expert == pytest.approx(1.998e21, rel=2.5e-3)
        formula = 96 * 24 * 2048**2 * (1 + 2048 / (6 * 2048) + 50_272 / (16 * 24 * 2048))
        assert k * expert == pytest.approx(formula * 167_772_160_000, rel=1e-12)
    plans = [plan for plan in plan_training(PAPER, None, HARDWARE["a100"]) if plan.rule.startswith("train_btm")]
    assert len(plans) == 8
    assert sum(plan.steps * plan.flops for plan in plans) == pytest.approx(1.998e21, rel=2.5e-3)
    # A job for each expert, of 10,000 updates on its eighth of the tokens.
    assert {(plan.jobs, plan.steps, plan.tokens, plan.experts) for plan in plans} == {(1, 10_000, 20_971_520_000, 1)}
    hours = sum(plan.steps * plan.flops for plan in plans) / 137e12 / 3600
    assert sum(plan.rank_hours for plan in plans) == pytest.approx(hours, rel=1e-9)
    # Every expert of 128 GPUs sends its own gradients, and nothing for another expert.
    assert {plan.synced for plan in plans} == {4 * plans[0].expert}
    assert plans[0].weights == 4 * plans[0].expert


def test_the_papers_larger_seed() -> None:
    """OPT-6.7B: 32 blocks of 4,096, of which each of K experts has all, and no GPU of 80 GB holds the state."""
    config = load_run(REPOSITORY / "config" / "cbtm-6.7b.yaml")
    plans = plan_training(config, None, HARDWARE["a100"])
    formula = 96 * 32 * 4096**2 * (1 + 2048 / (6 * 4096) + 50_264 / (16 * 32 * 4096)) * 167_772_160_000
    for rule, experts in (("train_btm", 8), ("train_cbtm_16", 16)):
        some = [plan for plan in plans if plan.rule.startswith(rule)]
        assert len(some) == experts
        assert sum(plan.steps * plan.flops for plan in some) == pytest.approx(formula, rel=1e-12)
        for plan in some:
            # Blocks, embedding, positions and the last norm; fp32 parameters, gradients and two moments.
            assert plan.expert == 32 * (12 * 4096**2 + 13 * 4096) + (50_257 + 2048 + 2) * 4096
            assert (plan.shared, plan.state, plan.steps) == (0, 16 * plan.expert, 10_000)
    assert config.config.training.learning_rate == 1.2e-4


def test_the_experts_of_a_run_are_jobs_of_their_own() -> None:
    config = tiny(btm=BTM, few=BTM | {"experts_per_job": 2}, dense_on=BTM | {"kind": "dense", "schedule": "restart"})
    plans = {plan.name: plan for plan in plan_training(config, None, HARDWARE["cpu"])}
    step = 4 * 32
    one, (pair,) = plans["btm-licenses"], [plan for name, plan in plans.items() if "+" in name]
    assert (one.begin, one.steps, one.tokens, one.synced) == (15, 32, 32 * step, 0)
    assert (pair.tokens, pair.hours, pair.flops) == (2 * one.tokens, 2 * one.hours, 2 * one.flops)
    # The sum over experts is what the dense model takes.
    dense = plans["dense"]
    experts = [plan for name, plan in plans.items() if name.startswith("btm-")]
    assert sum(plan.tokens for plan in experts) == dense.tokens == plans["dense_on"].tokens
    assert sum(plan.flops for plan in experts) == dense.flops
    assert plans["dense_on"].hours == pytest.approx(dense.hours * 17 / 32)
    rules = {rule for job in plan_jobs(config, "cpu") for rule in job.rules}
    assert {rule_of(job) for model in config.trained for job in model.jobs} <= rules
    assert {"join_btm", "join_few"} <= rules
    # Each expert's checkpoints are a whole model's.
    assert one.checkpoint == dense.checkpoint
    assert in_one_line(config, "cpu")
    assert all(table.row_count for table in training_tables(config, None, "cpu"))


def test_a_job_of_two_experts_sends_and_saves_what_both_do() -> None:
    often = BTM | {"checkpoint_every": 10}
    config = tiny(btm=often, few=often | {"experts_per_job": 2})
    plans = {plan.name: plan for plan in plan_training(config, 3, HARDWARE["cpu"])}
    one, (pair,) = plans["btm-licenses"], [plan for name, plan in plans.items() if "+" in name]
    assert one.synced == 4 * one.expert
    # After updates 20 and 30 of 15 to 32.
    assert one.saved == 2 * one.checkpoint
    assert (pair.synced, pair.saved) == (2 * one.synced, 2 * one.saved)


def test_what_ranks_send_is_what_they_hold_together() -> None:
    config = tiny(btm=BTM | {"ranks": 2}, demix={"ranks": 3}, wide={"kind": "demix", "ranks": 6})
    plans = {plan.name: plan for plan in plan_training(config, None, HARDWARE["cpu"])}
    assert plans["btm-licenses"].synced == 4 * plans["btm-licenses"].expert
    assert plans["demix"].synced == 4 * plans["demix"].shared
    assert plans["wide"].synced == 4 * (plans["demix"].shared + plans["demix"].expert)
    assert plans["dense"].synced == 0


def test_scoring_takes_a_whole_pass_for_each_whole_model() -> None:
    """Of an added expert too. Experts of DEMix share the attention of the first layer."""
    rows = {"models": {"btm": BTM}, "adaptation": {**TINY["adaptation"], "model": "btm"}}
    config, saved = completed_run(TINY | rows), {}
    costs = ScoringCosts(config, HARDWARE["cpu"])
    for job in scoring_jobs(config):
        for part in (part for part in job.parts if len(part.columns) > 1 and not part.own):
            single = replace(part, columns=part.columns[:1])
            together, alone = (costs.of_part(one, job.jobs)[0] for one in (part, single))
            saved[job.rule, part.model] = 1 - together / (len(part.columns) * alone)
        assert costs.of_job(job)[0] == pytest.approx(sum(costs.of_part(part, job.jobs)[0] for part in job.parts))
    whole = {("score_known_btm", "btm"), ("score_btm", "btm"), ("score_adapted_fortunes", "btm")}
    others = {(f"score_{known}others", "demix") for known in ("known_", "")}
    assert saved.keys() >= whole | others | {("score_known_others", "without-licenses")}
    assert {part for part, share in saved.items() if share == pytest.approx(0, abs=1e-12)} == whole
    assert saved["score_others", "demix"] > 0.05


def test_each_expert_gets_an_sbatch_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {path.name for path in write_sbatch_files(tiny(btm=BTM), "cpu")}
    assert names >= {"btm-licenses.sh", "btm-parliament.sh", "dense.sh"}
