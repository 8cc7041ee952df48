"""Parts of tables: means over domains, changes in percent, second lines of cells.

Every average over domains is the plain mean of the domains' perplexities, or "–" if a domain's perplexity is missing.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from demix.progress import so_many
from demix.report.domains import Domains, mean_of, percent
from demix.report.material import Material
from demix.report.results import Results, paired
from demix.report.systems import ByDomain, systems_on
from demix.report.verdict import mean_interval
from demix.run.run import Run
from demix.run.systems import System

ORACLE_NOTE = (
    "Oracle: the single best domain token or expert is chosen on the test data itself, so that no real system "
    "could have known it."
)
WEIGHTS_NOTE = (
    "Rows without a remark weight experts by all earlier tokens of the block (Eq. 5 and 6 of the paper). "
    "'released scorer' and 'released weights' look at the previous token only, as the paper's published code does. Two "
    "rules are not the paper's: 'tempered' sums over all earlier text, in which older tokens count less; 'switching' "
    "is a chain that may change its expert at each token. 'switching' knows the domain by a prior fitted on dev, as "
    "'cached' is by its prior."
)
# What an interval of a domain with fewer than 20 test documents is.
WITHIN_NOTE = (
    "Such an interval says what other text of the same documents could give. One over documents would be wider, since "
    "other documents differ more."
)
INTERVAL_NOTE = (
    "Below a perplexity is its 95% interval, from resampling the domain's test documents, each with all of its pieces. "
    "The interval says what other text of the domain could give, not what another training could. Where a domain has "
    "fewer than 20 documents, blocks of sqrt(N) of its N tokens are resampled instead, within these documents. "
    f"{WITHIN_NOTE} A text of fewer than 400 tokens has no interval."
)
MEAN_NOTE = (
    "Below a number is its 95% interval, from resampling test documents, where every domain has one. Of a change it is "
    "from the same resamples of both systems. Significant: the whole interval of the domain's difference is below zero."
)
# The columns of counts: documents of origin, and the pieces of them that are scored.
COUNTED = {"Documents": "{:,.0f}", "Pieces": "{:,.0f}"}


def ends_lower(dense: pd.Series, demix: pd.Series) -> str:
    """Which of Dense-DAPT and DEMix-DAPT ends at the lower mean perplexity, in words; one value per novel domain."""
    both = pd.DataFrame({"Dense-DAPT": dense, "DEMix-DAPT": demix}).dropna()
    if both.empty:
        return "there are no rows of both"
    (lower, low), (higher, high) = both.mean().sort_values().items()
    count = int((both[lower] < both[higher]).sum())
    return f"{lower} ends lower for {count} of {so_many(len(both), 'domain')} (mean {low:.1f}, {higher} {high:.1f})"


def lowest(frame: pd.DataFrame, axis: int) -> pd.DataFrame:
    """True where a cell is the lowest of its row (axis 1) or column (axis 0), at the two decimals printed."""
    rounded = frame.round(2)
    return rounded.eq(rounded.min(axis=axis), axis=1 - axis)


def second_lines(found: pd.DataFrame) -> list[str]:
    """The second line of each cell of `evaluations`: the spread over seeds, or the interval over documents."""
    lines = []
    for row in found.itertuples():
        if pd.isna(row.perplexity):
            lines.append("")
        elif row.seeds > 1:
            lines.append(f"± {row.spread:.2f}")
        else:
            lines.append(f"[{row.low:.2f}, {row.high:.2f}]" if pd.notna(row.low) else "–")
    return lines


def compared(
    material: Material, lines: Mapping[str, tuple[System, System]], kinds: Iterable[Domains]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Numbers and second lines: a row for each label of `lines`, of a system beside the one that it is compared with.

    The columns of each of `kinds` are the mean perplexity over its domains, the change in percent, and the number of
    domains where perplexity is lower. Below stands the 95% interval over documents or, with several seeds, the standard
    deviation of a seed's mean and of a seed's change. A system beside itself has no change. Merged models are made of
    the run's own seed alone.
    """
    rows: dict[str, dict[str, Any]] = {label: {} for label in lines}
    beneath: dict[str, dict[str, str]] = {label: {} for label in lines}
    for (label, (system, base)), domains in product(lines.items(), kinds):
        results = material.own if system.method == "merged" else material.results
        seeds, name = list(results.by_seed.values()), domains.heading
        found = results.of(system, domains.names)
        own, other = found["perplexity"], results.perplexities(base, domains.names)
        rows[label][name], means = mean_of(own), [one.mean(system, domains.names) for one in seeds]
        beneath[label][name] = _below("[{:.2f}, {:.2f}]", mean_interval(own, found[["low", "high"]].dropna()), means)
        if system != base:
            bounds = paired(material.bounds, system, base, domains.names)
            changes = percent(np.array([one.mean(base, domains.names) for one in seeds]), np.array(means))
            interval = mean_interval(own - other, bounds)
            relative = interval and tuple(100 * bound / mean_of(other) for bound in interval)
            rows[label][f"{name}, %"] = percent(mean_of(other), mean_of(own))
            beneath[label][f"{name}, %"] = _below("{:+.1f} to {:+.1f}", relative, changes)
            both, significant = (own + other).count(), (bounds["high"] < 0).sum()
            lower = f"{(own < other).sum()} of {both}" if both else ""
            rows[label][f"{name}, lower"] = lower + f" ({significant} significant)" * (
                len(bounds) > 0 and len(seeds) == 1
            )
    return pd.DataFrame.from_dict(rows, orient="index"), pd.DataFrame.from_dict(beneath, orient="index")


def _below(form: str, interval: tuple[float, ...] | None, by_seed: Sequence[float]) -> str:
    """The second line of a mean: its spread over several seeds, or its interval; empty where there is neither."""
    if len(by_seed) > 1:
        return f"± {np.std(by_seed, ddof=1):.2f}" if np.isfinite(by_seed).all() else ""
    return form.format(*interval).replace("-", "−") if interval else ""


def by_domain(
    results: Results, systems: Mapping[str, ByDomain], domains: list[str]
) -> tuple[pd.DataFrame, pd.DataFrame | None, tuple[str, ...]]:
    """Perplexities, second lines (None without any interval or spread) and notes; one row per domain.

    `systems` has the system of each column. The last columns count test documents and their pieces.
    """
    found = {label: results.of(system, domains) for label, system in systems.items()}
    frame = pd.DataFrame({label: one["perplexity"] for label, one in found.items()}, index=domains)
    for count in ("documents", "pieces"):
        frame[count.title()] = pd.DataFrame({label: one[count] for label, one in found.items()}).max(axis=1)
    beneath = pd.DataFrame({label: second_lines(one) for label, one in found.items()}, index=domains)
    return frame, *explained(beneath, results)


def by_system(
    results: Results, systems: Mapping[str, System], domains: list[str]
) -> tuple[pd.DataFrame, pd.DataFrame | None, tuple[str, ...]]:
    """Perplexities, second lines and notes as of `by_domain`, one row per system; the first column is the mean."""
    found = {label: results.of(system, domains) for label, system in systems.items()}
    frame = pd.DataFrame({label: one["perplexity"] for label, one in found.items()}).T.reindex(columns=domains)
    frame.insert(0, "Mean", [mean_of(values) for _, values in frame.iterrows()])
    below = pd.DataFrame({label: second_lines(one) for label, one in found.items()}, index=domains).T
    beneath, notes = explained(below, results)
    documents, pieces = (
        pd.DataFrame({label: one[count] for label, one in found.items()}).max(axis=1)
        for count in ("documents", "pieces")
    )
    counts = ", ".join(f"{name} {number:,.0f} ({pieces[name]:,.0f})" for name, number in documents.dropna().items())
    return frame, beneath, (*notes, *([f"Test documents (and their pieces): {counts}."] if counts else []))


def explained(beneath: pd.DataFrame, results: Results) -> tuple[pd.DataFrame | None, tuple[str, ...]]:
    """The second lines, or None if all are empty, and the note that explains the lines."""
    seeds = len(results.by_seed)
    if seeds > 1:
        return beneath, (f"Perplexities are means over {seeds} seeds, ± their standard deviation.",)
    some = beneath.apply(lambda column: column.str.startswith("[")).to_numpy().any()
    few = "No domain has the 20 test documents, or the 400 test tokens, that an interval needs."
    return (beneath, (INTERVAL_NOTE,)) if some else (None, (few,))


def mean_notes(results: Results) -> tuple[str, ...]:
    """What stands below the numbers of `compared`."""
    seeds = len(results.by_seed)
    several = "± the standard deviation of a seed's mean, or of the change within a seed"
    return (f"Means over {seeds} seeds, {several}." if seeds > 1 else MEAN_NOTE,)


def seed_note(run: Run) -> tuple[str, ...]:
    """What the seed phase of the model of the removal experiments does to them; nothing without a seed phase."""
    model = run.whole
    if not model.settings.seed_tokens:
        return ()
    return (
        f"{model.label} and −Domain began with what the model {model.parent} had learned of every domain in its first "
        f"{model.settings.seed_tokens:,} tokens: a seed that has seen a domain weakens its removal.",
    )


def systems_frame(kinds: Iterable[Domains], run: Run) -> pd.DataFrame:
    """One row per domain and system of the tables that is evaluated on it, in order (column place)."""
    return pd.DataFrame(
        {"domain": domain, "kind": domains.kind, **vars(system)}
        for domains in kinds
        for domain in domains.names
        for system in systems_on(domain, domains.kind, run)
    ).reset_index(names="place")


def numbered(frame: pd.DataFrame) -> pd.DataFrame:
    """`frame` with its rows numbered from 1."""
    return frame.set_axis([str(number) for number in range(1, len(frame) + 1)])
