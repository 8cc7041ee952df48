"""Table 5 of the paper: test perplexity on each novel domain, for the baselines and for every way to mix the experts. A
row marked oracle takes the best token or expert, chosen on the test data itself.
"""

from demix.report.item import Group, TableItem
from demix.report.material import Material
from demix.report.needs import NOVEL
from demix.report.systems import POSTERIOR_MIXTURES
from demix.report.table import Table
from demix.run.main_systems import trained_systems
from demix.run.run import Run
from demix.run.systems import System

ITEM = TableItem("Table  5: perplexity on the novel domains", Group.PAPER, 5, needs=(NOVEL,))


def make(material: Material) -> Table:
    from demix.report.cells import ORACLE_NOTE, WEIGHTS_NOTE, by_system, lowest

    domains, lines = material.novel, _lines(material.run)
    frame, beneath, notes = by_system(material.results, lines, domains)
    honest = frame.drop(index=[label for label in lines if label.endswith("oracle)")])
    return Table(
        f"Test perplexity by domain, on {len(domains):,} domain{'s' * (len(domains) != 1)} never trained on, for the "
        "baselines and for DEMix by the way its experts are mixed. Lower is better; the lowest of each column is bold, "
        "oracles left out.",
        frame,
        notes=(ORACLE_NOTE, WEIGHTS_NOTE, *notes),
        best=lowest(honest, axis=0),
        beneath=beneath,
    )


def _lines(run: Run) -> dict[str, System]:
    """The systems of the table by their labels."""
    lines: dict[str, System] = {}
    for system in trained_systems(run):
        if system.method == "naive":
            label = system.label.removesuffix(" (naive)")
            oracle, on_dev = (
                (f"{label} (naive, oracle)", f"{label} (naive, chosen on dev)")
                if label != system.label
                else (f"{label} (oracle)", f"{label} (chosen on dev)")
            )
            lines |= {oracle: system, on_dev: system.chosen_on_dev()}
        else:
            lines[system.label] = system
    mixed = [system for system in lines.values() if system.weights == "history"]
    scored = (
        system.released_scorer() if system in POSTERIOR_MIXTURES else system.with_weights("released")
        for system in mixed
    )
    return lines | {system.label: system for system in scored}
