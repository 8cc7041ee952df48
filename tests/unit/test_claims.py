"""Claims judged on results that show them, fail them, or cannot tell: the results of a run with other perplexities."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from demix.report.claims import rows
from demix.report.verdict import Claim, compare, corrected
from demix.run.run import Run
from support.configs import changed
from support.frozen import rows_of, run_data
from support.report import all_items, square_pairs, verdict, verdicts


def of(model: str, method: str, weights: str = "", experts: str = "training") -> str:
    """The rows of a system of a model's table."""
    experts = "dense" if method == "dense" else experts
    return f"(model == '{model}' and method == '{method}' and weights == '{weights}' and experts == '{experts}')"


def clustered(model: str) -> str:
    return of(model, "uniform", "cluster")


DENSE, UNBALANCED = of("dense", "dense"), of("dense_unbalanced", "dense")
BOTH, TOKEN = f"{DENSE} or {UNBALANCED}", of("domain_token", "naive")
NAIVE, AVERAGE = of("demix", "naive"), of("demix", "average")
UNIFORM, UPDATING, CACHED = (of("demix", prior, "history") for prior in ("uniform", "updating", "cached"))
ALL, ADDED = of("demix", "cached", "history", "all"), "experts.str.startswith('plus-')"
WITHOUT = "model == 'demix' and method == 'cached' and weights == 'history' and experts.str.startswith('minus-')"
ADAPTED = "model.str.startswith('dense-dapt')"
ROUTED = " or ".join(of(model, "dense") for model in ("switch", "upcycled"))
BY_DOMAIN = " or ".join(of(model, "cached", "history") for model in ("demix", "demix_seeded", "btm", "flexolmo"))
RIVALS = " or ".join(of(name, "dense") for name in ("rival", "remembers"))
# Systems from the worst to the best: what a claim says.
CLAIMS = {
    "balancing_helps": (UNBALANCED, DENSE),
    "in_domain_naive": (BOTH, NAIVE),
    "in_domain_cached": (BOTH, CACHED),
    "cached_against_naive": (NAIVE, CACHED),
    "own_expert_best": ("method == 'expert' and expert != domain", "method == 'expert' and expert == domain"),
    "novel_against_best_expert": (NAIVE, CACHED),
    "novel_against_dense": (BOTH, CACHED),
    "novel_domain_agnostic_against_dense": (BOTH, UPDATING),
    "novel_against_domain_token": (TOKEN, f"{UPDATING} or {CACHED}"),
    "order_of_priors": (AVERAGE, UNIFORM, UPDATING, CACHED),
    "demix_dapt_against_dense_dapt": (ADAPTED, ADDED),
    "dense_dapt_forgets": (ADAPTED, DENSE),
    "one_added_expert_reduces": (CACHED, ADDED),
    "removal_hurts": (WITHOUT, CACHED),
    "added_experts_help": (CACHED, ALL),
    "added_experts_against_dense_dapt": (ADAPTED, ALL),
    "added_experts_reduce": (CACHED, ALL),
    "demix_tempered_against_dense": (BOTH, of("demix", "uniform", "tempered")),
    "demix_tempered_against_rivals": (RIVALS, of("demix", "uniform", "tempered")),
    "experts_against_the_same_counts": (of("rival", "dense"), of("mixed", "dense")),
    "clusters_beat_one": (DENSE, f"{clustered('cbtm_2')} or {clustered('cbtm_3')}"),
    "random_clusters_are_worse": (clustered("cbtm_3_random"), f"{DENSE} or {clustered('cbtm_3')}"),
    "balance_helps_at_large_k": (clustered("cbtm_3_unbalanced"), clustered("cbtm_3")),
    "btm_against_dense": (DENSE, of("btm", "cached", "history")),
    "domain_experts_against_token_routed": (ROUTED, BY_DOMAIN),
    "clusters_against_upcycling": (of("upcycled", "dense"), f"{clustered('cbtm_2')} or {clustered('cbtm_3')}"),
    "seeding_helps": (CACHED, of("demix_seeded", "cached", "history")),
    "one_expert_beats_one_cluster": (DENSE, "weights == 'cluster' and top_k == 1"),
    "trained_together_against_outputs": ("weights == 'tempered' and top_k == 2", of("btx", "dense")),
}
# Those that allow half a percent more: the second must not be worse than the first.
HARMLESS = {
    "added_experts_do_no_harm": (CACHED, ALL),
    "clusters_against_metadata": (clustered("btm"), clustered("cbtm_3")),
    "few_experts_suffice": (clustered("cbtm_3"), f"{clustered('cbtm_3')} and top_k == 2"),
    "routers_are_enough": (of("btx", "dense"), of("btx_routers", "dense")),
}
ALIKE = 100.0


def own_of(run: Run) -> pd.DataFrame:
    """The results of the run's own seed."""
    return rows_of(run).query("seed == 1")


def levelled(run: Run, systems: tuple[str, ...], step: float) -> pd.DataFrame:
    """The results of the run's own seed, all alike but for `systems`: each `step` times the perplexity of the last."""
    results = own_of(run).assign(perplexity=ALIKE)
    for number, query in enumerate(systems):
        results.loc[results.eval(query), "perplexity"] = ALIKE * step**number
    return results


def judged(name: str, run: Run, results: pd.DataFrame, **frames: object) -> str:
    differences = rows_of(run, "differences").iloc[:0]
    return verdict(name, run_data(run, results=results, **{"differences": differences} | frames))


# Of these a mean over domains is one number, and no difference is too small to count.
OF_MEANS = ("one_added_expert_reduces", "dense_dapt_forgets")
OTHERS = {
    "demix_dapt",
    "overlap_correlates",
    "removal_like_never_trained",
    "merged_forget",
    "own_cluster_expert_best",
}


@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_says_what_the_perplexities_say(name: str, frozen: Run) -> None:
    systems = CLAIMS[name]
    for step, expected in ((0.9, "shown"), (1.1, "not shown"), (1 - 5e-5, "weak")):
        assert judged(name, frozen, levelled(frozen, systems, step)) == expected
    rest = levelled(frozen, systems, 0.9).query(f"not ({systems[-1]})")
    assert judged(name, frozen, rest) == "cannot be judged"
    # One domain makes the mean agree while most domains do not; half of the domains are no majority.
    mixed = levelled(frozen, systems, 1.01)
    mixed.loc[mixed["domain"].isin(["parliament", "fortunes"]) & ~mixed.eval(systems[-1]), "perplexity"] *= 9
    assert judged(name, frozen, mixed) == ("shown" if name in OF_MEANS else "mixed")


@pytest.mark.parametrize("name", HARMLESS)
def test_harm_is_more_than_half_a_percent(name: str, frozen: Run) -> None:
    for step, expected in ((0.9, "shown"), (1.0048, "shown"), (1.0052, "not shown"), (1.00501, "weak")):
        assert judged(name, frozen, levelled(frozen, HARMLESS[name], step)) == expected


def test_all_claims_of_a_run_are_tested(frozen: Run) -> None:
    of_models = {name for name, row in frozen.rows.items() if row.kind.has_experts and not row.masked}
    tempered = {f"{name}_tempered_against_{other}" for name in of_models for other in ("dense", "rivals")}
    assert verdicts(run_data(frozen)).keys() == {*CLAIMS, *HARMLESS, *OTHERS} | tempered


@pytest.mark.parametrize(
    ("name", "value", "half", "expected"),
    [
        ("cached_against_naive", 90, 1, "shown"),
        # Independent errors of three domains: their mean has an error of half / √3.
        ("cached_against_naive", 90, 17, "shown"),
        ("cached_against_naive", 90, 17.5, "weak"),
        ("cached_against_naive", 110, 1, "not shown"),
        ("cached_against_naive", 110, 17.5, "weak"),
        # The edge of harm is at 100.5.
        ("added_experts_do_no_harm", 100.1, 0.5, "shown"),
        ("added_experts_do_no_harm", 100.4, 0.5, "weak"),
        ("added_experts_do_no_harm", 100.6, 0.5, "weak"),
        ("added_experts_do_no_harm", 100.9, 0.5, "not shown"),
    ],
)
def test_a_difference_whose_interval_has_the_edge_is_weak(
    name: str, value: float, half: float, expected: str, frozen: Run
) -> None:
    first, second = (CLAIMS | HARMLESS)[name]
    results = levelled(frozen, (first, second), value / ALIKE)
    differences = rows_of(frozen, "differences").query("seed == 1 and against == 'demix_cached'")
    # Known is what another system has less than the cached prior: the one whose claim is the cached prior's is turned.
    less = value - ALIKE if second == ALL else ALIKE - value
    known = differences.query(ALL if second == ALL else NAIVE)
    known = known.assign(perplexity=less, perplexity_low=less - half, perplexity_high=less + half)
    assert judged(name, frozen, results, differences=known) == expected
    # Without that of one domain there is no interval of the mean.
    assert judged(name, frozen, results, differences=known[known["domain"] != "licenses"]) in ("shown", "not shown")


@pytest.mark.parametrize(("half", "expected"), [(1, "shown"), (40, "weak")])
def test_experts_with_the_same_counts_have_an_interval(half: float, expected: str, frozen: Run) -> None:
    name = "experts_against_the_same_counts"
    known = rows_of(frozen, "differences").query("seed == 1 and against == 'dense' and model == 'mixed'")
    known = known.assign(against="rival", perplexity_low=-10 - half, perplexity_high=-10 + half)
    assert judged(name, frozen, levelled(frozen, CLAIMS[name], 0.9), differences=known) == expected


def test_a_model_with_another_optimizer_is_not_judged_by_the_dense_model(frozen: Run) -> None:
    other = ({"learning_rate": 1e-3}, {"optimizer": {"kind": "muon", "beta1": 0.8}})
    runs = [changed(frozen, models={"demix_other": {"kind": "demix"} | keys}) for keys in other]
    judged = [{row.name for row in rows(run)} for run in runs]
    assert judged[0] - judged[1] == {"demix_other_tempered_against_dense", "demix_other_tempered_against_rivals"}


def test_seeds_that_disagree_make_a_claim_weak(frozen: Run) -> None:
    systems = CLAIMS["balancing_helps"]
    for step, expected in ((0.8, "shown"), (1.2, "weak")):
        both = [levelled(frozen, systems, 0.9), levelled(frozen, systems, step).assign(seed=2)]
        assert judged("balancing_helps", frozen, pd.concat(both)) == expected


def test_adaptation_is_judged_by_parents_and_by_what_it_leaves(frozen: Run) -> None:
    adapted = of("demix", "naive", experts="all")
    results = levelled(frozen, ("method == 'expert'", f"{adapted} and kind == 'novel'"), 0.9)
    assert judged("demix_dapt", frozen, results) == "shown"
    results.loc[results.eval(f"{adapted} and domain == 'licenses'"), "perplexity"] *= 1.01
    assert judged("demix_dapt", frozen, results) == "mixed"
    results.loc[results.eval(f"{adapted} and kind == 'novel'"), "perplexity"] *= 2
    assert judged("demix_dapt", frozen, results) == "mixed"
    assert judged("demix_dapt", frozen, results[~results.eval(adapted)]) == "cannot be judged"


@pytest.mark.parametrize(("without", "expected"), [(150, "shown"), (120, "not shown")])
def test_removal_is_judged_by_what_is_nearer(without: float, expected: str, frozen: Run) -> None:
    results = levelled(frozen, (CACHED,), 1)
    results.loc[results.eval(WITHOUT), "perplexity"] = without
    results.loc[results["model"] == "without-scripture", "perplexity"] = 160
    assert judged("removal_like_never_trained", frozen, results) == expected
    rest = results[results["model"] != "without-scripture"]
    assert judged("removal_like_never_trained", frozen, rest) == "cannot be judged"


@pytest.mark.parametrize(
    ("factors", "expected"),
    [((2.0, 2.5, 3.0), "shown"), ((1.1, 1.1, 1.1), "not shown"), ((9.0, 1.2, 1.1), "mixed")],
)
def test_merged_models_forget_as_demix_does(factors: tuple[float, ...], expected: str, frozen: Run) -> None:
    results = levelled(frozen, (CACHED, WITHOUT), 1.3)
    for name, factor in zip(frozen.training, factors, strict=True):
        lost = (results["experts"] == f"minus-{name}") & ~results.eval(WITHOUT)
        results.loc[lost, "perplexity"] = ALIKE * factor
    assert judged("merged_forget", frozen, results) == expected


@pytest.mark.parametrize(("slope", "domains", "expected"), [(-1, 5, "shown"), (-1, 3, "weak"), (1, 5, "not shown")])
def test_affinity_is_judged_by_orders_of_domains(slope: float, domains: int, expected: str, frozen: Run) -> None:
    """Three domains have six orders: too few for a p value below 0.05."""
    overlap = np.random.default_rng(0).uniform(0, 1, domains**2)
    names = [f"d{number}" for number in range(domains)]
    pairs = square_pairs(names, np.exp(slope * overlap), overlap)
    assert judged("overlap_correlates", frozen, own_of(frozen), pairs={"training": pairs}) == expected


@pytest.mark.parametrize(("factor", "expected"), [(1.1, "shown"), (0.9, "not shown")])
def test_experts_of_clusters_are_judged_on_their_clusters(factor: float, expected: str, frozen: Run) -> None:
    clusters = run_data(frozen).clusters
    others = clusters.losses["cluster"].map("c{:02}".format) != clusters.losses["expert"]
    losses = clusters.losses.assign(nats=4.0 + others * np.log(factor))
    verdict = judged("own_cluster_expert_best", frozen, own_of(frozen), clusters=replace(clusters, losses=losses))
    assert verdict == expected


def test_claims_are_significant_after_holms_correction_in_each_family() -> None:
    """p of .005, .01, .03 and .04 become .02, .03, .06 and .06; a claim has the largest p of its comparisons."""
    values, names, half = pd.Series([1.0, 1.0]), pd.Series([2.0, 2.0]), 0.7
    part = compare("A", values, "B", names, bounds=pd.DataFrame({"low": [-1 - half] * 2, "high": [-1 + half] * 2}))
    assert part.p == pytest.approx(2 * stats.norm.sf(1 / (half / np.sqrt(2) / 1.96)), rel=1e-9)

    def claim(name: str, *found: float, published: bool = True) -> Claim:
        return Claim(name, "", tuple(replace(part, p=p, rival=f"rival of {p}") for p in found), published)

    judged = [claim("a", 0.01), claim("b", 0.001, 0.04), claim("c", 0.03), claim("d", 0.005), claim("e", np.nan)]
    found = corrected([*judged, claim("f", 0.04, published=False)])
    adjusted = {one.name: one.adjusted for one in found}
    assert adjusted == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02, "e": np.nan, "f": 0.04}, nan_ok=True)
    assert [one.verdict for one in found] == ["shown", "weak", "weak", "shown", "shown", "shown"]
    assert found[0].said == "shown compared with rival of 0.01"
    lost = replace(part, mean_agrees=False, agreeing=0, rival="the winner")
    weak, won = replace(part, significant=False), found[0].parts
    said = [replace(found[0], parts=parts).said for parts in ((*won, lost), (lost,), (*won, weak), (lost, weak))]
    assert said == [f"mixed: {found[0].said}", "not shown", "weak", "weak"]


def test_the_page_counts_certain_domains(frozen: Run, tmp_path: Path) -> None:
    """An interval around zero is on no side."""
    results = levelled(frozen, CLAIMS["cached_against_naive"], 0.9)
    known = rows_of(frozen, "differences").query(f"seed == 1 and against == 'demix_cached' and {NAIVE}")
    half = known["domain"].map({"parliament": 1, "scripture": 10, "licenses": 11}).fillna(1)
    known = known.assign(perplexity_low=10 - half, perplexity_high=10 + half)
    all_items()["claims"].write(run_data(frozen, results=results, differences=known), tmp_path)
    (told,) = re.findall(
        '<tbody id="cached_against_naive">(.*?)</tbody>', (tmp_path / "claims.html").read_text(), re.DOTALL
    )
    assert re.findall("<td>(.*?)</td>", told) == ["−10.0%", "−15.0% to −5.0%", "3 of 3 (1 of 3)"]
    assert ">✓ shown compared with DEMix (naive)<" in told
