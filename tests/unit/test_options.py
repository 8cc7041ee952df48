"""Options of `architecture`: which fit one another, rows with options of their own, and what stays as it was."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from demix.config.architecture import Architecture
from demix.errors import DemixError
from demix.plan.cost import plan_training
from demix.plan.flops import HARDWARE
from demix.report.adapting import changed_bytes
from demix.run.check import completed_run
from demix.run.models import Model
from demix.run.rules import RunRules
from demix.run.run import Run

TINY = yaml.safe_load((Path(__file__).parents[1] / "workflow" / "tiny.yaml").read_text())
ALIBI = {"position": "alibi"}
MASKED = {"attention": "bidirectional", "objective": "mlm"}


def tiny(sizes: dict[str, Any] | None = None, **rows: Any) -> Run:
    config = copy.deepcopy(TINY) | {"models": rows}
    config["architecture"] |= sizes or {}
    return completed_run(config)


def row_of(run: Run, name: str) -> Model:
    return next(model for model in run.planned if model.name == name)


def test_a_row_has_the_options_of_its_own_and_others_stay_as_they_are() -> None:
    plain, run = tiny(), tiny(demix={"architecture": ALIBI}, far={"kind": "dense", "architecture": ALIBI})
    rules, before = RunRules(run), RunRules(plain)
    assert run.config.values["architecture"] == plain.config.values["architecture"] == TINY["architecture"]
    for name in ("dense", "dense_unbalanced", "domain_token"):
        assert rules.training_settings(row_of(run, name)) == before.training_settings(row_of(plain, name))
    for name in ("demix", "far", "without-licenses"):
        given = json.loads(rules.training_settings(row_of(run, name)))["architecture"]
        assert given == TINY["architecture"] | ALIBI
    assert row_of(run, "demix").architecture.position == "alibi"
    assert row_of(run, "dense-dapt-fantasy").architecture.position == "learned"
    run = tiny(dense={"architecture": ALIBI})
    assert row_of(run, "dense-dapt-fantasy").architecture.position == "alibi"


def test_a_row_overrides_the_section_and_a_branch_takes_its_parents_options() -> None:
    branches = {
        "seeded": {"kind": "demix", "parent": "dense", "seed_tokens": 6000},
        "up": {"kind": "routed", "experts": 4, "top_k": 2, "parent": "dense", "seed_tokens": 6000},
        "same": {"kind": "branched", "parent": "dense", "seed_tokens": 6000, "architecture": {"head": "tied"}},
    }
    run = tiny(ALIBI, dense={"architecture": {"position": "learned"}}, **branches)
    rules = RunRules(run)
    positions = {model.name: model.architecture.position for model in run.trained}
    assert positions["demix"] == "alibi"
    assert {positions[name] for name in ("dense", *branches)} == {"learned"}
    given = [json.loads(rules.training_settings(row_of(run, name)))["architecture"] for name in ("dense", "same")]
    assert given[0] == given[1]
    # The plan counts the parameters of the adapted row.
    assert {plan.name for plan in plan_training(run, None, HARDWARE["cpu"])} >= {"same-licenses", "up"}


@pytest.mark.parametrize(
    ("sizes", "rows", "told"),
    [
        ({"attention": "bidirectional"}, {}, "architecture.attention: is bidirectional, and the objective is clm"),
        ({"objective": "mlm"}, {}, "architecture.attention: is causal, and the objective is mlm"),
        ({"alibi": "symmetric"}, {}, "architecture.alibi: is given to position learned and attention causal"),
        (ALIBI | {"alibi": "asymmetric"}, {}, "architecture.alibi: is given to position alibi and attention causal"),
        (MASKED | {"alibi": "symmetric"}, {}, "is given to position learned and attention bidirectional"),
        ({}, {"demix": {"architecture": {"objective": "mlm"}}}, "config key models.demix.architecture.attention: is c"),
        ({"position": "rotary"}, {}, "config key architecture.position: is 'rotary'; allowed is one of learned, sinu"),
        ({"mask": "learned"}, {}, "architecture.mask: is learned, and the objective is clm; leave it out"),
        ({"head": "roberta"}, {}, "architecture.head: is roberta, and the objective is clm; leave it out"),
        ({"clap_inputs": "plain"}, {}, "architecture.clap_inputs: is given to the head tied; leave it out"),
        ({"position": "sinusoidal", "width": 33, "heads": 3}, {}, "architecture.position: is sinusoidal, and width is"),
        ({"norm_place": "post", "residual": "parallel"}, {}, "architecture.norm_place: is post, and residual is"),
        ({}, {"demix": {"architecture": {"layers": 3}}}, "config key models.demix.architecture.layers: is not known"),
        (
            {},
            {"seeded": {"kind": "demix", "parent": "dense", "seed_tokens": 6000, "architecture": ALIBI}},
            "config key models.seeded.architecture.position: is alibi where its parent dense has learned",
        ),
        (
            {},
            {"up": {"kind": "routed", "top_k": 2, "parent": "dense", "seed_tokens": 6000, "architecture": ALIBI}},
            "config key models.up.architecture.position: is alibi where its parent dense has learned",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused_in_one_line(sizes: Any, rows: Any, told: str) -> None:
    with pytest.raises(DemixError) as error:
        tiny(sizes, **rows)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_a_description_names_only_options_that_differ_from_the_usual_ones() -> None:
    sizes = {"layers": 2, "width": 32, "heads": 2, "context": 32}
    assert Architecture(**sizes, position="learned", head="tied", objective="clm").described == sizes
    masked = Architecture(**sizes, **MASKED, **ALIBI, alibi="asymmetric", head="clap")
    assert masked.described == sizes | MASKED | ALIBI | {"alibi": "asymmetric", "head": "clap"}
    assert Architecture(**masked.described) == masked
    assert Architecture(2, 32, 2, 32) == Architecture(**sizes)


def test_adaptation_changes_the_bytes_of_its_own_rows() -> None:
    sizes = {name: changed_bytes(tiny(**{name: {"architecture": ALIBI}})) for name in ("demix", "dense")}
    plain = changed_bytes(tiny())
    assert sizes["demix"] == plain, "an expert has no positions"
    (dense,) = {name for name in plain if "Dense" in name}
    assert plain[dense] - sizes["dense"][dense] == 4 * 32 * 32
