"""Each kind of model with each key of a row: planned, or refused in one line that names the row and a key."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from demix.config.models import KINDS, ModelRow
from demix.errors import DemixError
from demix.plan.jobs import plan_jobs
from demix.run.check import completed_run
from demix.run.merged import MERGED
from demix.run.models import rule_of
from demix.run.placement import place
from demix.run.rules import RunRules
from demix.run.run import Run
from demix.run.scoring import scoring_jobs
from demix.run.systems import evaluated
from demix.settings import names_of, settings_from
from demix.train.stage import ModelTraining, Training
from support.configs import small
from support.row_keys import SECTIONS, rows


def run_of(models: dict[str, Any], **sections: Any) -> Run:
    return completed_run(small(**SECTIONS | sections, models=models))


@pytest.fixture(scope="module")
def accepted() -> Run:
    """The run of all rows that a config may have. Every other one is refused here by a key of its own."""
    found, subjects = {}, {}
    for name, row in rows():
        try:
            run_of({name: row})
        except DemixError as error:
            subjects[name] = error.subject
        else:
            found[name] = row
    assert [name for name, subject in subjects.items() if not subject.startswith(f"config key models.{name}.")] == []
    assert {row["kind"] for row in found.values()} == {*KINDS}
    assert {*chain.from_iterable(found.values())} == {*names_of(ModelRow)}, "each key is of use in some row"
    return run_of(found)


def test_each_accepted_row_reads_what_the_workflow_makes(accepted: Run) -> None:
    rules = RunRules(accepted)
    made = {f"{rules.folder}/sweep/{model.name}.json" for model in accepted.swept}
    made |= {*rules.tokens(accepted.domains, "train", "dev", "test")}
    made |= {*chain.from_iterable(rules.seed_files(*seed) for seed in accepted.seeds)}
    for clustering, split in accepted.learned_splits:
        made |= {*rules.shards(clustering, accepted.clusters(clustering), split)}
    for merged in accepted.routed_merges:
        made |= {*rules.experts(merged.place, MERGED)}
    trained = chain.from_iterable(
        rules.trained_files(part) for one in accepted.trained for job in one.jobs for part in job
    )
    made |= {*trained, *rules.begun_files("imported/gpt2")}
    for model in accepted.trained:
        parts = chain.from_iterable(rules.trained_files(part) for part in model.parts)
        assert {*rules.train_inputs(model), *rules.chosen_rate(model), *rules.seed_of(model), *parts} <= made, (
            model.name
        )


def test_each_accepted_row_is_a_training_of_its_updates(accepted: Run) -> None:
    rules = RunRules(accepted)
    for model in accepted.trained:
        settings = settings_from(Training, rules.training_settings(model))
        shards = [Path(path) for path in rules.train_inputs(model)]
        training = ModelTraining(model.kind.name, settings, shards)
        (part, *_) = model.parts
        training = training.alone(part.part) if model.in_parts else training
        assert training.steps == model.updates > model.first_step, model.name
        own = model.settings
        assert len(place(model.kind, part.domains, own.sequences, own.ranks, own.replicas)) == own.ranks, model.name


def test_each_accepted_row_is_scored_and_planned(accepted: Run) -> None:
    scored = {part.model for job in scoring_jobs(accepted, apart=True) for part in job.parts}
    assert {model.name for model in accepted.trained} <= scored
    for domain in accepted.domains:
        assert {table.model for table in evaluated(accepted, domain)} >= {*accepted.rows}
    planned = {rule for job in plan_jobs(accepted, "h100") for rule in job.rules}
    assert {rule_of(job) for model in accepted.trained for job in model.jobs} <= planned
