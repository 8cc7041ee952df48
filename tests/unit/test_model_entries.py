"""Entries of `models` in a config: options of their own, parents, and what is trained, made and scored of them."""

import json
import math
from typing import Any

import pytest

from demix.config.architecture import DECODERS, Architecture, architecture_from
from demix.config.counts import parameters, training_flops_per_token
from demix.config.evaluation import MixingRecipe
from demix.evaluate.losses import Plan
from demix.model.manifest import tokens_learned
from demix.plan.cost import plan_training
from demix.plan.flops import HARDWARE
from demix.report.cells import changed_bytes
from demix.report.systems import all_training_flops
from demix.run.check import completed_run
from demix.run.evaluated import chosen_on_dev, compared, evaluated
from demix.run.rules import RunRules
from demix.run.run import Run
from demix.run.scoring import ScoringPart, scoring_jobs
from demix.run.systems import main_systems, table_rows
from support.entries import TINY, tiny, trained
from support.errors import refused

ALIBI = {"architecture": {"position": "alibi"}}
MASKED = {"objective": "mlm"}
SWEEP = {"sweep": {"learning_rates": [1], "tokens": 768}}
RESTART = {"kind": "demix", "parent": "dense", "seed_tokens": 6000, "schedule": "restart"}
SEEDED = {"kind": "demix", "parent": "dense", "seed_tokens": 6000}
BRANCHED = {"kind": "branched", "parent": "dense", "seed_tokens": 6000}
SWITCH = {"kind": "routed", "experts": 4}
UPCYCLED = {"kind": "routed", "experts": 4, "top_k": 2, "every": 2, "parent": "dense", "seed_tokens": 6000}
BTX = {"kind": "routed", "parent": "seeded", "tokens": 6000}
WIDTH, TOKENS = TINY["architecture"]["width"], TINY["training"]["tokens"]


def options(run: Run, name: str) -> dict[str, Any]:
    """The architecture that the training of a model is given."""
    found: dict[str, Any] = json.loads(RunRules(run).training_settings(trained(run, name)))["architecture"]
    return found


def parts(run: Run) -> list[ScoringPart]:
    return [part for job in scoring_jobs(run) for part in job.parts]


@pytest.mark.parametrize("preset", DECODERS)
def test_a_preset_is_its_options_and_keys_beside_it_come_first(preset: str) -> None:
    sizes = {"layers": 3, "width": 32, "heads": 2, "context": 8}
    assert architecture_from({"preset": preset} | sizes) == Architecture(**sizes, **DECODERS[preset])
    assert architecture_from({"preset": preset, "activation": "relu2"} | sizes).activation == "relu2"
    assert Architecture(**architecture_from({"preset": preset} | sizes).described) == architecture_from(
        {"preset": preset} | sizes
    )
    assert architecture_from({"preset": "gpt3-xl", "context": 2048}).context == 2048


def test_an_entry_has_options_of_its_own_and_others_stay_as_they_are() -> None:
    plain, run = tiny(), tiny({"demix": ALIBI, "far": {"kind": "dense"} | ALIBI})
    assert run.config.values["architecture"] == plain.config.values["architecture"] == TINY["architecture"]
    for name in ("dense", "dense_unbalanced", "domain_token"):
        assert RunRules(run).training_settings(trained(run, name)) == RunRules(plain).training_settings(
            trained(plain, name)
        )
    for name in ("demix", "far", "without-licenses"):
        assert options(run, name) == TINY["architecture"] | ALIBI["architecture"]
    assert trained(run, "dense-dapt-fantasy").architecture.position == "learned"
    assert trained(tiny({"dense": ALIBI}), "dense-dapt-fantasy").architecture.position == "alibi"
    changed, usual = changed_bytes(tiny({"dense": ALIBI})), changed_bytes(plain)
    assert {usual[name] - changed[name] for name in usual if "Dense" in name} == {4 * WIDTH * 32}


def test_an_entry_overrides_the_section_and_a_branch_has_its_parents_options() -> None:
    branches = {"seeded": SEEDED, "up": UPCYCLED, "same": BRANCHED}
    learned = {"dense": {"architecture": {"position": "learned"}}}
    run = tiny(learned | branches, architecture=ALIBI["architecture"])
    positions = {model.name: model.architecture.position for model in run.trained}
    assert positions["demix"] == "alibi"
    assert {positions[name] for name in ("dense", *branches)} == {"learned"}
    assert options(run, "dense") == options(run, "same")


def test_a_token_routed_entry_is_one_column_for_the_flops_of_a_dense_model() -> None:
    config = tiny({"switch": SWITCH, "upcycled": UPCYCLED})
    switch, up = (trained(config, name) for name in ("switch", "upcycled"))
    assert switch.experts == switch.columns == ("dense",)
    tables = [table for table in evaluated(config, "parliament") if table.model in ("switch", "upcycled")]
    assert [(table.columns, table.sets) for table in tables] == [(("dense",), ())] * 2
    layers, context, types = 2, 32, config.types
    dense = 96 * layers * WIDTH**2 * (1 + context / 6 / WIDTH + types / 16 / layers / WIDTH)
    assert switch.settings.tokens == int(TOKENS * dense / (dense + 4 * 2 * 2 * WIDTH * 4))
    more = 4 * 1 * (16 * WIDTH**2 + 2 * WIDTH * 4)
    assert up.settings.tokens == 6000 + int((TOKENS - 6000) * dense / (dense + more))
    assert (up.restarts, up.settings.warmup) == (True, 0)
    assert RunRules(config).beginning(up).endswith(" --restart")
    plans = {plan.name: plan.steps for plan in plan_training(config, None, HARDWARE["cpu"])}
    assert plans["dense"] > plans["upcycled"]
    routed = {"experts": 4, "top_k": 1, "every": 1, "capacity": 1.25, "balance": 0.01}
    assert options(config, "switch") == TINY["architecture"] | {"routed": routed}
    assert options(config, "upcycled")["routed"]["capacity"] == 2.0
    assert "routed" not in options(config, "dense")


def test_costs_count_chosen_experts_and_the_seed_of_a_dense_model() -> None:
    config = tiny({"switch": SWITCH | {"label": "switch"}, "upcycled": UPCYCLED | {"label": "upcycled"}})
    plans = {plan.name: plan for plan in plan_training(config, None, HARDWARE["cpu"])}
    for name in ("switch", "upcycled"):
        assert plans[name].all_flops <= plans["dense"].all_flops < plans[name].all_flops + plans[name].flops
    routed = {"experts": 4, "balance": 0.01, "capacity": 2.0}
    switch, up = (
        architecture_from(TINY["architecture"] | {"routed": routed | one})
        for one in ({"top_k": 1, "every": 1}, {"top_k": 2, "every": 2})
    )
    assert (plans["switch"].shared, plans["switch"].expert) == parameters(switch, config.types)
    assert plans["switch"].state - plans["dense"].state == 16 * (plans["switch"].expert - plans["dense"].expert)
    types, step = config.types, trained(config, "dense").step_tokens
    seed, updates = 6000 // step, {name: trained(config, name).updates for name in ("switch", "upcycled")}
    by_token = [training_flops_per_token(one, types, 32) for one in (switch, up, up.unrouted)]
    found = {name: all_training_flops(trained(config, name), config) for name in updates}
    assert found["switch"] == pytest.approx(by_token[0] * updates["switch"] * step)
    rest = updates["upcycled"] - seed
    assert found["upcycled"] == pytest.approx(step * (by_token[1] * rest + by_token[2] * seed))


def test_a_parent_in_a_folder_has_unknown_flops() -> None:
    run = tiny({"dense": {}, "mine": {"kind": "branched", "label": "mine", "parent": "imported/mine"}})
    assert math.isnan(all_training_flops(trained(run, "mine"), run)), "no number that looks complete"
    begun = {"model": "known", "step": 0, "tokens": None, "state_sha256": "4" * 64}
    seeded = {"tokens": 50, "parent": {"model": "dense", "step": 3, "tokens": 20}}
    assert tokens_learned({"tokens": 50}) == tokens_learned(seeded) == 50
    assert tokens_learned({"tokens": 50, "parent": begun | {"tokens": 7}}) == 57
    assert tokens_learned({}) is tokens_learned({"tokens": 50, "parent": begun}) is None
    assert tokens_learned({"tokens": 5, "parent": "dense"}) is None, "those of the adaptation alone"


def test_no_rule_that_reads_the_text_mixes_a_masked_entry_and_no_table_of_others_has_it() -> None:
    rows = {"masked_dense": {"kind": "dense", "architecture": MASKED}, "masked": {"architecture": MASKED}}
    rows |= {"masked_k2": {"kind": "demix", "architecture": MASKED, "data": "k2"}}
    rows["masked"] |= {"kind": "demix"}
    weights = ["history", "released", "tempered", "switching", "cluster", "cluster+history"]
    evaluation = {"weights": weights, "temperatures": [1], "top_k": [2]}
    clusterings = {"by_domain": {"method": "metadata"}, "k2": {"clusters": 2}}
    config, plain = (tiny(some, clusterings=clusterings, evaluation=evaluation) for some in (rows, {}))
    assert [trained(config, name).masked for name in (*rows, "demix")] == [True, True, True, False]
    recipe = MixingRecipe(weights=tuple(weights), temperatures=(1.0,), top_k=(2,))
    for domain in ("parliament", "fantasy"):
        tables = {table.model: table for table in evaluated(config, domain)}
        assert [table for name, table in tables.items() if name not in rows] == [*evaluated(plain, domain)]
        assert (tables["masked_dense"].columns, tables["masked_dense"].sets) == (("dense",), ())
        for name in ("masked", "masked_k2"):
            (some,) = tables[name].sets
            found = {(one.method, one.weights, one.top_k) for one, _ in Plan(recipe, some, 10).mixtures()}
            floors = {("best_block", "", None), ("best_token", "", None)}
            static = {("average", "", None), ("fitted", "", None)}
            # Two experts have no fewer than two.
            assert found == floors | static | ({("fitted", "", 2)} if name == "masked" else set())
        assert compared(config, domain) == compared(plain, domain)
    for of in (chosen_on_dev, table_rows, main_systems):
        assert of(config) == of(plain)
    assert {part.model for part in parts(config)} - {part.model for part in parts(plain)} == {*rows}


def of_x(**keys: Any) -> dict[str, Any]:
    """A config in which the entry x has these keys, beside a parent for it."""
    return {"models": {"seeded": SEEDED, "btm": BRANCHED, "x": keys}}


FLEXOLMO = {"kind": "anchored", "parent": "dense", "seed_tokens": 6000, "weight_decay": 0.0}
ONE = {
    "models": {"flexolmo": FLEXOLMO},
    "removal": {"merged": ["flexolmo"]},
    "domains": {"training": {"law": TINY["domains"]["training"]["licenses"]}},
}
LLAMA3 = {"kind": "llama3", "factor": 2.0, "low": 4.0, "high": 1.0}
MASKED_ROW = {"models": {"masked": {"kind": "demix", "architecture": MASKED}, "x": SWITCH}}
# What is changed in the tiny config, and the subject of the error: keys of `architecture` alone, then other sections.
ARCHITECTURES: list[tuple[dict[str, Any], str]] = [
    ({"key_heads": 3}, "key_heads"),
    ({"rope_theta": 5.0}, "rope_theta"),
    ({"position": "rope", "rope_share": 0.45}, "rope_share"),
    ({"norm_place": "after", "residual": "parallel"}, "norm_place"),
    ({"position": "rope", "rope_scaling": LLAMA3}, "rope_scaling.low"),
    ({"position": "rope", "rope_scaling": {"kind": "yarn", "factor": 2.0}}, "rope_scaling.kind"),
    ({"epsilon": 0.0}, "epsilon"),
    ({"mask": "learned"}, "mask"),
    ({"position": "sinusoidal", "width": 33, "heads": 3}, "position"),
]
SECTIONS: list[tuple[dict[str, Any], str]] = [
    ({"architecture": TINY["architecture"] | MASKED}, "models.demix.architecture.objective"),
    ({"models": {"dense": {"architecture": MASKED}}}, "models.dense.architecture.objective"),
    ({"models": {"demix": {"architecture": {"layers": 3}}}}, "models.demix.architecture.layers"),
    (of_x(kind="domain_token", architecture=MASKED), "models.x.kind"),
    (of_x(kind="branched", averages=True, architecture=MASKED), "models.x.averages"),
    (of_x(kind="demix", averages=True), "models.x.averages"),
    (of_x(**SEEDED | ALIBI), "models.x.architecture"),
    (of_x(kind="routed", experts=0), "models.x.experts"),
    (of_x(kind="routed", top_k=9), "models.x.top_k"),
    (of_x(kind="routed", every=3), "models.x.every"),
    (of_x(kind="routed", capacity=0.1), "models.x.capacity"),
    (of_x(kind="routed", data="k2"), "models.x.data"),
    (of_x(kind="routed", parent="dense", seed_tokens=6000), "models.x.top_k"),
    (of_x(**UPCYCLED | {"trained": "routers"}), "models.x.trained"),
    (of_x(**BTX | {"seed_tokens": 6000}), "models.x.seed_tokens"),
    (of_x(**BTX | {"parent": "btm", "experts": 4}), "models.x.experts"),
    (of_x(**BTX | {"every": 2}), "models.x.every"),
    ({"models": {**MASKED_ROW["models"], "x": BTX | {"parent": "masked"}}}, "models.x.parent"),
    (of_x(kind="demix", schedule="restart"), "models.x.schedule"),
    (of_x(**RESTART | SWEEP), "models.x.sweep"),
    (of_x(**RESTART | {"tokens": 6143}), "models.x.tokens"),
    (of_x(**RESTART | {"seed_tokens": 383, "sequences": 1}), "models.x.seed_tokens"),
    (of_x(**BRANCHED | {"ranks": 5}), "models.x.ranks"),
    (of_x(kind="branched", **SWEEP), "models.x.sweep"),
    *(
        (of_x(**SWITCH) | {"removal": TINY["removal"] | {"merged": [row]}}, f"removal.merged: {row}")
        for row in ("x", "dense", "demix", "none")
    ),
    (ONE, "removal.merged: flexolmo"),
    (
        of_x(**FLEXOLMO | {"data": "k2"})
        | {"clusterings": {"k2": {"clusters": 3}}, "removal": TINY["removal"] | {"merged": ["x"]}},
        "removal.merged: x",
    ),
    (of_x(kind="anchored", weight_decay=0.0), "models.x.parent"),
    (of_x(kind="demix", parent=5), "models.x.parent"),
    (of_x(kind="demix", parent="hub:owner/name@main"), "models.x.parent"),
    *(
        (MASKED_ROW | {section: TINY.get(section, {}) | {key: model}}, f"{section}.{key}")
        for model, section, key in (
            ("masked", "adaptation", "model"),
            ("masked", "removal", "model"),
            ("x", "adaptation", "model"),
            ("x", "adaptation", "dense"),
            ("x", "removal", "model"),
        )
    ),
]


@pytest.mark.parametrize(
    ("sections", "subject"),
    [
        *(({"architecture": TINY["architecture"] | keys}, f"architecture.{key}") for keys, key in ARCHITECTURES),
        *SECTIONS,
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_its_key(sections: dict[str, Any], subject: str) -> None:
    with refused(subject) as error:
        completed_run(TINY | sections)
    assert "\n" not in str(error.value)
