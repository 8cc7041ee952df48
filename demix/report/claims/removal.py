"""Claims about the removal of experts."""

from collections.abc import Iterator

from demix.progress import so_many
from demix.report.claims.row import Row, Versus
from demix.report.material import Material
from demix.report.needs import SECOND_TRAINING, WITHOUT_DOMAIN
from demix.report.systems import ByDomain, before_removal, without_domain, without_expert
from demix.report.verdict import Part


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
        f"nearer to −Domain than to +Expert on {int(nearer.sum())} of the "
        f"{so_many(len(rows), 'domain')} trained without.",
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
        "Without its expert, a domain fares about as with a model that never saw the domain",
        "Table 7",
        _like_never_trained,
        needs=(SECOND_TRAINING, WITHOUT_DOMAIN),
    ),
)
