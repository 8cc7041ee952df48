"""The numbers that the paper prints, as far as they are known; paper.json names the source of each."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

# The paper's names of the sizes in Table 2, by preset.
SIZES = {"gpt3-small": "125M", "gpt3-medium": "350M", "gpt3-large": "760M", "gpt3-xl": "1.3B"}


@dataclass(frozen=True)
class Printed:
    """Means over domains that one table of the paper prints for one size, by label in the table of the same name here.

    `preset` is None where the size and the systems of the numbers are unknown; the labels then name no system.
    """

    table: str
    preset: str | None
    means: dict[str, float]
    source: str


def size_of(config: dict[str, Any]) -> str | None:
    """The preset whose size in the paper a run has, or None. A preset with changed sizes has no size of the paper."""
    architecture = {key: value for key, value in (config.get("architecture") or {}).items() if value is not None}
    preset = architecture.get("preset")
    changed = architecture.keys() - {"preset", "context"} or architecture.get("context", 1024) != 1024
    return preset if preset in SIZES and not changed else None


@cache
def printed() -> tuple[Printed, ...]:
    """All entries of paper.json."""
    return tuple(Printed(**entry) for entry in json.loads(Path(__file__).with_name("paper.json").read_text("utf-8")))
