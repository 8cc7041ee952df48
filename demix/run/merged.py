"""Models that are made of a row's experts without training, and which a run scores as models of their own."""

from collections.abc import Iterable
from dataclasses import dataclass

from demix.config.architecture import Architecture
from demix.config.models import DENSE_EXPERT
from demix.run.models import Model, made_of

# The experts of a merged model, which is a single model.
MERGED = (DENSE_EXPERT,)
# What a key of a row makes, by the column weights in results.
MADE_BY = {"averages": ("uniform", "posterior"), "merged_routed": ("routed",)}


@dataclass(frozen=True)
class Merged:
    """A model made of the experts of `model`, by `weights`.

    It is their average with equal weights (uniform) or by the cached prior of a domain (posterior), or its tokens
    choose among them in every layer (routed). `place` is its folder below models/ and scores/, in which {domain} stands
    for the domain of the prior.
    """

    model: Model
    weights: str

    @property
    def place(self) -> str:
        """The folder of the merged model: one for each domain's prior, else one in all."""
        return made_of(self.model.name, self.weights)

    @property
    def token_routed(self) -> bool:
        """Whether its tokens choose among the experts; otherwise it is an average of them."""
        return self.weights == "routed"

    @property
    def rule(self) -> str:
        """The rule of the workflow that makes it."""
        return "merge_routed" if self.token_routed else "average_by_domain" if self.by_domain else "average"

    @property
    def by_domain(self) -> bool:
        """Whether each domain has a merged model of its own."""
        return self.weights == "posterior"

    def of(self, domain: str) -> str:
        """The folder of the merged model that is scored on `domain`."""
        return self.place.format(domain=domain)

    @property
    def architecture(self) -> Architecture:
        """The architecture of the merged model."""
        own = self.model.architecture
        return own.merged_routed(len(self.choices)) if self.token_routed else own

    @property
    def choices(self) -> tuple[str, ...]:
        """The experts that were merged, an anchor first."""
        return (DENSE_EXPERT,) * self.model.kind.anchored + self.model.experts


def merged_models(models: Iterable[Model]) -> tuple[Merged, ...]:
    """The merged models of those of `models` whose rows ask for them."""
    asked = ((model, key) for model in models for key in MADE_BY if getattr(model.settings, key))
    return tuple(Merged(model, weights) for model, key in asked for weights in MADE_BY[key])
