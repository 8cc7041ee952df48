"""The numbers that the paper prints, beside a run's own."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import demix
from demix.config.config import Config
from demix.report.items import all_items
from demix.run.run import Run
from support.frozen import material
from support.report import tables_of

PRINTED = json.loads((Path(demix.__file__).parent / "report" / "paper.json").read_text())
SIZES = {"gpt3-small": "125M", "gpt3-medium": "350M", "gpt3-large": "760M", "gpt3-xl": "1.3B"}


def beside_paper(name: str, frozen: Run, folder: Path, architecture: dict[str, Any]) -> pd.DataFrame:
    """The cells of a table of the run, were it of another size."""
    run = Run(Config.complete(frozen.config.values | {"architecture": architecture}), frozen.folder)
    all_items()[name].write(material(run), folder)
    (found,) = tables_of((folder / "tables" / f"{name}.md").read_text())[""]
    return found.cells


@pytest.mark.parametrize("entry", PRINTED, ids=lambda entry: f"{entry['table']}, {entry['preset']}")
def test_every_printed_number_stands_beside_a_run_of_its_size(
    entry: dict[str, Any], frozen: Run, tmp_path: Path
) -> None:
    cells = beside_paper(entry["table"], frozen, tmp_path, {"preset": entry["preset"], "context": 1024})
    label = f"Paper, {SIZES[entry['preset']]}"
    columns = (
        {label: entry["column"]}
        if "column" in entry
        else {f"{label}: {name}": values for name, values in entry.get("columns", {}).items()}
    )
    for column, values in columns.items():
        shown = cells[column][cells[column] != "–"]
        assert shown.astype(float).to_dict() == values
    for row, values in entry.get("rows", {}).items():
        assert {column: float(cells.at[f"{label}: {row}", column].replace("−", "-")) for column in values} == values
    # The printed means are those of the printed rows.
    lines = entry.get("rows") or entry.get("columns") or {}
    if len(lines) > 2:
        frame = pd.DataFrame(lines).T
        assert (frame.drop(index="mean").mean() - frame.loc["mean"]).abs().max() < 0.06


def test_all_sizes_of_all_tables_are_printed() -> None:
    sizes = {(entry["table"], entry["preset"]) for entry in PRINTED}
    several = {(f"table{number}", size) for number in (3, 5, 6, 13) for size in SIZES}
    assert sizes == several | {("table4", "gpt3-xl"), ("table7", "gpt3-small")}


def test_another_size_stands_beside_the_smallest(frozen: Run, tmp_path: Path) -> None:
    cells = beside_paper("table5", frozen, tmp_path, {"preset": "gpt3-xl", "context": 1024, "layers": 3})
    assert [column for column in cells if column.startswith("Paper")] == ["Paper, 125M"]
