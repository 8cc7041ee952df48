"""The run on one page: which model is best, verdicts on the paper's claims, figures, time and cost by stage, settings,
versions. Its tables and figures are in the other categories of the menu.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from demix.report.item import FigureItem, Group, PageItem
from demix.report.material import Material
from demix.report.table import Table
from demix.run.run import Run

if TYPE_CHECKING:
    from demix.report.ranking import Entry, Ranking

ITEM = PageItem("The run on one page", place=2, category="At a glance")
PACKAGES = ("demix", "torch", "numpy", "pyarrow", "duckdb", "snakemake", "altair", "mlflow")


def make(material: Material) -> Mapping[str, str]:
    import json
    import platform
    from importlib.metadata import version

    from demix.report import left_out_notes
    from demix.report.claims import claims
    from demix.report.dots import ranked
    from demix.report.figures import inline
    from demix.report.items import all_items
    from demix.report.main_table import beside_ngrams
    from demix.report.page import render
    from demix.report.ranking import ranking
    from demix.report.stages import drawing
    from demix.report.verdict import Verdict
    from demix.run.kept import config_fingerprint, kept

    run, found = material.run, ranking(material)
    judged = claims(material)
    page = render(
        "index",
        title=f"Run {run.name}",
        paragraphs=[],
        notes=left_out_notes(run),
        ranking=found,
        remarks=[*found.remarks, material.partly_known],
        dots={name: inline(ranked(found, narrow=name == "narrow")) for name in ("broad", "narrow")},
        main=shown(found, found.main),
        counts=beside_ngrams(material),
        claims_title=all_items()["claims"].title,
        rest=shown(found, [one for one in found.entries if one not in found.main]),
        claims={verdict: [one for one in judged if one.verdict == verdict] for verdict in get_args(Verdict)},
        groups=groups(run),
        cards={model.name: model.label for model in run.planned},
        stages=drawing(),
        cost=material.cost,
        scale=material.scale_note,
        settings=json.dumps(kept(run.config), indent=1, ensure_ascii=False),
        digest=config_fingerprint(run.config),
        versions={"Python": platform.python_version()} | {name: version(name) for name in PACKAGES},
    )
    return {"html": page}


def shown(ranking: "Ranking", entries: "Sequence[Entry]") -> dict[str, Any]:
    """Lines of the main table as the page takes them: however a reader sorts them, oracles follow what is none."""
    from demix.report.formats import part_of_page

    page = part_of_page(table(ranking, entries))
    lines, oracles = [line for group in page["groups"] for line in group], {one.label for one in entries if one.oracle}
    groups = [[line for line in lines if (line.label in oracles) == oracle] for oracle in (False, True)]
    return page | {"groups": [group for group in groups if group]}


def table(ranking: "Ranking", entries: "Sequence[Entry]") -> Table:
    """Lines of the main table, best first: means, changes from Dense (Balanced) with their intervals, and passes."""
    import pandas as pd

    rows: dict[str, dict[str, Any]] = {}
    beneath: dict[str, dict[str, str]] = {}
    best: dict[str, dict[str, bool]] = {}
    lowest = {domains.kind: ranking.lowest(domains.kind) for domains in ranking.material.kinds}
    for entry in entries:
        row: dict[str, Any] = {}
        rows[entry.label], below, bold = row, beneath.setdefault(entry.label, {}), best.setdefault(entry.label, {})
        for domains in ranking.material.kinds:
            name, measured = domains.said, entry.on[domains.kind]
            change, significant = (f"{domains.heading}, {what}" for what in ("change in %", "significant"))
            row[name], row[change] = measured.mean, measured.change if entry is not ranking.dense else float("nan")
            row[significant] = f"{measured.significant} of {measured.known}" if measured.known else " "
            interval = "{:+.1f} to {:+.1f}".format(*measured.interval).replace("-", "−") if measured.interval else ""
            below[change] = "oracle" if measured.oracle else interval
            bold[name] = entry is lowest[domains.kind]
        row["Experts run per token"], row["Remark"] = float(entry.passes), entry.apart or " "
    frame = pd.DataFrame.from_dict(rows, orient="index")
    return Table(
        "",
        # A column of blanks says nothing.
        frame if any(entry.apart for entry in entries) else frame.drop(columns="Remark", errors="ignore"),
        formats={name: "{:+.1f}" for name in frame if name.endswith("%")} | {"Experts run per token": "{:.0f}"},
        best=pd.DataFrame.from_dict(best, orient="index"),
        beneath=pd.DataFrame.from_dict(beneath, orient="index"),
    )


def groups(run: Run) -> dict[str, list[dict[str, Any]]]:
    """Figures, then the tables of the report by group: what each shows, and its files, the HTML first."""
    from demix.report import report_items

    found: dict[str, list[dict[str, Any]]] = {Group.FIGURES.value: []}
    for group in filter(None, Group):
        for item in report_items(run):
            if item.group == group:
                heading = Group.FIGURES if isinstance(item, FigureItem) else group
                found.setdefault(heading.value, []).append({"shows": item.title, "files": item.files})
    return found
