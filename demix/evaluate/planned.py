"""Which mixtures of a set of experts an evaluation computes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from demix.config.evaluation import MixingRecipe
from demix.config.mixing import Weights, parsed_weights
from demix.evaluate.losses import PlannedMixture
from demix.mix.mixtures import FLOORS
from demix.mix.priors import RELEASED_DECAY
from demix.mix.rules import WeightsRule, released_rule, weights_rule
from demix.run.systems import ExpertSet


def planned_mixtures(
    evaluation: MixingRecipe, some: ExpertSet, scored: int, chosen: Mapping[str | int, WeightsRule] | None = None
) -> Iterator[tuple[PlannedMixture, str]]:
    """All mixtures of a set of experts, each with the variant that it is a row of; `scored` dev blocks are there.

    `chosen` are the rules of weights whose parameters are chosen on dev.
    """
    planner = Planner(evaluation, some, scored, chosen or {})
    yield from planner.of_tables()
    if len(evaluation.routing_context) + len(evaluation.temperatures) > 1:
        for mixture in planner.routed_grid():
            yield mixture, "routing"
    if some.variants:
        yield from planner.varied()


@dataclass(frozen=True)
class Planner:
    """The mixtures of a set of experts; the fields are the arguments of `planned_mixtures`."""

    evaluation: MixingRecipe
    some: ExpertSet
    scored: int
    chosen: Mapping[str | int, WeightsRule] = field(default_factory=dict)

    def of_tables(self) -> Iterator[tuple[PlannedMixture, str]]:
        """The mixtures of the tables, with the published code's beside weights by distance."""
        for top_k in (None, *self._fewer):
            for method in self.some.methods:
                for weights, parsed in self._named.items():
                    if method in parsed.rules.evaluated:
                        mixture = self._mixture(method, weights, top_k=top_k)
                        yield mixture, ""
                        if parsed.family == "cluster":
                            yield replace(mixture, rule=released_rule(mixture.rule)), "released_scorer"
                # The prior alone: equal weights have no likeliest experts.
                if method == "fitted" or (method == "average" and top_k is None):
                    yield self._mixture(method, top_k=top_k), ""
        if "average" in self.some.methods:
            for method in FLOORS:
                yield self._mixture(method), ""

    def varied(self) -> Iterator[tuple[PlannedMixture, str]]:
        """The grids of decays and of numbers of dev blocks, and the scorer that was published with the paper."""
        given = self.evaluation
        for weights, parsed in self._named.items():
            if "cached" not in parsed.rules.evaluated or parsed.rules.routed:
                continue
            for decay in sorted({*given.decays, given.decay}):
                for method in ("updating", "cached"):
                    yield replace(self._mixture(method, weights), decay=decay), "decay"
            for blocks in sorted({min(number, self.scored) for number in (*given.prior_blocks, given.dev_blocks)}):
                yield replace(self._mixture("cached", weights), dev_blocks=blocks), "dev_blocks"
        for method in ("updating", "cached"):
            mixture = self._mixture(method, "released")
            yield replace(mixture, rule=released_rule(mixture.rule), decay=RELEASED_DECAY), "released_scorer"

    def routed_grid(self, contexts: int | None = None) -> list[PlannedMixture]:
        """The mixtures by all temperatures, all top-k and the first of the contexts.

        There are none for experts without clusters, and for sets that few methods mix.
        """
        given = self.evaluation
        found = [
            self._mixture(method, weights, context, temperature, top_k)
            for weights, parsed in self._named.items()
            if parsed.rules.routed and "average" in self.some.methods
            for method in parsed.rules.evaluated
            for context in given.routing_context[:contexts]
            for temperature in sorted({*given.temperatures, given.temperature})
            for top_k in (None, *self._fewer)
        ]
        return list(dict.fromkeys(found))

    @property
    def _named(self) -> dict[str | int, Weights]:
        """The weights by name; those by distance need a centre for each expert."""
        named = {weights: parsed_weights(weights) for weights in self.some.weights or self.evaluation.weights}
        return {weights: parsed for weights, parsed in named.items() if self.some.routing or not parsed.rules.routed}

    @property
    def _fewer(self) -> list[int]:
        """The values of top-k that leave an expert out."""
        return [k for k in self.evaluation.top_k if k < len(self.some.experts)]

    def _mixture(
        self,
        method: str,
        weights: str | int = "",
        context: str = "",
        temperature: float | None = None,
        top_k: int | None = None,
    ) -> PlannedMixture:
        """The mixture by a method and named weights; a temperature that these leave open is `temperature`."""
        given, rule, routing = self.evaluation, self.chosen.get(weights), ""
        if weights and (parsed := parsed_weights(weights)).rules.routed:
            hot = given.temperature if temperature is None else temperature
            rule = weights_rule(replace(parsed, parameters=parsed.parameters or (hot,)))
            routing, context = self.some.routing, context or given.routing_context[0]
        blocks = min(given.dev_blocks, self.scored)
        rule = rule or weights_rule(weights)
        return PlannedMixture(
            method, self.some.experts, rule, weights, given.decay, blocks, top_k, routing, context if routing else ""
        )
