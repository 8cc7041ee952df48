"""The lines of the first page on each domain: change of test perplexity from Dense (Balanced), with 95% intervals."""

from typing import Any

from demix.report.item import FigureItem, Group
from demix.report.material import Material

ITEM = FigureItem("Change from the dense model, domain by domain", Group.FIGURES, 1)
PANEL_COLUMNS = 4


def make(material: Material) -> tuple[Any, str]:
    import altair as alt

    from demix.report.domains import percent
    from demix.report.dots import dots, line_colour, within_the_axis
    from demix.report.heatmaps import MOST_SHOWN
    from demix.report.look import finite, small_heading
    from demix.report.ranking import ranking
    from demix.report.results import paired
    from demix.report.systems import BALANCED

    found = ranking(material)
    entries, left_out = within_the_axis(found)
    panels: list[Any] = []
    for domains in material.kinds:
        dense = material.own.perplexities(BALANCED, domains.names)
        records: dict[str, list[dict[str, Any]]] = {name: [] for name in domains.names[:MOST_SHOWN]}
        for entry in entries:
            if entry.on[domains.kind].oracle:
                continue
            change = percent(dense, material.own.perplexities(entry.system, domains.names))
            # Where a domain has no interval, the quotient is NaN.
            bounds = paired(material.bounds, entry.system, BALANCED, domains.names).mul(100).div(dense, axis="index")
            for name, own in records.items():
                values = {end: finite(bounds.at[name, end]) for end in ("low", "high")}
                own.append(
                    {"system": entry.label, "what": entry.what, "domain": name, "value": finite(change[name])} | values
                )
        for name, own in records.items():
            named = not len(panels) % PANEL_COLUMNS
            panel = dots(
                own,
                [one.label for one in entries],
                "change in %",
                labels=named,
                zero=True,
                step=16,
                color=line_colour(),
            )
            panels.append(panel.properties(title=small_heading(f"{name} ({domains.kind})")))
    chart = alt.concat(*panels, columns=PANEL_COLUMNS, spacing=14).resolve_scale(x="shared")
    return chart, (
        f"Test perplexity on each domain, as the change from {found.dense.label} in %. Left of the line is better. "
        f"Lines are 95% intervals from resampling the same test documents.{left_out}"
    )
