"""The numbers that the paper prints, beside a run's own."""

import pandas as pd
import pytest

from demix.config.config import Config
from demix.report.item import Group
from demix.report.paper import SIZES, beside_paper, printed
from demix.run.run import Run
from support.report import names_of, table_of
from support.synthetic_run import MadeUp


@pytest.fixture(scope="module")
def run(made_up: MadeUp) -> MadeUp:
    return made_up


def of_paper(run: MadeUp, preset: str = "gpt3-small", **sizes: int) -> Run:
    section = {"preset": preset, "context": 1024} | sizes
    return Run(Config.complete(run.keys | {"architecture": section}), run.path)


def test_the_papers_numbers_stand_beside_a_run_of_its_size(run: MadeUp) -> None:
    """In a column by system, the mixtures beside the released scorer; the smallest size beside another run."""
    five = table_of("table5", run.material())
    for preset, sizes, label, value in (
        ("gpt3-small", {}, "Paper, 125M", 21.4),
        ("gpt3-xl", {}, "Paper, 1.3B", 17.0),
        ("gpt3-xl", {"layers": 3}, "Paper, 125M", 21.4),
    ):
        found = beside_paper(five, of_paper(run, preset, **sizes))
        assert found.frame.loc["DEMix (cached prior), released scorer", label] == value
        assert pd.isna(found.frame.loc["DEMix (cached prior)", label])
        assert found.frame[label].notna().sum() == 8
        assert found.text()[label].tolist().count("–") == len(five.frame) - 8
        assert ("this run has none of its sizes" in found.notes[-2]) == bool(sizes)
        assert "8^(1/1024) = 1.002 in perplexity" in found.notes[-1]
    three = beside_paper(table_of("table3", run.material()), of_paper(run))
    assert three.frame["Paper, 125M"].dropna().tolist() == [20.6, 19.9, 19.2, 18.4, 17.8]


def test_the_papers_rows_stand_below_the_runs_own(run: MadeUp) -> None:
    seven = beside_paper(table_of("table7", run.material()), of_paper(run))
    assert seven.frame.loc["Paper, 125M: mean", ["+Expert", "−Expert", "−Domain"]].tolist() == [18.2, 28.5, 30.6]
    assert seven.frame.loc["Paper, 125M: 1b", "−Domain"] == 30.4
    assert seven.text().loc["Paper, 125M: mean", "Documents"] == "–"
    assert {label for label in seven.summaries if label.startswith("Paper")} == {"Paper, 125M: mean"}
    four = beside_paper(table_of("table4", run.material()), of_paper(run))
    assert four.frame["Paper, 1.3B: mean"].dropna().tolist() == [13.8, 13.8, 13.4]
    assert four.text().loc["DEMix (naive)", "Paper, 1.3B: cs"] == "12.2"
    assert "the only size of this table" in four.notes[-2]
    six = beside_paper(table_of("table6", run.material()), of_paper(run, "gpt3-large"))
    assert six.frame.loc["Paper, 760M: mean, novel"].dropna().tolist() == [17.4, 13.5]
    thirteen = beside_paper(table_of("table13", run.material()), of_paper(run))
    assert thirteen.text().loc["Paper, 125M: mean"].tolist() == ["+70.1", "−55.1", *["–"] * 4, " "]


def test_every_printed_number_has_its_place(run: MadeUp) -> None:
    """Each size of each table, with labels of the run's own tables; the printed means are those of the printed rows."""
    tables = {name: table_of(name, run.material()) for name in names_of(Group.PAPER)}
    sizes = {name: [one.preset for one in printed() if one.table == name] for name in names_of(Group.PAPER)}
    assert sizes == {name: list(SIZES) for name in names_of(Group.PAPER)} | {
        "table4": ["gpt3-xl"],
        "table7": ["gpt3-small"],
    }
    for one in printed():
        frame = tables[one.table].frame
        for values in (one.column, *one.columns.values()):
            assert set(values) <= set(frame.index)
        for values in one.rows.values():
            assert set(values) <= set(frame.columns)
        if len(printed_rows := one.rows or one.columns) > 2:
            rows = pd.DataFrame(printed_rows).T
            assert (rows.drop(index="mean").mean() - rows.loc["mean"]).abs().max() < 0.06
