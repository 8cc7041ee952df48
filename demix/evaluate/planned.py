"""Which mixtures of a set of experts an evaluation computes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from demix.config.evaluation import MixingRecipe
from demix.config.mixing import Weights, parsed_weights
from demix.evaluate.losses import PlannedMixture
from demix.mix.mixtures import FLOORS
from demix.mix.priors import RELEASED_DECAY
from demix.mix.rules import WeightsRule, released_rule, weights_rule
from demix.run.systems import ExpertSet

Planned = Iterator[tuple[PlannedMixture, str]]


@dataclass(frozen=True)
class Plan:
    """The mixtures of a set of experts, each with the variant that it is a row of; `scored` dev blocks are there.

    `chosen` are the rules of weights whose parameters are chosen on dev.
    """

    evaluation: MixingRecipe
    some: ExpertSet
    scored: int
    chosen: Mapping[str, WeightsRule] = field(default_factory=dict)

    def mixtures(self) -> Planned:
        """The mixtures of the tables, then those of the variants."""
        yield from self._of_tables()
        if len(self.evaluation.routing_context) + len(self.evaluation.temperatures) > 1:
            for mixture in self.routed_grid(*self.evaluation.routing_context):
                yield mixture, "routing"
        if self.some.variants:
            yield from self._varied()

    def _of_tables(self) -> Planned:
        """The mixtures of the tables, and, for weights by distance, those of the published code."""
        for top_k in self._top_k:
            for method in self.some.methods:
                for weights, parsed in self._named.items():
                    if method in parsed.rules.evaluated:
                        mixture = self._mixture(method, weights, top_k=top_k)
                        yield mixture, ""
                        if parsed.family == "cluster":
                            yield replace(mixture, rule=released_rule(mixture.rule)), "released_scorer"
                # Only the prior: equal weights have no likeliest experts.
                if method == "fitted" or (method == "average" and top_k is None):
                    yield self._mixture(method, top_k=top_k), ""
        if "average" in self.some.methods:
            for method in FLOORS:
                yield self._mixture(method), ""

    def _varied(self) -> Planned:
        """The grids of decays and of numbers of dev blocks, and the scorer that was published with the paper."""
        given = self.evaluation
        for weights, parsed in self._named.items():
            if "cached" not in parsed.rules.evaluated or parsed.rules.routed:
                continue
            for decay in sorted({*given.decays, given.decay}):
                for method in ("updating", "cached"):
                    yield self._mixture(method, weights, decay=decay), "decay"
            for blocks in sorted({min(number, self.scored) for number in (*given.prior_blocks, given.dev_blocks)}):
                yield self._mixture("cached", weights, dev_blocks=blocks), "dev_blocks"
        rule = released_rule(weights_rule("released"))
        for method in ("updating", "cached"):
            yield self._mixture(method, "released", rule=rule, decay=RELEASED_DECAY), "released_scorer"

    def routed_grid(self, *contexts: str) -> list[PlannedMixture]:
        """The mixtures by all temperatures, all top-k and `contexts`.

        There are none for experts without clusters, and for sets that few methods mix.
        """
        given = self.evaluation
        found = [
            self._mixture(method, weights, temperature, context=context, top_k=top_k)
            for weights, parsed in self._named.items()
            if parsed.rules.routed and "average" in self.some.methods
            for method in parsed.rules.evaluated
            for context in contexts
            for temperature in sorted({*given.temperatures, given.temperature})
            for top_k in self._top_k
        ]
        return list(dict.fromkeys(found))

    @cached_property
    def _named(self) -> dict[str, Weights]:
        """The weights by name; those by distance need a centre for each expert."""
        named = {weights: parsed_weights(weights) for weights in self.some.weights or self.evaluation.weights}
        return {weights: parsed for weights, parsed in named.items() if self.some.routing or not parsed.rules.routed}

    @property
    def _top_k(self) -> tuple[int | None, ...]:
        """No top-k, then the values that leave an expert out."""
        return (None, *(k for k in self.evaluation.top_k if k < len(self.some.experts)))

    def _mixture(self, method: str, weights: str = "", temperature: float | None = None, **more: Any) -> PlannedMixture:
        """The mixture by a method and named weights; a temperature that these leave open is `temperature`."""
        given, rule, routed = self.evaluation, self.chosen.get(weights), dict[str, Any]()
        if weights and (parsed := parsed_weights(weights)).rules.routed:
            hot = given.temperature if temperature is None else temperature
            rule = weights_rule(replace(parsed, parameters=parsed.parameters or (hot,)))
            routed = {"routing": self.some.routing, "context": given.routing_context[0]}
        usual: dict[str, Any] = {"rule": rule or weights_rule(weights), "weights": weights, "decay": given.decay}
        usual |= {"dev_blocks": min(given.dev_blocks, self.scored)}
        return PlannedMixture(method, self.some.experts, **usual | routed | more)
