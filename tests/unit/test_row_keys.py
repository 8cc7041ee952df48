"""Each kind of model with each key of a row: planned, or refused in one line that names the row and a key."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from demix.config.models import ModelRow
from demix.errors import DemixError
from demix.plan.jobs import plan_jobs
from demix.run.check import completed_run
from demix.run.merged import MERGED
from demix.run.placement import place
from demix.run.rules import RunRules
from demix.run.run import Run
from demix.run.scoring import scoring_jobs
from demix.run.systems import evaluated
from demix.settings import names_of, settings_from
from demix.train.stage import ModelTraining, Training
from support.configs import small
from support.row_keys import KEYS, SECTIONS, SEED, rows


def run_of(models: dict[str, Any], **sections: Any) -> Run:
    return completed_run(small(**SECTIONS | sections, models=models))


@pytest.fixture(scope="module")
def accepted() -> Run:
    """The run of all rows that a config may have. Every other one is refused here, in a line that names it."""
    found, refused = {}, {}
    for name, row in rows():
        try:
            run_of({name: row})
        except DemixError as error:
            refused[name] = str(error)
        else:
            found[name] = row
    told = {
        name for name, line in refused.items() if line.startswith(f"config key models.{name}.") and "\n" not in line
    }
    assert told == refused.keys()
    assert (len(found), len(refused)) == (767, 1095), (
        "see which rows are taken, or refused, before these numbers change"
    )
    return run_of(found)


def test_each_key_is_tried() -> None:
    assert {"kind", "parent", *KEYS} == {*names_of(ModelRow)}


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
    planned = {job.name for job in plan_jobs(accepted, "h100")}
    assert {model.name for model in accepted.trained if not model.in_parts} <= planned


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"kind": "demix", "trained": "routers", "parent": "a/b"}, r"trained: is given to a row of kind demix; use"),
        ({"kind": "dense", "replicas": {"law": 2}}, r"replicas: is given to a row of kind dense, whose ranks share"),
        ({"kind": "demix", "data": "k2", "replicas": {"law": 2}}, r"replicas: is \{'law': 2\}, of training domains"),
        ({"kind": "demix", "replicas": {"law": 2}}, r"ranks: is 1, but the replicas of 2 domains make 3"),
        ({"kind": "demix", "replicas": {"laws": 2}}, r"replicas\.laws: is no training domain"),
        ({"kind": "demix", "ranks": 3}, r"ranks: is 3, which does not fit 2 domains"),
        ({"kind": "demix", "z_loss": 0.1} | SEED, r"z_loss: is 0\.1 where its parent dense has None; leave it"),
        ({"kind": "demix", "parent": "a/b", "sweep": KEYS["sweep"]}, r"sweep: is given to a row that begins with a"),
        ({"kind": "routed", "parent": "demix", "sweep": KEYS["sweep"]}, r"sweep: is given to a row that begins with a"),
        ({"kind": "anchored"} | SEED, r"weight_decay: is 0\.1, and the parent's feedforwards would decay too; use 0"),
    ],
)
def test_what_a_training_would_refuse_or_overlook_is_refused_before(row: dict[str, Any], told: str) -> None:
    with pytest.raises(DemixError, match=rf"^config key models\.mine\.{told}"):
        run_of({"mine": row})


def test_what_is_taken_from_other_sections_is_told_there() -> None:
    run_of({"mine": {"kind": "demix", "z_loss": None, "optimizer": None} | SEED})
    run_of({"mine": {"kind": "anchored"} | SEED, "dense": {"weight_decay": 0.0}})
    three = {"sequences": 2, "ranks": 3, "replicas": {"law": 2}}
    run_of(
        {"plain": {"kind": "dense"}, "clusters": {"kind": "demix", "data": "k2", "replicas": {}, "ranks": 2}},
        training=three,
    )
    with pytest.raises(DemixError, match=r"^config key models\.mine\.replicas: is .* the row learns from clusters"):
        run_of({"mine": {"kind": "demix", "data": "k2"}}, training=three)
    with pytest.raises(DemixError, match=r"^config key training\.ranks: is 3, which does not fit 2 domains"):
        run_of({}, training={"ranks": 3})
    flexible = {"kind": "anchored", "weight_decay": 0.0} | SEED
    with pytest.raises(
        DemixError, match=r"^config key adaptation\.model: is mine of kind anchored, and no expert of a"
    ):
        run_of({"mine": flexible}, adaptation={"model": "mine"})
    assert run_of({"mine": flexible}, adaptation={"model": "mine"}, domains={"novel": {}}).adaptations == ()


def test_a_plan_divides_ranks_as_the_config_does() -> None:
    run = run_of({"mine": {"kind": "demix", "ranks": 3, "replicas": {"law": 2}}})
    (job,) = [job for job in plan_jobs(run, "h100") if job.name == "mine"]
    assert job.ranks == 3
