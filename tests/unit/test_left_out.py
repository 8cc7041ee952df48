"""Merged models that lose one domain's expert after the other: what is scored, planned, evaluated, refused."""

from typing import Any

import pytest

from demix.plan.jobs import count_jobs
from demix.run.check import completed_run
from demix.run.evaluated import evaluated
from demix.run.run import Run
from demix.run.scoring import ScoringPart, scoring_jobs
from support.errors import refused


def removing(run: Run, *merged: str, **more: Any) -> Run:
    """The run of the config of `run`, whose merged models of these rows lose experts."""
    return completed_run(run.config.values | {"removal": run.config.values["removal"] | {"merged": merged}} | more)


def parts(run: Run) -> list[ScoringPart]:
    return [part for job in scoring_jobs(run) for part in job.parts]


@pytest.mark.parametrize("launch", ["local", "slurm"])
def test_each_training_domain_is_scored_without_its_expert_once(frozen: Run, launch: str) -> None:
    run, before = (removing(frozen, *rows, cluster={"launch": launch}) for rows in (("demix", "btx"), ()))
    new = [part for part in parts(run) if part not in parts(before)]
    assert sorted((part.folder, part.domains, part.without, part.splits) for part in new) == sorted(
        (f"{folder}@minus-{name}", (name,), name, ("test",))
        for folder in ("demix-routed", "btx")
        for name in run.training
    )
    assert all(part.settings["without"] == part.without for part in new)
    assert len(parts(run)) == len(parts(before)) + len(new)
    assert {*count_jobs(run)} == {*count_jobs(before)}


def test_it_is_evaluated_as_the_model_with_a_set_of_experts_of_its_own(frozen: Run) -> None:
    run, before = removing(frozen, "demix", "btx"), removing(frozen)
    for domain in run.domains:
        now, then = evaluated(run, domain), evaluated(before, domain)
        new = [one for one in now if one not in then]
        assert [one for one in now if one in then] == list(then)
        assert [(one.model, one.folder, one.merged, one.without, one.seed) for one in new] == [
            (model, f"{folder}@minus-{domain}", merged, domain, 1)
            for model, folder, merged in (("demix", "demix-routed", "routed"), ("btx", "btx", ""))
            if domain in run.training
        ]


@pytest.mark.parametrize("row", ["switch", "dense", "demix_3", "btz"])
def test_what_has_no_expert_of_a_domain_to_lose_is_refused(frozen: Run, row: str) -> None:
    with refused(f"config key removal.merged: {row}"):
        removing(frozen, "demix", row)


def test_a_merged_model_of_two_experts_keeps_them(frozen: Run) -> None:
    domains = frozen.config.values["domains"]
    two = {name: domains["training"][name] for name in ("parliament", "scripture")}
    models = {"demix": {"merged_routed": True}}
    with refused("config key removal.merged: demix"):
        removing(frozen, "demix", domains=domains | {"training": two}, models=models, tasks={}, lm_eval=None)
