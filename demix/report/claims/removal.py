"""Claims about the removal of experts."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from demix.progress import so_many
from demix.report.claims.row import Row, Versus
from demix.report.domains import mean_of, percent
from demix.report.material import Material
from demix.report.needs import MERGED_REMOVAL, SECOND_TRAINING, WITHOUT_DOMAIN
from demix.report.systems import ByDomain, before_removal, without_choice, without_domain, without_expert
from demix.report.verdict import Part
from demix.run.systems import System, merged_whole

if TYPE_CHECKING:
    import pandas as pd


def _like_never_trained(material: Material) -> Iterator[Part]:
    import pandas as pd

    run = material.run
    systems: dict[str, ByDomain] = {
        "with": before_removal(run),
        "without": without_expert(run),
        "never": without_domain,
    }
    rows = pd.DataFrame(
        {name: material.results.perplexities(system, material.training) for name, system in systems.items()}
    ).dropna()
    if rows.empty:
        yield Part(False, 0, 0, "+Expert, −Expert and −Domain: no domain has all three.")
        return
    mean = rows.mean()
    nearer = (rows["without"] - rows["never"]).abs() < (rows["without"] - rows["with"]).abs()
    yield Part(
        abs(mean["without"] - mean["never"]) < abs(mean["without"] - mean["with"]),
        int(nearer.sum()),
        len(rows),
        f"+Expert {mean['with']:.2f}, −Expert {mean['without']:.2f}, −Domain {mean['never']:.2f}; −Expert is "
        f"nearer to −Domain than to +Expert on {int(nearer.sum())} of the {so_many(len(rows), 'domain')} that have a "
        "model trained without.",
    )


def _merged_forget(material: Material) -> Iterator[Part]:
    """Whether leaving its expert out costs a domain as much in merged models as in DEMix, one part per merged model."""
    run, domains = material.run, material.training

    def costs(whole: System, without: ByDomain) -> "pd.Series":
        return percent(material.own.perplexities(whole, domains), material.own.perplexities(without, domains))

    own = costs(before_removal(run), without_expert(run))
    for whole in merged_whole(run).values():
        found = costs(whole, without_choice(whole))
        agreeing = int((found >= own).sum())
        yield Part(
            mean_of(found) >= mean_of(own),
            agreeing,
            len(domains),
            f"{whole.label} {mean_of(found):+.1f}%, {run.whole.label} {mean_of(own):+.1f}%; at least as much on "
            f"{agreeing} of {so_many(len(domains), 'domain')}.",
        )


ROWS = (
    Row(
        "removal_hurts",
        "Leaving a domain's expert out at test time raises the perplexity of its domain",
        "Table 7",
        lambda material: [
            Versus(
                without_expert(material.run), before_removal(material.run), labels=("−Expert", "+Expert"), higher=True
            )
        ],
        needs=(SECOND_TRAINING,),
    ),
    Row(
        "removal_like_never_trained",
        "Removing a domain's expert is about as good as never having trained on the domain",
        "Table 7",
        _like_never_trained,
        needs=(SECOND_TRAINING, WITHOUT_DOMAIN),
    ),
    Row(
        "merged_forget",
        "A merged model without a domain's expert forgets the domain as DEMix does: perplexity rises as much or more",
        "",
        _merged_forget,
        needs=(SECOND_TRAINING, MERGED_REMOVAL),
    ),
)
