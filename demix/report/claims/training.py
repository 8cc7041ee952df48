"""Claims about the domains that models were trained on."""

from collections.abc import Iterator

from demix.progress import so_many
from demix.report.claims.row import Row, Versus, below_dense, on_all
from demix.report.material import Material
from demix.report.needs import DENSE_UNBALANCED, SECOND_TRAINING
from demix.report.systems import BALANCED, CACHED, DENSE, NAIVE
from demix.report.verdict import Part


def _diagonal(material: Material) -> Iterator[Part]:
    from demix.report.affinity import affinities

    ratios = affinities(material.results, material.run)
    ratios = ratios[(ratios["kind"] == "training") & (ratios["domain"] != ratios["expert"])].dropna()
    best = ratios.groupby("domain")["ratio"].min()
    agreeing = int((best > 1).sum())
    sentence = (
        f"The best other expert's perplexity is {best.mean():.2f} times the own expert's on average; the own expert is "
        f"the best on {agreeing} of {so_many(len(best), 'domain')}."
        if len(best)
        else "Perplexities of single experts: no rows."
    )
    yield Part(bool(best.mean() > 1), agreeing, len(best), sentence)


def _overlap_correlates(material: Material) -> Iterator[Part]:
    import numpy as np

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


ROWS = (
    Row(
        "balancing_helps",
        "Balancing the training domains helps: Dense (Balanced) has lower perplexity than Dense {on_all}",
        "Tables 3 and 5",
        on_all(BALANCED, DENSE),
        needs=(DENSE_UNBALANCED,),
    ),
    Row(
        "in_domain_naive",
        "With the domain known, DEMix has lower perplexity than {dense} on the training domains",
        "Table 3, for 125M to 760M; at 1.3B the paper's DEMix equals Dense",
        below_dense(NAIVE, on="training"),
    ),
    Row(
        "in_domain_cached",
        "With a cached prior, for which it reads dev text of the domain, DEMix also has lower perplexity than {dense} "
        "on the training domains",
        "Table 3",
        below_dense(CACHED, on="training"),
    ),
    Row(
        "cached_against_naive",
        "On the training domains a mixture with a cached prior has lower perplexity than only the domain's own expert",
        "5.4, Table 3",
        (Versus(CACHED, NAIVE),),
        needs=(SECOND_TRAINING,),
    ),
    Row(
        "own_expert_best",
        "On each training domain the domain's own expert is the best of all",
        "Figure 2, the diagonal",
        _diagonal,
        needs=(SECOND_TRAINING,),
    ),
    Row(
        "overlap_correlates",
        "An expert predicts a training domain the better, the more text they share",
        "5.2: r = 0.40 over 64 pairs, own experts included; the paper does not print its measure of overlap",
        _overlap_correlates,
        needs=(SECOND_TRAINING,),
    ),
)
