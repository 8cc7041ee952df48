"""Choices on dev splits: parameters of mixing rules, and the parent of an added expert (paper, section 6).

`tempered` is chosen per model, `switching` per domain. The choice for a model uses no text of a novel domain, so
`tempered` is domain-agnostic.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from demix.config.evaluation import DECAY
from demix.config.mixing import DEFAULTS
from demix.evaluate.score_tables import ScoreTable, read_scores, refuse_evidence
from demix.files import write_json
from demix.mix.mixtures import Mixture
from demix.mix.priors import fitted_log_prior
from demix.mix.rules import History, Switching, Tempered, WeightsRule, in_blocks
from demix.model.manifest import tempered_of

BETAS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
GAMMAS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 1.0)
ALPHAS = (0.001, 0.003, 0.01, 0.03, 0.06, 0.1, 0.2, 0.35, 0.6, 1.0)
# Parameters for two experts or fewer, where nothing can be mixed without a domain's own expert.
DEFAULT = Tempered(*DEFAULTS["tempered"])


def tempered_on_dev(dev: Mapping[str, ScoreTable], reset: bool = False) -> dict[Tempered, float]:
    """The rules of the grid of `tempered`, best first, with the nats per token of each.

    `dev` holds the table of each training domain's dev split.

    Nats per token are the mean, over domains, of two losses with a uniform prior: with all experts, and without the
    domain's own expert. The second loss stands for novel domains. If no expert has the name of the domain, the expert
    with the lowest loss on it is left out. With two experts or fewer the grid is empty. With `reset` each rule starts
    its sum of log-likelihoods again at each block.
    """
    parts = []
    for domain, table in dev.items():
        refuse_evidence(f"{domain}.dev", table.folds, "tempered")
        own = domain if domain in table.experts else table.experts[int(table.scores.sum(axis=(0, 1)).argmax())]
        parts += [table, table.select([expert for expert in table.experts if expert != own])]

    def nats(rule: Tempered) -> float:
        used = in_blocks(rule) if reset else rule
        mixtures = [Mixture(used, np.full(len(part.experts), -np.log(len(part.experts)))) for part in parts]
        mixed = [one.table(part.scores, part.mask).sum() for one, part in zip(mixtures, parts, strict=True)]
        return -2 * float(np.mean([log_p / part.tokens for log_p, part in zip(mixed, parts, strict=True)]))

    if min(len(table.experts) for table in dev.values()) <= 2:
        return {}
    grid = {rule: nats(rule) for rule in (Tempered(beta, gamma) for beta in BETAS for gamma in GAMMAS)}
    return dict(sorted(grid.items(), key=lambda tried: tried[1]))


def switching_on_dev(dev: ScoreTable, log_prior: np.ndarray, reset: bool = False) -> WeightsRule:
    """The rule `switching` with the α of lowest loss on a domain's dev split, with the prior `log_prior`.

    With `reset` its chain starts again at each block.
    """
    rules = [in_blocks(Switching(alpha)) if reset else Switching(alpha) for alpha in ALPHAS]
    return max(rules, key=lambda rule: Mixture(rule, log_prior).table(dev.scores, dev.mask).sum())


def mixing_of(model: Path) -> Tempered:
    """The rule `tempered` with the parameters of the model in the folder `model` (`tempered_of`)."""
    return Tempered(*tempered_of(model))


def choose_parent(scores: Path, domain: str, experts: Sequence[str], *, blocks: int, decay: float) -> dict[str, Any]:
    """The expert to copy for `domain`: the highest cached posterior (`history`) on its dev split (paper, section 6).

    Returns the parent, its posterior, and for comparison the expert of lowest dev loss, with all posteriors and losses
    (nats per token) by expert. `scores` is scores/<model>; the posterior is computed from `blocks` of dev with `decay`
    (lambda). For a masked model, which has no such posterior, the fitted prior of these blocks replaces it.
    """
    table = read_scores(scores / f"{domain}.dev", experts)
    if table.folds:
        prior = np.exp(fitted_log_prior(table.scores[:blocks], table.mask[:blocks]))
    else:
        prior = np.exp(History().cached_log_prior(table.scores, table.mask, decay=decay, blocks=blocks))
    losses = -table.scores.sum(axis=(0, 1)) / table.tokens
    return {
        "parent": experts[int(prior.argmax())],
        "parent_prior": float(prior.max()),
        "priors": dict(zip(experts, prior.tolist(), strict=True)),
        "lowest_dev_loss_expert": experts[int(losses.argmin())],
        "dev_losses": dict(zip(experts, losses.tolist(), strict=True)),
    }


def own_dev_losses(scores: Path, experts: Sequence[str], blocks: int) -> dict[str, float]:
    """Nats per token of each expert on the first `blocks` dev blocks of its own domain, from scores/<model>."""
    losses = {}
    for name in experts:
        table = read_scores(scores / f"{name}.dev", (name,))
        losses[name] = float(-table.scores[:blocks].sum() / table.mask[:blocks].sum())
    return losses


def choose_mixing(scores: Path, domains: Sequence[str], experts: Sequence[str], output: Path) -> None:
    """Choose the parameters of the rule tempered for a model, on the dev splits of its training domains.

    `scores` is the model's folder of score tables, `output` its mixing.json.
    """
    dev = {domain: read_scores(scores / f"{domain}.dev", experts) for domain in domains}
    grid = tempered_on_dev(dev)
    content = asdict(next(iter(grid), DEFAULT)) | {
        "experts": list(experts),
        "domains": {domain: table.sha256 for domain, table in dev.items()},
        "grid": [asdict(rule) | {"nats_per_token": nats} for rule, nats in grid.items()],
    }
    write_json(output, content, sort_keys=False)


def average_experts(
    model: Path,
    experts: Sequence[str],
    output: Path,
    scores: Path | None = None,
    domain: str = "",
    blocks: int = 100,
    decay: float = DECAY,
) -> None:
    """Average the parameters of experts, with equal weights or with the cached prior of a domain.

    The prior comes from `blocks` blocks of the domain's dev split in `scores`, the model's folder of score tables.
    """
    # This imports torch, which no other function here needs.
    from demix.model.merge import merge_experts

    weights = dict.fromkeys(experts, 1 / len(experts))
    if scores is not None:
        weights = choose_parent(scores, domain, experts, blocks=blocks, decay=decay)["priors"]
    merge_experts(model, weights, output)
