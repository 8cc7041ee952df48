"""The systems of a run's main table: what its first page ranks, and what `demix sql` has as the table `main`."""

from demix.run.run import Run
from demix.run.systems import System, ngram_systems, row_systems, table_rows


def added(run: Run) -> tuple[System, System]:
    """Two systems of the model with added experts, over all its experts: each domain's own expert, and the mixture."""
    row, label = run.receiver.row, run.receiver.label
    return (
        System(f"{label}, all experts (naive)", row, "all", "naive"),
        System(f"{label}, all experts (cached)", row, "all", "cached", "history"),
    )


def trained_systems(run: Run) -> list[System]:
    """The systems of every row of `models` over its training experts: first the paper's rows, then further rows."""
    return [system for row in table_rows(run).values() for system in row_systems(row, run)]


def ngram_lines(run: Run) -> list[System]:
    """The n-grams of the main table, by order: of all training text, and of domains by `tempered`, else `cached`."""
    systems = ngram_systems(run)
    weights = next((one.weights for one in systems if one.weights.startswith("tempered")), "")
    return [
        one
        for one in systems
        if one.method == "dense" or (one.weights == weights if weights else one.method == "cached")
    ]


def main_systems(run: Run) -> list[tuple[System, System]]:
    """The lines of the main table, n-grams last: each system after the one whose name it has there."""
    systems = trained_systems(run)
    lines = [(system, system) for system in systems if not system.weights]
    lines += [
        (system, variant)
        for system in (*(system for system in systems if system.weights == "history"), added(run)[1])
        for variant in (system, system.with_weights("released"))
    ]
    lines += [(system, system) for system in systems if system.weights not in ("", "history")]
    return lines + [(system, system) for system in ngram_lines(run)]
