"""How experts are mixed: methods, rules that weight experts by the text so far, and their allowed combinations."""

import re
from dataclasses import dataclass

# `naive` is not listed, because it uses a single expert. Apart from `average`, a method is named by its prior.
METHODS = ("average", "uniform", "updating", "cached", "fitted")


# Methods for masked language models, whose experts must not be weighted by the text: a single expert, equal weights,
# and fixed weights that are optimised on dev.
UNWEIGHTED = ("naive", "average", "fitted")


@dataclass(frozen=True)
class Family:
    """Mixing rules that differ only in the values of their `parameters` (docs/explanation/mixing.md, "Rules").

    `parameters` maps names to the bounds of their values. If a config does not give parameters, they are chosen on dev.
    `evaluated` are the mixing methods shown in tables, and `refused` the methods that cannot be used with these rules.
    Rules that are `routed` need the distances of the text to the experts' clusters; their default temperature is the
    config's.
    """

    parameters: dict[str, tuple[float, float]]
    evaluated: tuple[str, ...]
    refused: tuple[str, ...] = ()
    routed: bool = False


IN_BLOCK = Family({}, ("uniform", "updating", "cached"))
# These rules use earlier blocks. With a prior made of posteriors, the evidence of these blocks would count twice.
TWICE = ("updating", "cached")
NEARNESS = {"temperature": (1e-6, 1e6)}
FAMILIES = {
    "history": IN_BLOCK,
    "released": IN_BLOCK,
    "tempered": Family({"beta": (0, 10), "gamma": (0, 1)}, ("uniform",), TWICE),
    "switching": Family({"alpha": (0, 1)}, ("fitted",), TWICE),
    "cluster": Family(NEARNESS, ("uniform",), routed=True),
    "cluster+history": Family(NEARNESS, ("uniform", "cached"), routed=True),
}

# Parameters that are used if none were chosen on dev.
DEFAULTS = {"tempered": (0.1, 0.99), "switching": (0.2,), "cluster": (0.1,), "cluster+history": (0.1,)}


@dataclass(frozen=True)
class Weights:
    """A parsed value of `evaluation.weights`.

    `parameters` are in the order of the family's parameters, and empty if they must be chosen on dev.
    """

    family: str
    parameters: tuple[float, ...] = ()

    @property
    def rules(self) -> Family:
        """The family of the rule. `average`, which uses only the prior, has the family of `history`."""
        return FAMILIES.get(self.family, IN_BLOCK)

    @property
    def open(self) -> bool:
        """Whether the parameters must be chosen on dev."""
        return len(self.rules.parameters) > len(self.parameters)


def parsed_weights(weights: str) -> Weights:
    """A value of `evaluation.weights`, such as history or tempered(0.2,0.98), as an object.

    Raises ValueError(cause, cure) for any other value.
    """
    known = ", ".join(FAMILIES)
    found = re.fullmatch(r"([a-z+]+)(?:\(([^()]*)\))?", weights)
    if not found or found[1] not in FAMILIES:
        raise ValueError(f"{weights} is not a known rule", f"use one of {known}")
    allowed = FAMILIES[found[1]].parameters
    if found[2] is None:
        return Weights(found[1])
    form = f"{found[1]}({','.join(allowed)})" if allowed else found[1]
    try:
        numbers = tuple(float(number) for number in found[2].split(","))
    except ValueError:
        numbers = ()
    if not allowed or len(numbers) != len(allowed):
        raise ValueError("does not have the rule's parameters", f"use {form}")
    for number, (name, (least, most)) in zip(numbers, allowed.items(), strict=True):
        if not least <= number <= most:
            raise ValueError(f"has {name} {number:g}", f"use {form} with {name} from {least:g} to {most:g}")
    return Weights(found[1], numbers)
