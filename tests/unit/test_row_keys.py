"""Each kind of model with each key of an entry: planned, or refused in one line that names the entry and a key."""

from collections.abc import Iterator
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest

from demix.config.models import ENTRIES, KINDS, TokenRouting
from demix.errors import DemixError
from demix.plan.jobs import count_jobs
from demix.run.check import completed_run
from demix.run.evaluated import evaluated
from demix.run.placement import place
from demix.run.rules import RunRules
from demix.run.run import Run
from demix.run.scoring import scoring_jobs
from demix.settings import names_of, settings_from
from demix.train.stage import ModelTraining, Training
from support.configs import small

# A value for each key but `kind` and `parent`, none of which is the usual one.
KEYS: dict[str, Any] = {
    "label": "",
    "seed_tokens": 300,
    "schedule": "restart",
    "data": "k2",
    "averages": True,
    "experts": 4,
    "top_k": 2,
    "every": 2,
    "capacity": 1.5,
    "balance": 0.1,
    "warmup": 0.5,
    "clip": 2.0,
    "weight_decay": 0.5,
    "precision": "fp16",
    "optimizer": {"kind": "muon"},
    "learning_rate_schedule": {"kind": "cosine"},
    "dropout": 0.1,
    "checkpoint_every": 7,
    "micro_sequences": 1,
    "compile": True,
    "checkpoint_activations": True,
    "shard_optimizer": True,
    "tokens": 900,
    "sequences": 1,
    "learning_rate": 0.5,
    "dev_blocks": 1,
    "trained": "routers",
    "preset": "modern",
    "ranks": 2,
    "sweep": {"learning_rates": [0.5], "tokens": 500},
    "architecture": {"position": "alibi"},
}
SEED = {"parent": "dense", "seed_tokens": 500}
# How a row begins, and what it learns.
BEGINNINGS: dict[str, dict[str, Any]] = {
    "scratch": {},
    "seed": SEED,
    "restart": SEED | {"schedule": "restart"},
    "folder": {"parent": "imported/gpt2"},
    "merge": {"parent": "demix"},
    "clusters": {"data": "k2"},
    "masked": {"architecture": {"objective": "mlm"}},
}
# What a row of a kind says with each key, so that the key alone decides.
BESIDE = {"anchored": {"weight_decay": 0.0}, "routed": {"top_k": 2}}
SECTIONS: dict[str, Any] = {
    "architecture": {"layers": 2, "width": 8, "heads": 1, "context": 8},
    "training": {"sequences": 2},
    "clusterings": {"k2": {"clusters": 2}},
}


# The keys that change which files a training reads and makes, and which jobs there are.
WIRING = ("seed_tokens", "schedule", "data", "averages", "dev_blocks", "sweep", "trained")


def rows() -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows with names: each kind with each beginning, and with the keys of `WIRING`; other keys in pairs with both."""
    kinds, beginnings = [*KINDS], [*BEGINNINGS]
    cases = [*product(kinds, beginnings, ("", *WIRING)), *product(["routed"], ["scratch"], names_of(TokenRouting))]
    for turn, key in enumerate(key for key in KEYS if key not in WIRING):
        for number in range(max(len(kinds), len(beginnings))):
            cases.append((kinds[number % len(kinds)], beginnings[(number + turn) % len(beginnings)], key))
    for kind, beginning, key in cases:
        row = {"kind": kind} | BESIDE.get(kind, {}) | BEGINNINGS[beginning]
        name = "_".join(filter(None, (kind, beginning, key)))
        if key == "architecture":
            row[key] = row.get(key, {}) | KEYS[key]
        elif key:
            row |= {key: f"Mine, {name}" if key == "label" else KEYS[key]} | BESIDE.get(key, {})
        yield name, row


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
    assert {*chain.from_iterable(found.values())} == {*chain.from_iterable(map(names_of, ENTRIES.values()))}, (
        "each key is of use in some entry"
    )
    return run_of(found)


def test_each_accepted_row_reads_what_the_workflow_makes(accepted: Run) -> None:
    rules = RunRules(accepted)
    made = {f"{rules.folder}/sweep/{model.name}.json" for model in accepted.swept}
    made |= {*rules.tokens(accepted.domains, "train", "dev", "test"), "imported/gpt2/model.json"}
    made |= {f"{rules.folder}/seeds/{parent}/step-{step:08d}/manifest.json" for parent, step in accepted.seeds}
    made |= {f"{rules.folder}/clusters/{name}/shards/{split}.json" for name, split in accepted.learned_splits}
    made |= {*chain(*(rules.model(merged.place) for merged in accepted.routed_merges))}
    made |= {f"{rules.folder}/{part.folder}/model.json" for one in accepted.trained for part in one.trainings}
    for model in accepted.trained:
        parts = [f"{rules.folder}/{part.folder}/model.json" for part in model.parts]
        assert {*rules.train_files(model), *rules.chosen_rate(model), *rules.seed_of(model), *parts} <= made, model.name


def test_each_accepted_row_is_a_training_of_its_updates(accepted: Run) -> None:
    rules = RunRules(accepted)
    for model in accepted.trained:
        settings = settings_from(Training, rules.training_settings(model))
        shards = [Path(path) for path in rules.train_inputs(model)]
        training = ModelTraining(model.kind.name, settings, shards)
        (part, *_) = model.parts
        training = training.of_expert(part.part) if model.in_parts else training
        assert training.steps == model.updates > model.first_step, model.name
        own = model.settings
        assert len(place(model.kind, part.domains, own.sequences, own.ranks)) == own.ranks, model.name


def test_each_accepted_row_is_scored_and_planned(accepted: Run) -> None:
    scored = {part.model for job in scoring_jobs(accepted) for part in job.parts}
    assert {model.name for model in accepted.trained} <= scored
    for domain in accepted.domains:
        assert {table.model for table in evaluated(accepted, domain)} >= {*accepted.rows}
    planned, trainings = count_jobs(accepted), [part for one in accepted.trained for part in one.trainings]
    assert planned["train"] + planned["train_expert"] == len(trainings)
