"""The run on one page: main table, verdicts on the paper's claims, time and cost by stage, settings, versions. Its
tables and figures are in the other categories of the menu.
"""

from collections.abc import Mapping
from typing import Any, get_args

from demix.report.item import Group, PageItem
from demix.report.material import Material
from demix.run.run import Run

ITEM = PageItem("The run on one page", place=2, category="At a glance")
PACKAGES = ("demix", "torch", "numpy", "pyarrow", "duckdb", "snakemake", "altair", "mlflow")


def make(material: Material) -> Mapping[str, str]:
    import json
    import platform
    from importlib.metadata import version

    from demix.report import left_out_notes
    from demix.report.claims import claims
    from demix.report.main_table import main_table
    from demix.report.page import render
    from demix.report.stages import drawing
    from demix.report.verdict import Verdict
    from demix.run.kept import config_fingerprint, kept

    run, table = material.run, main_table(material)
    page = render(
        "index",
        title=f"Run {run.name}",
        paragraphs=[material.scale_note],
        notes=left_out_notes(run),
        main=table,
        rows=list(zip(*(column.cells for column in table.columns), strict=True)),
        claims=sorted(claims(material), key=lambda claim: get_args(Verdict).index(claim.verdict)),
        groups=groups(run),
        cards=[model.name for model in run.planned],
        stages=drawing(),
        cost=material.cost,
        settings=json.dumps(kept(run.config), indent=1, ensure_ascii=False),
        digest=config_fingerprint(run.config),
        versions={"Python": platform.python_version()} | {name: version(name) for name in PACKAGES},
    )
    return {"html": page}


def groups(run: Run) -> dict[str, list[dict[str, Any]]]:
    """The tables and figures of the report by group: what each shows, and its files, the HTML first."""
    from demix.report import report_items

    found: dict[str, list[dict[str, Any]]] = {}
    for group in filter(None, Group):
        for item in report_items(run):
            if item.group == group:
                found.setdefault(group.value, []).append({"shows": item.heading, "files": item.files})
    return found
