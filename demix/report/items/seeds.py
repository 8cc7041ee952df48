"""Change of the mean test perplexity from Dense (Balanced) to every other system, both trained with the same seed, for
each seed of the run, with mean and standard deviation where there are several.
"""

from demix.report.domains import mean_of, percent
from demix.report.item import Group, TableItem
from demix.report.material import Material
from demix.report.systems import BALANCED
from demix.report.table import Table
from demix.run.main_systems import trained_systems

ITEM = TableItem("Against Dense (Balanced), seed by seed", Group.FURTHER, 5)


def make(material: Material) -> Table:
    import numpy as np
    import pandas as pd

    systems = [system for system in trained_systems(material.run) if system != BALANCED]
    rows: dict[str, dict[str, float]] = {system.label: {} for system in systems}
    by_seed = material.results.by_seed
    for domains in material.kinds:
        base = {seed: found.mean(BALANCED, domains.names) for seed, found in by_seed.items()}
        for system in systems:
            changes = [percent(base[seed], found.mean(system, domains.names)) for seed, found in by_seed.items()]
            row = rows[system.label]
            row |= {f"{domains.heading}, seed {seed}": value for seed, value in zip(by_seed, changes, strict=True)}
            if len(changes) > 1:
                row[f"{domains.heading}, mean"] = mean_of(changes)
                row[f"±, {domains.kind}"] = float(np.std(changes, ddof=1))
    frame = pd.DataFrame.from_dict(rows, orient="index")
    return Table(
        "The change of the mean test perplexity over domains from Dense (Balanced) to each system, in percent, both "
        "trained with the same seed on the same text. Negative: better than Dense (Balanced).",
        frame,
        notes=(
            "Compared within a seed, because a seed moves both systems of a pair.",
            "On novel domains single experts and domain tokens (naive) are oracles, chosen on the test data.",
            *(["± is the standard deviation over seeds."] if len(by_seed) > 1 else []),
        ),
        formats={column: "{:.2f}" if column.startswith("±") else "{:+.2f}" for column in frame},
    )
