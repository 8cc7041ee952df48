"""Models that are made of a row's experts without training, and which a run scores as models of their own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from demix.config.architecture import Architecture
from demix.config.routed import architecture_of
from demix.config.rows import DENSE_EXPERT, novel_domains, training_domains
from demix.config.systems import Model, made_of, trained

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
    def rule(self) -> str:
        """The rule of the workflow that makes it."""
        if self.weights == "routed":
            return f"merge_routed_{self.model.rule}"
        return f"average_{self.model.rule}" + ("__uniform" if self.weights == "uniform" else "")

    @property
    def by_domain(self) -> bool:
        """Whether each domain has a merged model of its own."""
        return self.weights == "posterior"

    def of(self, domain: str) -> str:
        """The folder of the merged model that is scored on `domain`."""
        return self.place.format(domain=domain)

    def jobs(self, config: Mapping[str, Any]) -> int:
        """The number of jobs that merge."""
        return len(training_domains(config)) + len(novel_domains(config)) if self.by_domain else 1

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """The architecture of the merged model."""
        own = architecture_of(config, self.model.settings)
        return own.merged_routed(len(self.model.experts)) if self.weights == "routed" else own


def merged_models(config: Mapping[str, Any]) -> tuple[Merged, ...]:
    """The merged models of a completed config's rows that ask for them, with the run's own seed."""
    rows = [one for one in trained(config) if one.name == one.row and not one.removed]
    asked = ((row, key) for row in rows for key in MADE_BY if row.settings.get(key))
    return tuple(Merged(row, weights) for row, key in asked for weights in MADE_BY[key])
