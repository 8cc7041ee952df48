"""Which mixtures of a set of experts an evaluation computes."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from demix.config.evaluation import MixingRecipe
from demix.config.mixing import Weights, parsed_weights
from demix.evaluate.losses import Mixture
from demix.mix.mixtures import FLOORS
from demix.mix.priors import RELEASED_DECAY
from demix.mix.rules import weights_rule
from demix.run.systems import ExpertSet


def planned_mixtures(evaluation: MixingRecipe, some: ExpertSet, scored: int) -> Iterator[tuple[Mixture, str]]:
    """All mixtures of a set of experts, each with the variant that it is a row of; `scored` dev blocks are there."""
    main = Mixture("cached", some.experts, decay=evaluation.decay, dev_blocks=min(evaluation.dev_blocks, scored))
    named = {weights: parsed_weights(weights) for weights in some.weights or evaluation.weights}
    # Weights by distance need a centre for each expert.
    named = {weights: parsed for weights, parsed in named.items() if some.routing or not parsed.rules.routed}
    yield from _of_tables(evaluation, some, main, named)
    if len(evaluation.routing_context) + len(evaluation.temperatures) > 1:
        for mixture in routed_grid(evaluation, some, scored):
            yield mixture, "routing"
    if some.variants:
        yield from _varied(evaluation, main, named, scored)


def _of_tables(
    evaluation: MixingRecipe, some: ExpertSet, main: Mixture, named: Mapping[str | int, Weights]
) -> Iterator[tuple[Mixture, str]]:
    """The mixtures of the tables, with the published code's beside weights by distance."""
    for top_k in (None, *_fewer(evaluation, some)):
        for method in some.methods:
            for weights, parsed in named.items():
                if method in parsed.rules.evaluated:
                    mixture = replace(main, method=method, weights=weights, top_k=top_k)
                    mixture = routed(mixture, some.routing, evaluation.routing_context[0], evaluation.temperature)
                    yield mixture, ""
                    if parsed.family == "cluster":
                        yield replace(mixture, scorer="released"), "released_scorer"
            # The prior alone: equal weights have no likeliest experts.
            if method == "fitted" or (method == "average" and top_k is None):
                yield replace(main, method=method, weights="", top_k=top_k), ""
    if "average" in some.methods:
        for method in FLOORS:
            yield replace(main, method=method, weights=""), ""


def _varied(
    evaluation: MixingRecipe, main: Mixture, named: Mapping[str | int, Weights], scored: int
) -> Iterator[tuple[Mixture, str]]:
    """The grids of decays and of numbers of dev blocks, and the scorer that was published with the paper."""
    for weights, parsed in named.items():
        if "cached" not in parsed.rules.evaluated or parsed.rules.routed:
            continue
        for decay in sorted({*evaluation.decays, evaluation.decay}):
            for method in ("updating", "cached"):
                yield replace(main, method=method, weights=weights, decay=decay), "decay"
        for blocks in sorted({min(number, scored) for number in (*evaluation.prior_blocks, main.dev_blocks)}):
            yield replace(main, weights=weights, dev_blocks=blocks), "dev_blocks"
    for method in ("updating", "cached"):
        released = replace(main, method=method, weights="released", decay=RELEASED_DECAY, scorer="released")
        yield released, "released_scorer"


def routed(mixture: Mixture, routing: str, context: str, temperature: float) -> Mixture:
    """`mixture` with the distances to the centres of the clustering `routing`, where its weights are made of distances.

    `temperature` is for weights that leave it open.
    """
    weights = parsed_weights(mixture.weights)
    if not weights.rules.routed:
        return mixture
    rule = weights_rule(replace(weights, parameters=weights.parameters or (temperature,)))
    return replace(mixture, rule=rule, routing=routing, context=context)


def routed_grid(evaluation: MixingRecipe, some: ExpertSet, scored: int, contexts: int | None = None) -> list[Mixture]:
    """The mixtures of a set of experts by all temperatures, all top-k and the first of the contexts.

    There are none for experts without clusters, and for sets that few methods mix.
    """
    main = Mixture("", some.experts, decay=evaluation.decay, dev_blocks=min(evaluation.dev_blocks, scored))
    found = [
        routed(replace(main, method=method, weights=weights, top_k=top_k), some.routing, context, temperature)
        for weights in some.weights or evaluation.weights
        if some.routing and parsed_weights(weights).rules.routed and "average" in some.methods
        for method in parsed_weights(weights).rules.evaluated
        for context in evaluation.routing_context[:contexts]
        for temperature in sorted({*evaluation.temperatures, evaluation.temperature})
        for top_k in (None, *_fewer(evaluation, some))
    ]
    return list(dict.fromkeys(found))


def _fewer(evaluation: MixingRecipe, some: ExpertSet) -> list[int]:
    """The values of top-k that leave an expert out."""
    return [k for k in evaluation.top_k if k < len(some.experts)]
