"""The numbers that the paper prints, as far as they were found; paper.json says where each is from."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

# The paper's names of the sizes in Table 2, by our presets.
SIZES = {"gpt3-small": "125M", "gpt3-medium": "350M", "gpt3-large": "760M", "gpt3-xl": "1.3B"}


@dataclass(frozen=True)
class Printed:
    """Means over domains that one table of the paper prints for one size, by the label that our table has for each.

    Where it is not known what the numbers stand for, `preset` is None and the labels are no system's.
    """

    table: str
    preset: str | None
    means: dict[str, float]
    source: str


def size_of(config: dict[str, Any]) -> str | None:
    """The preset of the paper's size that a run has, or None: a preset with other sizes on top is none of them."""
    architecture = {key: value for key, value in (config.get("architecture") or {}).items() if value is not None}
    preset = architecture.get("preset")
    changed = architecture.keys() - {"preset", "context"} or architecture.get("context", 1024) != 1024
    return preset if preset in SIZES and not changed else None


@cache
def printed() -> tuple[Printed, ...]:
    """All that paper.json holds."""
    return tuple(Printed(**entry) for entry in json.loads(Path(__file__).with_name("paper.json").read_text("utf-8")))
