"""Tables over several seeds: means, their spread, and changes within a seed."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from demix.report.main_table import main_table
from demix.report.paper import scale_note
from demix.report.results import Results
from demix.run.check import completed_run
from support.report import table_of
from support.synthetic_run import MadeUp


@pytest.fixture(scope="module")
def run(made_up: MadeUp) -> MadeUp:
    return made_up


def test_seeds_are_shown_as_mean_and_spread(run: MadeUp) -> None:
    """Runs of different seeds have other test splits, hence other tokens."""
    rows = run.results.rows
    other = rows.assign(seed=2, perplexity=rows["perplexity"] + 6, tokens_sha256="other")
    both = Results(pd.concat([rows, other], ignore_index=True))
    table = table_of("table4", run.material(results=both))
    assert table.frame.loc["Dense", "law"] == pytest.approx(154 + 3)
    assert table.second_lines().loc["Dense", "law"] == f"± {6 / math.sqrt(2):.2f}"
    assert (
        table_of("table3", run.material(results=both)).second_lines().loc["Dense", "Perplexity"]
        == f"± {6 / math.sqrt(2):.2f}"
    )
    full = table_of("full", run.material(results=both)).frame
    assert set(full["± seeds"].round(6)) == {round(6 / math.sqrt(2), 6)}
    assert full["Low"].isna().all()
    assert "2 seeds" in scale_note(both, run.run)


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"preset": "modern", "layers": 2, "width": 8, "heads": 1, "context": 16}, "2 layers of width 8"),
        ({"preset": "gpt3-small"}, "architecture gpt3-small"),
    ],
)
def test_the_size_of_a_run_is_told_whatever_its_preset(run: MadeUp, section: dict[str, object], told: str) -> None:
    config = run.run.config.values | {"architecture": section}
    assert told in scale_note(run.results, completed_run(config))


def test_changes_within_a_seed_and_their_spread(run: MadeUp) -> None:
    """The second seed doubles the perplexities of both systems of a pair and those of DEMix by a further tenth."""
    rows = run.results.rows
    again = rows.assign(seed=2, perplexity=rows["perplexity"] * np.where(rows["model"] == "demix", 2.2, 2.0))
    one, both = (
        table_of("seeds", run.material(results=Results(pd.concat(found)))).frame for found in ([rows], [rows, again])
    )
    assert list(one.columns) == ["Training, seed 1", "Novel, seed 1"]
    assert one.loc["DEMix (naive)", "Training, seed 1"] == pytest.approx(100 * (1 / 1.3 - 1))
    changes = 100 * (1 / 1.3 - 1), 100 * (1.1 / 1.3 - 1)
    assert both.loc["DEMix (naive)", ["Training, seed 1", "Training, seed 2"]].to_list() == pytest.approx(changes)
    assert both.loc["DEMix (naive)", "Training, mean"] == pytest.approx(np.mean(changes))
    assert both.loc["DEMix (naive)", "±, training"] == pytest.approx(stats.tstd(changes))
    assert both.loc["Dense", "±, training"] == pytest.approx(0, abs=1e-9)
    assert "Dense (Balanced)" not in both.index


def test_rules_that_a_config_leaves_out_have_no_rows_in_the_main_table(run: MadeUp) -> None:
    less = Results(run.results.rows.query("weights != 'released'"))
    weights = [list(main_table(run.material(results=results)).columns[1].cells) for results in (run.results, less)]
    assert weights[1] == [rule for rule in weights[0] if rule != "released"]
    assert len(weights[1]) < len(weights[0])
