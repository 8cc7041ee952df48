"""The numbers that the paper prints, beside a run's own."""

import pandas as pd
import pytest

from demix.report import PAPER_TABLES
from demix.report.all_tables import beside_paper
from demix.report.paper import SIZES, printed
from demix.report.paper_tables import table3, table4, table5, table6, table7, table13
from demix.run.run import Run
from support.configs import changed
from support.synthetic_run import MadeUp


@pytest.fixture(scope="module")
def run(made_up: MadeUp) -> MadeUp:
    return made_up


def of_paper(run: MadeUp, preset: str = "gpt3-small", **sizes: int) -> Run:
    return changed(run.run, architecture={"preset": preset, "context": 1024} | sizes)


def test_the_papers_numbers_stand_beside_a_run_of_its_size(run: MadeUp) -> None:
    """In a column by system, the mixtures beside the released scorer; the smallest size beside another run."""
    five = table5(run.results, run.run)
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
    three = beside_paper(table3(run.results, run.run), of_paper(run))
    assert three.frame["Paper, 125M"].dropna().tolist() == [20.6, 19.9, 19.2, 18.4, 17.8]


def test_the_papers_rows_stand_below_the_runs_own(run: MadeUp) -> None:
    seven = beside_paper(table7(run.results, run.run), of_paper(run))
    assert seven.frame.loc["Paper, 125M: mean", ["+Expert", "−Expert", "−Domain"]].tolist() == [18.2, 28.5, 30.6]
    assert seven.frame.loc["Paper, 125M: 1b", "−Domain"] == 30.4
    assert seven.text().loc["Paper, 125M: mean", "Documents"] == "–"
    assert {label for label in seven.summaries if label.startswith("Paper")} == {"Paper, 125M: mean"}
    four = beside_paper(table4(run.results, run.run), of_paper(run))
    assert four.frame.loc["Paper, 1.3B: mean"].dropna().tolist() == [13.8, 13.8, 13.4]
    assert "the only size of this table" in four.notes[-2]
    six = beside_paper(table6(run.results, run.run), of_paper(run, "gpt3-large"))
    assert six.frame.loc["Paper, 760M: mean, novel"].dropna().tolist() == [17.4, 13.5]
    thirteen = beside_paper(table13(run.results, run.run, run.parents), of_paper(run))
    assert thirteen.text().loc["Paper, 125M: mean"].tolist() == ["+70.1", "−55.1", *["–"] * 4, " "]


def test_every_printed_number_has_its_place(run: MadeUp) -> None:
    """Each size of each table, with labels of the run's own tables; the printed means are those of the printed rows."""
    tables = {
        one.name: one for one in (make(run.results, run.run) for make in (table3, table4, table5, table6, table7))
    }
    tables["table13"] = table13(run.results, run.run, run.parents)
    sizes = {name: [one.preset for one in printed() if one.table == name] for name in PAPER_TABLES}
    assert sizes == {name: list(SIZES) for name in PAPER_TABLES} | {"table4": ["gpt3-xl"], "table7": ["gpt3-small"]}
    for one in printed():
        frame = tables[one.table].frame
        assert set(one.column) <= set(frame.index)
        for values in one.rows.values():
            assert set(values) <= set(frame.columns)
        if len(one.rows) > 2:
            rows = pd.DataFrame(one.rows).T
            assert (rows.drop(index="mean").mean() - rows.loc["mean"]).abs().max() < 0.06
