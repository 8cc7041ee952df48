"""Every system on every domain: test perplexity with its interval over documents, and bits per byte."""

from demix.report.item import Group, TableItem
from demix.report.material import Material
from demix.report.table import Table

ITEM = TableItem("Every system on every domain", Group.FURTHER, 7)


def make(material: Material) -> Table:
    from demix.files.database import ask
    from demix.report.cells import COUNTED, INTERVAL_NOTE, numbered, systems_frame

    frame = ask(
        """select domain as Domain, kind as Kind, label as System, perplexity as Perplexity, low as Low, high as High,
            spread as "± seeds", bits_per_byte as "Bits per byte",
            documents as Documents, pieces as Pieces, tokens as Tokens
        from systems join evaluations using (domain, model, experts, method, weights, variant)
        where evaluations.top_k = 0 and expert = '' and perplexity is not null order by place""",
        systems=systems_frame(material.kinds, material.run),
        evaluations=material.results.evaluations,
    )
    seeds = len(material.results.by_seed)
    several = (
        f"Means over {seeds} seeds, ± their standard deviation, where a system has them; else one seed's interval."
    )
    return Table(
        "Test perplexity, the bounds of its 95% interval, and bits per byte of the text, of every system of the tables "
        "on every domain. Lower is better. Bits per byte compare across tokenizers, perplexities do not.",
        numbered(frame if seeds > 1 else frame.drop(columns="± seeds")),
        notes=(INTERVAL_NOTE if seeds == 1 else several,),
        formats=COUNTED | {"Tokens": "{:,.0f}", "Bits per byte": "{:.3f}"},
        long=True,
    )
