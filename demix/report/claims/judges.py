"""Claims that no comparison of two systems decides: the functions that claims.toml names under `judge`."""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from demix.progress import so_many
from demix.report.adapting import adapting
from demix.report.affinity import affinities
from demix.report.claims.pairs import several_clusters
from demix.report.domains import mean_of, percent
from demix.report.material import Material
from demix.report.systems import (
    ByDomain,
    before_adding,
    before_dense_dapt,
    before_removal,
    without_choice,
    without_domain,
    without_expert,
)
from demix.report.verdict import UNCHANGED, Part, as_percent, compare
from demix.run.main_systems import added
from demix.run.systems import System, merged_whole


def own_expert_best(material: Material) -> Iterator[Part]:
    """Whether each domain's own expert is the best on it."""
    ratios = affinities(material.results, material.run)
    ratios = ratios[(ratios["kind"] == "training") & (ratios["domain"] != ratios["expert"])].dropna()
    yield _diagonal(ratios.groupby("domain")["ratio"].min().to_numpy(), "", "domain")


def own_cluster_best(material: Material) -> Iterator[Part]:
    """Whether each cluster's own expert is the best on the cluster's test documents, one part per model."""
    for family in several_clusters(material.run):
        model = family.model
        ratios = material.clusters.over_own(model.row, material.seed, model.domains).to_numpy(copy=True)
        np.fill_diagonal(ratios, np.nan)
        best = np.array([np.nanmin(line) for line in ratios if np.isfinite(line).any()])
        yield _diagonal(best, f"{model.label}: ", "cluster")


def _diagonal(best: np.ndarray, of: str, over: str) -> Part:
    """Whether own experts are best, by the ratios of the best other expert's perplexity to theirs."""
    agreeing = int((best > 1).sum())
    sentence = (
        f"{of}The best other expert's perplexity is {best.mean():.2f} times the own expert's on average; the own "
        f"expert is the best on {agreeing} of {so_many(len(best), over)}."
        if len(best)
        else f"{of}No perplexities of single experts."
    )
    return Part(bool(len(best) and best.mean() > 1), agreeing, len(best), sentence)


def overlap_correlates(material: Material) -> Iterator[Part]:
    found = material.relation_with_own
    r, known = -found.pearson, np.isfinite(found.pearson)
    sentence = (
        f"Pearson r = {r:.2f} over {found.pairs} pairs of a domain and an expert, of the share of bigrams with minus "
        f"the log perplexity ratio (p = {found.permutation_p:.2g} for Spearman's with whole domains permuted)."
        if known
        else "Overlap of bigrams and perplexities of single experts: no rows."
    )
    # One number over all pairs: there is no majority of domains.
    yield Part(bool(r > 0), int(r > 0), int(known), sentence, bool(found.permutation_p < 0.05))


def adapts(material: Material) -> Iterator[Part]:
    """The new experts against their parents, and the training domains before and after."""
    before, after = (found["DEMix-DAPT: own domain"] for found in adapting(material))
    parent = "the likeliest training expert" if material.averaged else "its parent"
    yield compare("Adapted expert", after, parent, before)
    own = (before_adding(material.run)[0], added(material.run)[0])
    old, new = (material.results.perplexities(one, material.training) for one in own)
    change = (new / old - 1).abs().dropna()
    agreeing = int((change <= UNCHANGED).sum())
    sentence = (
        f"Training domains by their own experts: unchanged on {agreeing} of {len(change)}, by construction "
        f"(largest change {100 * change.max():.3g}%)."
        if len(change)
        else "Training domains by their own experts: no rows."
    )
    yield Part(bool(len(change)) and agreeing == len(change), agreeing, len(change), sentence)


def forgets(material: Material) -> Iterator[Part]:
    """The mean over the training domains after each Dense-DAPT, against that before."""
    before, after = (found["Dense-DAPT: training domains"] for found in adapting(material))
    changes = (after / before - 1).dropna()
    agreeing = int((changes > 0).sum())
    sentence = (
        f"Dense-DAPT changes the mean perplexity of the training domains by {as_percent(changes.mean())} on "
        f"average ({as_percent(changes.min())} to {as_percent(changes.max())}), a rise for {agreeing} of "
        f"{so_many(len(changes), 'novel domain')}."
        if len(changes)
        else f"Dense-DAPT against {before_dense_dapt(material.run).label}: no rows."
    )
    yield Part(bool(changes.mean() > 0), agreeing, len(changes), sentence)


def one_reduces(material: Material) -> Iterator[Part]:
    """Each novel domain's expert alone added to the training experts: the mean over the training domains."""
    before, after = (found["One expert added: training domains"] for found in adapting(material))
    label = "With one more expert, averaged over the training domains,"
    yield compare(label, after, "training experts", before, over="added expert")


def like_never_trained(material: Material) -> Iterator[Part]:
    run = material.run
    systems: dict[str, ByDomain] = {
        "with": before_removal(run),
        "without": without_expert(run),
        "never": without_domain,
    }
    rows = pd.DataFrame(
        {name: material.results.perplexities(system, material.training) for name, system in systems.items()}
    ).dropna()
    if rows.empty:
        yield Part(False, 0, 0, "+Expert, −Expert and −Domain: no domain has all three.")
        return
    mean = rows.mean()
    nearer = (rows["without"] - rows["never"]).abs() < (rows["without"] - rows["with"]).abs()
    yield Part(
        abs(mean["without"] - mean["never"]) < abs(mean["without"] - mean["with"]),
        int(nearer.sum()),
        len(rows),
        f"+Expert {mean['with']:.2f}, −Expert {mean['without']:.2f}, −Domain {mean['never']:.2f}; −Expert is "
        f"nearer to −Domain than to +Expert on {int(nearer.sum())} of the {so_many(len(rows), 'domain')} that have a "
        "model trained without.",
    )


def merged_forget(material: Material) -> Iterator[Part]:
    """Whether leaving its expert out costs a domain as much in merged models as in DEMix, one part per merged model."""
    run, domains = material.run, material.training

    def costs(whole: System, without: ByDomain) -> pd.Series:
        return percent(material.own.perplexities(whole, domains), material.own.perplexities(without, domains))

    own = costs(before_removal(run), without_expert(run))
    for whole in merged_whole(run).values():
        found = costs(whole, without_choice(whole))
        agreeing = int((found >= own).sum())
        yield Part(
            mean_of(found) >= mean_of(own),
            agreeing,
            len(domains),
            f"{whole.label} {mean_of(found):+.1f}%, {run.whole.label} {mean_of(own):+.1f}%; at least as much on "
            f"{agreeing} of {so_many(len(domains), 'domain')}.",
        )
