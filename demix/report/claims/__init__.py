"""The claims of the paper and ours: which of them a run shows, with the numbers that decide.

Each module has the claims about one subject, a row each.
"""

from functools import lru_cache

from demix.report.claims import adaptation, added, families, novel, removal, training, weights
from demix.report.claims.row import Row
from demix.report.material import Material
from demix.report.needs import Need, missing
from demix.report.verdict import Claim
from demix.run.run import Run

_PAPER = (*training.ROWS, *novel.ROWS, *adaptation.ROWS, *removal.ROWS, *added.ROWS)


def rows(run: Run) -> list[Row]:
    """The claims about what the run has, in the order in which they are shown."""
    every = (*_PAPER, *weights.rows(run), *families.ROWS)
    return [row for row in every if not missing(row.needs, run)]


def needs_of_claims() -> dict[str, tuple[Need, ...]]:
    """What the claims need of a run, by name."""
    return {row.name: row.needs for row in (*_PAPER, *families.ROWS)}


@lru_cache(maxsize=1)
def claims(material: Material) -> list[Claim]:
    """The claims judged on a run: on its own seed, and on whether its other seeds say the same."""
    run = material.run
    seeds = (run.seed, *(seed for seed in material.results.by_seed if seed != run.seed))
    own, *others = (material.of_seed(seed) for seed in seeds)
    judged = (row.judged(own).among([row.judged(one) for one in others]) for row in rows(run))
    return [claim for claim in judged if claim.parts]
