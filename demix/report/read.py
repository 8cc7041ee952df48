"""Reads the files of a run that a report uses: rows, results by system, kinds of domains."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from demix.errors import DemixError
from demix.evaluate.columns import COLUMNS, DIFFERENCES, POSTERIORS, PRIORS, TASKS
from demix.files import is_made, read_json, read_json_lines
from demix.files.database import ask
from demix.files.parquet import parquet_reader
from demix.progress import so_many
from demix.report import needs
from demix.report.needs import Need
from demix.report.systems import ByDomain
from demix.run.run import Run
from demix.run.systems import BASES, System


def mean_of(values: Iterable[float]) -> float:
    """The plain mean; NaN without values or if a value is NaN."""
    numbers = np.asarray(list(values), dtype="float64")
    return float(numbers.mean()) if len(numbers) else float("nan")


def percent(before: Any, after: Any) -> Any:
    """The change from `before` to `after`, in percent of `before`."""
    return 100 * (after / before - 1)


@dataclass(frozen=True)
class Domains:
    """The domains of one kind, `training` or `novel`, in the config's order."""

    kind: str
    names: list[str]

    @property
    def heading(self) -> str:
        """The kind as the heading of a column."""
        return self.kind.capitalize()

    @property
    def counted(self) -> str:
        """The kind with the number of its domains: "8 novel"."""
        return f"{len(self.names)} {self.kind}"

    @property
    def said(self) -> str:
        """The number of domains: "8 novel domains"."""
        return so_many(len(self.names), f"{self.kind} domain")


def domains_of(run: Run) -> list[Domains]:
    """The kinds of domains that a run has: training domains first."""
    kinds = (Domains("training", list(run.training)), Domains("novel", list(run.novel)))
    return [domains for domains in kinds if domains.names]


@dataclass(frozen=True, eq=False)
class Results:
    """The rows of `results.parquet`, and the numbers that tables use.

    Raises DemixError unless all rows of a domain's split were scored on the same tokens. Each seed is checked
    separately, since runs with different seeds split their domains differently.
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
        return {seed: self.of_seed(seed) for seed in sorted(self.rows["seed"].unique())}

    def of_seed(self, seed: int) -> "Results":
        """The rows of one random seed."""
        kept = self.rows["seed"] == seed
        return self if kept.all() else Results(self.rows[kept], self.path)

    @cached_property
    def evaluations(self) -> pd.DataFrame:
        """The test results by system and domain. Single experts and grids are left out.

        The columns up to domain are the key, which the index has as tuples; top_k is 0 without top-k, and if it was
        chosen on dev. Then come perplexity, low, high (bounds of the 95% interval over documents), spread,
        bits_per_byte, documents, pieces, tokens and seeds. With several seeds all numbers are means over the seeds,
        spread is the standard deviation of the perplexity, and there is no interval. With one seed spread is NaN.
        """
        found = ask(
            """select model, experts, method, weights, variant,
                if(variant = 'dev_temperature', 0, coalesce(top_k, 0))::int as top_k, domain,
                avg(perplexity) as perplexity,
                if(count(*) = 1, min(perplexity_low), null) as low,
                if(count(*) = 1, min(perplexity_high), null) as high,
                stddev_samp(perplexity) as spread, avg(bits_per_byte) as bits_per_byte,
                avg(documents) as documents, avg(pieces) as pieces, avg(tokens) as tokens, count(*)::double as seeds
            from results
            where split = 'test' and method <> 'expert' and variant not in ('decay', 'dev_blocks', 'routing')
            group by all order by all""",
            results=self.rows,
        )
        return found.set_axis(_flat(found.loc[:, :"domain"].itertuples(index=False, name=None)))

    def of(self, system: ByDomain, domains: Iterable[str]) -> pd.DataFrame:
        """`evaluations` of `system` on each of `domains`; NaN where it was not evaluated."""
        names = list(domains)
        systems = [system if isinstance(system, System) else system(name) for name in names]
        wanted = [(*one.key, one.variant, one.top_k or 0, name) for one, name in zip(systems, names, strict=True)]
        return self.evaluations.reindex(_flat(wanted)).set_axis(names)

    def perplexities(self, system: ByDomain, domains: Iterable[str]) -> pd.Series:
        """Test perplexity of `system` on each of `domains`."""
        return self.of(system, domains)["perplexity"]

    def mean(self, system: ByDomain, domains: Iterable[str]) -> float:
        """The mean of `perplexities`."""
        return mean_of(self.perplexities(system, domains))

    @cached_property
    def single(self) -> pd.DataFrame:
        """Test perplexity of single experts (columns) by model, label of the expert set, and domain."""
        found = ask(
            """select model, experts, domain, expert, avg(perplexity) as perplexity
            from results where split = 'test' and method = 'expert' group by all order by all""",
            results=self.rows,
        )
        return found.pivot(index=["model", "experts", "domain"], columns="expert", values="perplexity")

    def expert_perplexities(
        self, model: str, domains: Iterable[str], experts: Iterable[str], label: str = "all"
    ) -> pd.DataFrame:
        """Test perplexity of each single expert of `model` (columns) on each of `domains` (rows).

        `label` is that of the expert set's rows. NaN where the expert was not evaluated.
        """
        names = list(domains)
        keys = pd.MultiIndex.from_product([[model], [label], names])
        return self.single.reindex(index=keys, columns=list(experts)).astype("float64").set_axis(names)


def _flat(keys: Iterable[tuple[str | int, ...]]) -> pd.Index:
    # A report looks up hundreds of systems: each needs 6 ms in the levels of a MultiIndex, 0.6 ms here.
    return pd.Index(list(keys), tupleize_cols=False, dtype=object)


Bounds = Mapping[tuple[str, ...], tuple[float, float]]


def bounds_of(differences: pd.DataFrame) -> Bounds:
    """The bounds of the 95% interval of each difference in perplexity, by (against, domain, model, experts, …)."""
    known = differences.dropna(subset=["perplexity_low", "perplexity_high"])
    keys = known[["against", "domain", "model", "experts", "method", "weights"]].itertuples(index=False, name=None)
    return dict(zip(keys, zip(known["perplexity_low"], known["perplexity_high"], strict=True), strict=True))


def paired(bounds: Bounds, system: ByDomain, base: System, domains: Iterable[str]) -> pd.DataFrame:
    """Bounds (low, high) of the 95% interval of `system` minus `base` in perplexity, on the same documents of a domain.

    Only differences to `BASES`, to the second systems of `balanced_pairs` and to `rivals` have such intervals; systems
    with a variant or a top-k have none. Domains without an interval are left out.
    """
    whole = base.top_k is None and not base.variant
    by_row = base.model if whole and (base.by_distance or base.method == "dense") else ""
    against = next((key for key, one in BASES.items() if one == base), by_row)
    found = ((name, system if isinstance(system, System) else system(name)) for name in sorted(domains))
    keys = {name: (against, name, *one.key) for name, one in found if not one.variant and one.top_k is None}
    known = {name: bounds[key] for name, key in keys.items() if key in bounds}
    index = pd.Index([*known], name="domain", dtype="str")
    return pd.DataFrame([*known.values()], index=index, columns=["low", "high"], dtype="float64")


def paired_either_way(bounds: Bounds, one: ByDomain, other: System, domains: Iterable[str]) -> pd.DataFrame:
    """`paired`, or its reverse if more domains have the interval of `other` minus `one`."""
    found = paired(bounds, one, other, domains)
    if not isinstance(one, System):
        return found
    turned = -paired(bounds, other, one, domains).rename(columns={"low": "high", "high": "low"})
    return max(found, turned, key=len)


# The most domains, and the most experts, of a figure: more cells could not be distinguished.
MAX_SHOWN = 64
_SYSTEM = ("model", "experts", "method", "weights")
_EXPERT = ("model", "experts", "weights", "domain", "expert", "seed")
_VARIANT = ("top_k", "variant", "decay", "dev_blocks", "context", "temperature", "expert", "domain", "split", "seed")


@dataclass(frozen=True)
class RowsFile:
    """A kind of Parquet file: its path below a run's folder ({} is a training domain), its columns, the columns that
    identify a row (none: rows may be equal), the requirement for a run to have the file, and whether a report reads
    only the rows of the domains and experts that figures show (of all pairs of 1,024 domains there are gigabytes)."""

    path: str
    columns: Collection[str]
    key: tuple[str, ...] = ()
    need: Need | None = None
    only_shown: bool = False


_FOUND = ("task", "domain", "documents", "long_documents", "found_documents", "ngrams", "found_ngrams")
FILES = {
    "results": RowsFile("results.parquet", COLUMNS, (*_SYSTEM, *_VARIANT)),
    "priors": RowsFile("priors.parquet", PRIORS, _EXPERT, only_shown=True),
    "posteriors": RowsFile("posteriors.parquet", POSTERIORS, (*_EXPERT, "decay", "split", "block"), only_shown=True),
    "differences": RowsFile("differences.parquet", DIFFERENCES, (*_SYSTEM, "against", "domain", "seed")),
    "overlap": RowsFile(
        "corpus/overlap.parquet",
        ("domain", "expert", "overlap", "train_tokens", "test_bigrams"),
        ("domain", "expert"),
    ),
    "tasks": RowsFile("tasks.parquet", TASKS, need=needs.TASKS),
    "harness": RowsFile("tasks.parquet", TASKS, need=needs.HARNESS),
    "contamination": RowsFile("harness/contamination/{}.parquet", _FOUND, need=needs.HARNESS),
}


def read_rows(path: str | Path, kind: str, names: Collection[str] | None = None) -> pd.DataFrame:
    """The rows of a Parquet file of a run, or only those whose domain and expert are in `names`.

    `kind` is a key of `FILES`: results (also of suites), priors, posteriors, … Raises DemixError if a column is missing
    or a row is doubled.
    """
    file = FILES[kind]
    with parquet_reader(path) as stored:
        if missing := [name for name in file.columns if name not in stored.schema_arrow.names]:
            raise DemixError(path, f"has no column {', '.join(missing)}", "rerun the evaluation with this version")
        parts = (pa.Table.from_batches([batch]) for batch in stored.iter_batches())
        if names is not None:
            wanted = pc.field("domain").isin([*names]) & pc.field("expert").isin([*names])
            parts = (part.filter(wanted) for part in parts)
        rows = pa.concat_tables([stored.schema_arrow.empty_table(), *parts]).to_pandas()
    if file.key and (doubled := rows.duplicated([*file.key])).any():
        domain = rows.loc[doubled, "domain"].iloc[0]
        cause = f"has rows of {domain} twice: the evaluation of one domain is in the place of another's"
        raise DemixError(path, cause, f"delete {Path(path).parent / 'evaluations'} and the file, then rerun")
    if kind in ("tasks", "harness"):
        rows = rows[rows["metric"].notna() == (kind == "harness")]
    return rows


def read_results(path: str | Path) -> Results:
    """The rows of `results.parquet` or `suites.parquet`. Raises DemixError also if they cannot be compared."""
    return Results(read_rows(path, "results"), path)


def read_metrics(path: str | Path) -> Iterable[dict[str, Any]]:
    """The rows of a metrics file; nothing if the run has no such file. Raises DemixError on a row without tokens."""
    path = Path(path)
    if not is_made(path):
        return
    for number, row in enumerate(read_json_lines(path), start=1):
        if "tokens" not in row:
            raise DemixError(f"{path}:{number}", "has no tokens", "rerun the stage that makes it")
        yield row


@dataclass(frozen=True)
class Parent:
    """The start of a novel domain's expert: a copy of the training expert with the highest posterior (`likeliest`), or
    the average of all training experts weighted by posterior."""

    likeliest: str
    averaged: bool = False


def read_parents(experts: str | Path, novel: Iterable[str]) -> dict[str, Parent]:
    """The parent of each novel domain's expert, from `models/<model>/experts/<domain>.json`.

    Domains without such a file are left out.
    """
    files = {domain: Path(experts) / f"{domain}.json" for domain in novel}
    lineages = {domain: read_json(path) for domain, path in files.items() if is_made(path)}
    return {domain: _parent(lineage) for domain, lineage in lineages.items()}


def _parent(lineage: Mapping[str, Any]) -> Parent:
    weights = {name: origin["weight"] for name, origin in lineage.get("parents", {}).items()}
    return Parent(max(weights, key=weights.__getitem__), averaged=True) if weights else Parent(lineage["parent"])
