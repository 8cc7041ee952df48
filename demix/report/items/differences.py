"""Test loss and perplexity of each system minus those of the balanced dense model, and minus those of DEMix with a
cached prior, on the same documents, with intervals over documents.
"""

from demix.errors import DemixError
from demix.report.item import Group, TableItem
from demix.report.material import Material
from demix.report.table import Table
from demix.run.compared import balanced_pairs
from demix.run.systems import BASES

ITEM = TableItem("Differences between systems on the same documents", Group.FURTHER, 8)


def make(material: Material) -> Table:
    """Raises DemixError for a row whose system is none of the tables'."""
    import pandas as pd

    from demix.files.database import ask
    from demix.report.cells import COUNTED, WITHIN_NOTE, numbered, systems_frame

    differences = material.differences
    named = {base.model: base.label for _, base in balanced_pairs(material.run)}
    named |= {name: base.label for name, base in BASES.items()}
    frame = ask(
        """select domain as Domain, label as System, base as Less,
            nats_per_token as "Nats a token", nats_per_token_low as "Nats low", nats_per_token_high as "Nats high",
            perplexity as Perplexity, perplexity_low as "Perplexity low", perplexity_high as "Perplexity high",
            documents as Documents, pieces as Pieces, seed::varchar as Seed
        -- What is subtracted is the oracle's choice, not that on dev.
        from differences left join (from systems where variant = '') using (domain, model, experts, method, weights)
        left join bases using (against) order by min(place) over (partition by domain), number""",
        differences=differences.assign(number=range(len(differences))),
        systems=systems_frame(material.kinds, material.run),
        bases=pd.DataFrame(named.items(), columns=["against", "base"]),
    )
    if len(unknown := frame[frame["System"].isna() | frame["Less"].isna()]):
        cause = f"{len(unknown)} rows are of systems that no table has, such as on {unknown['Domain'].iloc[0]}"
        raise DemixError("differences.parquet", cause, "make it anew with this run's config: delete it, then rerun")
    if differences["seed"].nunique() < 2:
        frame = frame.drop(columns="Seed")
    formats = {name: "{:+.4f}" for name in frame if name.startswith("Nats")}
    formats |= {name: "{:+.2f}" for name in frame if name.startswith("Perplexity")}
    return Table(
        "A system's test loss (nats a token) and perplexity minus those of another (column Less). Negative: better "
        "than the other. Low and high are the bounds of 95% intervals from resampling the domain's test documents, the "
        "same ones for both. Where an interval leaves out zero, other documents would hardly change the sign.",
        numbered(frame),
        notes=(
            "Where a domain has fewer than 20 test documents, blocks of their text are resampled, within these "
            f"documents. {WITHIN_NOTE} Intervals are of one training and say nothing of seeds.",
        ),
        formats=formats | COUNTED,
        long=True,
    )
