"""Table 5 of the paper: test perplexity on each novel domain, for the baselines and for every way to mix the experts. A
row marked oracle takes the best token or expert, chosen on the test data itself.
"""

from demix.report.domains import mean_of
from demix.report.item import Group, TableItem
from demix.report.material import Material
from demix.report.needs import NOVEL
from demix.report.systems import BALANCED, CACHED, POSTERIOR_MIXTURES, trained_systems
from demix.report.table import Table
from demix.run.run import Run
from demix.run.systems import System

ITEM = TableItem("Table  5: perplexity on the novel domains", Group.PAPER, 5, needs=(NOVEL,))


def make(material: Material) -> Table:
    import pandas as pd

    from demix.report.cells import ORACLE_NOTE, WEIGHTS_NOTE, explained, lowest, second_lines

    domains, results = material.novel, material.results
    lines = _lines(material.run)
    found = {label: results.of(system, domains) for label, system in lines.items()}
    frame = pd.DataFrame({label: one["perplexity"] for label, one in found.items()}).T.reindex(columns=domains)
    frame.insert(0, "Mean", [mean_of(values) for _, values in frame.iterrows()])
    below = pd.DataFrame({label: second_lines(one) for label, one in found.items()}, index=domains).T
    beneath, notes = explained(below, results)
    documents = found[BALANCED.label]["documents"].combine_first(found[CACHED.label]["documents"]).dropna()
    counts = ["Test documents: " + ", ".join(f"{k} {n:.0f}" for k, n in documents.items()) + "."]
    honest = frame.drop(index=[label for label in lines if label.endswith("oracle)")])
    return Table(
        f"Test perplexity by domain, on {len(domains):,} domain{'s' * (len(domains) != 1)} never trained on, for the "
        "baselines and for DEMix by the way its experts are mixed. Lower is better; the lowest of each column is bold, "
        "oracles left out.",
        frame,
        notes=(ORACLE_NOTE, WEIGHTS_NOTE, *notes, *(counts if len(documents) else ())),
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
