"""Which line of the main table is best at equal FLOPs, by how much and whether significantly."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from demix.report.ranking import ranking
from demix.run.run import Run
from support.configs import changed
from support.frozen import material, rows_of, with_models
from support.report import first_page, says

# Perplexities of the lines by model, method and weights; all other systems have 150.
DENSE, TEMPERED, CACHED = ("dense", "dense", ""), ("demix", "uniform", "tempered"), ("demix", "cached", "history")
LINES = {
    DENSE: 130.0,
    ("dense_unbalanced", "dense", ""): 140.0,
    ("domain_token", "naive", ""): 120.0,
    ("demix", "naive", ""): 90.0,
    CACHED: 101.0,
    TEMPERED: 102.0,
    ("demix", "fitted", "switching"): 100.0,
}
OTHERS = 150.0
SYSTEM = ["model", "method", "weights"]


def lined(run: Run, **models: float) -> pd.DataFrame:
    """The results of the run's own seed with the perplexities of `LINES`; `models` has those of whole models."""
    results = rows_of(run).query("seed == 1")
    keys = results[SYSTEM].apply(tuple, axis=1)
    perplexity = results["model"].map(models).fillna(keys.map(LINES)).fillna(OTHERS)
    # All experts, and those of other sets, are no line of these.
    known = results["experts"].isin(["training", "dense"]) & (results["variant"] == "")
    return results.assign(perplexity=perplexity.where(known, OTHERS))


def less(run: Run, half: float | tuple[float, float], against: str, *systems: tuple[str, str, str]) -> pd.DataFrame:
    """What `systems` have less than the base `against`, with intervals of `half` to either side, by kind if two."""
    known = rows_of(run, "differences").query(
        f"seed == 1 and against == '{against}' and experts in ('training', 'dense')"
    )
    keys = known[SYSTEM].apply(tuple, axis=1)
    known, keys = known[keys.isin(systems)], keys[keys.isin(systems)]
    value = keys.map(LINES) - LINES[{"dense": DENSE, "demix_cached": CACHED}[against]]
    by_kind = half if isinstance(half, tuple) else (half, half)
    widths = known["kind"].map(dict(zip(("training", "novel"), by_kind, strict=True)))
    return known.assign(perplexity=value, perplexity_low=value - widths, perplexity_high=value + widths)


def test_the_best_is_known_before_test_text_is_read(frozen: Run, tmp_path: Path) -> None:
    """Lower are the rules that are told the domain, and the expert that the test text chose."""
    differences = less(frozen, 20, "dense", TEMPERED)
    main, rest = first_page(material(frozen, results=lined(frozen), differences=differences), tmp_path)
    assert main.marked == ("DEMix (tempered)",)
    means = main.numbers["3 training domains"].drop("+ Domain Token")
    assert means.is_monotonic_increasing
    assert main.cells.index[-1] == "+ Domain Token", "an oracle on novel domains"
    assert means["DEMix (tempered)"] == 102
    assert says(main.cells.at["DEMix (tempered)", "Training, change in %"], 100 * (102 / 130 - 1))
    # Errors of three domains add up as those of independent ones.
    low, high = (100 * (102 - 130 + sign * 20 / np.sqrt(3)) / 130 for sign in (-1, 1))
    below = main.beneath.at["DEMix (tempered)", "Training, change in %"]
    assert below == f"{low:+.1f} to {high:+.1f}".replace("-", "−")
    assert main.cells.loc["DEMix (tempered)", ["Training, significant", "Novel, significant"]].tolist() == [
        "3 of 3",
        "2 of 2",
    ]
    oracles = [label.endswith("(naive)") for label in rest.cells.index]
    assert any(oracles)
    assert oracles == sorted(oracles)
    assert {*rest.beneath.loc[oracles, "Novel, change in %"]} == {"oracle"}


def test_models_with_other_training_stand_apart_and_no_model_may_be_below_dense(frozen: Run, tmp_path: Path) -> None:
    results = lined(frozen, dense=50, btx=10, dense_short=10)
    main, rest = first_page(material(frozen, results=results), tmp_path)
    assert main.marked == ("Dense (Balanced)",)
    remarks = pd.concat([main.cells, rest.cells])["Remark"]
    assert all(remarks[frozen.rows[name].label].strip() for name in ("btx", "dense_short"))
    assert not remarks[["DEMix (tempered)", "Dense (Balanced)"]].str.strip().any()


def test_what_began_with_the_same_models_folder_has_equal_flops(frozen: Run, tmp_path: Path) -> None:
    """However many tokens that model had learned from, which is not known."""
    run = with_models(frozen, tmp_path / "own", "demix", "dense")
    run = changed(run, models={name: {"kind": name, "parent": "imported/one"} for name in ("dense", "demix")})
    unknown = {"dense": None, "demix": None}
    main, _ = first_page(material(run, results=lined(frozen), tokens_before=unknown), tmp_path)
    assert "Remark" not in main.cells


def test_a_warm_start_stands_beside_the_same_rule_without_it(frozen: Run, tmp_path: Path) -> None:
    main, _ = first_page(material(frozen, results=lined(frozen, demix_seeded=95, btm=96)), tmp_path)
    seeded = f"{frozen.rows['demix_seeded'].label} (tempered)"
    assert main.marked == (seeded,)
    assert {seeded, "DEMix (tempered)", "DEMix (cached prior)", "Dense (Balanced)"} <= {*main.cells.index}


def test_a_model_counts_once_by_whatever_rules_it_predicts(frozen: Run) -> None:
    def counted(results: pd.DataFrame) -> int:
        found = ranking(material(frozen, results=results))
        assert f"Of {found.models} models" in found.verdict
        return found.models

    results = lined(frozen)
    equal = {one.system.model for one in ranking(material(frozen, results=results)).entries if one.fair}
    models = {model.name for model in frozen.own}
    assert counted(results) == len(equal & models)
    assert counted(results.query("weights != 'switching'")) == counted(results)
    assert counted(results.query("model != 'btm'")) == counted(results) - 1


def test_what_learned_from_novel_domains_is_compared_with_dense_models_that_did(frozen: Run) -> None:
    adapted = {f"dense-dapt-{name}": 75.0 for name in frozen.novel}
    remarks = ranking(material(frozen, results=lined(frozen, **adapted))).remarks
    (told,) = [remark for remark in remarks if "all experts" in remark]
    assert "15.4% above Dense (Balanced)" in told
    assert "100.0% above Dense-DAPT" in told


def test_a_run_without_dense_has_no_changes(frozen: Run, tmp_path: Path) -> None:
    results = lined(frozen).query("model != 'dense'")
    main, _ = first_page(material(frozen, results=results), tmp_path)
    assert main.numbers["Training, change in %"].isna().all()


@pytest.mark.parametrize(
    ("half", "direct", "bold"),
    # Tempered is 1 above cached on the mean, which is exact on the same resamples and wide by way of Dense.
    [((0.01, 5), None, (True, False)), ((5, 0.01), (0.01, 5), (True, False))],
)
def test_bold_is_surely_below_the_next(
    half: tuple[float, float], direct: tuple[float, float] | None, bold: tuple[bool, bool], frozen: Run, tmp_path: Path
) -> None:
    """On training domains, and on novel ones."""
    known = [less(frozen, half, "dense", TEMPERED, CACHED)]
    known += [less(frozen, direct, "demix_cached", TEMPERED)] if direct else []
    results = lined(frozen)
    main, _ = first_page(material(frozen, results=results, differences=pd.concat(known)), tmp_path)
    for column, expected in zip(("3 training domains", "2 novel domains"), bold, strict=True):
        shown = main.bold[column]
        assert shown[shown].index.tolist() == ["DEMix (cached prior)"] * expected
