"""The numbers of `results.parquet` behind each line of a table, and the intervals of differences."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from demix.errors import DemixError
from demix.files.database import ask
from demix.report.domains import mean_of
from demix.report.systems import ByDomain
from demix.run.systems import BASES, System


@dataclass(frozen=True, eq=False)
class Results:
    """The rows of `results.parquet`, and what the tables show of them.

    Raises DemixError unless all rows of a domain's split were scored on the same tokens. Each seed is checked alone:
    runs of different seeds split their domains differently.
    """

    rows: pd.DataFrame
    path: object = "results"

    def __post_init__(self) -> None:
        mixed = ask(
            """select domain, split, count(distinct tokens_sha256) as sequences from results
            group by domain, split, seed having sequences > 1 order by sequences desc, domain, split, seed limit 1""",
            results=self.rows,
        )
        for row in mixed.itertuples():
            raise DemixError(
                self.path,
                f"holds perplexities of {row.domain}.{row.split} over {row.sequences} different token sequences",
                "delete the evaluations of that domain and rerun, so that all models are scored on the same tokens",
            )

    @cached_property
    def by_seed(self) -> dict[int, "Results"]:
        """The rows of each seed."""
        return {seed: Results(rows, self.path) for seed, rows in self.rows.groupby("seed")}

    def of_seed(self, seed: int) -> "Results":
        """The rows of one seed, without the rows of models trained again with another seed."""
        return Results(self.rows[self.rows["seed"] == seed], self.path)

    @cached_property
    def evaluations(self) -> pd.DataFrame:
        """The test results by system and domain; those of single experts by expert too. Grids are left out.

        The columns up to domain are the key (top_k 0 for none, and where dev chose), which the index holds as tuples.
        Then come perplexity, low, high (bounds of the 95% interval over documents), spread, bits_per_byte, documents,
        pieces, tokens and seeds. With several seeds all numbers are means over the seeds, spread is the standard
        deviation of the perplexity, and there is no interval. With one seed spread is NaN.
        """
        found = ask(
            """select model, experts, method, weights, variant,
                if(variant = 'dev_temperature', 0, coalesce(top_k, 0))::int as top_k,
                if(method = 'expert', expert, '') as expert, domain,
                avg(perplexity) as perplexity,
                if(count(*) = 1, min(perplexity_low), null) as low,
                if(count(*) = 1, min(perplexity_high), null) as high,
                stddev_samp(perplexity) as spread, avg(bits_per_byte) as bits_per_byte,
                avg(documents) as documents, avg(pieces) as pieces, avg(tokens) as tokens, count(*)::double as seeds
            from results where split = 'test' and variant not in ('decay', 'dev_blocks', 'routing')
            group by all order by all""",
            results=self.rows,
        )
        return found.set_axis(_flat(found.loc[:, :"domain"].itertuples(index=False, name=None)))

    def of(self, system: ByDomain, domains: Iterable[str]) -> pd.DataFrame:
        """`evaluations` of `system` on each of `domains`; NaN where it was not evaluated."""
        names = list(domains)
        systems = [system if isinstance(system, System) else system(name) for name in names]
        return self._looked_up(((one, "", name) for one, name in zip(systems, names, strict=True)), names)

    def perplexities(self, system: ByDomain, domains: Iterable[str]) -> pd.Series:
        """Test perplexity of `system` on each of `domains`."""
        return self.of(system, domains)["perplexity"]

    def mean(self, system: ByDomain, domains: Iterable[str]) -> float:
        """The mean of `perplexities`."""
        return mean_of(self.perplexities(system, domains))

    def expert_perplexities(self, model: str, domain: str, experts: Iterable[str], label: str = "all") -> pd.Series:
        """Test perplexity on `domain` of each single expert of `model`; `label` names the expert set's rows."""
        names, alone = list(experts), System("", model, label, "expert")
        return self._looked_up(((alone, name, domain) for name in names), names)["perplexity"]

    def _looked_up(self, keys: Iterable[tuple[System, str, str]], labels: Iterable[str]) -> pd.DataFrame:
        """The evaluations of (system, expert, domain), under `labels`; NaN where there is none."""
        wanted = [(*one.key, one.variant, one.top_k or 0, expert, domain) for one, expert, domain in keys]
        return self.evaluations.reindex(_flat(wanted)).set_axis(list(labels))


def _flat(keys: Iterable[tuple[str | int, ...]]) -> pd.Index:
    # A report looks up hundreds of systems: 6 ms each in the levels of a MultiIndex, 0.6 ms here.
    return pd.Index(list(keys), tupleize_cols=False, dtype=object)


Bounds = Mapping[tuple[str, ...], tuple[float, float]]


def bounds_of(differences: pd.DataFrame) -> Bounds:
    """The bounds of the 95% interval of each difference in perplexity, by (against, domain, model, experts, …)."""
    known = differences.dropna(subset=["perplexity_low", "perplexity_high"])
    keys = known[["against", "domain", "model", "experts", "method", "weights"]].itertuples(index=False, name=None)
    return dict(zip(keys, zip(known["perplexity_low"], known["perplexity_high"], strict=True), strict=True))


def paired(bounds: Bounds, system: ByDomain, base: System, domains: Iterable[str]) -> pd.DataFrame:
    """Bounds (low, high) of the 95% interval of `system` minus `base` in perplexity, on the same documents of a domain.

    Only `BASES` and the second systems of `balanced_pairs` have such intervals, and none is of a variant or of a top-k.
    Domains without an interval are left out.
    """
    by_row = base.model if base.by_distance and base.top_k is None and not base.variant else ""
    against = next((key for key, one in BASES.items() if one == base), by_row)
    found = ((name, system if isinstance(system, System) else system(name)) for name in sorted(domains))
    keys = {name: (against, name, *one.key) for name, one in found if not one.variant and one.top_k is None}
    known = {name: bounds[key] for name, key in keys.items() if key in bounds}
    index = pd.Index([*known], name="domain", dtype="str")
    return pd.DataFrame([*known.values()], index=index, columns=["low", "high"], dtype="float64")


def paired_either_way(bounds: Bounds, one: ByDomain, other: System, domains: Iterable[str]) -> pd.DataFrame:
    """`paired`, turned round where more domains have the interval of `other` minus `one`."""
    found = paired(bounds, one, other, domains)
    if not isinstance(one, System):
        return found
    turned = -paired(bounds, other, one, domains).rename(columns={"low": "high", "high": "low"})
    return max(found, turned, key=len)


def prior_table(priors: pd.DataFrame, model: str, training: list[str], domains: list[str]) -> pd.DataFrame:
    """Cached priors (`history`) of the training experts of `model`: one row per domain, one column per expert."""
    rows = priors.query("model == @model and experts == 'training' and weights == 'history'")
    table = rows.pivot(index="domain", columns="expert", values="prior")
    return table.reindex(index=domains, columns=training).astype("float64")
