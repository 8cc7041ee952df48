"""Every system on every domain: test perplexity with its interval over documents, bits per byte, and the difference
from other systems on the same documents.
"""

from demix.report.item import Group, TableItem
from demix.report.material import Material
from demix.report.table import Table
from demix.run.compared import balanced_pairs
from demix.run.systems import BASES

ITEM = TableItem("Every system on every domain", Group.FURTHER, 7)


def make(material: Material) -> Table:
    import pandas as pd

    from demix.files.database import ask
    from demix.report.cells import COUNTED, INTERVAL_NOTE, numbered, systems_frame

    key = ["model", "experts", "method", "weights"]
    found = ask(
        """select domain as Domain, kind as Kind, label as System, perplexity as Perplexity, low as Low, high as High,
            spread as "± seeds", bits_per_byte as "Bits per byte",
            documents as Documents, pieces as Pieces, tokens as Tokens, model, experts, method, weights, variant
        from systems join evaluations using (domain, model, experts, method, weights, variant)
        where evaluations.top_k = 0 and expert = '' and perplexity is not null order by place""",
        systems=systems_frame(material.kinds, material.run),
        evaluations=material.results.evaluations,
    )
    found, seeds = numbered(found), len(material.results.by_seed)
    frame = found.drop(columns=[*key, "variant", *(["± seeds"] if seeds == 1 else [])])
    beneath = pd.DataFrame(index=frame.index)
    labels = {base.model: base.label for _, base in balanced_pairs(material.run)}
    labels |= {name: base.label for name, base in BASES.items()}
    # What is subtracted is the oracle's choice, not that on dev.
    differences = material.differences.assign(variant="").rename(columns={"domain": "Domain"})
    for against, rows in differences[differences["seed"] == material.run.seed].groupby("against", sort=False):
        less = found[["Domain", *key, "variant"]].merge(rows, "left").set_axis(found.index)
        frame[f"Less {labels[against]}"] = less["perplexity"]
        beneath[f"Less {labels[against]}"] = [
            "" if pd.isna(low) else f"[{low:+.2f}, {high:+.2f}]".replace("-", "−")
            for low, high in zip(less["perplexity_low"], less["perplexity_high"], strict=True)
        ]
    return Table(
        "Test perplexity, the bounds of its 95% interval, and bits per byte of the text, of every system of the tables "
        "on every domain; and its perplexity less that of another system on the same documents, with the 95% interval "
        "of the difference. Lower is better. Bits per byte compare across tokenizers, perplexities do not.",
        frame,
        notes=(
            INTERVAL_NOTE,
            f"Perplexities are means over {seeds} seeds, ± their standard deviation, where a system has them."
            if seeds > 1
            else "differences.parquet has the differences in nats per token, too.",
            "Differences are of the run's own seed. Negative: better than the other system.",
        ),
        formats=COUNTED
        | {"Tokens": "{:,.0f}", "Bits per byte": "{:.3f}"}
        | {name: "{:+.2f}" for name in frame if name.startswith("Less ")},
        beneath=beneath,
        long=True,
    )
