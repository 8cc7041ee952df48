"""The pages of a report: the run at a glance, and the claims of the paper."""

import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, get_args

from demix.report import left_out_notes, report_items
from demix.report.charts import inline, ranked
from demix.report.claims import claims as judged_claims
from demix.report.item import SCALE, FigureItem, paragraphs
from demix.report.paper import scale_note
from demix.report.ranking import Entry, Ranking, main_table, ranking
from demix.report.run_data import RunData
from demix.report.table import Table, as_markdown, part_of_page, render
from demix.report.verdict import Verdict
from demix.run.run import Run, config_fingerprint, kept

FIGURES = "Figures"
# The headings of the elements of each module of this folder.
GROUPS = {"paper": "Tables of the paper", "further": "Further tables", "figures": FIGURES, "families": "All models"}
PACKAGES = ("demix", "torch", "numpy", "pyarrow", "duckdb", "snakemake", "altair", "mlflow")
CLAIMS_TITLE = "Claims of the papers and of this project, judged on this run"
_SIGNS = {"shown": "✓", "weak": "≈", "mixed": "~", "not shown": "✗", "cannot be judged": "?"}


def claims(data: RunData) -> Mapping[str, str]:
    """Claims of the papers and of this project, each judged on this run, with the numbers that decide. A claim is shown
    only if the mean over domains and more than half of the domains agree; it is weak if the difference is not
    significant.

    A comparison is weak if its difference of means, whatever its sign, is not significant: it is within 0.01%, its 95%
    interval contains 0, or random seeds disagree. Otherwise the comparison is shown if both the mean over domains and
    more than half of the domains agree with the claim, mixed if only one of them agrees, and not shown if neither does.
    A claim with one comparison has the verdict of this comparison. A claim with several has their verdict if they
    agree. If some are weak, and the others are all shown or all not shown, the claim is weak; in all other cases it is
    mixed. A claim cannot be judged if numbers are missing. Each comparison has the relative change, its 95% interval,
    and the number of domains that agree; in parentheses: on how many domains the whole interval agrees. An interval
    compares two models on the same test documents; it does not cover another training. If a domain has fewer than 20
    test documents, its interval is from stretches of text within them, and is narrower than an interval over documents.
    All printed numbers are of the run's own random seed; other seeds decide only whether seeds disagree. The p value of
    a comparison is two-sided and assumes a normal distribution with the comparison's interval. So a small p next to
    “not shown” means a significant difference against the claim. The p value of a claim is the largest p value of its
    comparisons. A claim that would be shown or not shown is weak if its p value is above 0.05 after Holm's correction,
    which is made separately over the claims of the papers and over ours.
    """
    judged, (_, rule) = judged_claims(data), paragraphs(claims)
    notes = [*left_out_notes(data.run), SCALE]
    counts = {verdict: sum(claim.verdict == verdict for claim in judged) for verdict in _SIGNS}
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count) + f", of {len(judged)}."
    lines = [f"# {CLAIMS_TITLE}", "", summary.capitalize(), "", rule, ""]
    families = {"Of the papers": [one for one in judged if one.published]}
    families["Ours"] = [one for one in judged if not one.published]
    for family, some in families.items():
        lines += [f"## {family}", ""]
        lines += [f"- **{one.said}**: {as_markdown(one.statement)} {as_markdown(one.numbers)}" for one in some]
        lines += [""]
    shown = {"paragraphs": [summary], "notes": [rule, *notes], "families": families, "signs": _SIGNS}
    return {
        "html": render("claims", title=CLAIMS_TITLE, **shown),
        "md": "\n\n".join(["\n".join(lines), *(f"*{as_markdown(note)}*" for note in notes)]) + "\n",
    }


def index(data: RunData) -> Mapping[str, str]:
    """The run on one page: which model is best, verdicts on the claims of the papers, figures, time and memory of each
    workflow rule, settings, versions. Tables and figures are in the other categories of the menu.
    """
    run, found, judged = data.run, ranking(data), judged_claims(data)
    page = render(
        "index",
        title=f"Run {run.name}",
        paragraphs=[],
        notes=left_out_notes(run),
        ranking=found,
        remarks=found.remarks,
        dots={name: inline(ranked(found, narrow=name == "narrow")) for name in ("broad", "narrow")},
        main=_shown(found, found.main),
        claims_title=CLAIMS_TITLE,
        rest=_shown(found, [one for one in found.entries if one not in found.main]),
        claims={verdict: [one for one in judged if one.verdict == verdict] for verdict in get_args(Verdict)},
        groups=_groups(run),
        cards={model.name: model.label for model in run.planned},
        cost=part_of_page(Table(data.cost, formats=dict.fromkeys(data.cost, "{:,.1f}") | {"Jobs": "{:,.0f}"})),
        scale=scale_note(data.results, run),
        settings=json.dumps(kept(run.config), indent=1, ensure_ascii=False),
        digest=config_fingerprint(run.config),
        versions={"Python": platform.python_version()} | {name: version(name) for name in PACKAGES},
    )
    return {"html": page}


def _shown(found: Ranking, entries: Sequence[Entry]) -> dict[str, Any]:
    """Lines of the main table as the page shows them: however a reader sorts them, oracles come last."""
    page = part_of_page(main_table(found, entries))
    lines, oracles = [line for group in page["groups"] for line in group], {one.label for one in entries if one.oracle}
    groups = [[line for line in lines if (line.label in oracles) == oracle] for oracle in (False, True)]
    return page | {"groups": [group for group in groups if group]}


def _groups(run: Run) -> dict[str, list[dict[str, Any]]]:
    """Figures, then the tables of the report by group: what each shows, and its files, the HTML first."""
    found: dict[str, list[dict[str, Any]]] = {FIGURES: []}
    for item in report_items(run):
        if item.module in GROUPS:
            heading = FIGURES if isinstance(item, FigureItem) else GROUPS[item.module]
            found.setdefault(heading, []).append({"shows": item.title, "files": item.files})
    return found
