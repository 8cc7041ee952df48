"""The paper's claims judged on made-up runs that show them, fail them, or cannot tell."""

from collections.abc import Callable
from pathlib import Path

import pytest

from demix.report.claims import Claim, claims, write_claims
from support.synthetic_run import Key, build_run


def judge(path: Path, change: Callable[[Key, float], float | None] = lambda key, value: value) -> dict[str, Claim]:
    run = build_run(path, change=change)
    return {claim.name: claim for claim in claims(run.results, run.differences, run.parents, run.config)}


def test_a_run_like_the_paper_shows_every_claim(tmp_path: Path) -> None:
    judged = judge(tmp_path)
    assert [claim.name for claim in judged.values() if not claim.shown] == []
    assert "DEMix (naive) 110.00 against Dense 154.00 (−28.6%), lower on 3 of 3" in judged["in_domain_naive"].numbers
    beyond = "and so is the whole 95% interval of the difference on 1 of 1."
    assert f"Dense (Balanced) 143.00 (−23.1%), lower on 3 of 3 domains, {beyond}" in judged["in_domain_naive"].numbers
    assert judged["novel_against_best_expert"].numbers.endswith(f"lower on 2 of 2 domains, {beyond}")
    assert judged["removal_hurts"].numbers.endswith(f"higher on 3 of 3 domains, {beyond}")
    assert "−Expert 198.00 against +Expert 111.10 (+78.2%), higher on 3 of 3" in judged["removal_hurts"].numbers
    assert "+20.0% on average" in judged["dense_dapt_forgets"].numbers
    assert "unchanged on 3 of 3, by construction (largest change 0%)" in judged["demix_dapt"].numbers


def test_a_run_unlike_the_paper_shows_none(tmp_path: Path) -> None:
    def change(key: Key, value: float) -> float:
        if key.model.startswith("without-"):
            return value * 9
        if key.experts.startswith("minus-"):
            return value / 9
        if key.model.startswith("dense"):
            return value / 100 / (2 if key.model.startswith("dense-dapt") else 1)
        if key.model == "demix" and key.experts == "all" and key.method != "expert":
            return value * 3
        return value / 2 if key.method == "naive" and key.kind == "novel" else value

    assert {
        name: claim.verdict for name, claim in judge(tmp_path, change).items() if claim.verdict != "not shown"
    } == {}


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

    assert judge(tmp_path / "a", harmed(1.004))["added_experts_do_no_harm"].verdict == "shown"
    assert judge(tmp_path / "b", harmed(1.006))["added_experts_do_no_harm"].verdict == "not shown"


@pytest.mark.parametrize(
    ("missing", "names"),
    [
        (lambda key: key.model.startswith("without-"), {"removal_like_never_trained"}),
        (lambda key: key.experts.startswith("minus-"), {"removal_hurts", "removal_like_never_trained"}),
        (lambda key: key.model.startswith("dense-dapt"), {"dense_dapt_forgets"}),
        (lambda key: key.experts == "all", {"demix_dapt", "added_experts_help", "added_experts_do_no_harm"}),
    ],
)
def test_what_cannot_be_judged_is_said(tmp_path: Path, missing: Callable[[Key], bool], names: set[str]) -> None:
    judged = judge(tmp_path, lambda key, value: None if missing(key) else value)
    assert {name for name, claim in judged.items() if claim.shown is None} == names
    for name in names:
        assert "no rows" in judged[name].numbers or "no domain has all three" in judged[name].numbers


def test_files(tmp_path: Path) -> None:
    run = build_run(tmp_path, change=lambda key, v: v * 2 if key.experts == "all" else v)
    write_claims(run.results, run.differences, run.parents, run.config, tmp_path)
    text, html = (tmp_path / "claims.md").read_text(), (tmp_path / "claims.html").read_text()
    judged = claims(run.results, run.differences, run.parents, run.config)
    for claim in judged:
        assert f"**{claim.verdict}**: {claim.statement} {claim.numbers}" in text
        assert claim.verdict in html
    assert f"{sum(bool(claim.shown) for claim in judged)} shown" in text
    assert "Differs from the paper" in html
