"""Tables 3, 4, 5, 6, 7 and 13 of the paper and those of our own, as numbers (pandas) and as HTML, Markdown and LaTeX.

Every average over domains is the plain mean of the domains' perplexities, and "–" where one of them is missing.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from demix.files import write_text
from demix.report import results as read
from demix.report.affinity import affinities, relations, with_overlap
from demix.report.page import render
from demix.report.paper import SIZES, printed, size_of
from demix.report.results import (
    comparable,
    evaluations,
    expert_perplexities,
    grid,
    novel_domains,
    perplexities,
    training_domains,
)

if TYPE_CHECKING:
    import rich.table

IN_DOMAIN = (read.DENSE, read.BALANCED, read.DOMAIN_TOKEN, read.NAIVE, read.CACHED)
MIXTURES = (read.NAIVE, read.AVERAGE, read.UNIFORM, read.UPDATING, read.CACHED)
POSTERIOR_MIXTURES = (read.UNIFORM, read.UPDATING, read.CACHED)
ORACLE_NOTE = (
    "Oracle: the single best domain token or expert is chosen on the test data itself, so that no real system "
    "could have known it."
)
WEIGHTS_NOTE = (
    "Rows without a remark weight experts by all earlier tokens of the block (Eq. 7 and 8 of the paper); "
    "'released weights' looks at the previous token only, as the code published with the paper does."
)
INTERVAL_NOTE = (
    "Below a perplexity its 95% interval from resampling the domain's test documents, and “–” where the domain has "
    "fewer than 20 of them. It says what other text of the domain could give, not what another training could."
)


@dataclass(frozen=True)
class Table:
    """A table of numbers and what a reader must know of it.

    `frame` has one row a label, NaN (or "") where the run has no such evaluation. `formats` maps a column to its
    format, two decimals by default. `summaries` are the rows that average the rows above them. `best` marks the
    cells to print bold. `beneath` is a second line of a cell, where it has one. A `long` table may run over pages.
    """

    name: str
    title: str
    caption: str
    frame: pd.DataFrame
    notes: tuple[str, ...] = ()
    formats: dict[str, str] = field(default_factory=dict)
    summaries: frozenset[str] = frozenset()
    best: pd.DataFrame | None = None
    beneath: pd.DataFrame | None = None
    long: bool = False

    def text(self) -> pd.DataFrame:
        """The cells as printed."""
        columns = {
            column: [_cell(value, self.formats.get(column, "{:.2f}")) for value in values]
            for column, values in self.frame.items()
        }
        return pd.DataFrame(columns, index=self.frame.index, dtype=object)

    def bold(self) -> pd.DataFrame:
        """True for the cells that are printed bold."""
        if self.best is None:
            return pd.DataFrame(False, index=self.frame.index, columns=self.frame.columns)
        return self.best.reindex(index=self.frame.index, columns=self.frame.columns, fill_value=False).astype(bool)

    def second_lines(self) -> pd.DataFrame:
        """The second line of each cell, empty where it has none."""
        beneath = self.beneath if self.beneath is not None else pd.DataFrame()
        return (
            beneath.reindex(index=self.frame.index, columns=self.frame.columns, fill_value="").fillna("").astype(object)
        )

    def noted(self, *notes: str) -> "Table":
        """This table with more notes below it."""
        return replace(self, notes=(*self.notes, *notes))


def _cell(value: Any, form: str) -> str:
    if isinstance(value, str):
        return value or "–"
    if pd.isna(value):
        return "–"
    text = form.format(value)
    return (text if any(digit in text for digit in "123456789") else text.lstrip("+-")).replace("-", "−")


def _mean(values: Iterable[float]) -> float:
    numbers = np.asarray(list(values), dtype="float64")
    return float(numbers.mean()) if len(numbers) else float("nan")


def _percent(before: Any, after: Any) -> Any:
    return 100 * (after / before - 1)


def _lowest(frame: pd.DataFrame, axis: int) -> pd.DataFrame:
    """True where a cell is the lowest of its row (axis 1) or column (axis 0), at the two decimals printed."""
    rounded = frame.round(2)
    return rounded.eq(rounded.min(axis=axis), axis=1 - axis)


def _spread(found: pd.DataFrame) -> list[str]:
    """The second line of cells that `evaluations` found: the spread over seeds, else the interval over documents."""
    lines = []
    for row in found.itertuples():
        if pd.isna(row.perplexity):
            lines.append("")
        elif row.seeds > 1:
            lines.append(f"± {row.spread:.2f}")
        else:
            lines.append(f"[{row.low:.2f}, {row.high:.2f}]" if pd.notna(row.low) else "–")
    return lines


def _by_domain(results: pd.DataFrame, systems: dict[str, Callable[[str], read.System]], domains: list[str]) -> Any:
    """Perplexities, second lines (None where there is no interval and no spread) and notes, domains as rows.

    `systems` maps a column to the system that each domain has there. The last column counts the test documents.
    """
    found = {
        label: pd.concat([evaluations(results, system(name), [name]) for name in domains])
        if domains
        else evaluations(results, system(""), [])
        for label, system in systems.items()
    }
    frame = pd.DataFrame({label: one["perplexity"] for label, one in found.items()}, index=domains)
    frame["Documents"] = pd.DataFrame({label: one["documents"] for label, one in found.items()}).max(axis=1)
    beneath = pd.DataFrame({label: _spread(one) for label, one in found.items()}, index=domains)
    return frame, *_told(beneath, results)


def _told(beneath: pd.DataFrame, results: pd.DataFrame) -> tuple[pd.DataFrame | None, tuple[str, ...]]:
    """Second lines, if any says something, and the note that explains them."""
    seeds = results["seed"].nunique()
    if seeds > 1:
        return beneath, (f"Perplexities are means over {seeds} seeds, ± their standard deviation.",)
    some = beneath.apply(lambda column: column.str.startswith("[")).to_numpy().any()
    few = "No domain has the 20 test documents that an interval over documents needs."
    return (beneath, (INTERVAL_NOTE,)) if some else (None, (few,))


def _always(system: read.System) -> Callable[[str], read.System]:
    return lambda _: system


def _seeds_of(results: pd.DataFrame, system: read.System, domains: list[str]) -> str:
    """The mean over domains of each seed, as its spread over seeds."""
    means = [_mean(perplexities(rows, system, domains)) for _, rows in results.groupby("seed")]
    return f"± {np.std(means, ddof=1):.2f}" if len(means) > 1 and np.isfinite(means).all() else ""


def table3(results: pd.DataFrame, config: dict[str, Any]) -> Table:
    """Table 3: mean test perplexity over the training domains of the dense baselines and DEMix."""
    domains = training_domains(config)
    columns = {system.label: perplexities(results, system, domains) for system in IN_DOMAIN}
    balanced = columns[read.BALANCED.label]
    rows = {}
    for label, values in columns.items():
        both = values.notna() & balanced.notna()
        other = label != read.BALANCED.label and both.any()
        rows[label] = {
            "Perplexity": _mean(values),
            "Against Dense (Balanced), %": _percent(_mean(balanced), _mean(values)) if other else np.nan,
            "Domains better than Dense (Balanced)": f"{(values < balanced)[both].sum()} of {both.sum()}"
            if other
            else "",
        }
    frame = pd.DataFrame.from_dict(rows, orient="index")
    seeds = results["seed"].nunique()
    spread = {system.label: {"Perplexity": _seeds_of(results, system, domains)} for system in IN_DOMAIN}
    return Table(
        "table3",
        "Table 3: perplexity on the training domains",
        f"Test perplexity averaged over the {len(domains)} training domains, for two dense baselines, a dense model "
        "with domain tokens, and DEMix with the domain known (naive) or mixed with a cached prior. Lower is better.",
        frame,
        notes=(f"Means over {seeds} seeds, ± the standard deviation of a seed's mean.",) if seeds > 1 else (),
        formats={"Against Dense (Balanced), %": "{:+.1f}"},
        best=_lowest(frame[["Perplexity"]], axis=0),
        beneath=pd.DataFrame.from_dict(spread, orient="index"),
    )


def table4(results: pd.DataFrame, config: dict[str, Any]) -> Table:
    """Table 4: test perplexity of each training domain, the systems of Table 3 as columns."""
    domains = training_domains(config)
    frame, beneath, notes = _by_domain(results, {one.label: _always(one) for one in IN_DOMAIN}, domains)
    label = f"Mean of {len(domains)}"
    frame.loc[label] = [*(_mean(frame[system.label]) for system in IN_DOMAIN), np.nan]
    return Table(
        "table4",
        "Table 4: perplexity by training domain",
        "Test perplexity on each training domain, for the systems of Table 3. Lower is better; the lowest of each "
        "domain is bold.",
        frame,
        notes=notes,
        formats={"Documents": "{:.0f}"},
        summaries=frozenset({label}),
        best=_lowest(frame.drop(columns="Documents"), axis=1),
        beneath=beneath,
    )


def table5(results: pd.DataFrame, config: dict[str, Any]) -> Table:
    """Table 5: test perplexity on each novel domain, baselines and ways to mix, `released` weights below.

    The one token or expert that a novel domain is given is chosen on its dev split, or by an oracle on the test.
    """
    domains = novel_domains(config)
    lines = {
        "Dense": read.DENSE,
        "Dense (Balanced)": read.BALANCED,
        "+ Domain Token (oracle)": read.DOMAIN_TOKEN,
        "+ Domain Token (chosen on dev)": read.DOMAIN_TOKEN.chosen_on_dev(),
        "DEMix (naive, oracle)": read.NAIVE,
        "DEMix (naive, chosen on dev)": read.NAIVE.chosen_on_dev(),
        **{system.label: system for system in MIXTURES[1:]},
    }
    for system in POSTERIOR_MIXTURES:
        released = system.with_weights("released")
        lines[released.label] = released
    found = {label: evaluations(results, system, domains) for label, system in lines.items()}
    frame = pd.DataFrame({label: one["perplexity"] for label, one in found.items()}).T.reindex(columns=domains)
    frame["Mean"] = [_mean(values) for _, values in frame.iterrows()]
    beneath, notes = _told(
        pd.DataFrame({label: _spread(one) for label, one in found.items()}, index=domains).T, results
    )
    documents = found["Dense"]["documents"].combine_first(found["DEMix (cached prior)"]["documents"]).dropna()
    honest = frame.drop(index=["+ Domain Token (oracle)", "DEMix (naive, oracle)"])
    return Table(
        "table5",
        "Table 5: perplexity on the novel domains",
        f"Test perplexity on each of the {len(domains)} domains never trained on, for the baselines and for DEMix by "
        "the way its experts are mixed. Lower is better; the lowest of each column is bold, oracles left out.",
        frame,
        notes=(
            ORACLE_NOTE,
            WEIGHTS_NOTE,
            *notes,
            *(
                ["Test documents: " + ", ".join(f"{k} {n:.0f}" for k, n in documents.items()) + "."]
                * bool(len(documents))
            ),
        ),
        best=_lowest(honest, axis=0),
        beneath=beneath,
    )


def table6(results: pd.DataFrame, config: dict[str, Any]) -> Table:
    """Table 6: test perplexity with the training experts and with the adapted experts added, cached prior."""
    training, novel = training_domains(config), novel_domains(config)
    few, many = f"{len(training)} experts", f"{len(training) + len(novel)} experts{'' if novel else ', none added'}"
    parts, lines, summaries, notes = [], [], [], ()
    for kind, domains in (("training", training), ("novel", novel)):
        if not domains:
            continue
        systems = {few: _always(read.CACHED), many: _always(read.ALL_CACHED)}
        part, beneath, told = _by_domain(results, systems, domains)
        summaries.append(f"Mean of {len(domains)} {kind}")
        part.loc[summaries[-1]] = [_mean(part[few]), _mean(part[many]), np.nan]
        parts.append(part)
        lines += [beneath] if beneath is not None else []
        # What is said where no domain has an interval goes only where no kind has one.
        notes = told if beneath is not None or not notes else notes
    frame = pd.concat(parts)
    best = _lowest(frame[[few, many]], axis=1)
    frame.insert(2, "Change, %", _percent(frame[few], frame[many]))
    return Table(
        "table6",
        "Table 6: adding experts",
        f"Test perplexity with a cached prior, over the {len(training)} experts trained together and over these and "
        f"the {len(novel)} that DEMix-DAPT added, first on the training, then on the novel domains. Lower is better.",
        frame,
        notes=notes,
        formats={"Change, %": "{:+.2f}", "Documents": "{:.0f}"},
        summaries=frozenset(summaries),
        best=best,
        beneath=pd.concat(lines) if lines else None,
    )


def table7(results: pd.DataFrame, config: dict[str, Any]) -> Table:
    """Table 7: test perplexity of a training domain with its expert, without it, and never trained on."""
    domains = training_domains(config)
    systems = {"+Expert": _always(read.CACHED), "−Expert": read.without_expert, "−Domain": read.without_domain}
    frame, beneath, notes = _by_domain(results, systems, domains)
    complete = frame[list(systems)].dropna()
    every = f"Mean of all {len(domains)}"
    summaries = [every]
    frame.loc[every] = [*(_mean(frame[column]) for column in systems), np.nan]
    if 0 < len(complete) < len(domains):
        summaries.append(f"Mean of the {len(complete)} that have all three")
        frame.loc[summaries[-1]] = [*complete.mean(), np.nan]
    replacement = (config.get("removal") or {}).get("replacement")
    return Table(
        "table7",
        "Table 7: removing experts",
        "Test perplexity on a training domain with all experts (+Expert), with the domain's own expert left out "
        "(−Expert), and by a model never trained on the domain (−Domain). All three with a cached prior. Higher "
        "without the expert means that leaving it out takes the domain away.",
        frame,
        notes=(
            "−Domain puts a replacement"
            + (f" ({replacement})" if replacement else "")
            + " in the domain's place and trains for the same steps; it is run for "
            + (f"{len(complete)} of the {len(domains)} domains." if len(complete) else "none of the domains."),
            *notes,
        ),
        formats={"Documents": "{:.0f}"},
        summaries=frozenset(summaries),
        beneath=beneath,
    )


def table13(results: pd.DataFrame, config: dict[str, Any], parents: dict[str, str]) -> Table:
    """Table 13: change of perplexity in percent by Dense-DAPT and DEMix-DAPT, on old domains and on the new one.

    `parents` maps a novel domain to the expert that its own was copied from.
    """
    training, novel = training_domains(config), novel_domains(config)
    dense = perplexities(results, read.BALANCED, [*training, *novel])
    experts = perplexities(results, read.ALL_NAIVE, [*training, *novel])
    before = perplexities(results, read.NAIVE, training)
    rows = {}
    for name in novel:
        adapted = perplexities(results, read.dense_adapted(name), [*training, name])
        parent = parents.get(name, "")
        parent_perplexity = expert_perplexities(results, name, [parent])[parent] if parent else np.nan
        rows[name] = {
            "Dense-DAPT: training domains": _percent(_mean(dense[training]), _mean(adapted[training])),
            "Dense-DAPT: own domain": _percent(dense[name], adapted[name]),
            "DEMix-DAPT: training domains": _percent(_mean(before), _mean(experts[training])),
            "DEMix-DAPT: own domain": _percent(parent_perplexity, experts[name]),
            "Parent expert": parent,
        }
    columns = [
        f"{kind}-DAPT: {part} domain{s}" for kind in ("Dense", "DEMix") for part, s in (("training", "s"), ("own", ""))
    ]
    frame = pd.DataFrame.from_dict(rows, orient="index", columns=[*columns, "Parent expert"])
    label = f"Mean of {len(novel)}"
    frame.loc[label] = [*(_mean(frame[column]) for column in columns), " "]
    return Table(
        "table13",
        "Table 13: adapting to a novel domain, and forgetting",
        "Change of test perplexity in percent (negative is better) by adapting to the domain of each row: averaged "
        f"over the {len(training)} training domains, which shows forgetting, and on the domain adapted to. Dense-DAPT "
        "is compared with the dense (balanced) model; DEMix-DAPT's expert with the parent expert it was copied from, "
        "and on training domains each domain's own expert before and after the experts were added, the same by "
        "construction: no file of theirs is written, which sha256 sums beside each expert and score table prove.",
        frame,
        formats=dict.fromkeys(columns, "{:+.1f}"),
        summaries=frozenset({label}),
    )


def overlap_table(results: pd.DataFrame, overlap: pd.DataFrame, config: dict[str, Any]) -> Table:
    """The correlation of Figure 2's two halves: affinity of experts and bigrams that domains share."""
    rows = {
        f"{found.kind} domains": {
            "Domains": found.domains,
            "Pairs": found.pairs,
            "Spearman": found.spearman,
            "p of Spearman": found.spearman_p,
            "p, domains permuted": found.permutation_p,
            "Pearson (log ratio)": found.pearson,
            "p of Pearson": found.pearson_p,
        }
        for found in relations(with_overlap(affinities(results, config), overlap))
    }
    tokens = overlap["train_tokens"].max() if len(overlap) else 0
    return Table(
        "overlap",
        "Affinity of experts and overlap of bigrams",
        "Correlation, over pairs of a domain and an expert, of the perplexity ratio (Figure 2) with the share of the "
        "bigrams of the domain's test split that occur in the expert's training text. Negative: an expert predicts a "
        "domain the better the more bigrams they share. On training domains a domain's own expert is left out.",
        pd.DataFrame.from_dict(rows, orient="index"),
        notes=(
            "Each domain and each expert is in several pairs, so that there are fewer independent observations than "
            "pairs and the p values that count pairs are too small; the one with whole domains permuted (9,999 random "
            "orders, or all where there are fewer; two-sided) does not take pairs for independent.",
            f"Bigrams of tokens, none across documents; of each training text its first {tokens:,} tokens.",
        ),
        formats=dict.fromkeys(("Domains", "Pairs"), "{:.0f}")
        | dict.fromkeys(("Spearman", "Pearson (log ratio)"), "{:+.2f}")
        | dict.fromkeys(("p of Spearman", "p, domains permuted", "p of Pearson"), "{:.2g}"),
    )


def weights_table(results: pd.DataFrame, config: dict[str, Any]) -> Table:
    """Every rule of weights that was evaluated, and the released code's scorer, by method: means over domains."""
    rules = list(dict.fromkeys(results.loc[results["method"].isin(["uniform", "updating", "cached"]), "weights"]))
    lines = {}
    for base in POSTERIOR_MIXTURES:
        for rule in rules:
            lines[base.label.removesuffix(")") + f", {_rule(rule)})"] = (base, replace(base, weights=rule))
        released = replace(base, weights="released", variant="released_scorer")
        lines[base.label.removesuffix(")") + ", released scorer)"] = (base, released)
    frame = _against_history(results, lines, config)
    return Table(
        "weights",
        "How experts are weighted: all of the block, its last tokens, or as in the released code",
        "Mean test perplexity of DEMix by the tokens that a token's weights look at, and how much higher it is than "
        "with all earlier tokens of the block (the paper's Eq. 7 and 8). Lower is better.",
        frame,
        notes=(
            "Released weights: the previous token only, and equal weights at a block's start whatever the prior. "
            "Released scorer: besides, the posterior of a block is taken at its last position, averaged over the "
            "released code's batches, and its running mean over-weights the first block and decays by 0.7.",
        ),
        formats={column: "{:+.2f}" for column in frame if column.endswith("%")},
    )


def _rule(weights: str) -> str:
    if weights.isdigit():
        return f"last {weights} token{'s' * (weights != '1')}"
    return f"{weights} weights" if weights == "released" else weights


def _against_history(
    results: pd.DataFrame, lines: dict[str, tuple[read.System, read.System]], config: dict[str, Any]
) -> pd.DataFrame:
    """Means over each kind of domains of the second system of each line, and its change from the first in percent."""
    rows = {}
    for label, (base, system) in lines.items():
        rows[label] = {}
        for kind, domains in _groups(config):
            if not domains:
                continue
            mean, reference = (_mean(perplexities(results, one, domains)) for one in (system, base))
            rows[label][f"Mean of {len(domains)} {kind}"] = mean
            rows[label][f"{kind}: against history, %"] = _percent(reference, mean) if system != base else np.nan
    frame = pd.DataFrame.from_dict(rows, orient="index")
    return frame[frame.notna().any(axis=1)] if frame.notna().to_numpy().any() else frame


def decay_table(results: pd.DataFrame, config: dict[str, Any]) -> Table:
    """Mean test perplexity by the decay λ of the updating prior and of the cached one."""
    settings = config.get("evaluation") or {}
    frame = _grid_frame(results, "decay", "decay", ("updating", "cached"), config)
    best = "; ".join(
        f"{column}: {values.idxmin() if values.round(2).nunique() > 1 else 'all alike'}"
        for column, values in frame.items()
        if values.notna().any()
    )
    return Table(
        "decay",
        "The decay λ of the prior",
        "Mean test perplexity of DEMix over its training experts by the decay λ of Eq. 9, for the updating prior and "
        "for the cached one. Lower is better; the lowest of each column is bold.",
        frame,
        notes=(
            f"The other tables use {settings.get('decay', 'the config’s')}.",
            *([f"Lowest: {best}. Read off the test data, so no choice that a system could have made."] if best else []),
        ),
        best=_lowest(frame, axis=0) if len(frame) else None,
    )


def dev_blocks_table(results: pd.DataFrame, config: dict[str, Any]) -> Table:
    """Mean test perplexity by the number of dev blocks that the cached prior is taken from."""
    settings = config.get("evaluation") or {}
    frame = _grid_frame(results, "dev_blocks", "dev_blocks", ("cached",), config)
    return Table(
        "dev_blocks",
        "How much dev text the cached prior needs",
        "Mean test perplexity of DEMix over its training experts with a cached prior, by the number of dev blocks that "
        "the prior is taken from. Lower is better; the lowest of each column is bold.",
        frame,
        notes=(f"The other tables use {settings.get('dev_blocks', 'the config’s number')}; the paper 100.",),
        best=_lowest(frame, axis=0) if len(frame) else None,
    )


def _grid_frame(
    results: pd.DataFrame, variant: str, column: str, methods: tuple[str, ...], config: dict[str, Any]
) -> pd.DataFrame:
    columns = {
        f"{method} prior, {len(domains)} {kind}": grid(results, variant, method, column, domains)
        for kind, domains in _groups(config)
        if domains
        for method in methods
    }
    frame = pd.DataFrame(columns).sort_index()
    frame.index = [f"{value:g}" for value in frame.index]
    return frame


def full_table(results: pd.DataFrame, config: dict[str, Any]) -> Table:
    """Every system on every domain, a row each: perplexity, interval, documents, tokens, bits per byte."""
    rows = []
    for kind, domains in _groups(config):
        for domain in domains:
            for system in _every_system(domain, kind):
                found = evaluations(results, system, [domain]).iloc[0]
                if pd.notna(found["perplexity"]):
                    rows.append({"Domain": domain, "Kind": kind, "System": system.label} | found.to_dict())
    names = {
        "perplexity": "Perplexity", "low": "Low", "high": "High", "spread": "± seeds", "bits_per_byte": "Bits per byte",
        "documents": "Documents", "tokens": "Tokens",
    }  # fmt: skip
    frame = pd.DataFrame(rows, columns=["Domain", "Kind", "System", *names]).rename(columns=names)
    seeds = results["seed"].nunique()
    frame = frame if seeds > 1 else frame.drop(columns="± seeds")
    frame.index = [str(number) for number in range(1, len(frame) + 1)]
    return Table(
        "full",
        "Every system on every domain",
        "Test perplexity, the bounds of its 95% interval, and bits per byte of the text, of every system of the tables "
        "on every domain. Lower is better. Bits per byte compare across tokenizers, perplexities do not.",
        frame,
        notes=(INTERVAL_NOTE,)
        if seeds == 1
        else (
            f"Means over {seeds} seeds, ± their standard deviation, where a system has them; else one seed's interval.",
        ),
        formats={"Documents": "{:,.0f}", "Tokens": "{:,.0f}", "Bits per byte": "{:.3f}"},
        long=True,
    )


def differences_table(differences: pd.DataFrame, config: dict[str, Any]) -> Table:
    """Each system less each of `read.BASES`, over the same documents of a domain."""
    bases = {name: base.label for name, base in read.BASES.items()}
    rows = []
    for kind, domains in _groups(config):
        for domain in domains:
            found = differences[differences["domain"] == domain]
            named = {
                (one.model, one.experts, one.method, one.weights): one.label for one in _every_system(domain, kind)
            }
            for row in found.itertuples():
                rows.append({
                    "Domain": domain, "System": named[row.model, row.experts, row.method, row.weights],
                    "Less": bases[row.against], "Nats a token": row.nats_per_token, "Nats low": row.nats_per_token_low,
                    "Nats high": row.nats_per_token_high, "Perplexity": row.perplexity,
                    "Perplexity low": row.perplexity_low,
                    "Perplexity high": row.perplexity_high, "Documents": row.documents,
                    "Seed": str(row.seed),
                })  # fmt: skip
    nats, perplexity = (["Nats a token", "Nats low", "Nats high"], ["Perplexity", "Perplexity low", "Perplexity high"])
    columns = ["Domain", "System", "Less", *nats, *perplexity]
    frame = pd.DataFrame(rows, columns=[*columns, "Documents", "Seed"])
    if differences["seed"].nunique() < 2:
        frame = frame.drop(columns="Seed")
    frame.index = [str(number) for number in range(1, len(frame) + 1)]
    formats = dict.fromkeys(nats, "{:+.4f}")
    formats |= dict.fromkeys(perplexity, "{:+.2f}")
    return Table(
        "differences",
        "Differences between systems on the same documents",
        "A system's test loss (nats a token) and perplexity less those of another, with the bounds of 95% intervals "
        "from resampling the domain's test documents, the same ones for both. Negative: better than the other; an "
        "interval that leaves out zero: other documents would hardly turn it round.",
        frame,
        notes=("“–” where the domain has fewer than 20 test documents. One training each: seeds are not in it.",),
        formats=formats | {"Documents": "{:,.0f}"},
        long=True,
    )


AUDITED = {
    "own": "own expert alone",
    "mixture": "all experts",
    "minus": "without its expert",
    "without": "never trained on it",
}


def audit_table(audit: pd.DataFrame, config: dict[str, Any]) -> Table:
    """What the models still know of a removed domain's documents word for word, train against test."""
    columns = {"matched": "Tokens word for word, {}", "share": "Tokens right, {} (%)", "nll": "Nats, {}"}
    rows = {}
    for domain in training_domains(config):
        for system, label in AUDITED.items():
            found = audit[(audit["domain"] == domain) & (audit["system"] == system)]
            if not len(found):
                continue
            means = found.groupby("split")[list(columns)].mean()
            rows[f"{domain}, {label}"] = {
                heading.format(split): means[name].get(split, np.nan) * (100 if name == "share" else 1)
                for name, heading in columns.items()
                for split in ("train", "test")
            } | {f"Documents, {split}": float((found["split"] == split).sum()) for split in ("train", "test")}
    headings = [heading.format(split) for heading in columns.values() for split in ("train", "test")]
    counts = [f"Documents, {split}" for split in ("train", "test")]
    frame = pd.DataFrame.from_dict(rows, orient="index", columns=[*headings, *counts])
    return Table(
        "audit",
        "What is left of a removed domain, word for word",
        "Documents of a removed domain are continued from 50 tokens of theirs, greedily: how many of the next 50 are "
        "the document's before the first that is not, the share of all 50 that are, and the loss of the document's own "
        "50 tokens (nats). Means over documents that were trained on and over test documents, which no model saw.",
        frame,
        notes=(
            "Train above test by more than chance means that training documents were memorized; without the domain's "
            "expert, by what all experts share.",
        ),
        formats=dict.fromkeys(counts, "{:.0f}"),
    )


def _every_system(domain: str, kind: str) -> list[read.System]:
    naive = (read.DOMAIN_TOKEN, read.NAIVE)
    oracle = [replace(system, label=f"{system.label}, oracle") for system in naive]
    single = [*naive] if kind == "training" else [*oracle, *(system.chosen_on_dev() for system in naive)]
    mixed = [*MIXTURES[1:], *(system.with_weights("released") for system in POSTERIOR_MIXTURES)]
    removed = [
        replace(read.without_expert(domain), label="DEMix without its expert (cached)"),
        replace(read.without_domain(domain), label="DEMix never trained on it (cached)"),
    ]
    adapted = [replace(read.dense_adapted(domain), label="Dense-DAPT to it")]
    return [read.DENSE, read.BALANCED, *single, *mixed, read.ALL_NAIVE, read.ALL_CACHED, *removed, *adapted]


def scale_note(results: pd.DataFrame, config: dict[str, Any]) -> str:
    """What of this run differs from the paper in data, budget and scale, in one or two sentences."""
    architecture, tokenizer = config.get("architecture") or {}, config.get("tokenizer") or {}
    training = config.get("training") or {}
    parts = [f"{len(training_domains(config))} training and {len(novel_domains(config))} novel domains"]
    if "preset" in architecture:
        parts.append(f"architecture {architecture['preset']}")
    elif {"layers", "width"} <= architecture.keys():
        parts.append(f"{architecture['layers']} layers of width {architecture['width']}")
    if "context" in architecture:
        parts.append(f"blocks of {architecture['context']:,} tokens")
    if "vocab_size" in tokenizer:
        parts.append(f"a vocabulary of {tokenizer['vocab_size']:,}")
    if isinstance(training.get("tokens"), int):
        parts.append(f"{training['tokens']:,} training tokens a model")
    for column, noun in (("tokens", "test tokens a domain"), ("documents", "test documents a domain")):
        numbers = results.loc[results["split"] == "test", column]
        if len(numbers):
            low, high = int(numbers.min()), int(numbers.max())
            parts.append(f"{low:,} {noun}" if low == high else f"{low:,} to {high:,} {noun}")
    return (
        f"Differs from the paper in data, budget and scale. This run ({config.get('run', 'unnamed')}): "
        + ", ".join(parts)
        + (f", {seeds} seeds" if (seeds := results["seed"].nunique()) > 1 else ", one seed")
        + ". The paper: its own 8 and 8 domains, 125M to 1.3B parameters a dense model, blocks of 1,024 "
        "tokens, a vocabulary of 50,257, about two days on 32 to 128 GPUs a model. Compare the order, not the values."
    )


def beside_paper(table: Table, config: dict[str, Any]) -> Table:
    """`table` with the means that the paper prints for a run of this size, or with a note that says why without."""
    preset = size_of(config)
    if preset is None:
        sizes = ", ".join(SIZES.values())
        return table.noted(
            f"The paper has no model of this run's size ({sizes}): none of its numbers stands beside these."
        )
    entries = [one for one in printed() if one.table == table.name]
    label = f"Paper, {SIZES[preset]}"
    for one in entries:
        frame = table.frame.copy()
        if one.preset == preset and frame.columns.isin(list(one.means)).any():
            # An object column takes a blank: "–" would say that this run lacks the number.
            blank = [np.nan if frame[column].dtype.kind in "fi" else " " for column in frame]
            frame.loc[label] = [one.means.get(column, empty) for column, empty in zip(frame, blank, strict=True)]
            return replace(table, frame=frame, summaries=table.summaries | {label}).noted(_PRINTED)
        if one.preset == preset and frame.index.isin(list(one.means)).any():
            frame[label] = pd.Series(one.means)
            return replace(table, frame=frame).noted(_PRINTED)
    unplaced = "; ".join(", ".join(f"{mean:.2f}" for mean in one.means.values()) for one in entries if not one.preset)
    told = f" It prints the means {unplaced}, of which the size and the systems are not recorded." if unplaced else ""
    return table.noted(
        f"What the paper prints here for {SIZES[preset]} is not recorded in demix/report/paper.json.{told}"
    )


_PRINTED = (
    "“Paper” is the mean that the paper prints for this size: over its own domains, of which some here are later or "
    "other releases, trained for about two days on 32 to 128 GPUs, one seed."
)


def all_tables(
    results: pd.DataFrame,
    differences: pd.DataFrame,
    overlap: pd.DataFrame,
    audit: pd.DataFrame,
    parents: dict[str, str],
    config: dict[str, Any],
) -> list[Table]:
    """The paper's tables and our own. Raises DemixError if rows of one domain were scored on different tokens."""
    comparable(results)
    # What is added, removed or varied is so for the run's own seed alone: means over seeds do not stand beside it.
    own = read.of_seed(results, config)
    makers: list[Callable[[pd.DataFrame, dict[str, Any]], Table]] = [table3, table4, table5]
    paper = [*(make(results, config) for make in makers), table6(own, config), table7(own, config)]
    return [
        *(beside_paper(table, config) for table in (*paper, table13(own, config, parents))),
        weights_table(own, config),
        decay_table(own, config),
        dev_blocks_table(own, config),
        overlap_table(own, overlap, config),
        full_table(results, config),
        differences_table(differences, config),
        audit_table(audit, config),
    ]


def write_tables(
    results: pd.DataFrame,
    differences: pd.DataFrame,
    overlap: pd.DataFrame,
    audit: pd.DataFrame,
    parents: dict[str, str],
    config: dict[str, Any],
    output_dir: str | Path,
) -> None:
    """Write each table as `<name>.html`, `.md` and `.tex` into `output_dir`."""
    note = scale_note(results, config)
    for table in all_tables(results, differences, overlap, audit, parents, config):
        numbers = table.frame.select_dtypes("number")
        empty = () if numbers.notna().to_numpy().any() else ("This run has no rows for this table.",)
        notes = (*empty, *table.notes, note)
        for suffix, text in (("html", _html), ("md", _markdown), ("tex", _latex)):
            write_text(Path(output_dir) / f"{table.name}.{suffix}", text(table, notes))


def _html(table: Table, notes: tuple[str, ...]) -> str:
    text, bold, beneath = table.text(), table.bold(), table.second_lines()
    text_columns = [column for column, values in table.frame.items() if values.dtype.kind not in "fi"]
    groups: list[list[dict[str, Any]]] = [[]]
    for position, (label, values) in enumerate(table.frame.iterrows()):
        summary = label in table.summaries
        if groups[-1] and groups[-1][-1]["summary"] and not summary:
            groups.append([])
        cells = [
            {
                "text": text.at[label, column],
                "best": bold.at[label, column],
                "beneath": beneath.at[label, column],
                "is_text": column in text_columns,
                "key": value if isinstance(value, str) else "" if pd.isna(value) else f"{value:.10g}",
            }
            for column, value in values.items()
        ]
        groups[-1].append({"label": label, "summary": summary, "position": position, "cells": cells})
    return render(
        "table",
        title=table.title,
        paragraphs=[table.caption],
        notes=notes,
        headings=["", *table.frame.columns],
        text_headings=text_columns,
        groups=groups,
    )


def _markdown(table: Table, notes: tuple[str, ...]) -> str:
    text, bold, beneath = table.text().map(as_markdown), table.bold(), table.second_lines().map(as_markdown)
    text = text.mask(bold, "**" + text + "**") + beneath.mask(beneath != "", "<br>" + beneath)
    text.index = [as_markdown(label) for label in text.index]
    text.columns = [as_markdown(column) for column in text.columns]
    alignment = ["left", *("left" if values.dtype.kind not in "fi" else "right" for _, values in table.frame.items())]
    body = text.to_markdown(colalign=alignment, disable_numparse=True)
    caption, *notes = (as_markdown(line) for line in (table.caption, *notes))
    return "\n\n".join([f"**{table.title}.** {caption}", body, *(f"*{note}*" for note in notes)]) + "\n"


def as_markdown(text: object) -> str:
    """`text` as Markdown shows it in a table: no HTML of a name is rendered."""
    return str(text).replace("|", r"\|").replace("<", "&lt;")


def _latex(table: Table, notes: tuple[str, ...]) -> str:
    text, bold, beneath = table.text(), table.bold(), table.second_lines()
    cells = text.map(_escape)
    cells = cells.mask(bold, r"\textbf{" + cells + "}")
    # Braces, since a bracket after a line break would be read as its length.
    two_lines = r"\shortstack[r]{" + cells + r"\\{\tiny " + beneath.map(_escape) + "}}"
    style = cells.mask(beneath != "", two_lines).style
    style = style.format_index(escape="latex", axis=0).format_index(escape="latex", axis=1)
    layout = "l" + "".join("l" if values.dtype.kind not in "fi" else "r" for _, values in table.frame.items())
    caption = _escape(" ".join([f"{table.title}. {table.caption}", *notes]))
    if table.long:
        body = style.to_latex(
            hrules=True, column_format=layout, environment="longtable", caption=caption, label=f"tab:demix-{table.name}"
        )
        # Styler would print the whole caption on every page.
        body = body.replace(rf"\caption[]{{{caption}}}", rf"\caption[]{{{_escape(table.title)}, continued}}")
        text = "% needs \\usepackage{booktabs,longtable}\n{\\small\n" + body + "}\n"
        return text.replace("−", "$-$").replace("–", "--")
    body = style.to_latex(hrules=True, column_format=layout)
    lines = [r"\toprule", r"\midrule", r"\bottomrule"]
    assert all(line in body for line in lines)
    for label in sorted(table.summaries):
        start = f"\n{_escape(label)} &"
        body = body.replace(start, "\n\\midrule" + start)
    text = (
        "% needs \\usepackage{booktabs}\n\\begin{table}\n\\centering\n\\small\n"
        f"\\caption{{{caption}}}\n\\label{{tab:demix-{table.name}}}\n{body}\\end{{table}}\n"
    )
    return text.replace("−", "$-$").replace("–", "--")


def _escape(text: str) -> str:
    for character, command in (("\\", r"\textbackslash "), *((each, f"\\{each}") for each in "&%_#{}$")):
        text = text.replace(character, command)
    for character, command in (
        ("λ", r"$\lambda$"),
        ("±", r"$\pm$"),
        ("“", "``"),
        ("”", "''"),
        ("’", "'"),
        ("…", r"\ldots{}"),
    ):
        text = text.replace(character, command)
    return text


def main_table(results: pd.DataFrame, config: dict[str, Any]) -> "rich.table.Table":
    """Mean test perplexity on the training and on the novel domains of every system, for the terminal.

    Mixtures show both kinds of weights: all earlier tokens of the block (`history`, the paper's) and the previous
    token only (`released`, the code published with it).
    """
    import rich.table

    results = read.of_seed(comparable(results), config)
    groups = [(kind, domains) for kind, domains in _groups(config) if domains]
    table = rich.table.Table(title="Mean test perplexity (lower is better)", title_justify="left")
    table.add_column("system")
    table.add_column("weights")
    for kind, domains in groups:
        table.add_column(f"{len(domains)} {kind} domains", justify="right")
    lines = [(system, system) for system in (read.DENSE, read.BALANCED, read.DOMAIN_TOKEN, read.NAIVE, read.AVERAGE)]
    lines += [
        (system, variant)
        for system in (*POSTERIOR_MIXTURES, read.ALL_CACHED)
        for variant in (system, system.with_weights("released"))
    ]
    for named, system in lines:
        cells = []
        for kind, domains in groups:
            oracle = kind == "novel" and system in (read.DOMAIN_TOKEN, read.NAIVE)
            cells.append(_cell(_mean(perplexities(results, system, domains)), "{:.2f}") + (" *" if oracle else "  "))
        table.add_row(named.label, system.weights, *cells)
    if novel_domains(config):
        table.caption = "* oracle: the best single token or expert, chosen on the test data"
    return table


def _groups(config: dict[str, Any]) -> list[tuple[str, list[str]]]:
    return [("training", training_domains(config)), ("novel", novel_domains(config))]
