"""Parts of tables: means over domains, changes in percent, second lines of cells.

Every average over domains is the plain mean of the domains' perplexities, or "–" if a domain's perplexity is missing.
"""

from collections.abc import Iterable, Mapping

import pandas as pd

from demix.progress import so_many
from demix.report.domains import Domains, mean_of
from demix.report.results import Results
from demix.report.systems import ByDomain, systems_on
from demix.report.verdict import mean_interval
from demix.run.run import Run
from demix.run.systems import System

PRINTED_MIXTURES = (
    "The paper's mixtures stand beside the released scorer or the released weights, because weights by all earlier "
    "tokens of a block (Eq. 5 and 6) cannot give them: by these equations a uniform prior costs a block of 1,024 "
    "tokens at most ln 8 nats more than any other prior of 8 experts, a factor of 8^(1/1024) = 1.002 in perplexity. "
    "The paper's Table 5 prints 24.5 / 21.4 = 1.145 for uniform against cached."
)
ORACLE_NOTE = (
    "Oracle: the single best domain token or expert is chosen on the test data itself, so that no real system "
    "could have known it."
)
WEIGHTS_NOTE = (
    "Rows without a remark weight experts by all earlier tokens of the block (Eq. 5 and 6 of the paper). "
    "'released scorer' and 'released weights' look at the previous token only, as the paper's published code does. Two "
    "rules are not the paper's: 'tempered' sums over all earlier text, in which older tokens count less; 'switching' "
    "is a chain that may change its expert at each token. 'switching' is told the domain by a prior fitted on dev, as "
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
    "from the same resamples of both systems."
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


def beneath_mean(results: Results, system: System, domains: list[str]) -> str:
    """The spread over seeds, or the interval over documents, of a mean over domains; empty where there is neither."""
    found = results.of(system, domains)
    if found["perplexity"].isna().any():
        return ""
    if len(results.by_seed) > 1:
        return results.spread(system, domains)
    interval = mean_interval(found["perplexity"], found[["low", "high"]].dropna())
    return f"[{interval[0]:.2f}, {interval[1]:.2f}]" if interval else ""


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


def seed_note(run: Run) -> tuple[str, ...]:
    """What the seed phase of the model of the removal experiments does to them; nothing without a seed phase."""
    model = run.whole
    if not model.settings.seed_tokens:
        return ()
    return (
        f"{model.label} and −Domain began with what the model {model.parent} had learned of every domain in its first "
        f"{model.settings.seed_tokens:,} tokens: a seed that has seen a domain weakens its removal.",
    )


def grid_frame(results: Results, setting: str, methods: Iterable[str], kinds: Iterable[Domains]) -> pd.DataFrame:
    """The columns of `Results.grid` by prior and kind of domains."""
    methods = list(methods)
    columns = {
        f"{method} prior, {domains.counted}": results.grid(setting, method, domains.names)
        for domains in kinds
        for method in methods
    }
    frame = pd.DataFrame(columns).sort_index()
    frame.index = [f"{value:g}" for value in frame.index]
    return frame


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
