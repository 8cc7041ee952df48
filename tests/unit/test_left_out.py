"""Merged models that lose one domain's expert after the other: what is scored, planned, evaluated, judged, refused."""

import copy
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from demix.errors import DemixError
from demix.plan.jobs import plan_jobs
from demix.report.claims import claims
from demix.report.items.merged_removal import make
from demix.report.results import Results
from demix.report.systems import without_choice
from demix.run.check import completed_run
from demix.run.run import Run
from demix.run.scoring import ScoringPart, scoring_jobs
from demix.run.systems import evaluated, merged_whole
from support.configs import changed
from support.families_run import build_families
from support.synthetic_run import TRAINING

TINY = yaml.safe_load((Path(__file__).parents[1] / "workflow" / "tiny.yaml").read_text())
ROWS = {
    "demix": {"merged_routed": True},
    "btx": {"kind": "routed", "parent": "demix", "tokens": 6000},
    "switch": {"kind": "routed", "experts": 4},
    "on_clusters": {"kind": "demix", "data": "k2", "merged_routed": True},
}


def tiny(*merged: str, **more: Any) -> Run:
    removal = {"removal": TINY["removal"] | {"merged": list(merged)}}
    config = copy.deepcopy(TINY) | {"models": ROWS, "clusterings": {"k2": {"clusters": 2}}, "seeds": [1, 2]}
    return completed_run(config | removal | more)


def parts(run: Run, *, apart: bool = False) -> list[ScoringPart]:
    return [part for job in scoring_jobs(run, apart=apart) for part in job.parts]


@pytest.mark.parametrize("apart", [False, True])
def test_each_training_domain_is_scored_without_its_expert_once(apart: bool) -> None:
    run, before = tiny("demix", "btx"), tiny()
    new = [part for part in parts(run, apart=apart) if part not in parts(before, apart=apart)]
    assert sorted((part.folder, part.domains, part.without, part.splits) for part in new) == sorted(
        (f"{folder}@minus-{name}", (name,), name, ("test",))
        for folder in ("demix-routed", "btx")
        for name in run.training
    )
    assert all(part.settings({})["without"] == part.without for part in new)
    assert len(parts(run, apart=apart)) == len(parts(before, apart=apart)) + len(new)
    rules = {job.rule for job in scoring_jobs(run, apart=apart)} - {
        job.rule for job in scoring_jobs(before, apart=apart)
    }
    assert rules == ({"score_demix_routed_left_out", "score_btx_left_out"} if apart else set())
    now, then = ({rule for job in plan_jobs(one, "cpu") for rule in job.rules} for one in (run, before))
    assert now == then


def test_it_is_evaluated_as_the_model_with_a_set_of_experts_of_its_own() -> None:
    run, before = tiny("demix", "btx"), tiny()
    for domain in run.domains:
        now, then = evaluated(run, domain), evaluated(before, domain)
        assert now[: len(then)] == then
        assert [(one.model, one.folder, one.merged, one.without, one.seed) for one in now[len(then) :]] == [
            (model, f"{folder}@minus-{domain}", merged, domain, 1)
            for model, folder, merged in (("demix", "demix-routed", "routed"), ("btx", "btx", ""))
            if domain in run.training
        ]
        assert all(("without" in one.told) == bool(one.without) for one in now)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("switch", "is no row with a merged model of domains; name a row with merged_routed, or one that trains"),
        ("dense", "is no row with a merged model of domains"),
        ("on_clusters", "is no row with a merged model of domains"),
        ("btz", "is no row with a merged model of domains"),
    ],
)
def test_what_has_no_expert_of_a_domain_to_lose_is_refused(row: str, told: str) -> None:
    with pytest.raises(DemixError, match=rf"^config key removal\.merged: {row}: {told}"):
        tiny("demix", row)


def test_a_merged_model_of_two_experts_keeps_them() -> None:
    domains = copy.deepcopy(TINY["domains"])
    domains["training"] = dict(list(domains["training"].items())[:2])
    with pytest.raises(DemixError, match=r"merged: demix: has too few experts to lose one; leave it out, or add"):
        tiny("demix", domains=domains, removal={"merged": ["demix"]})


def test_what_leaving_out_costs_is_in_the_table_and_judged(tmp_path: Path) -> None:
    """Rows of the results as plain loops read them."""
    made = build_families(tmp_path)
    run = changed(made.run, removal=made.keys["removal"] | {"merged": ["demix_seeded"]})
    (whole,) = merged_whole(run).values()
    assert without_choice(whole)("law").experts == "minus-law"
    rows = made.results.rows
    merged = rows[(rows["model"] == "demix_seeded") & (rows["method"] == "merged") & rows["domain"].isin(TRAINING)]
    removed = (rows["model"] == "demix") & rows["experts"].str.startswith("minus-")
    own = rows[removed].set_index("domain")["perplexity"]
    for factors, verdict in (((2.0, 2.5, 3.0), "shown"), ((1.1, 1.1, 1.1), "not shown"), ((9.0, 1.2, 1.1), "mixed")):
        lost = merged.assign(experts="minus-" + merged["domain"], perplexity=merged["perplexity"] * list(factors))
        material = made.material(run, results=Results(pd.concat([rows, lost], ignore_index=True)))
        table = make(material).frame
        name = next(label for label in table.index if label != run.whole.label)
        mean = sum(100 * (factor - 1) for factor in factors) / 3
        assert table.loc[name, "Change, %"] == pytest.approx(mean)
        assert table.loc[name, [f"{domain}, %" for domain in TRAINING]].tolist() == pytest.approx(
            [100 * (factor - 1) for factor in factors]
        )
        assert table.loc[name, "Without the domain's"] == pytest.approx(lost["perplexity"].mean())
        assert table.loc[run.whole.label, "Without the domain's"] == pytest.approx(own[list(TRAINING)].mean())
        (claim,) = [claim for claim in claims(material) if claim.name == "merged_forget"]
        assert claim.verdict == verdict, claim.numbers
        assert f"{mean:+.1f}%" in claim.numbers
