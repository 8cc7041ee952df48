"""The table of rows with options of architecture of their own, against plain means over rows of results."""

from dataclasses import replace

import pandas as pd
import pytest

from demix.report import left_out
from demix.report.results import Results
from demix.run.variants import variant_rows
from support.configs import changed
from support.report import table_of
from support.synthetic_run import NOVEL, TRAINING, MadeUp

MLM = {"attention": "bidirectional", "objective": "mlm"}
ROWS = {
    "dense_alibi": {"kind": "dense", "label": "dense_alibi", "architecture": {"position": "alibi"}},
    "dense_both": {"kind": "dense", "label": "dense_both", "architecture": {"position": "alibi", "head": "clap"}},
    "demix_clap": {"kind": "demix", "label": "demix_clap", "architecture": {"head": "clap"}},
    "dense_same": {"kind": "dense", "architecture": {"head": "tied"}},
    "dense_longer": {"kind": "dense", "architecture": {"head": "clap"}, "tokens": 4915200},
    "masked": {"kind": "demix", "architecture": MLM},
}
FACTORS = {"dense_alibi": 0.9, "dense_both": 1.1, "demix_clap": 0.8}


@pytest.fixture(scope="module")
def run(made_up: MadeUp) -> MadeUp:
    rows = made_up.results.rows
    more = [
        found.assign(model=name, perplexity=found["perplexity"] * factor)
        for name, factor in FACTORS.items()
        for found in [rows[rows["model"] == ROWS[name]["kind"]]]
    ]
    return replace(
        made_up, run=changed(made_up.run, models=ROWS), results=Results(pd.concat([rows, *more], ignore_index=True))
    )


def test_only_rows_that_differ_in_options_alone_are_variants(run: MadeUp) -> None:
    assert variant_rows(run.run) == {"dense_alibi": "dense", "dense_both": "dense", "demix_clap": "demix"}
    assert "variants" not in left_out(run.run)
    plain = changed(run.run, models=dict.fromkeys(FACTORS))
    assert left_out(plain)["variants"] == "row of other options"


def test_each_variant_stands_below_the_row_that_it_is_compared_with(run: MadeUp) -> None:
    frame = table_of("variants", run.material()).frame
    assert list(frame.index) == ["Dense (Balanced)", "dense_alibi", "dense_both", "DEMix", "demix_clap"]
    assert list(frame["Options"]) == [
        "learned positions, tied head", "position alibi", "position alibi, head clap", "learned positions, tied head",
        "head clap",
    ]  # fmt: skip
    rows = run.results.rows.query("split == 'test' and variant == '' and top_k.isna()")
    for label, *system in (
        ("dense_alibi", "dense_alibi", "dense", ""), ("demix_clap", "demix_clap", "cached", "history"),
        ("DEMix", "demix", "cached", "history"),
    ):  # fmt: skip
        for kind, domains in (("Training", TRAINING), ("Novel", NOVEL)):
            found = rows[(rows[["model", "method", "weights"]] == system).all(axis=1)]
            found = found[found["experts"].isin(["training", "dense"]) & found["domain"].isin(domains)]
            assert frame.at[label, kind] == pytest.approx(found["perplexity"].mean())
    for label, factor in FACTORS.items():
        assert frame.at[label, "Training, %"] == pytest.approx(100 * (factor - 1))
        assert frame.at[label, "Novel: lower"] == len(NOVEL) * (factor < 1)
    assert frame.loc[["Dense (Balanced)", "DEMix"], "Novel, %"].isna().all()
