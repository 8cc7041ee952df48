"""Tables 3, 4, 5, 6, 7 and 13 of the paper, as numbers (pandas) and as HTML, Markdown and LaTeX.

Every average over domains is the plain mean of the domains' perplexities, and "–" where one of them is missing.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from demix.files import write_text
from demix.report import results as read
from demix.report.page import render
from demix.report.results import comparable, expert_perplexities, novel_domains, perplexities, training_domains

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


@dataclass(frozen=True)
class Table:
    """A table of numbers and what a reader must know of it.

    `frame` has one row a label, NaN (or "") where the run has no such evaluation. `formats` maps a column to its
    format, two decimals by default. `summaries` are the rows that average the rows above them. `best` marks the
    cells to print bold.
    """

    name: str
    title: str
    caption: str
    frame: pd.DataFrame
    notes: tuple[str, ...] = ()
    formats: dict[str, str] = field(default_factory=dict)
    summaries: frozenset[str] = frozenset()
    best: pd.DataFrame | None = None

    def text(self) -> pd.DataFrame:
        """The cells as printed."""
        columns = {
            column: [_cell(value, self.formats.get(column, "{:.2f}")) for value in values]
            for column, values in self.frame.items()
        }
        return pd.DataFrame(columns, index=self.frame.index)

    def bold(self) -> pd.DataFrame:
        """True for the cells that are printed bold."""
        if self.best is None:
            return pd.DataFrame(False, index=self.frame.index, columns=self.frame.columns)
        return self.best.reindex(index=self.frame.index, columns=self.frame.columns, fill_value=False).astype(bool)


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
    return Table(
        "table3",
        "Table 3: perplexity on the training domains",
        f"Test perplexity averaged over the {len(domains)} training domains, for two dense baselines, a dense model "
        "with domain tokens, and DEMix with the domain known (naive) or mixed with a cached prior. Lower is better.",
        frame,
        formats={"Against Dense (Balanced), %": "{:+.1f}"},
        best=_lowest(frame[["Perplexity"]], axis=0),
    )


def table4(results: pd.DataFrame, config: dict[str, Any]) -> Table:
    """Table 4: test perplexity of each training domain, the systems of Table 3 as columns."""
    domains = training_domains(config)
    frame = pd.DataFrame({system.label: perplexities(results, system, domains) for system in IN_DOMAIN})
    label = f"Mean of {len(domains)}"
    frame.loc[label] = [_mean(values) for _, values in frame.items()]
    return Table(
        "table4",
        "Table 4: perplexity by training domain",
        "Test perplexity on each training domain, for the systems of Table 3. Lower is better; the lowest of each "
        "domain is bold.",
        frame,
        summaries=frozenset({label}),
        best=_lowest(frame, axis=1),
    )


def table5(results: pd.DataFrame, config: dict[str, Any]) -> Table:
    """Table 5: test perplexity on each novel domain, baselines and ways to mix, `released` weights below."""
    domains = novel_domains(config)
    lines = {
        "Dense": read.DENSE,
        "Dense (Balanced)": read.BALANCED,
        "+ Domain Token (oracle)": read.DOMAIN_TOKEN,
        "DEMix (naive, oracle)": read.NAIVE,
        **{system.label: system for system in MIXTURES[1:]},
    }
    for system in POSTERIOR_MIXTURES:
        released = system.with_weights("released")
        lines[released.label] = released
    frame = pd.DataFrame({label: perplexities(results, system, domains) for label, system in lines.items()}).T
    frame = frame.reindex(columns=domains)
    frame["Mean"] = [_mean(values) for _, values in frame.iterrows()]
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
        ),
        best=_lowest(honest, axis=0),
    )


def table6(results: pd.DataFrame, config: dict[str, Any]) -> Table:
    """Table 6: test perplexity with the training experts and with the adapted experts added, cached prior."""
    training, novel = training_domains(config), novel_domains(config)
    few, many = f"{len(training)} experts", f"{len(training) + len(novel)} experts"
    parts, summaries = [], []
    for kind, domains in (("training", training), ("novel", novel)):
        if not domains:
            continue
        part = pd.DataFrame(
            {
                few: perplexities(results, read.CACHED, domains),
                many: perplexities(results, read.ALL_CACHED, domains),
            }
        )
        summaries.append(f"Mean of {len(domains)} {kind}")
        part.loc[summaries[-1]] = [_mean(values) for _, values in part.items()]
        parts.append(part)
    frame = pd.concat(parts)
    best = _lowest(frame, axis=1)
    frame["Change, %"] = _percent(frame[few], frame[many])
    return Table(
        "table6",
        "Table 6: adding experts",
        f"Test perplexity with a cached prior, over the {len(training)} experts trained together and over these and "
        f"the {len(novel)} that DEMix-DAPT added, first on the training, then on the novel domains. Lower is better.",
        frame,
        formats={"Change, %": "{:+.2f}"},
        summaries=frozenset(summaries),
        best=best,
    )


def table7(results: pd.DataFrame, config: dict[str, Any]) -> Table:
    """Table 7: test perplexity of a training domain with its expert, without it, and never trained on."""
    domains = training_domains(config)
    frame = pd.DataFrame(
        {
            "+Expert": perplexities(results, read.CACHED, domains),
            "−Expert": [perplexities(results, read.without_expert(name), [name])[name] for name in domains],
            "−Domain": [perplexities(results, read.without_domain(name), [name])[name] for name in domains],
        },
        index=domains,
    )
    complete = frame.dropna()
    every = f"Mean of all {len(domains)}"
    summaries = [every]
    frame.loc[every] = [_mean(frame[column]) for column in frame]
    if 0 < len(complete) < len(domains):
        summaries.append(f"Mean of the {len(complete)} that have all three")
        frame.loc[summaries[-1]] = complete.mean()
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
        ),
        summaries=frozenset(summaries),
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
        + ", one seed. The paper: its own 8 and 8 domains, 125M to 1.3B parameters a dense model, blocks of 1,024 "
        "tokens, a vocabulary of 50,257, about two days on 32 to 128 GPUs a model. Compare the order, not the values."
    )


def all_tables(results: pd.DataFrame, parents: dict[str, str], config: dict[str, Any]) -> list[Table]:
    """Tables 3, 4, 5, 6, 7 and 13. Raises DemixError if rows of one domain were scored on different tokens."""
    comparable(results)
    makers: list[Callable[[pd.DataFrame, dict[str, Any]], Table]] = [table3, table4, table5, table6, table7]
    return [*(make(results, config) for make in makers), table13(results, config, parents)]


def write_tables(
    results: pd.DataFrame, parents: dict[str, str], config: dict[str, Any], output_dir: str | Path
) -> None:
    """Write each table as `<name>.html`, `.md` and `.tex` into `output_dir`."""
    note = scale_note(results, config)
    for table in all_tables(results, parents, config):
        numbers = table.frame.select_dtypes("number")
        empty = () if numbers.notna().to_numpy().any() else ("This run has no rows for this table.",)
        notes = (*empty, *table.notes, note)
        for suffix, text in (("html", _html), ("md", _markdown), ("tex", _latex)):
            write_text(Path(output_dir) / f"{table.name}.{suffix}", text(table, notes))


def _html(table: Table, notes: tuple[str, ...]) -> str:
    text, bold = table.text(), table.bold()
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
    text, bold = table.text(), table.bold()
    text = text.mask(bold, "**" + text + "**")
    text.index = [str(label).replace("|", r"\|") for label in text.index]
    alignment = ["left", *("left" if table.frame[column].dtype.kind not in "fi" else "right" for column in text)]
    body = text.to_markdown(colalign=alignment, disable_numparse=True)
    return "\n\n".join([f"**{table.title}.** {table.caption}", body, *(f"*{note}*" for note in notes)]) + "\n"


def _latex(table: Table, notes: tuple[str, ...]) -> str:
    bold = table.bold()
    style = table.text().style.format(escape="latex").format_index(escape="latex", axis=0)
    style = style.format_index(escape="latex", axis=1)
    style = style.apply(lambda _: bold.map(lambda mark: "font-weight: bold" if mark else ""), axis=None)
    layout = "l" + "".join("l" if values.dtype.kind not in "fi" else "r" for _, values in table.frame.items())
    body = style.to_latex(hrules=True, column_format=layout, convert_css=True)
    lines = [r"\toprule", r"\midrule", r"\bottomrule"]
    assert all(line in body for line in lines)
    for label in sorted(table.summaries):
        start = f"\n{_escape(label)} &"
        body = body.replace(start, "\n\\midrule" + start)
    caption = _escape(" ".join([f"{table.title}. {table.caption}", *notes]))
    text = (
        "% needs \\usepackage{booktabs}\n\\begin{table}\n\\centering\n\\small\n"
        f"\\caption{{{caption}}}\n\\label{{tab:demix-{table.name}}}\n{body}\\end{{table}}\n"
    )
    return text.replace("−", "$-$").replace("–", "--")


def _escape(text: str) -> str:
    for character, command in (("\\", r"\textbackslash "), ("&", r"\&"), ("%", r"\%"), ("_", r"\_"), ("#", r"\#")):
        text = text.replace(character, command)
    return text


def main_table(results: pd.DataFrame, config: dict[str, Any]) -> "rich.table.Table":
    """Mean test perplexity on the training and on the novel domains of every system, for the terminal.

    Mixtures show both kinds of weights: all earlier tokens of the block (`history`, the paper's) and the previous
    token only (`released`, the code published with it).
    """
    import rich.table

    comparable(results)
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
