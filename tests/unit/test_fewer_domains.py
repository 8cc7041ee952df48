"""Domains that a config leaves out of those of its base, and models that are trained on one domain fewer."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, strategies

from demix.plan.cost import HARDWARE, plan_training
from demix.run.check import completed_run, load_run
from demix.run.models import Model
from demix.run.placement import place_experts, ranks_without
from demix.run.rules import RunRules
from demix.run.run import Run
from support.configs import TEXT, domains, small

REPOSITORY = Path(__file__).parents[2]


def test_null_leaves_out_a_domain_of_the_base(tmp_path: Path) -> None:
    left_out = {"training": {"scripture": None, "politics": None}, "novel": {"wiki": None, "politics": TEXT}}
    mine = tmp_path / "mine.yaml"
    mine.write_text(yaml.safe_dump({"base": str(REPOSITORY / "config" / "sample.yaml"), "domains": left_out}))
    run, sample = load_run(mine), load_run(REPOSITORY / "config" / "sample.yaml")
    assert run.training == tuple(name for name in sample.training if name not in left_out["training"])
    assert run.novel == (*(name for name in sample.novel if name != "wiki"), "politics"), "moved to the novel domains"
    assert run.rows["demix"].learned == run.training
    assert completed_run(run.config.values).config.values == run.config.values


FOUR = domains(("law", "news", "code", "wiki"), ("songs",))
SEEDED = {"kind": "demix", "parent": "dense", "seed_tokens": 500}


def removing(removal: dict[str, Any] | None = None, **sections: Any) -> Run:
    without = {"retrain_without": ["news"]} | (removal or {})
    return completed_run(small(**{"domains": FOUR, "removal": without} | sections))


def without(run: Run) -> Model:
    (model,) = run.without
    return model


def test_a_model_without_a_domain_keeps_the_tokens_of_each_other_domain() -> None:
    run = removing(training={"sequences": 2})
    model, whole = without(run), run.whole
    assert (model.domains, model.columns, model.updates) == (
        ("law", "code", "wiki"),
        ("law", "code", "wiki"),
        whole.updates,
    )
    assert model.settings.tokens == 3 * whole.updates * 2 * 8, "updates of three domains, two sequences and 8 positions"
    rules = RunRules(run)
    told, before = (json.loads(rules.training_settings(one)) for one in (model, whole))
    assert told.pop("tokens") < before.pop("tokens")
    assert told == before, "what else a training is told is the same"
    assert [Path(path).parent.name for path in rules.train_inputs(model)] == ["law", "code", "wiki"]
    (plan,) = [one for one in plan_training(run, 8, HARDWARE["h100"]) if one.name == model.name]
    assert (plan.tokens, plan.steps, plan.ranks) == (model.settings.tokens, whole.updates, 6)


def test_a_model_without_a_domain_may_begin_anew_from_its_parents_state() -> None:
    run = removing({"model": "again"}, models={"again": SEEDED | {"schedule": "restart"}})
    model, whole = without(run), run.whole
    assert (model.seed_step, model.parent_step_tokens) == (whole.seed_step, 32) == (15, 32), "the parent's own steps"
    assert model.first_step == 20, "480 tokens in updates of 24"
    assert model.updates - model.first_step == whole.updates - whole.first_step == 16
    scratch = removing({"model": "scratch"}, models={"scratch": SEEDED | {"seed_tokens": 0}})
    assert without(scratch).updates == scratch.whole.updates


def test_experts_that_are_whole_models_are_not_trained_again() -> None:
    model = without(removing({"model": "btm"}, models={"btm": SEEDED | {"kind": "branched"}}))
    assert model.jobs == ()
    assert [part.folder for part in model.parts] == ["branches/btm/law", "branches/btm/code", "branches/btm/wiki"]


@given(strategies.integers(2, 12), strategies.integers(1, 4), strategies.data())
def test_the_ranks_of_one_domain_fewer_fit(count: int, sequences: int, data: strategies.DataObject) -> None:
    fitting = [n for n in range(1, count) if count % n == 0] + [n * count for n in range(1, sequences + 1)]
    ranks = data.draw(strategies.sampled_from(fitting))
    fewer = ranks_without(count, ranks)
    assert fewer <= ranks
    assert len(place_experts([f"d{n}" for n in range(count - 1)], sequences, fewer)) == fewer


@pytest.mark.parametrize(
    ("replicas", "replacement", "ranks", "left"),
    [
        ({"news": 2}, None, 3, {}),
        ({"law": 2}, None, 4, {"law": 2}),
        ({}, None, 3, {}),
        ({"news": 2}, "songs", 5, {"songs": 2}),
    ],
)
def test_ranks_of_a_domain_go_with_it(
    replicas: dict[str, int], replacement: str | None, ranks: int, left: dict[str, int]
) -> None:
    run = removing(
        {"replacement": replacement}, training={"sequences": 2, "ranks": 5 if replicas else 4, "replicas": replicas}
    )
    settings = without(run).settings
    assert (settings.ranks, settings.replicas) == (ranks, left)
    place_experts(without(run).domains, 2, settings.ranks, settings.replicas)
