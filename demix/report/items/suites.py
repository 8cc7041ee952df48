"""Perplexity and bits per byte on the sources of each suite: no model learns from them, and nothing is chosen there."""

from demix.report.item import Group, TableItem
from demix.report.material import Material
from demix.report.needs import SUITES
from demix.report.table import Table
from demix.run.systems import row_systems, table_rows

ITEM = TableItem("Suites", Group.TASKS, 4, needs=(SUITES,))
ORACLE = " (oracle)"


def make(material: Material) -> Table:
    import pandas as pd

    from demix.report.cells import lowest

    run, found = material.run, material.suites.of_seed(material.run.seed)
    domains = list(run.suites)
    names = [f"{suite}: {name}" for suite, sources in (run.config.evaluation.suites or {}).items() for name in sources]
    systems = [one for row in table_rows(run).values() for one in row_systems(row, run)]
    shown = {
        system.label + ORACLE * (system.method == "naive"): of.set_axis(names)
        for system in systems
        if (of := found.of(system, domains))["perplexity"].notna().any()
    }
    values = pd.DataFrame({label: of["perplexity"] for label, of in shown.items()})
    counts = next(iter(shown.values()))["tokens"]
    fair = [label for label in values if not label.endswith(ORACLE)]
    return Table(
        "Test perplexity on each source of a suite, and below it bits per byte, which compare across tokenizers. Lower "
        "is better. No model learned from these texts or was adapted to them, and nothing was chosen on them.",
        pd.concat([counts.rename("Tokens"), values], axis=1),
        notes=(
            "Texts that a training domain holds are left out. Experts are those of the training domains, by rules that "
            "need no dev text and no clusters; an oracle is the best expert or domain token of the test text itself. "
            "Bold: the lowest of a row that is no oracle.",
        ),
        formats={"Tokens": "{:,.0f}"},
        best=lowest(values[fair], axis=1),
        beneath=pd.DataFrame({label: of["bits_per_byte"].map("{:.3f}".format) for label, of in shown.items()}),
        long=len(values) > 40,
    )
