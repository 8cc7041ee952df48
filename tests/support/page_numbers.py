"""The numbers of README's tables beside those of a finished run of the sample, of which they tell.

    python tests/support/page_numbers.py results/sample

Prints each number that is another one when it is rounded as on the page, and then ends with status 1. The last digits
of perplexities depend on the processor.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from demix.report.adapting import adaptation_table
from demix.report.material import Material
from demix.run.main_systems import ngram_lines, trained_systems
from demix.run.run import Run

README = Path(__file__).parents[2] / "README.md"
# The part of a row's label that stands on the page, by what identifies its system: row of models, method and weights.
SYSTEMS = {
    "5-grams, all text": ("ngram5", "dense", ""),
    "5-grams by domain": ("ngram5_domains", "uniform", "tempered"),
    "Paper's recipe: Dense": ("dense_paper", "dense", ""),
    "Paper's recipe: DEMix": ("demix_paper", "uniform", "tempered"),
    "Dense (Balanced)": ("dense", "dense", ""),
    "+ domain token": ("domain_token", "naive", ""),
    "DEMix, cached prior": ("demix", "cached", "history"),
    "DEMix, tempered": ("demix", "uniform", "tempered"),
    "DEMix after a seed phase, tempered": ("demix_seeded", "uniform", "tempered"),
}
ADAPTED = ("Dense-DAPT", "DEMix-DAPT")


@dataclass(frozen=True)
class Printed:
    """A number of a page, as it is printed there, and the run's value of it."""

    row: str
    text: str
    value: float

    @property
    def rounded(self) -> str:
        """The value with the digits of the page."""
        digits = len(self.text.partition(".")[2])
        return f"{self.value:,.{digits}f}"


def numbers(run: Path, page: Path = README) -> list[Printed]:
    """The numbers of the tables of `page` with their values in `run`. Raises ValueError where a row is missing."""
    whole = Run.read(run)
    material = Material(whole)
    systems = {(one.model, one.method, one.weights): one for one in (*trained_systems(whole), *ngram_lines(whole))}
    values = {
        label: [material.own.mean(systems[key], domains.names) for domains in material.kinds]
        for label, key in SYSTEMS.items()
    }
    adapted = adaptation_table(material).frame
    values |= {label: adapted.loc[label].tolist() for label in ADAPTED}
    found = []
    for (label, texts), wanted in zip(printed(page, tuple(values)).items(), values.values(), strict=True):
        if len(texts) != len(wanted):
            raise ValueError(f"{page}: the row {label} has {len(texts)} numbers, and the run {len(wanted)}")
        found += [Printed(label, text, value) for text, value in zip(texts, wanted, strict=True)]
    return found


def printed(page: Path, labels: tuple[str, ...] = (*SYSTEMS, *ADAPTED)) -> dict[str, list[str]]:
    """The numbers in the first row of the tables of `page` whose first cell begins with each label."""
    rows = [line.strip("| ").partition("|") for line in page.read_text().splitlines() if line.startswith("|")]
    return {
        label: next((re.findall(r"\d[\d,]*\.?\d*", cells) for first, _, cells in rows if first.startswith(label)), [])
        for label in labels
    }


def main() -> int:
    """Print the numbers that differ. Returns the exit status."""
    other = [one for one in numbers(Path(sys.argv[1])) if one.text != one.rounded]
    for one in other:
        print(f"{README.name}, {one.row}: {one.text} is {one.rounded} ({one.value})")
    return int(bool(other))


if __name__ == "__main__":
    sys.exit(main())
