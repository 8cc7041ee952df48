"""Parts of tables: means over domains, changes in percent, second lines of cells, and adaptation before and after.

Every average over domains is the plain mean of the domains' perplexities, or "–" if a domain's perplexity is missing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from demix.report.read import Bounds, Domains, Results, mean_of, paired, percent
from demix.report.run_data import RunData
from demix.report.systems import (
    ByDomain,
    before_adding,
    before_dense_dapt,
    both_kept,
    dense_adapted,
    one_added,
    parameters_of,
    released,
)
from demix.report.table import Table
from demix.report.verdict import mean_interval
from demix.run.run import Run
from demix.run.systems import System, added

# On the interval of a domain with fewer than 20 test documents.
WITHIN_NOTE = "Such an interval covers only other text of the same documents; one over documents would be wider."
INTERVAL_NOTE = "Below a perplexity is its 95% interval, which does not cover another training (notes of Table 4)."
MEAN_NOTE = (
    "Below a number is its 95% interval over resampled test documents (the same for both models of a change), if every "
    "domain has one. “significant” counts the domains where the whole interval of the difference is below zero."
)


def lowest(frame: pd.DataFrame, axis: int) -> pd.DataFrame:
    """True where a cell is the lowest of its row (axis 1) or column (axis 0), at the two decimals printed."""
    rounded = frame.round(2)
    return rounded.eq(rounded.min(axis=axis), axis=1 - axis)


@dataclass(frozen=True)
class Measured:
    """The mean perplexity of a system on some domains, and its change relative to another system, in percent.

    `interval` has the bounds of the change, if every domain has an interval. `known` is the number of domains with an
    interval, `significant` the number of these where the whole interval of the difference is below zero. `both` is the
    number of domains with perplexities of both systems, `lower` the number of these where the system's is lower.
    """

    mean: float
    change: float
    interval: tuple[float, float] | None
    significant: int
    known: int
    lower: int
    both: int


def measured(results: Results, bounds: Bounds, system: System, base: System, domains: list[str]) -> Measured:
    """`system` on `domains` compared with `base`, with the intervals of their differences in `bounds`."""
    own, other = (results.perplexities(one, domains) for one in (system, base))
    known, mean, of_base = paired(bounds, system, base, domains), mean_of(own), mean_of(other)
    interval = mean_interval(own - other, known)
    return Measured(
        mean,
        percent(of_base, mean),
        (100 * interval[0] / of_base, 100 * interval[1] / of_base) if interval else None,
        int((known["high"] < 0).sum()),
        len(known),
        int((own < other).sum()),
        int((own + other).count()),
    )


def compared(data: RunData, lines: Mapping[str, tuple[System, System]], kinds: Iterable[Domains]) -> Table:
    """A row for each label of `lines`; each label has a system and the system that it is compared with.

    The columns of each kind of domains are the mean perplexity, the change in percent, and the number of domains where
    perplexity is lower. Below a number is the 95% interval over documents or, with several seeds, the standard
    deviation over seeds of the mean or of the change. A system compared with itself has no change. Merged models exist
    only for the run's own seed.
    """
    rows: dict[str, dict[str, Any]] = {label: {} for label in lines}
    beneath: dict[str, dict[str, str]] = {label: {} for label in lines}
    for (label, (system, base)), domains in product(lines.items(), kinds):
        results = data.own if system.method == "merged" else data.results
        seeds, name = list(results.by_seed.values()), domains.heading
        found, means = results.of(system, domains.names), [one.mean(system, domains.names) for one in seeds]
        one = measured(results, data.bounds, system, base, domains.names)
        rows[label][name], interval = one.mean, mean_interval(found["perplexity"], found[["low", "high"]].dropna())
        beneath[label][name] = _below("[{:.2f}, {:.2f}]", interval, means)
        if system != base:
            changes = percent(np.array([one.mean(base, domains.names) for one in seeds]), np.array(means))
            rows[label][f"{name}, %"] = one.change
            beneath[label][f"{name}, %"] = _below("{:+.1f} to {:+.1f}", one.interval, changes)
            note = f" ({one.significant} significant)" if one.known and len(seeds) == 1 else ""
            rows[label][f"{name}, lower"] = (f"{one.lower} of {one.both}" if one.both else "") + note
    frame, several = pd.DataFrame.from_dict(rows, orient="index"), len(data.results.by_seed)
    spread = f"Means over {several} random seeds, ± the standard deviation over seeds of the mean or of the change."
    return Table(
        frame,
        notes=(spread if several > 1 else MEAN_NOTE,),
        best=lowest(frame[[domains.heading for domains in kinds]], axis=0),
        beneath=pd.DataFrame.from_dict(beneath, orient="index"),
    )


def _below(form: str, interval: tuple[float, ...] | None, by_seed: Sequence[float]) -> str:
    """The second line of a mean: the spread over several seeds, or the interval; empty if there is neither."""
    if len(by_seed) > 1:
        return f"± {np.std(by_seed, ddof=1):.2f}" if np.isfinite(by_seed).all() else ""
    return form.format(*interval).replace("-", "−") if interval else ""


def by_domain(results: Results, systems: Mapping[str, ByDomain], groups: Mapping[str, list[str]]) -> Table:
    """A row for each domain of `groups` and a column for each of `systems`; the last columns count test documents and
    their chunks. Below its domains each group has two rows: their mean, under the group's name, and the mean with
    released weights.
    """
    frame, beneath, counts = _each(results, systems, [name for names in groups.values() for name in names])
    parts: list[pd.DataFrame] = []
    summaries: list[str] = []
    for label, names in groups.items():
        means = {label: [mean_of(frame.loc[names, column]) for column in frame]}
        means[f"{label}, released weights"] = [results.mean(released(one), names) for one in systems.values()]
        parts += [frame.loc[names].join(counts), pd.DataFrame.from_dict(means, orient="index", columns=[*frame])]
        summaries += means
    return Table(pd.concat(parts), summaries=frozenset(summaries), **_explained(beneath, results))


def by_system(results: Results, systems: Mapping[str, System], domains: list[str]) -> Table:
    """A row for each of `systems`; columns are the mean and each domain. The lowest except oracles are bold."""
    found, beneath, counts = _each(results, systems, domains)
    frame = found.T
    frame.insert(0, "Mean", [mean_of(values) for _, values in frame.iterrows()])
    known = counts.dropna().itertuples(name=None)
    counted = ", ".join(f"{name} {documents:,.0f} ({pieces:,.0f})" for name, documents, pieces in known)
    honest = frame.drop(index=[label for label in systems if label.endswith("oracle)")])
    table = Table(frame, best=lowest(honest, axis=0), **_explained(beneath.T, results))
    return table.noted(f"Scored documents (and their chunks): {counted}.") if counted else table


def _each(
    results: Results, systems: Mapping[str, ByDomain], domains: list[str]
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Perplexities by domain (rows) and system, their second lines, and the documents and chunks of each domain."""
    found = {label: results.of(system, domains) for label, system in systems.items()}
    perplexities = pd.DataFrame({label: one["perplexity"] for label, one in found.items()}, index=domains)
    beneath = pd.DataFrame({label: [*map(_second_line, one.itertuples())] for label, one in found.items()}, domains)
    counts = {
        count.title(): pd.DataFrame({label: one[count] for label, one in found.items()}).max(axis=1)
        for count in ("documents", "pieces")
    }
    return perplexities, beneath, pd.DataFrame(counts, index=domains)


def _second_line(row: Any) -> str:
    """The second line of a perplexity of `evaluations`: the spread over seeds, or the interval over documents."""
    if pd.isna(row.perplexity):
        return ""
    if row.seeds > 1:
        return f"± {row.spread:.2f}"
    return f"[{row.low:.2f}, {row.high:.2f}]" if pd.notna(row.low) else "–"


def _explained(beneath: pd.DataFrame, results: Results) -> dict[str, Any]:
    """The second lines (omitted if none is an interval or a spread), and the note that explains them."""
    seeds = len(results.by_seed)
    if seeds > 1:
        note = f"Perplexities are means over {seeds} random seeds, ± the standard deviation over these seeds."
    elif beneath.apply(lambda column: column.str.startswith("[")).to_numpy().any():
        note = INTERVAL_NOTE
    else:
        return {"notes": ("No domain has the 20 test documents or the 400 test tokens that an interval needs.",)}
    return {"notes": (note,), "beneath": beneath}


def seed_note(run: Run) -> tuple[str, ...]:
    """The effect of a dense warm start on the removal experiments; empty without a warm start."""
    model = run.whole
    if not model.settings.seed_tokens:
        return ()
    return (
        f"{model.label} and −Domain start from the model {model.parent}, trained on {model.settings.seed_tokens:,} "
        "tokens of all training domains. Removing an expert or a domain therefore has a smaller effect.",
    )


def numbered(frame: pd.DataFrame) -> pd.DataFrame:
    """`frame` with its rows numbered from 1."""
    return frame.set_axis([str(number) for number in range(1, len(frame) + 1)])


ADAPTATIONS = ("Dense-DAPT", "Dense and Dense-DAPT", "DEMix-DAPT", "One expert added")


def adapting(data: RunData) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Test perplexities before and after the adaptation to each novel domain: one row per domain.

    The columns are Dense-DAPT, the mixture of the dense models before and after Dense-DAPT, DEMix-DAPT, and the mixture
    with one expert added, each on the training domains (the mean) and on the domain adapted to. DEMix-DAPT's expert is
    compared with the training expert of highest posterior.
    """
    run, results = data.run, data.own
    (naive, cached), (all_naive, _) = before_adding(run), added(run)
    found: dict[int, dict[str, dict[str, float]]] = {0: {}, 1: {}}
    for name in data.novel:
        systems = (
            (before_dense_dapt(run), dense_adapted(run)(name)),
            (before_dense_dapt(run), both_kept(run)(name)),
            (naive, all_naive),
            (cached, one_added(run)(name)),
        )
        for (kind, pair), when in product(zip(ADAPTATIONS, systems, strict=True), found):
            row = found[when].setdefault(name, {})
            row[f"{kind}: training domains"] = results.mean(pair[when], data.training)
            row[f"{kind}: own domain"] = results.mean(pair[when], [name])
        likeliest = data.parents[name].likeliest if name in data.parents else ""
        of_parent = results.expert_perplexities(naive.model, [name], [likeliest])
        found[0][name]["DEMix-DAPT: own domain"] = of_parent.loc[name, likeliest]
    before, after = (pd.DataFrame.from_dict(rows, orient="index", dtype="float64") for rows in found.values())
    return before, after


def changed_bytes(run: Run) -> dict[str, int]:
    """The bytes (fp32) of the parameters that the adaptation to one domain changes, by the names of `ADAPTATIONS`."""
    dense = next(model for model in run.trained if model.name == run.config.adaptation.dense)
    shared, feedforwards = parameters_of(dense, run)
    changed = shared + feedforwards if run.config.adaptation.dense_trained == "all" else feedforwards
    _, expert = parameters_of(run.receiver, run)
    return dict(zip(ADAPTATIONS, (4 * changed, 4 * changed, 4 * expert, 4 * expert), strict=True))
