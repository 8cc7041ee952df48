"""The data of a run that a report reads, each at its first use: experts on domains, clusters, costs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from demix.files import check_sealed, read_json
from demix.query.ask import Answers
from demix.query.views import QueryRun
from demix.report.needs import SUITES
from demix.report.read import (
    FILES,
    MAX_SHOWN,
    Bounds,
    Domains,
    Parent,
    Results,
    bounds_of,
    domains_of,
    read_parents,
    read_results,
    read_rows,
)
from demix.run.models import Model
from demix.run.run import Run
from demix.run.systems import clustered, ngram_folders

PERMUTATIONS = 9999


@dataclass(frozen=True)
class Relation:
    """Correlation of the log perplexity ratio with the bigram overlap, over `pairs` of one of `domains` and an expert.

    Values are NaN if pairs are too few, incomplete or constant. Pairs are dependent, since each domain and each expert
    is in several pairs. The only p value, `permutation_p`, is therefore that of `spearman` under permutations of whole
    domains; it is NaN for one domain, which has no other order.
    """

    kind: str
    domains: int
    pairs: int
    spearman: float
    pearson: float
    permutation_p: float


@dataclass(frozen=True, eq=False)
class Pairs:
    """Tables with a row for each domain of a kind and a column for each training expert.

    `ratio` is the perplexity of the expert on the domain, divided by the reference perplexity: that of the own expert
    of a training domain, and of the best expert on a novel domain. `overlap` is the share of bigrams (0 to 1). NaN
    where the run has no such rows.
    """

    ratio: pd.DataFrame
    overlap: pd.DataFrame


def ratios(results: Results, run: Run, kind: str) -> pd.DataFrame:
    """`Pairs.ratio` for the domains of a kind."""
    training, names = list(run.training), list(run.training if kind == "training" else run.novel)
    every, own = (results.expert_perplexities("demix", names, training, label) for label in ("all", "training"))
    scores = every.where(every.notna().any(axis=1), own)
    return scores.div(np.diag(scores) if kind == "training" else scores.min(axis=1), axis=0)


def relation(pairs: Pairs, kind: str, *, own: bool = False) -> Relation:
    """The relation over the domains of a kind.

    Pairs of a training domain with its own expert are left out, or included with `own` (section 5.2 of the paper).
    """
    from scipy import stats

    ratio, shared, square = pairs.ratio.to_numpy(), pairs.overlap.to_numpy(), kind == "training"
    used = ~np.eye(len(ratio), dtype=bool) if square and not own else np.ones(ratio.shape, bool)
    domains, count = len(ratio), int(used.sum())
    known = np.isfinite(ratio[used]) & np.isfinite(shared[used])
    if count < 3 or not known.all() or np.ptp(ratio[used]) == 0 or np.ptp(shared[used]) == 0:
        return Relation(kind, domains, int(known.sum()), *[float("nan")] * 3)
    found = (rank(shared[used], np.log(ratio[used])).statistic for rank in (stats.spearmanr, stats.pearsonr))
    # A permutation of whole domains reorders the ranks without changing them: only the sum of products depends on it.
    ranks, others = np.zeros(ratio.shape), np.zeros(ratio.shape)
    ranks[used], others[used] = (stats.rankdata(values) for values in (ratio[used], shared[used]))
    others[used] -= others[used].mean()

    def permuted(order: np.ndarray) -> float:
        order = order.astype(int)
        return float(np.vdot(others, ranks[np.ix_(order, order)] if square else ranks[order]))

    permutation_p = float("nan")
    if domains > 1:
        how = {"permutation_type": "pairings", "n_resamples": PERMUTATIONS, "batch": 100, "rng": 0}
        permutation_p = stats.permutation_test((np.arange(domains),), permuted, vectorized=False, **how).pvalue
    return Relation(kind, domains, count, *map(float, (*found, permutation_p)))


DOCUMENTS = """
select clustering, domain, cluster, count(*)::double as documents from clusters where split = 'train' group by all
"""
# The number of test documents of each cluster, and this number divided by the mean over clusters.
SIZES = """
select clustering, cluster, count(*)::double as documents,
    count(*) / avg(count(*)) over (partition by clustering) as share
from clusters where split = 'test' group by clustering, cluster order by all
"""
LOSSES = """
select model, seed, clustering, cluster, expert, sum(nll) / sum(tokens) as nats
from losses join clusters using (run, domain, split, document) group by all
"""


@dataclass(frozen=True, eq=False)
class Clusters:
    """The clusters on which the models of a run train: the rows of `DOCUMENTS`, `LOSSES` and `SIZES`.

    `cluster` is a number, the place of the cluster's expert in the model's list of experts.
    """

    documents: pd.DataFrame
    losses: pd.DataFrame
    sizes: pd.DataFrame

    def over_own(self, model: Model, seed: int) -> pd.DataFrame:
        """Perplexity of each expert (columns) on each cluster (rows), divided by that of the cluster's own expert.

        These are the numbers of Figure 15. NaN for a cluster without test documents.
        """
        names, known = model.domains, {"model": model.row, "seed": seed, "clustering": model.data}
        rows = self.losses[(self.losses[[*known]] == pd.Series(known)).all(axis=1)]
        table = rows.pivot(index="cluster", columns="expert", values="nats").astype("float64")
        table = table.reindex(index=range(len(names)), columns=names).set_axis(names)
        return np.exp(table.sub(np.diag(table), axis=0))

    def shares(self, clustering: str, domains: list[str], names: tuple[str, ...]) -> pd.DataFrame:
        """The share of each domain's training documents (rows) that are in each cluster (columns): Figure 16."""
        rows = self.documents[self.documents["clustering"] == clustering]
        table = rows.pivot(index="domain", columns="cluster", values="documents").fillna(0)
        table = table.reindex(index=domains, columns=range(len(names)), fill_value=0).set_axis(names, axis=1)
        return table.div(table.sum(axis=1), axis=0)


# Without the report itself and what follows, and rounded, since last digits depend on the order in which files are
# read: a report made again has the same bytes.
COST = """
select rule, count(*)::double as "Jobs", sum(seconds) / 60 as "Minutes",
    round(sum(cpu_seconds) / 60, 6) as "CPU minutes", max(max_rss_mib) as "Largest job, MiB"
from benchmarks where rule not in ('report', 'track') group by rule order by "CPU minutes" desc, rule
"""


@dataclass(frozen=True, eq=False)
class RunData:
    """A run as tables, figures and claims read it.

    `given` holds values to use instead of those of the run's files, by the names of properties.
    """

    run: Run
    given: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        vars(self).update(self.given)

    def rows(self, kind: str) -> pd.DataFrame:
        """The rows of a kind of file (`FILES`); empty if the run's config needs no such file."""
        if kind not in vars(self):
            file = FILES[kind]
            names = self.run.training if file.need is None or file.need.met(self.run) else ()
            paths = dict.fromkeys(self.run.folder / file.path.format(name) for name in names)
            shown = (*self.training[:MAX_SHOWN], *self.novel[:MAX_SHOWN]) if file.only_shown else None
            parts = [read_rows(path, kind, shown) for path in paths]
            vars(self)[kind] = pd.concat(parts, ignore_index=True) if len(parts) > 1 else (*parts, pd.DataFrame())[0]
        found: pd.DataFrame = vars(self)[kind]
        return found

    @cached_property
    def training(self) -> list[str]:
        """The training domains in the config's order."""
        return list(self.run.training)

    @cached_property
    def novel(self) -> list[str]:
        """The novel domains in the config's order."""
        return list(self.run.novel)

    @cached_property
    def kinds(self) -> list[Domains]:
        """The kinds of domains that the run has."""
        return domains_of(self.run)

    @cached_property
    def results(self) -> Results:
        """The rows of results.parquet."""
        return read_results(self.run.folder / "results.parquet")

    @cached_property
    def suites(self) -> Results:
        """The rows of suites.parquet."""
        return read_results(self.run.folder / "suites.parquet")

    @cached_property
    def own(self) -> Results:
        """The results of the run's own seed.

        Experts are added, removed and varied only for this seed: tables of them must not mix in other seeds.
        """
        return self.results.of_seed(self.run.seed)

    @cached_property
    def bounds(self) -> Bounds:
        """The intervals of `differences`."""
        return bounds_of(self.rows("differences"))

    @cached_property
    def pairs(self) -> dict[str, Pairs]:
        """Each training expert on each domain, by kind of domains."""
        rows = self.rows("overlap")[["domain", "expert", "overlap"]]
        overlap = rows.pivot(index="domain", columns="expert", values="overlap").astype("float64")
        return {
            one.kind: Pairs(
                ratios(self.own, self.run, one.kind), overlap.reindex(index=one.names, columns=self.training)
            )
            for one in self.kinds
        }

    @cached_property
    def parents(self) -> dict[str, Parent]:
        """The start of the expert of each novel domain."""
        return read_parents(self.run.folder / "models" / self.run.receiver.row / "experts", self.novel)

    @cached_property
    def averaged(self) -> bool:
        """Whether an expert of a novel domain started as the average of all training experts."""
        return any(parent.averaged for parent in self.parents.values())

    @cached_property
    def clusters(self) -> Clusters:
        """The clusters on which the run's models train."""
        return Clusters(
            *(self._asked(query) if clustered(self.run) else pd.DataFrame() for query in (DOCUMENTS, LOSSES, SIZES))
        )

    @cached_property
    def ngrams(self) -> dict[str, int]:
        """The number of n-grams that each of `evaluation.ngrams` counts, by the folder of its score tables.

        A copy of a run without its score tables has no such numbers.
        """
        folders = [ngram_folders(order)[0] for order in self.run.config.evaluation.ngrams or ()]
        files = [self.run.folder / "scores" / f"{name}.json" for name in folders]
        known = [read_json(file).get("ngrams", {}) for file in files if file.is_file()]
        return {name: count for counts in known for name, count in counts.items()}

    @cached_property
    def metrics(self) -> Path:
        """The folder of the metrics of trainings."""
        return self.run.folder / "metrics"

    @cached_property
    def cost(self) -> pd.DataFrame:
        """A row for each workflow rule that ran before the report: its jobs, their time and memory.

        Empty for a run whose stages were not started by Snakemake.
        """
        if not any(self.run.folder.glob("benchmarks/**/*.tsv")):
            return pd.DataFrame()
        return self._asked(COST).set_index("rule")

    def _asked(self, query: str) -> pd.DataFrame:
        """The answer to a query of `demix sql` on the run."""
        with Answers([QueryRun(self.run.name, self.run)]) as answers, answers.ask(query) as found:
            return found.read_pandas()

    def read(self) -> "RunData":
        """This object after reading all files of the run. Raises DemixError for a missing or damaged file."""
        # Curves are drawn after the tables, but a damaged file must raise an error before anything is written.
        for path in sorted(self.metrics.glob("*.jsonl")):
            check_sealed(path)
        for name in ("results", "parents", "cost", "clusters", "ngrams", *["suites"] * SUITES.met(self.run)):
            getattr(self, name)
        for kind in (kind for kind in FILES if kind != "results"):
            self.rows(kind)
        return self

    @cached_property
    def seed(self) -> int:
        """The seed of `own`."""
        return self.run.seed

    def of_seed(self, seed: int) -> "RunData":
        """The same data with the results of one seed. Only the run's own seed has differences."""
        if seed == self.run.seed and [*self.results.by_seed] == [seed]:
            return self
        shared = {
            "overlap": self.rows("overlap"),
            "parents": self.parents,
            "clusters": self.clusters,
            "ngrams": self.ngrams,
        }
        differences = self.rows("differences")
        differences = differences if seed == self.run.seed else differences.iloc[:0]
        results = self.results.of_seed(seed)
        own = {"results": results, "own": results, "differences": differences, "seed": seed}
        return RunData(self.run, shared | own)
