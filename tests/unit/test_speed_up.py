"""The speed-up of training over a dense model: costs between runs against scipy, and the table of a made-up run."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.interpolate import interp1d

from demix.config.counts import training_flops_per_token
from demix.report import report_files, report_items
from demix.report.families import lines
from demix.report.items.speed_up import cost_at
from demix.report.material import Material
from demix.report.results import Results
from demix.run.run import Run
from support.configs import changed
from support.report import table_of
from support.synthetic_run import NOVEL, TRAINING, MadeUp, base

LONG, SHORT = 2457600, 1228800
# Over the perplexity of the domain's own expert: the two lines meet between 1.3 and 1.4. All others lie beyond.
FACTORS = {"dense": 1.3, "dense_short": 1.6, "cbtm_2": 1.2, "cbtm_2_short": 1.4, "cbtm_3_random": 1.7}


@pytest.fixture(scope="module")
def run(families: MadeUp) -> Run:
    dense = {"kind": "dense", "tokens": SHORT, "label": "dense_short"}
    # Its line has no seed phase.
    clusters = {"kind": "branched", "data": "k2", "label": "cbtm_2"}
    return changed(families.run, models={"dense_short": dense, "cbtm_2": clusters})


@pytest.fixture(scope="module")
def frame(families: MadeUp, run: Run) -> pd.DataFrame:
    found = families.results.rows
    rows = pd.concat([found, found[found["model"] == "dense"].assign(model="dense_short")], ignore_index=True)
    for model, factor in FACTORS.items():
        own = rows["model"] == model
        rows.loc[own, "perplexity"] = factor * rows.loc[own, "domain"].map(base)
    return table_of("speed_up", Material(run, {"results": Results(rows), "tokens_before": {}})).frame


def test_a_line_and_a_dense_one_are_compared_where_both_have_been(run: Run, frame: pd.DataFrame) -> None:
    by_token = training_flops_per_token(run.architecture, run.types, run.context)
    assert list(frame.index) == [
        "cbtm_2_short against Dense (Balanced)",
        "cbtm_2 at the perplexity of Dense (Balanced)",
    ]
    for kind, domains in (("Training", TRAINING), ("Novel", NOVEL)):
        mean = np.mean([base(domain) for domain in domains])
        # A third of the way from 1.3 to 1.6, and half of that from 1.2 to 1.4.
        expected = [
            (1.4 * mean, SHORT, LONG ** (2 / 3) * SHORT ** (1 / 3)),
            (1.3 * mean, math.sqrt(LONG * SHORT), LONG),
        ]
        for (perplexity, own, dense), (_, row) in zip(expected, frame.iterrows(), strict=True):
            assert row[f"{kind}, perplexity"] == pytest.approx(perplexity)
            assert row[f"{kind}, FLOPs"] == pytest.approx(by_token * own)
            assert row[f"{kind}, FLOPs of dense"] == pytest.approx(by_token * dense)
            assert row[f"{kind}, speed-up"] == pytest.approx(dense / own)


def test_lines_that_share_no_perplexity_leave_the_table_without_rows(
    run: Run, families: MadeUp, tmp_path: Path
) -> None:
    rows = families.results.rows
    short = rows[rows["model"] == "dense"].assign(model="dense_short", perplexity=lambda own: 1000 * own["perplexity"])
    rows = pd.concat([rows.assign(perplexity=rows["perplexity"] * (1 + 99 * (rows["model"] == "dense"))), short])
    material = Material(run, {"results": Results(rows.reset_index(drop=True)), "tokens_before": {}})
    (item,) = (one for one in report_items(run) if one.name == "speed_up")
    item.write(material, tmp_path)
    assert "This run has no rows for this table." in (tmp_path / "tables" / "speed_up.md").read_text()


def test_rows_of_a_line_differ_in_their_budget_alone(run: Run) -> None:
    others = {"dense_hot": {"kind": "dense", "tokens": 819200, "learning_rate": 0.002}}
    others["cbtm_2_seeded"] = {"kind": "branched", "data": "k2", "parent": "dense", "seed_tokens": 819200}
    others["far"] = {"kind": "dense", "tokens": 819200, "architecture": {"position": "alibi"}}
    found = [[family.model.name for family in line] for line in lines(changed(run, models=others))]
    assert [line for line in found if len(line) > 1] == [["dense_short", "dense"], ["cbtm_2_short", "cbtm_2"]]
    assert all([name] in found for name in others)


def test_a_run_of_one_dense_budget_has_no_such_table(families: MadeUp, run: Run) -> None:
    assert "tables/speed_up.html" in report_files(run)
    assert "tables/speed_up.html" not in report_files(families.run)


@given(st.lists(st.tuples(st.floats(1, 1e20), st.floats(2, 500)), min_size=2, max_size=6, unique_by=lambda one: one[1]))
def test_between_runs_log_cost_is_linear_in_perplexity(runs: list[tuple[float, float]]) -> None:
    costs, perplexities = zip(*runs, strict=True)
    between = interp1d(perplexities, np.log(costs), bounds_error=False)
    for perplexity in (*perplexities, float(np.mean(perplexities)), min(perplexities) + 1e-3):
        assert np.log(cost_at(perplexity, costs, perplexities)) == pytest.approx(
            float(between(perplexity)), nan_ok=True
        )
    for beyond in (min(perplexities) - 0.1, max(perplexities) + 0.1):
        assert math.isnan(cost_at(beyond, costs, perplexities))
