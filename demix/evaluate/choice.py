"""Parameters of the rules that mix, chosen on dev splits: `tempered` by model, `switching` by domain.

No text of a novel domain takes part in the choice for a model, so `tempered` does not know the domain of a text.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from demix.config.mixing import DEFAULTS
from demix.evaluate.score_tables import ScoreTable, refuse_evidence
from demix.files import write_json
from demix.mix.mixtures import mix
from demix.mix.rules import Switching, Tempered
from demix.model.description import tempered_of

BETAS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
GAMMAS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 1.0)
ALPHAS = (0.001, 0.003, 0.01, 0.03, 0.06, 0.1, 0.2, 0.35, 0.6, 1.0)
# For two experts or fewer: without a domain's own expert there is nothing to mix.
DEFAULT = Tempered(*DEFAULTS["tempered"])


@dataclass(frozen=True)
class TriedRule:
    """A rule, and the nats per token that the choice minimises."""

    rule: Tempered
    nats: float


def tempered_on_dev(dev: Mapping[str, ScoreTable]) -> list[TriedRule]:
    """The grid of `tempered`, best first; `dev` holds the table of each training domain's dev split.

    Nats per token are the mean over domains of the loss of all experts and of the loss without the domain's own expert,
    both under a uniform prior. The second stands for novel domains. Where no expert has the name of the domain, the
    expert of the lowest loss on it is left out. With two experts or fewer the grid is empty.
    """
    parts = []
    for domain, table in dev.items():
        refuse_evidence(f"{domain}.dev", table.folds, "tempered")
        own = domain if domain in table.experts else table.experts[int(table.scores.sum(axis=(0, 1)).argmax())]
        parts += [table, table.select([expert for expert in table.experts if expert != own])]

    def nats(rule: Tempered) -> float:
        losses = [-mix(part.scores, part.mask, "uniform", rule).sum() / part.tokens for part in parts]
        return 2 * float(np.mean(losses))

    if min(len(table.experts) for table in dev.values()) <= 2:
        return []
    grid = [TriedRule(rule, nats(rule)) for rule in (Tempered(beta, gamma) for beta in BETAS for gamma in GAMMAS)]
    return sorted(grid, key=lambda tried: tried.nats)


def switching_on_dev(dev: ScoreTable, log_prior: np.ndarray) -> Switching:
    """The rule `switching` with the α that gives a domain's dev split the lowest loss under the prior `log_prior`."""
    rules = [Switching(alpha) for alpha in ALPHAS]
    return max(rules, key=lambda rule: mix(dev.scores, dev.mask, "fitted", rule, log_prior=log_prior).sum())


def write_mixing(path: Path, dev: Mapping[str, ScoreTable]) -> None:
    """Choose the parameters of `tempered` for a model on its training domains, and write its mixing.json."""
    grid = tempered_on_dev(dev)
    chosen = grid[0].rule if grid else DEFAULT
    write_json(
        path,
        {
            **asdict(chosen),
            "experts": list(next(iter(dev.values())).experts),
            "domains": {domain: table.sha256 for domain, table in dev.items()},
            "grid": [asdict(tried.rule) | {"nats_per_token": tried.nats} for tried in grid],
        },
        sort_keys=False,
    )


def mixing_of(model: Path) -> Tempered:
    """The rule `tempered` with the parameters of the model in the folder `model` (`tempered_of`)."""
    return Tempered(*tempered_of(model))
