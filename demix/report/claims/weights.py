"""Claims about rules of weights beyond the paper."""

from collections.abc import Iterator

from demix.report.claims.row import Row, below_dense
from demix.run.main_systems import trained_systems
from demix.run.run import Run


def rows(run: Run) -> Iterator[Row]:
    """A claim for each mixture of the run that sums over all earlier text and is not told the domain.

    None for a row with another optimizer than the dense model, whose recipe would be judged instead of its experts.
    """
    dense = run.rows["dense"].settings.optimizer
    for mixture in trained_systems(run):
        if mixture.weights.startswith("tempered") and run.rows[mixture.model].settings.optimizer == dense:
            yield Row(
                f"{mixture.model}_{mixture.weights}_against_dense",
                f"Ours, beyond the paper: {mixture.label}, without knowing the domain, has lower perplexity than "
                "{dense} {on_all}",
                "",
                below_dense(mixture),
            )
