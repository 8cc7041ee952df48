"""How well each expert predicts each domain (Figure 2), and the correlation with the bigrams in common."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from demix.report.results import Results
from demix.run.run import Run

PERMUTATIONS = 9999
# So many values are permuted at a time, a few copies of which are in memory.
PERMUTED_AT_ONCE = 10_000_000


@dataclass(frozen=True)
class Relation:
    """Correlation of the log perplexity ratio with the bigram overlap, over `pairs` of one of `domains` and an expert.

    Values are NaN where pairs are too few, incomplete or constant. Pairs are dependent, since each domain and each
    expert is in several. So the only p value, `permutation_p`, is that of `spearman` under permutations of whole
    domains; it is NaN for one domain, which has no other order.
    """

    kind: str
    domains: int
    pairs: int
    spearman: float
    pearson: float
    permutation_p: float


def affinities(results: Results, run: Run) -> pd.DataFrame:
    """Columns kind, domain, expert, ratio: perplexity of an expert on a domain, divided by the reference perplexity.

    The reference is the domain's own expert on a training domain and the best expert on a novel domain. The ratio is
    NaN where the run has no such rows.
    """
    training = list(run.training)
    rows = []
    for kind, domains in (("training", training), ("novel", run.novel)):
        for domain in domains:
            scores = results.expert_perplexities("demix", domain, training)
            if scores.isna().all():
                scores = results.expert_perplexities("demix", domain, training, "training")
            reference = scores[domain] if kind == "training" else scores.min()
            rows += [(kind, domain, expert, ratio) for expert, ratio in (scores / reference).items()]
    return pd.DataFrame(rows, columns=["kind", "domain", "expert", "ratio"])


def with_overlap(ratios: pd.DataFrame, overlap: pd.DataFrame) -> pd.DataFrame:
    """`ratios` with the column overlap (0 to 1), NaN where no overlap was counted."""
    return ratios.merge(overlap[["domain", "expert", "overlap"]], on=["domain", "expert"], how="left", validate="1:1")


def relations(pairs: pd.DataFrame) -> list[Relation]:
    """One relation over the training domains, each without the domain's own expert, and one over the novel domains."""
    return [_relation(str(kind), rows) for kind, rows in pairs.groupby("kind", sort=False)]


def relation_with_own(pairs: pd.DataFrame) -> Relation:
    """The relation over all pairs of the training domains, own experts included, as in section 5.2 of the paper."""
    return _relation("training", pairs[pairs["kind"] == "training"], own=True)


def _relation(kind: str, rows: pd.DataFrame, *, own: bool = False) -> Relation:
    from scipy import stats

    names, experts = ([*rows[name].unique()] for name in ("domain", "expert"))
    ratio, shared = (
        rows.pivot(index="domain", columns="expert", values=name).reindex(index=names, columns=experts).to_numpy()
        for name in ("ratio", "overlap")
    )
    ratio, square = np.log(ratio), kind == "training"
    used = ~np.eye(len(ratio), dtype=bool) if square and not own else np.ones(ratio.shape, bool)
    domains, count = len(ratio), int(used.sum())
    known = np.isfinite(ratio[used]) & np.isfinite(shared[used])
    if count < 3 or not known.all() or np.ptp(ratio[used]) == 0 or np.ptp(shared[used]) == 0:
        return Relation(kind, domains, int(known.sum()), *[float("nan")] * 3)
    found = (rank(shared[used], ratio[used]).statistic for rank in (stats.spearmanr, stats.pearsonr))
    # A permutation of whole domains reorders the ranks without changing them: ranks and their spread are computed once.
    ranks, others = np.zeros(ratio.shape), stats.rankdata(shared[used])
    ranks[used] = stats.rankdata(ratio[used])
    reference = (others - others.mean()) / others.std() / ranks[used].std() / count

    def permuted(orders: np.ndarray, axis: int = -1) -> np.ndarray:
        """The correlation for each of `orders` [..., domains]."""
        orders = np.moveaxis(orders, axis, -1).astype(int)
        moved = ranks[orders[..., np.newaxis], orders[..., np.newaxis, :]] if square else ranks[orders]
        return np.asarray(moved[..., used] @ reference)

    permutation_p = float("nan")
    if domains > 1:
        test = stats.permutation_test(
            (np.arange(domains),),
            permuted,
            permutation_type="pairings",
            vectorized=True,
            n_resamples=PERMUTATIONS,
            batch=min(1000, max(1, PERMUTED_AT_ONCE // ratio.size)),
            rng=0,
        )
        permutation_p = test.pvalue
    return Relation(kind, domains, count, *map(float, (*found, permutation_p)))
