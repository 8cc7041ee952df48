"""Runs side by side: settings that differ, and the main table with paired intervals.

What is compared is the number of the main table: the plain mean over domains of each domain's test perplexity, of the
run's own seed. The mean is over those domains that are of one kind in all runs. A difference is the change of this mean
from the first run to another, in percent of the first run's.

Its 95% interval is a paired bootstrap over documents. In each domain the documents are drawn again, those of one origin
together, or blocks of the text where documents are few (`demix.evaluate.intervals`), and both runs use the same draws;
domains are drawn independently of each other. Each resample gives the perplexities of all domains, their means and so
the change, whose 2.5% and 97.5% quantiles are the bounds. By domain, the difference is in nats per token, as in
differences.parquet: (loss of the run − loss of the first run) / tokens.

A pair has no interval, and the reason in its place, where the two runs did not score the same documents.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from demix.config.evaluation import MixingRecipe
from demix.config.training import selected
from demix.errors import DemixError, masked
from demix.evaluate.domain import Evaluation, system_losses
from demix.evaluate.intervals import MIN_TOKENS, block_tokens, bounds, resampled
from demix.files import digest, is_made, read_json, seed_for
from demix.progress import progress
from demix.report.read import domains_of, percent, read_results
from demix.run.evaluated import evaluated
from demix.run.run import Run, kept
from demix.run.systems import Evaluated, System, main_systems

PERPLEXITY, BITS = "perplexity", "bits_per_byte"
# Why a pair of runs has no interval, or no difference at all.
OTHER_TOKENIZER, OTHER_TOKENS, OTHER_DOCUMENTS = "other tokenizer", "other tokens", "other documents"
NOT_BOTH = "not in both"
NO_SCORES, OTHER_SCORES, FEW = "no score tables", "scored again", f"under {MIN_TOKENS} tokens"
SYSTEM = ("model", "experts", "method", "weights")
_MISSING = object()


@dataclass(frozen=True)
class Sample:
    """The test documents of a domain under a run: tokens [D] and origins [D], and by system what came of them.

    `why` says why there are no documents. `nats` are the losses per token, `resampled` their values [R] over resamples,
    without any for a short text. `block` is that of `demix.evaluate.intervals.block_tokens`.
    """

    sha256: str
    why: str = ""
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0))
    origins: np.ndarray = field(default_factory=lambda: np.empty(0))
    nats: dict[tuple[str, ...], float] = field(default_factory=dict)
    resampled: dict[tuple[str, ...], np.ndarray] = field(default_factory=dict)
    block: int = 0


@dataclass(frozen=True)
class ComparedRun:
    """A run to compare. `name` is that of its run, and the folder where several runs have the same name.

    `results` are the rows of systems by test split, of all seeds, and `own` those of the run's own seed; `tokenizer` is
    a digest of it; `samples` are by domain.
    """

    name: str
    of: Run
    results: pd.DataFrame
    tokenizer: str
    samples: dict[str, Sample] = field(default_factory=dict)

    @cached_property
    def own(self) -> pd.DataFrame:
        return self.results[self.results["seed"] == self.of.seed]


@dataclass(frozen=True)
class Comparison:
    """Runs, the first of them the base, and what they are compared in.

    `settings`: one row per key that differs, one column per run, values as JSON, "–" for a key that a run lacks.
    `systems`: one row per measure, kind of domains, system and run, with columns value (mean over domains), spread
    (standard deviation over seeds), and change, change_low, change_high (in percent of the base) and why (the reason
    why something is missing). What does not exist is NaN.
    `by_domain`: one row per domain, system and run but the first, with the columns nats, low and high.
    `domains` are those that are compared, by kind, and `left_out` those that not all runs have. `blocks` are the tokens
    of the blocks that were resampled in domains of few documents.
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
    of_kind = [{domains.kind: domains.names for domains in domains_of(run.of)} for run in runs]
    domains = {
        kind: [name for name in names if all(name in other.get(kind, ()) for other in of_kind)]
        for kind, names in of_kind[0].items()
    }
    named = dict.fromkeys(name for kinds in of_kind for names in kinds.values() for name in names)
    left_out = tuple(name for name in named if not any(name in shared for shared in domains.values()))
    with progress("documents of the runs", len(runs) * sum(map(len, domains.values()))) as advance:
        for run in runs:
            for kind, names in domains.items():
                for name in names:
                    run.samples[name] = _sample(run, kind, name)
                    advance(1, f"{run.name}: {name}")
    measures = [PERPLEXITY, BITS] if len({run.tokenizer for run in runs}) > 1 else [PERPLEXITY]
    systems: list[dict[str, Any]] = []
    by_domain: list[dict[str, Any]] = []
    for kind, names in domains.items():
        for measure in measures if names else ():
            systems += _rows(runs, kind, names, measure)
        for system in _systems(runs):
            by_domain += _domain_rows(runs, kind, names, system)
    columns = ["measure", "kind", "system", "oracle", "run", "value", "spread"]
    frame = pd.DataFrame(systems, columns=[*columns, "change", "change_low", "change_high", "why"])
    # A measure that no run has been evaluated by is left out.
    frame = frame[frame.groupby(["measure", "kind"])["value"].transform("count") > 0]
    return Comparison(
        runs, _settings(runs), frame,
        pd.DataFrame(by_domain, columns=["kind", "domain", "system", "run", "nats", "low", "high"]),
        {kind: names for kind, names in domains.items() if names}, left_out,
        {name: sample.block for name, sample in runs[0].samples.items() if sample.block},
    )  # fmt: skip


def _read(folders: Sequence[Path]) -> tuple[ComparedRun, ...]:
    if len(folders) < 2:
        raise DemixError("compare", "needs two runs", "name two folders results/<run> or more, the base first")
    places = [folder.resolve() for folder in folders]
    for number, folder in enumerate(folders):
        if places.index(places[number]) < number:
            raise DemixError(folder, "is named twice", "name each run once")
    runs = [Run.read(folder) for folder in folders]
    named = [run.name for run in runs]
    return tuple(
        ComparedRun(
            run.name if named.count(run.name) == 1 else str(run.folder), run, _results(run.folder),
            digest(read_json(run.folder / "tokenizer.json")),
        )
        for run in runs
    )  # fmt: skip


def _results(folder: Path) -> pd.DataFrame:
    rows = read_results(folder / "results.parquet").rows
    systems = (rows["variant"] == "") & rows["top_k"].isna() & (rows["method"] != "expert")
    return rows[systems & (rows["split"] == "test")]


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
    """The systems of the main tables of all runs, those of the first run first, each with a label of its own.

    A row of `models` may be of another kind in another run.
    """
    every: dict[tuple[str, ...], System] = {}
    for system in (system for run in runs for _, system in main_systems(run.of)):
        others = {one.label for key, one in every.items() if key != system.key}
        label = f"{system.label} ({system.method})" if system.label in others else system.label
        every.setdefault(system.key, replace(system, label=label))
    return list(every.values())


def _sample(run: ComparedRun, kind: str, domain: str) -> Sample:
    """The losses of the main table's systems by document, mixed again from the score tables, and their resamples."""
    rows = run.own[run.own["domain"] == domain].set_index(list(SYSTEM))
    (sha256,) = rows["tokens_sha256"].unique() if len(rows) else ("",)
    wanted, scores = {system.key for _, system in main_systems(run.of)}, run.of.folder / "scores"
    tables = _tables(run.of, domain, {key[:2] for key in wanted})
    if not all(is_made(scores / table.folder / f"{domain}.test" / "tokens.parquet") for table in tables):
        return Sample(sha256, NO_SCORES)
    recipe: dict[str, Any] = selected(MixingRecipe, run.of.config.evaluation) | {"top_k": (), "temperatures": ()}
    recipe["routing_context"] = recipe["routing_context"][:1]
    about: dict[str, Any] = {"kind": kind, "tables": tables, "compared": (), "against": (), "seed": run.of.seed}
    scored, lost = system_losses(scores, domain, Evaluation(**recipe, **about))
    known = {key: float(number) for key, number in rows["nll"].items() if key in wanted}
    same = all(key in lost and np.isclose(lost[key].nll.sum(), nll) for key, nll in known.items())
    if scored.sha256 != sha256 or not same:
        return Sample(sha256, OTHER_SCORES)
    found = {key: lost[key] for key in known}
    nats = {key: float(row.nll.sum() / scored.tokens.sum()) for key, row in found.items()}
    by_document = np.stack([scored.tokens, *(row.nll for row in found.values())])
    by_stretch = np.stack([scored.stretched, *(row.stretches for row in found.values())])
    # As in an evaluation: the same text is drawn for all systems and runs.
    drawn = resampled(by_document, scored.origins, by_stretch, seed_for(0, domain, sha256))
    by_system = {} if drawn is None else dict(zip(found, drawn[1:] / drawn[0], strict=True))
    block = block_tokens(len(np.unique(scored.origins)), int(scored.tokens.sum()))
    return Sample(sha256, "", scored.tokens, scored.origins, nats, by_system, block)


def _tables(run: Run, domain: str, wanted: set[tuple[str, str]]) -> tuple[Evaluated, ...]:
    """The score tables of the run's own seed with those of their sets of experts whose model and label are wanted."""
    tables = []
    for table in evaluated(run, domain):
        if table.seed == run.seed and not table.named_by_folder:
            named = [some for some in table.sets if (table.model, some.label) in wanted]
            sets = tuple(replace(some, singles=False, variants=False) for some in named)
            if sets or (table.model, "dense") in wanted:
                tables.append(replace(table, sets=sets))
    return tuple(tables)


def _why(runs: Sequence[ComparedRun], domain: str) -> str:
    """Why there is no interval in a domain, of one run or of the difference of two; "" if there is one."""
    first, *_ = found = [run.samples[domain] for run in runs]
    if len({run.tokenizer for run in runs}) > 1:
        return OTHER_TOKENIZER
    if any(sample.sha256 != first.sha256 for sample in found):
        return OTHER_TOKENS
    if reasons := [sample.why for sample in found if sample.why]:
        return reasons[0]
    pairs = [(sample.tokens, sample.origins) for sample in found]
    if not all(np.array_equal(ours, firsts) for pair in pairs for ours, firsts in zip(pair, pairs[0], strict=True)):
        return OTHER_DOCUMENTS
    return "" if first.resampled else FEW


def _rows(runs: Sequence[ComparedRun], kind: str, domains: list[str], measure: str) -> Iterator[dict[str, Any]]:
    """The rows of `Comparison.systems` on the domains of one kind."""
    base, means = runs[0], {run.name: _means(run, domains, measure) for run in runs}
    reasons = {run.name: next(filter(None, (_why([base, run], name) for name in domains)), "") for run in runs}
    for system in _systems(runs):
        values = {run.name: means[run.name].get(system.key, {}).get(run.of.seed, np.nan) for run in runs}
        for run in runs:
            row: dict[str, Any] = {"measure": measure, "kind": kind, "system": system.label, "run": run.name, "why": ""}
            row |= {"oracle": kind == "novel" and system.method == "naive", "value": values[run.name]}
            known = not np.isnan(values[run.name])
            if known and measure == PERPLEXITY:
                row["spread"] = pd.Series(means[run.name][system.key]).std()
            if run is not base:
                row["why"] = NOT_BOTH
            if run is not base and known and not np.isnan(values[base.name]):
                why, bits = reasons[run.name], measure == BITS
                # Runs of the base's tokenizer have perplexities to compare.
                row["why"] = why if not bits else OTHER_TOKENS if why == OTHER_TOKENIZER else ""
                if bits or why != OTHER_TOKENIZER:
                    row["change"] = percent(values[base.name], values[run.name])
                if not (bits or why):
                    resamples = (_resampled(one, domains, system) for one in (base, run))
                    row["change_low"], row["change_high"] = bounds(percent(*resamples))
            yield row


def _means(run: ComparedRun, domains: list[str], measure: str) -> dict[tuple[str, ...], dict[int, float]]:
    """The mean over domains by system and seed; NaN without one of the domains."""
    by_domain = run.results.set_index([*SYSTEM, "seed", "domain"])[measure].unstack("domain").reindex(columns=domains)
    found: dict[tuple[str, ...], dict[int, float]] = {}
    for (*key, seed), mean in by_domain.mean(axis=1, skipna=False).items():
        found.setdefault(tuple(key), {})[seed] = float(mean)
    return found


def _resampled(run: ComparedRun, domains: list[str], system: System) -> np.ndarray:
    """The mean perplexity over domains in each resample [R]."""
    means: np.ndarray = np.exp([run.samples[name].resampled[system.key] for name in domains]).mean(axis=0)
    return means


def _domain_rows(
    runs: Sequence[ComparedRun], kind: str, domains: list[str], system: System
) -> Iterator[dict[str, Any]]:
    """The rows of `Comparison.by_domain` of one system: those with an interval."""
    base, *others = runs
    for domain in domains:
        for run in others:
            first, second = base.samples[domain], run.samples[domain]
            if not _why([base, run], domain) and system.key in first.nats.keys() & second.nats.keys():
                low, high = bounds(second.resampled[system.key] - first.resampled[system.key])
                row = {"kind": kind, "domain": domain, "system": system.label, "run": run.name}
                yield row | {"nats": second.nats[system.key] - first.nats[system.key], "low": low, "high": high}
