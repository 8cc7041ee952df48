"""A claim as a row: what is claimed, where it stands, and the comparisons that decide on it.

No pandas is loaded before a claim is judged: the workflow asks what a run lacks.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from demix.report.material import Material
from demix.report.needs import Need
from demix.report.systems import DOMAIN_TOKEN, NAIVE, ByDomain, baselines
from demix.report.verdict import Claim, Part, claim_of, compare
from demix.run.run import Run
from demix.run.systems import System

if TYPE_CHECKING:
    import pandas as pd

# A mixture of more experts pays for a less certain prior π: up to −ln π/T nats per token. Half a percent is no harm.
HARM = 0.005
# On a novel domain the single expert or token is chosen on the test data.
ORACLES = {NAIVE: "best expert (oracle)", DOMAIN_TOKEN: "best domain token (oracle)"}


@dataclass(frozen=True)
class Versus:
    """Whether a system has a lower perplexity than another on the domains of a kind (`on`).

    Or a `higher` one, or one that is at most a fraction `allowance` above. `labels` are shown instead of the systems'
    own. Without `intervals` the means alone decide.
    """

    first: ByDomain
    second: ByDomain
    on: str = "training"
    labels: tuple[str, str] = ("", "")
    higher: bool = False
    allowance: float = 0.0
    intervals: bool = True

    def part(self, material: Material) -> Part:
        """The comparison, judged on one seed by test perplexities and the intervals of their differences."""
        domains = {domains.kind: domains.names for domains in material.kinds}.get(self.on, [])
        systems = (self.first, self.second)
        (label, values), (other, others) = (
            (given or self._label(system), material.results.perplexities(system, domains))
            for system, given in zip(systems, self.labels, strict=True)
        )
        bounds = self._bounds(material, domains)
        return compare(label, values, other, others, higher=self.higher, allowance=self.allowance, bounds=bounds)

    def _label(self, system: ByDomain) -> str:
        if not isinstance(system, System):
            return ""
        return ORACLES.get(system, system.label) if self.on == "novel" else system.label

    def _bounds(self, material: Material, domains: list[str]) -> "pd.DataFrame | None":
        """The bounds of the first less the second, turned round where those of the second less the first are known."""
        from demix.report.results import paired

        if not self.intervals or not isinstance(self.second, System):
            return None
        found = paired(material.bounds, self.first, self.second, domains)
        if not found.empty or not isinstance(self.first, System):
            return found
        turned = paired(material.bounds, self.second, self.first, domains)
        return -turned.rename(columns={"low": "high", "high": "low"})


Parts = Callable[[Material], Iterable[Versus | Part]]


@dataclass(frozen=True)
class Row:
    """A claim: its name, what is claimed, the source that says so, the comparisons that decide, and what it needs.

    `sentence` may be a function of the material, or hold {dense}, the names of the run's dense baselines, and {on_all},
    the kinds of its domains. `source` is empty for claims of ours. A run in which nothing can be compared has no such
    claim.
    """

    name: str
    sentence: str | Callable[[Material], str]
    source: str
    parts: tuple[Versus, ...] | Parts
    needs: tuple[Need, ...] = ()
    remark: Callable[[Material], str] = lambda material: ""

    def statement(self, material: Material) -> str:
        """What is claimed, with the source."""
        if callable(self.sentence):
            said = self.sentence(material)
        else:
            kinds = " and ".join(f"on the {domains.kind} domains" for domains in material.kinds)
            said = self.sentence.format(dense=dense_of(material.run), on_all=kinds)
        return f"{said} ({self.source})." * bool(self.source) + f"{said}." * (not self.source) + self.remark(material)

    def judged(self, material: Material) -> Claim:
        """The claim, judged on one seed."""
        parts = self.parts(material) if callable(self.parts) else self.parts
        judged = (part.part(material) if isinstance(part, Versus) else part for part in parts)
        return claim_of(self.name, self.statement(material), *judged)


def dense_of(run: Run) -> str:
    """The names of the dense baselines in a sentence."""
    dense = baselines(run)
    return "both dense baselines" if len(dense) > 1 else dense[0].label


def below_dense(*systems: System, on: str = "") -> Parts:
    """The comparisons of `systems` with each dense baseline, on one kind of domains or on all."""
    return lambda material: [
        Versus(system, base, domains.kind)
        for domains in material.kinds
        if domains.kind == (on or domains.kind)
        for system in systems
        for base in baselines(material.run)
    ]


def on_all(first: System, second: System) -> Parts:
    """The comparison of two systems on each kind of domains."""
    return lambda material: [Versus(first, second, domains.kind) for domains in material.kinds]
