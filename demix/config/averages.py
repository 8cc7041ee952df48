"""Models whose parameters are the average of a row's experts, which a run scores as models of their own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from demix.config.rows import DENSE_EXPERT, novel_domains, training_domains
from demix.config.systems import Model, trained

# The experts of an average, which is a single model.
AVERAGED = (DENSE_EXPERT,)


@dataclass(frozen=True)
class Average:
    """The average of the experts of `model` by `weights`: uniform, or posterior, the cached prior of a domain.

    `place` is its folder below models/ and scores/, in which {domain} stands for the domain of the prior.
    """

    model: Model
    weights: str

    @property
    def place(self) -> str:
        """The folder of the average of one domain's prior, or of equal weights."""
        return f"{self.model.name}-uniform" if self.weights == "uniform" else f"{self.model.name}-average-{{domain}}"

    @property
    def rule(self) -> str:
        """The rule of the workflow that makes it."""
        return f"average_{self.model.rule}" + ("__uniform" if self.weights == "uniform" else "")

    def of(self, domain: str) -> str:
        """The folder of the average that is scored on `domain`."""
        return self.place.format(domain=domain)

    def jobs(self, config: Mapping[str, Any]) -> int:
        """The number of jobs that average."""
        return 1 if self.weights == "uniform" else len(training_domains(config)) + len(novel_domains(config))


def averages(config: Mapping[str, Any]) -> tuple[Average, ...]:
    """The averages of a completed config's rows that ask for them, with the run's own seed."""
    asking = [
        one for one in trained(config) if one.name == one.row and one.settings.get("averages") and not one.removed
    ]
    return tuple(Average(model, weights) for model in asking for weights in ("uniform", "posterior"))
