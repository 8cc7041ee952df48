"""The paper's claims judged on made-up runs that show them, fail them, or cannot tell."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from demix.report import left_out_notes
from demix.report.claims import claims
from demix.report.claims.row import HARM
from demix.report.claims.weights import rows
from demix.report.items import all_items
from demix.report.results import Results
from demix.report.verdict import UNCHANGED, Claim, Part, claim_of, compare
from support.configs import changed
from support.synthetic_run import TRAINING, Key, build_run


def judge(path: Path, change: Callable[[Key, float], float | None] = lambda key, value: value) -> dict[str, Claim]:
    run = build_run(path, change=change)
    judged = claims(run.material())
    return {claim.name: claim for claim in judged}


def like_the_paper(key: Key, value: float) -> float:
    """Mixing and adding experts help on the training domains too, as the made-up run has it on the novel ones alone."""
    if key.model != "demix" or key.kind != "training" or key.method != "cached":
        return value
    return value * {"training": 0.95, "all": 0.93}.get(key.experts, 0.94 if key.experts.startswith("plus") else 1.0)


def test_a_run_like_the_paper_shows_every_claim(tmp_path: Path) -> None:
    judged = judge(tmp_path, like_the_paper)
    # Three domains have six orders: too few for a p value below 0.05.
    assert {name: claim.verdict for name, claim in judged.items() if not claim.shown} == {"overlap_correlates": "weak"}
    assert "DEMix (naive) 110.00 against Dense 154.00 (−28.6%), lower on 3 of 3" in judged["in_domain_naive"].numbers
    beyond = "(certain on 1 of 1)."
    assert f"Dense (Balanced) 143.00 (−23.1%), lower on 3 of 3 domains {beyond}" in judged["in_domain_naive"].numbers
    assert judged["novel_against_best_expert"].numbers.endswith(f"lower on 2 of 2 domains {beyond}")
    assert judged["removal_hurts"].numbers.endswith(f"higher on 3 of 3 domains {beyond}")
    assert "−Expert 198.00 against +Expert 105.55 (+87.6%), higher on 3 of 3" in judged["removal_hurts"].numbers
    assert "+20.0% on average" in judged["dense_dapt_forgets"].numbers
    assert "the best on 3 of 3 domains" in judged["own_expert_best"].numbers
    assert (
        "averaged over the training domains, 104.43 against training experts 105.55 (−1.1%), lower on 2 of 2 added"
        in (judged["one_added_expert_reduces"].numbers)
    )
    assert judged["order_of_priors"].numbers.count("lower on 2 of 2") == 3
    assert "over 9 pairs" in judged["overlap_correlates"].numbers
    told = {name for name, claim in judged.items() if "not told the domain" in claim.statement}
    assert told == {"novel_untold_against_dense", "demix_tempered_against_dense"}
    assert judged["demix_tempered_against_dense"].numbers.count("lower on") == 4
    assert "unchanged on 3 of 3, by construction (largest change 0%)" in judged["demix_dapt"].numbers


def test_a_row_with_another_optimizer_is_not_judged_by_the_dense_model(tmp_path: Path) -> None:
    one = {"demix_other": {"kind": "demix", "learning_rate": 1e-3}}
    two = {"demix_other": {"kind": "demix", "optimizer": {"kind": "muon"}}}
    run = build_run(tmp_path).run
    judged = [{row.name for row in rows(changed(run, models=models))} for models in (one, two)]
    assert judged[0] - judged[1] == {"demix_other_tempered_against_dense"}


def test_a_run_unlike_the_paper_shows_none(tmp_path: Path) -> None:
    def change(key: Key, value: float) -> float:
        if key.model.startswith("without-"):
            return value * 9
        if key.experts.startswith("minus-"):
            return value / 9
        if key.model == "dense_unbalanced":
            return value / 300
        if key.model.startswith("dense"):
            return value / 100 / (2 if key.model.startswith("dense-dapt") else 1)
        if key.model == "demix" and key.experts == "all" and key.method != "expert":
            return value * 4
        if key.experts.startswith("plus-"):
            return value * 3
        if key.method == "expert" and key.kind == "training" and key.expert in TRAINING:
            # The more text they share, the worse.
            return value * 9 / (1 + abs(TRAINING.index(key.expert) - TRAINING.index(key.domain)))
        # The better the prior, the worse.
        worse = {"uniform": 2, "updating": 2.5, "cached": 2.8}.get(key.method, 1)
        return value / 2 if key.method == "naive" and key.kind == "novel" else value * worse

    assert {name: claim.verdict for name, claim in judge(tmp_path, change).items() if claim.verdict != "not shown"} == {
        "overlap_correlates": "weak"
    }


def test_a_mean_against_the_majority_is_mixed(tmp_path: Path) -> None:
    """One domain that dense predicts terribly makes the mean agree while two of three domains do not."""

    def change(key: Key, value: float) -> float:
        if key.model.startswith("dense") and key.kind == "training":
            return value * 20 if key.domain == "news" else value / 2
        return value

    claim = judge(tmp_path, change)["in_domain_naive"]
    assert claim.verdict == "mixed"
    assert claim.shown is False
    assert "lower on 1 of 3 domains" in claim.numbers


def test_half_of_the_domains_is_no_majority(tmp_path: Path) -> None:
    claim = judge(tmp_path, lambda key, v: v * 5 if key.model.startswith("dense") and key.domain == "wiki" else v)
    assert claim["novel_against_dense"].verdict == "shown"
    claim = judge(
        tmp_path / "b", lambda key, v: v / 1.2 if key.model.startswith("dense") and key.domain == "wiki" else v
    )
    assert claim["novel_against_dense"].verdict == "mixed"


def test_forgetting_by_demix_would_be_told(tmp_path: Path) -> None:
    def change(key: Key, value: float) -> float:
        forgets = key.experts == "all" and key.method == "naive" and key.domain == "law"
        return value * 1.01 if forgets else value

    claim = judge(tmp_path, change)["demix_dapt"]
    assert claim.verdict == "mixed"
    assert "unchanged on 2 of 3, by construction (largest change 1%)" in claim.numbers


def test_harm_is_more_than_half_a_percent(tmp_path: Path) -> None:
    def harmed(factor: float) -> Callable[[Key, float], float]:
        return lambda key, v: v * factor if key.experts == "all" and key.method == "cached" else v

    assert judge(tmp_path / "a", harmed(1.0049))["added_experts_do_no_harm"].verdict == "shown"
    assert judge(tmp_path / "b", harmed(1.0052))["added_experts_do_no_harm"].verdict == "not shown"


BELOW, ABOVE = pd.Series({"law": 100.0, "wiki": 100.0}), pd.Series({"law": 110.0, "wiki": 120.0})


@pytest.mark.parametrize(
    ("values", "half", "verdict"),
    [
        (BELOW, 1.0, "shown"),
        # Independent errors of two domains add up to 22 / √2 = 15.6, more than the mean difference of 15.
        (BELOW, 21.0, "shown"),
        (BELOW, 22.0, "weak"),
        (ABOVE * 1.5, 1.0, "not shown"),
        (ABOVE * 1.1, 22.0, "weak"),
        (ABOVE * (1 - UNCHANGED / 2), None, "weak"),
        (ABOVE * (1 - UNCHANGED * 2), None, "shown"),
    ],
)
def test_a_difference_that_may_be_none_is_weak(values: pd.Series, half: float | None, verdict: str) -> None:
    less = values - ABOVE
    bounds = None if half is None else pd.DataFrame({"low": less - half, "high": less + half})
    part = compare("one", values, "other", ABOVE, bounds=bounds)
    assert part.verdict == verdict
    assert ("interval of the mean difference" in part.sentence) == (half is not None)


@pytest.mark.parametrize(
    ("more", "half", "verdict"),
    [
        # In percent of the others. The edge of harm is at 0.5.
        (0.4, 0.3, "weak"),
        (0.1, 0.2, "shown"),
        (0.6, 0.3, "weak"),
        (0.9, 0.2, "not shown"),
        (0.495, None, "weak"),
        (0.48, None, "shown"),
    ],
)
def test_a_difference_from_the_edge_of_harm_that_may_be_none_is_weak(
    more: float, half: float | None, verdict: str
) -> None:
    others = pd.Series({"law": 100.0})
    bounds = None if half is None else pd.DataFrame({"low": [more - half], "high": [more + half]}, index=["law"])
    part = compare("one", others + more, "other", others, allowance=HARM, bounds=bounds)
    assert part.verdict == verdict


def test_a_mean_has_an_interval_only_if_all_its_domains_have_one() -> None:
    bounds = pd.DataFrame({"low": [-99.0], "high": [99.0]}, index=["law"])
    part = compare("one", BELOW, "other", ABOVE, bounds=bounds)
    assert part.verdict == "shown"
    assert "mean difference" not in part.sentence


def test_seeds_that_disagree_make_a_claim_weak(tmp_path: Path) -> None:
    run = build_run(tmp_path)
    rows = run.results.rows
    novel_dense = (rows["model"] == "dense") & (rows["kind"] == "novel")
    other = rows[~rows["model"].str.contains("-")].assign(seed=2)
    other["perplexity"] *= np.where(novel_dense.loc[other.index], 9, 1)
    both = Results(pd.concat([rows, other], ignore_index=True))
    judged = {claim.name: claim for claim in claims(run.material(results=both))}
    assert judged["balancing_helps"].verdict == "weak"
    assert "The mean points the same way in 1 of 2 seeds." in judged["balancing_helps"].numbers
    assert judged["novel_against_dense"].verdict == "shown"
    assert "The mean points the same way in 2 of 2 seeds." in judged["novel_against_dense"].numbers
    # Experts are removed in one seed alone.
    assert judged["removal_like_never_trained"].verdict == "shown"


def part_of(verdict: str) -> Part:
    return Part(verdict == "shown", 1 if verdict == "shown" else 0, 1, "", borne=verdict != "weak")


@pytest.mark.parametrize(
    ("parts", "verdict"),
    [
        ("shown weak", "weak"),
        ("weak weak", "weak"),
        ("not_shown weak", "not shown"),
        ("shown not_shown", "mixed"),
        ("shown not_shown weak", "mixed"),
    ],
)
def test_a_weak_part_decides_only_what_nothing_speaks_against(parts: str, verdict: str) -> None:
    assert claim_of("name", "statement", *(part_of(part) for part in parts.split())).verdict == verdict


def test_a_run_has_no_claims_on_what_it_lacks(tmp_path: Path) -> None:
    run = build_run(tmp_path, novel=(), retrained=())
    judged = claims(run.material())
    assert "cannot be judged" not in {claim.verdict for claim in judged}
    assert not [claim.name for claim in judged if "novel" in claim.statement]
    assert {"balancing_helps", "in_domain_naive", "removal_hurts"} <= {claim.name for claim in judged}
    novel, removed = left_out_notes(run.run)
    assert novel.startswith(
        "This run has no novel domains: the report leaves out table5, table6, table13, rates, figure6"
    )
    assert novel.endswith("figure8, 12 claims.")
    assert removed == "This run has no model trained without a domain: the report leaves out audit, 1 claim."
    all_items()["claims"].write(run.material(), tmp_path)
    assert novel in (tmp_path / "claims.md").read_text()
    assert novel in (tmp_path / "claims.html").read_text()
    fewer = changed(run.run, models={"dense_unbalanced": None})
    against = {claim.name: claim for claim in claims(run.material(fewer, parents={}))}
    assert "balancing_helps" not in against
    assert "than Dense (Balanced) on the training domains" in against["in_domain_naive"].statement


@pytest.mark.parametrize(
    ("missing", "names"),
    [
        (lambda key: key.model.startswith("without-"), {"removal_like_never_trained"}),
        (lambda key: key.experts.startswith("minus-"), {"removal_hurts", "removal_like_never_trained"}),
        (lambda key: key.model.startswith("dense-dapt"), {"dense_dapt_forgets", "demix_dapt_against_dense_dapt"}),
        (lambda key: key.experts.startswith("plus-"), {"one_added_expert_reduces", "demix_dapt_against_dense_dapt"}),
        (lambda key: key.model == "domain_token", {"novel_against_domain_token"}),
        (lambda key: key.method == "average", {"order_of_priors"}),
    ],
)
def test_what_cannot_be_judged_is_said(tmp_path: Path, missing: Callable[[Key], bool], names: set[str]) -> None:
    judged = judge(tmp_path, lambda key, value: None if missing(key) else value)
    assert {name for name, claim in judged.items() if claim.shown is None} == names
    for name in names:
        assert "no rows" in judged[name].numbers or "no domain has all three" in judged[name].numbers


def test_files(tmp_path: Path) -> None:
    run = build_run(tmp_path, change=lambda key, v: v * 2 if key.experts == "all" else v)
    all_items()["claims"].write(run.material(), tmp_path)
    text, html = (tmp_path / "claims.md").read_text(), (tmp_path / "claims.html").read_text()
    judged = claims(run.material())
    for claim in judged:
        assert f"**{claim.verdict}**: {claim.statement} {claim.numbers}" in text
        assert claim.verdict in html
    assert f"{sum(bool(claim.shown) for claim in judged)} shown" in text
    assert "Differs from the paper" in html


def test_an_interval_around_zero_is_on_no_side() -> None:
    bounds = pd.DataFrame({"low": [-2.0, -1.0, 1.0], "high": [-1.0, 1.0, 2.0]}, ["law", "news", "code"])
    own, other = (pd.Series([value] * 3, bounds.index) for value in (1.0, 2.0))
    for higher in (False, True):
        told = compare("own", own, "other", other, higher=higher, bounds=bounds).sentence
        assert "(certain on 1 of 3)" in told
