"""Claims of the paper, each judged on this run, with the numbers that decide. A claim counts as shown only if the mean
over domains and more than half of the domains agree; it is weak if the run cannot tell the difference from none.
"""

from collections.abc import Mapping

from demix.report.item import PageItem
from demix.report.material import Material

ITEM = PageItem(
    "Claims of the paper, judged on this run", place=1, formats=(("html", "HTML"), ("md", "")), category="Claims"
)
_SIGNS = {"shown": "✓", "weak": "≈", "mixed": "~", "not shown": "✗", "cannot be judged": "?"}
_RULE = (
    "Shown: the mean over domains and more than half of the domains agree, in every comparison of the claim. Mixed: a "
    "part of this agrees. Weak: no difference is significant (it is within 0.01%, its 95% interval contains 0, or "
    "seeds disagree), and nothing contradicts the claim. Significant: domains whose whole interval agrees. Intervals "
    "are of the difference on the same test documents, of one training. A domain of fewer than 20 documents has an "
    "interval within them, from resampling blocks of their text. Such an interval is narrower than one over documents: "
    "it can make a claim weak, but never shows one. Numbers are those of the run's first seed."
)


def make(material: Material) -> Mapping[str, str]:
    from demix.report import left_out_notes
    from demix.report.claims import claims
    from demix.report.formats import as_markdown
    from demix.report.page import render

    judged, title = claims(material), ITEM.title
    notes = [*left_out_notes(material.run), material.scale_note]
    counts = {verdict: sum(claim.verdict == verdict for claim in judged) for verdict in _SIGNS}
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count) + f", of {len(judged)}."
    lines = [f"# {title}", "", summary.capitalize(), "", _RULE, ""]
    lines += [f"- **{claim.verdict}**: {as_markdown(claim.statement)} {as_markdown(claim.numbers)}" for claim in judged]
    return {
        "html": render("claims", title=title, paragraphs=[summary], notes=[_RULE, *notes], claims=judged, signs=_SIGNS),
        "md": "\n\n".join(["\n".join(lines), *(f"*{as_markdown(note)}*" for note in notes)]) + "\n",
    }
