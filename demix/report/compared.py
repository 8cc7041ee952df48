"""A comparison of runs as tables, as Markdown, as JSON, and as one page."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from demix.files import write_text
from demix.files.json_files import without_nan
from demix.progress import so_many
from demix.report.cells import WITHIN_NOTE, numbered
from demix.report.compare import BITS, PERPLEXITY, Comparison
from demix.report.table import Table, cell, markdown, part_of_page, render
from demix.run.run import config_fingerprint

MEASURES = {PERPLEXITY: "test perplexity", BITS: "bits per byte"}
# The characters of a setting's value that a table shows.
MAX_SHOWN = 60


def tables(compared: Comparison) -> list[Table]:
    """The runs, the settings that differ, and the main table by kind of domains."""
    groups = compared.systems.groupby(["measure", "kind"], sort=False)
    return [
        _runs_table(compared),
        _settings_table(compared),
        *(_systems_table(compared, str(measure), str(kind), rows) for (measure, kind), rows in groups),
    ]


def _runs(compared: Comparison) -> list[dict[str, Any]]:
    """What identifies each run."""
    return [
        {"run": one.name, "folder": str(run.folder), "name": run.name}
        | {"settings": config_fingerprint(run.config), "seed": run.seed}
        for one in compared.runs
        for run in [one.of]
    ]


def _runs_table(compared: Comparison) -> Table:
    frame = pd.DataFrame(_runs(compared)).set_index("run").rename_axis(None).astype(str).rename(columns=str.capitalize)
    frame["Seeds"] = [", ".join(str(seed) for seed in sorted(run.results["seed"].unique())) for run in compared.runs]
    notes = [
        "Settings is a digest of all settings except the name. In MLflow, Name is the tag demix.run of a run, and "
        "Settings is the tag demix.config."
    ]
    if not compared.domains:
        notes.append(
            "No perplexities are compared, since no domain is of the same kind (training or novel) in all runs. The "
            f"runs have the domains {', '.join(compared.left_out)}."
        )
    first = compared.runs[0].name
    return Table(frame, f"All runs are compared with {first}.", notes=tuple(notes), name="runs", title="Runs")


def _settings_table(compared: Comparison) -> Table:
    frame = compared.settings.map(lambda text: text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…")
    return Table(
        frame,
        "Defaults are filled in. “–”: the run has no such key." if len(frame) else "Only the names of the runs differ.",
        name="settings",
        title="Settings that differ",
    )


def _systems_table(compared: Comparison, measure: str, kind: str, rows: pd.DataFrame) -> Table:
    names, domains = [run.name for run in compared.runs], compared.domains[kind]
    rows = rows.assign(
        label=rows["system"] + np.where(rows["oracle"], " *", ""),
        spreads=[f"± {spread:.2f}" if pd.notna(spread) else "" for spread in rows["spread"]],
        intervals=[
            f"[{cell(low, '{:+.2f}')}, {cell(high, '{:+.2f}')}]" if pd.notna(low) else why
            for low, high, why in zip(rows["change_low"], rows["change_high"], rows["why"], strict=True)
        ],
    )

    def wide(values: str, changes: str) -> pd.DataFrame:
        """A row for each system: `values` of each run, then `changes` of each but the first."""
        by_run = [rows.pivot(index="label", columns="run", values=one) for one in (values, changes)]
        parts = [by_run[0][names], by_run[1][names[1:]].add_suffix(", change in %")]
        return pd.concat(parts, axis=1).loc[rows["label"].unique()].rename_axis(index=None)

    beneath = wide("spreads", "intervals")
    notes = [
        "Change: of the mean over domains, relative to the first run. Below it is its 95% interval, from resampling "
        "the test documents, the same ones for both runs, or why there is none. The interval shows how other test text "
        "could change the number, not how another training could." if measure == PERPLEXITY
        else "Runs with different tokenizers have no intervals here, since they predict different tokens. Runs with "
        "the same tokenizer are compared in perplexity.",
        *_within(compared, domains),
        *(["* oracle: the single best expert or domain token, chosen on test data."] if kind == "novel" else []),
        *(["Numbers are of a run's own random seed; if it has several seeds, ± is the standard deviation over them."]
          if rows["spreads"].ne("").any() else []),
        *([f"Left out, since they are not of the same kind in all runs: {', '.join(compared.left_out)}."]
          if compared.left_out else []),
    ]  # fmt: skip
    return Table(
        wide("value", "change"),
        f"Mean over the domains {', '.join(domains)}; lower is better.",
        notes=tuple(notes),
        formats=dict.fromkeys(names, "{:.2f}" if measure == PERPLEXITY else "{:.4f}") | {", change in %": "{:+.2f}"},
        beneath=beneath,
        name=f"{measure}_{kind}",
        title=f"Mean {MEASURES[measure]}, {so_many(len(domains), f'{kind} domain')}",
    )


def _within(compared: Comparison, domains: Iterable[str]) -> list[str]:
    """What was resampled on those of `domains` that have few documents, as a note."""
    few = [f"{name} ({compared.blocks[name]:,} tokens)" for name in domains if name in compared.blocks]
    return [f"Resampled by stretches of text within documents: {', '.join(few)}. {WITHIN_NOTE}"] if few else []


def _by_domain_table(compared: Comparison) -> Table:
    names = {"domain": "Domain", "kind": "Kind", "system": "System", "run": "Run", "nats": "Nats per token"}
    frame = compared.by_domain.rename(columns=names | {"low": "Low", "high": "High"})
    return Table(
        numbered(frame[[*names.values(), "Low", "High"]]),
        f"The loss of a run minus that of {compared.runs[0].name} on the domain’s test documents, in nats per token, "
        "and the bounds (low, high) of the 95% interval of this difference. Negative is better.",
        notes=("Only domains where both runs scored the same documents.", *_within(compared, compared.blocks)),
        formats=dict.fromkeys(("Nats per token", "Low", "High"), "{:+.4f}"),
        long=True,
        name="by_domain",
        title="Differences by domain",
    )


def as_markdown(compared: Comparison) -> str:
    """All tables as Markdown."""
    return "\n".join(markdown(table) for table in tables(compared))


def as_json(compared: Comparison) -> str:
    """What is compared as JSON: the runs, and the rows of each table by the names of `Comparison`."""
    found = {"runs": _runs(compared), "settings": compared.settings.to_dict("index"), "domains": compared.domains}
    found |= {"left_out": compared.left_out, "blocks": compared.blocks}
    found |= {name: getattr(compared, name).to_dict("records") for name in ("systems", "by_domain")}
    return json.dumps(without_nan(found), indent=2, ensure_ascii=False, allow_nan=False)


def write_page(compared: Comparison, path: str | Path) -> None:
    """Write all tables as one self-contained page, completely or not at all."""
    shown = [part_of_page(table) for table in [*tables(compared), _by_domain_table(compared)]]
    title = f"Runs compared: {', '.join(run.name for run in compared.runs)}"
    write_text(path, render("comparison", title=title, paragraphs=[], notes=[], parts=shown))
