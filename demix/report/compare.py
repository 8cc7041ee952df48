"""Runs side by side: settings that differ, and the main table with paired intervals.

The compared number is that of the main table: the unweighted mean over domains of the test perplexity, for the run's
own seed. The mean is over the domains that are of the same kind in all runs. A change is the change of this mean from
the first run to another, in percent of the first run's mean.

Its 95% interval is a paired bootstrap over documents. In each domain the documents are resampled, all chunks of one
source document together; a domain with few documents is resampled by stretches of text (`demix.evaluate.intervals`).
Both runs use the same draws, and domains are drawn independently of each other. Each resample gives the perplexities of
all domains, their means and so the change; its 2.5% and 97.5% quantiles are the bounds. By domain, the difference is in
nats per token, as in differences.parquet: (loss of the run − loss of the first run) / tokens.

The losses are those that the evaluation of a domain stores by system (`demix.evaluate.columns.SYSTEM_LOSSES`). If two
runs did not score the same documents, the reason is shown in place of the interval.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from demix.errors import DemixError, masked
from demix.evaluate.intervals import MIN_TOKENS, block_tokens, bounds, resampled
from demix.files import digest, read_json, read_parquet, seed_for
from demix.report.read import percent, read_results
from demix.run.run import Run, kept
from demix.run.systems import System, main_systems

PERPLEXITY, BITS = "perplexity", "bits_per_byte"
# The reasons why a pair of runs has no interval, or no difference at all.
OTHER_TOKENIZER, OTHER_TOKENS = "different tokenizer", "different tokens"
NOT_BOTH, FEW = "not in both runs", f"under {MIN_TOKENS} tokens"
SYSTEM = ["model", "experts", "method", "weights"]
_MISSING = object()
Key = tuple[str, ...]


@dataclass(frozen=True)
class ComparedRun:
    """A run to compare. `name` is the name of the run, or its folder if several runs have the same name."""

    name: str
    of: Run

    @cached_property
    def tokenizer(self) -> str:
        """A digest of the tokenizer."""
        return digest(read_json(self.of.folder / "tokenizer.json"))

    @cached_property
    def results(self) -> pd.DataFrame:
        """The test results of systems, for all seeds."""
        rows = read_results(self.of.folder / "results.parquet").rows
        systems = (rows["variant"] == "") & rows["top_k"].isna() & (rows["method"] != "expert")
        return rows[systems & (rows["split"] == "test")]

    @cached_property
    def own(self) -> pd.DataFrame:
        """The rows of the run's own seed."""
        return self.results[self.results["seed"] == self.of.seed]

    @cached_property
    def texts(self) -> pd.DataFrame:
        """The test text of each domain: the digest of its tokens, its documents and its tokens."""
        texts = self.own.drop_duplicates("domain").set_index("domain")[["tokens_sha256", "documents", "tokens"]]
        return texts.reindex([*self.of.domains])

    @cached_property
    def drawn(self) -> dict[str, dict[Key, np.ndarray]]:
        """The nats per token of each system in resamples [R], by domain; empty for a short text."""
        return {domain: _drawn(self, domain) for domain in self.of.domains}


@dataclass(frozen=True)
class Comparison:
    """Runs, the first of which is the base, and the results of the comparison.

    `settings`: one row per key that differs, one column per run, values as JSON, "–" for a key that a run lacks.
    `systems`: one row per measure, kind of domains, system and run, with columns value (mean over domains), spread
    (standard deviation over seeds), change, change_low and change_high (in percent of the base), and why (the reason
    for a missing number). Missing numbers are NaN.
    `by_domain`: one row per domain, system and run except the first, with the columns nats, low and high.
    `domains` are the compared domains by kind, and `left_out` the domains that are not of one kind in all runs.
    `blocks` has the length in tokens of the stretches that were resampled in domains with few documents.
    """

    runs: tuple[ComparedRun, ...]
    settings: pd.DataFrame
    systems: pd.DataFrame
    by_domain: pd.DataFrame
    domains: dict[str, list[str]]
    left_out: tuple[str, ...]
    blocks: dict[str, int]


def compare(folders: Sequence[Path]) -> Comparison:
    """Compare the runs in `folders` with the first. Raises DemixError for fewer than two, and for a damaged run."""
    runs = _read(folders)
    base, *_ = runs
    kinds = [{name: run.of.kind_of(name) for name in run.of.domains} for run in runs]
    every = dict.fromkeys(chain(*kinds))
    shared = [name for name in every if len({of_run.get(name) for of_run in kinds}) == 1]
    domains = {
        kind: [name for name in shared if kinds[0][name] == kind]
        for kind in dict.fromkeys(kinds[0][name] for name in shared)
    }
    measures = [PERPLEXITY, BITS] if len({run.tokenizer for run in runs}) > 1 else [PERPLEXITY]
    systems = [
        row for (kind, names), one in product(domains.items(), measures) for row in _rows(runs, kind, names, one)
    ]
    by_domain = [row for kind, names in domains.items() for row in _domain_rows(runs, kind, names)]
    columns = ["measure", "kind", "system", "oracle", "run", "value", "spread"]
    frame = pd.DataFrame(systems, columns=[*columns, "change", "change_low", "change_high", "why"])
    # A measure without numbers is left out.
    frame = frame[frame.groupby(["measure", "kind"])["value"].transform("count") > 0]
    blocks = {name: block_tokens(*base.texts.loc[name, ["documents", "tokens"]]) for name in shared}
    return Comparison(
        runs,
        _settings(runs),
        frame,
        pd.DataFrame(by_domain, columns=["kind", "domain", "system", "run", "nats", "low", "high"]),
        domains,
        tuple(name for name in every if name not in shared),
        {name: block for name, block in blocks.items() if block},
    )


def _read(folders: Sequence[Path]) -> tuple[ComparedRun, ...]:
    if len(folders) < 2:
        raise DemixError("compare", "needs two runs", "name two folders results/<run> or more, the base first")
    for number, folder in enumerate(folders):
        if folder.resolve() in [one.resolve() for one in folders[:number]]:
            raise DemixError(folder, "is named twice", "name each run once")
    runs = [Run.read(folder) for folder in folders]
    named = [run.name for run in runs]
    return tuple(ComparedRun(one.name if named.count(one.name) == 1 else str(one.folder), one) for one in runs)


def _settings(runs: Sequence[ComparedRun]) -> pd.DataFrame:
    found = dict(_differing([{**kept(run.of.config), "run": None} for run in runs]))
    texts = {
        key: [
            "–" if value is _MISSING else masked(json.dumps(value, sort_keys=True, ensure_ascii=False))
            for value in values
        ]
        for key, values in found.items()
    }
    return pd.DataFrame.from_dict(texts, orient="index", columns=[run.name for run in runs])


def _differing(values: Sequence[Any], path: str = "") -> Iterator[tuple[str, Sequence[Any]]]:
    """Dotted paths with their values by run, where these differ. A section that a run lacks is one value."""
    if all(isinstance(value, dict) for value in values):
        for key in dict.fromkeys(key for value in values for key in value):
            inner = [value.get(key, _MISSING) for value in values]
            yield from _differing(inner, f"{path}.{key}" if path else str(key))
    elif any(value != values[0] for value in values):
        yield path, values


def _systems(runs: Sequence[ComparedRun]) -> list[System]:
    """The systems of the main tables of all runs, those of the first run first, each with a distinct label.

    A model entry may have another type in another run.
    """
    every: dict[tuple[str, ...], System] = {}
    for system in (system for run in runs for _, system in main_systems(run.of)):
        others = {one.label for key, one in every.items() if key != system.key}
        label = f"{system.label} ({system.method})" if system.label in others else system.label
        every.setdefault(system.key, replace(system, label=label))
    return list(every.values())


def _drawn(run: ComparedRun, domain: str) -> dict[Key, np.ndarray]:
    rows = read_parquet(run.of.folder / "evaluations" / f"{domain}.systems.parquet").to_pandas()
    documents, stretches = (
        np.stack([rows[tokens][0], *rows[nll]]) for tokens, nll in (("tokens", "nll"), ("stretched", "stretches"))
    )
    # As in an evaluation, all systems and runs use the same draws.
    seed = seed_for(0, domain, run.texts.loc[domain, "tokens_sha256"])
    drawn = resampled(documents, rows["origins"][0], stretches, seed)
    keys = zip(*(rows[name] for name in SYSTEM), strict=True)
    return {} if drawn is None else dict(zip(keys, drawn[1:] / drawn[0], strict=True))


def _why(base: ComparedRun, run: ComparedRun, domains: Sequence[str]) -> str:
    """The reason why the difference of two runs on `domains` has no interval; "" if it has one."""
    if run.tokenizer != base.tokenizer:
        return OTHER_TOKENIZER
    if not run.texts.loc[domains].equals(base.texts.loc[domains]):
        return OTHER_TOKENS
    return "" if all(base.drawn[domain] for domain in domains) else FEW


def _rows(runs: Sequence[ComparedRun], kind: str, domains: list[str], measure: str) -> Iterator[dict[str, Any]]:
    """The rows of `Comparison.systems` on the domains of one kind."""
    base, means = runs[0], {run.name: _means(run, domains, measure) for run in runs}
    for system, run in product(_systems(runs), runs):
        first, value = (means[one.name].get((*system.key, one.of.seed), np.nan) for one in (base, run))
        row = {"measure": measure, "kind": kind, "system": system.label, "run": run.name, "value": value, "why": ""}
        row["oracle"] = kind == "novel" and system.method == "naive"
        if measure == PERPLEXITY and not np.isnan(value):
            row["spread"] = means[run.name].loc[system.key].std()
        if run is not base:
            row |= _change(base, run, domains, system, measure, first, value)
        yield row


def _change(
    base: ComparedRun, run: ComparedRun, domains: list[str], system: System, measure: str, first: float, value: float
) -> dict[str, Any]:
    """The change of a system's mean from `first` to `value`, with its interval or the reason why it has none."""
    why = NOT_BOTH if np.isnan(first + value) else _why(base, run, domains)
    if measure == BITS:
        # Runs with the base's tokenizer are compared in perplexity.
        why = {OTHER_TOKENIZER: OTHER_TOKENS, NOT_BOTH: NOT_BOTH}.get(why, "")
    elif not why:
        means = (np.exp([one.drawn[name][system.key] for name in domains]).mean(axis=0) for one in (base, run))
        low, high = bounds(percent(*means))
        return {"why": why, "change": percent(first, value), "change_low": low, "change_high": high}
    return {"why": why, "change": np.nan if why in (NOT_BOTH, OTHER_TOKENIZER) else percent(first, value)}


def _means(run: ComparedRun, domains: list[str], measure: str) -> pd.Series:
    """The mean over domains by system and seed; NaN without one of the domains."""
    by_domain = run.results.set_index([*SYSTEM, "seed", "domain"])[measure].unstack("domain").reindex(columns=domains)
    return by_domain.mean(axis=1, skipna=False)


def _domain_rows(runs: Sequence[ComparedRun], kind: str, domains: list[str]) -> Iterator[dict[str, Any]]:
    """The rows of `Comparison.by_domain` on the domains of one kind: those with an interval."""
    base, *others = runs
    nats = {run.name: run.own.set_index(["domain", *SYSTEM]).eval("nll / tokens") for run in runs}
    for system, domain, run in product(_systems(runs), domains, others):
        first, value = (nats[one.name].get((domain, *system.key)) for one in (base, run))
        if first is not None and value is not None and not _why(base, run, [domain]):
            low, high = bounds(run.drawn[domain][system.key] - base.drawn[domain][system.key])
            row = {"kind": kind, "domain": domain, "system": system.label, "run": run.name}
            yield row | {"nats": value - first, "low": low, "high": high}
