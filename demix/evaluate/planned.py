"""Which mixtures of a set of experts an evaluation computes."""

from collections.abc import Iterator
from dataclasses import replace

from demix.config.evaluated import ExpertSet
from demix.config.mixing import parsed_weights
from demix.config.sections import MixingRecipe
from demix.evaluate.losses import Mixture
from demix.evaluate.mix.mixtures import FLOORS
from demix.evaluate.mix.priors import RELEASED_DECAY


def planned_mixtures(evaluation: MixingRecipe, some: ExpertSet, scored: int) -> Iterator[tuple[Mixture, str]]:
    """All mixtures of a set of experts, each with the variant that it is a row of; `scored` dev blocks are there."""
    main = Mixture("cached", some.experts, decay=evaluation.decay, dev_blocks=min(evaluation.dev_blocks, scored))
    named = [(weights, parsed_weights(weights).rules.evaluated) for weights in some.weights or evaluation.weights]
    for top_k in (None, *(k for k in evaluation.top_k if k < len(some.experts))):
        for method in some.methods:
            for weights, evaluated in named:
                if method in evaluated:
                    yield replace(main, method=method, weights=weights, top_k=top_k), ""
            # The prior alone: equal weights have no likeliest experts.
            if method == "fitted" or (method == "average" and top_k is None):
                yield replace(main, method=method, weights="", top_k=top_k), ""
    if "average" in some.methods:
        for method in FLOORS:
            yield replace(main, method=method, weights=""), ""
    if not some.variants:
        return
    for weights, evaluated in named:
        if "cached" not in evaluated:
            continue
        for decay in sorted({*evaluation.decays, evaluation.decay}):
            for method in ("updating", "cached"):
                yield replace(main, method=method, weights=weights, decay=decay), "decay"
        for blocks in sorted({min(number, scored) for number in (*evaluation.prior_blocks, main.dev_blocks)}):
            yield replace(main, weights=weights, dev_blocks=blocks), "dev_blocks"
    for method in ("updating", "cached"):
        released = replace(main, method=method, weights="released", decay=RELEASED_DECAY, scorer="released")
        yield released, "released_scorer"
