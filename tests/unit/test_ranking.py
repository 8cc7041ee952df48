"""Which line of the main table is best at equal FLOPs, by how much and how surely."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from demix.report.dots import ranked as dots
from demix.report.items.index import table
from demix.report.ranking import Ranking, ranking
from demix.report.results import bounds_of, paired
from demix.run.systems import BASES, System
from support.configs import changed
from support.report import table_of
from support.synthetic_run import NOVEL, TRAINING, Key, MadeUp, base, build_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> MadeUp:
    return build_run(tmp_path_factory.mktemp("run"))


def less(of: dict[str, float], half: float, against: str = "dense") -> pd.DataFrame:
    """Differences in perplexity of DEMix by these rules of weights, each with an interval of `half` to either side."""
    methods = {"tempered": "uniform", "history": "cached", "released": "cached"}
    return pd.DataFrame([
        {"model": "demix", "experts": "training", "method": methods[rule], "weights": rule, "against": against,
         "domain": domain, "seed": 1, "perplexity": value, "perplexity_low": value - half,
         "perplexity_high": value + half}
        for rule, value in of.items() for domain in (*TRAINING, *NOVEL)
    ])  # fmt: skip


def ranked(run: MadeUp, **given: object) -> Ranking:
    return ranking(run.material(**given))


def test_the_verdict_is_in_numbers(run: MadeUp) -> None:
    """The best is tempered, though rules that are told the domain have lower means: nothing is chosen on test."""
    means = {
        kind: (np.mean([factor * base(name) for name in names]), np.mean([1.3 * base(name) for name in names]))
        for kind, names, factor in (("training", TRAINING, 1.05 * 0.97), ("novel", NOVEL, 1.05 * 0.97 * 1.15))
    }
    below = {kind: f"{100 * (1 - mine / dense):.1f}% below" for kind, (mine, dense) in means.items()}
    half = 30.0
    found = ranked(run, differences=less({"tempered": -31.0}, half))
    assert found.verdict == (
        f"Of 4 models at equal training FLOPs, DEMix (tempered) is best: {below['training']} Dense (Balanced) on the 3 "
        f"training domains, certain on 3 of 3; {below['novel']} on the 2 novel domains, certain on 2 of 2."
    )
    interval = found.best.first.interval
    assert interval is not None
    # Errors of three domains add up as those of independent ones.
    mine, dense = means["training"]
    expected = [100 * (mine - dense + sign * half / np.sqrt(3)) / dense for sign in (-1, 1)]
    assert interval == pytest.approx(expected)
    assert [entry.label for entry in found.main] == [
        "DEMix (cached prior)", "DEMix (tempered)", "Dense (Balanced)", "Dense", "+ Domain Token"
    ]  # fmt: skip


def test_dots_of_a_telephone_are_below_one_another(run: MadeUp) -> None:
    found = ranked(run)
    broad, narrow = (dots(found, narrow=narrow).to_dict() for narrow in (False, True))
    assert len(broad["hconcat"]) == len(narrow["vconcat"]) == 2
    # Panels below one another each name their lines.
    named = [[panel["layer"][1]["encoding"]["y"]["axis"]["labels"] for panel in one] for one in
             (broad["hconcat"], narrow["vconcat"])]  # fmt: skip
    assert named == [[True, False], [True, True]]
    assert max(len(line) for line in narrow["title"]["subtitle"]) <= 48


def test_more_training_and_oracles_are_never_best(tmp_path: Path) -> None:
    def best_of_all(key: Key, value: float) -> float:
        return value / 9 if key.method == "naive" or key.experts == "all" else value

    found = ranked(build_run(tmp_path, change=best_of_all))
    assert found.best.label == "DEMix (tempered)"
    assert [entry.oracle for entry in found.entries] == sorted(entry.oracle for entry in found.entries)
    assert found.entries[-1].oracle
    assert any(
        text.startswith("Apart, since its added experts learned from the novel domains") for text in found.remarks
    )


def test_a_row_with_more_tokens_stands_apart(run: MadeUp) -> None:
    tokens = run.keys["training"]["tokens"]
    longer = changed(run.run, models={"long": {"kind": "demix", "label": "Long", "tokens": 2 * tokens}})
    rows = run.results.rows
    of_long = rows[rows["model"] == "demix"].assign(model="long", perplexity=rows["perplexity"] / 2)
    found = ranking(run.material(longer, results=type(run.results)(pd.concat([rows, of_long]))))
    assert found.best.label == "DEMix (tempered)"
    assert found.models == 4
    (told,) = [text for text in found.remarks if "100% more FLOPs" in text]
    assert "Long (tempered)" in told


def test_none_below_dense_and_no_dense(tmp_path: Path) -> None:
    worse = build_run(tmp_path / "worse", change=lambda key, value: value if key.method == "dense" else 2 * value)
    said = ranked(worse).verdict
    assert said.startswith("Of 4 models at equal training FLOPs, none is below Dense (Balanced) on the 3 training")
    none = build_run(tmp_path / "none", change=lambda key, value: None if key.model == "dense" else value)
    assert "no numbers of Dense (Balanced)" in ranked(none).verdict


@pytest.mark.parametrize(
    ("half", "direct", "bold"),
    # Tempered is 0.936 above cached on the mean, which is exact on the same resamples and wide by way of Dense.
    [(0.01, None, True), (5.0, None, False), (5.0, 0.01, True), (0.01, 5.0, False)],
)
def test_bold_is_surely_below_the_next(run: MadeUp, half: float, direct: float | None, bold: bool) -> None:
    known = [less({"tempered": -31.0, "history": -32.0}, half)]
    known += [less({"tempered": 0.9}, direct, "demix_cached")] if direct else []
    found = ranked(run, differences=pd.concat(known))
    lowest = found.lowest("training")
    assert (lowest is not None and lowest.label == "DEMix (cached prior)") == bold
    shown = table(found, found.main).bold()["3 training domains"]
    assert shown.sum() == bold
    assert not table(found, found.main).bold().loc["+ Domain Token"].any()


def test_bounds_are_those_of_the_differences() -> None:
    rows = less({"tempered": -31.0, "history": -20.0}, 30.0)
    rows.loc[rows["domain"] == NOVEL[0], "perplexity_low"] = np.nan
    tempered = System("", "demix", "training", "uniform", "tempered")
    found = paired(bounds_of(rows), tempered, BASES["dense"], [NOVEL[0], *reversed(TRAINING), "unknown"])
    assert list(found.index) == sorted(TRAINING), "without domains that have no interval"
    assert set(found["low"]) == {-61.0}
    assert set(found["high"]) == {-1.0}
    assert paired(bounds_of(rows), tempered, BASES["dense_unbalanced"], TRAINING).empty
    assert paired(bounds_of(rows), replace(tempered, top_k=2), BASES["dense"], TRAINING).empty


def test_table3_has_the_interval_of_the_change_but_no_other_systems(run: MadeUp) -> None:
    known = less({"tempered": -31.0, "released": -20.0}, 30.0)
    below = table_of("table3", run.material(differences=known)).second_lines()["Against Dense (Balanced), %"]
    change, half = 100 * (1.05 * 0.97 / 1.3 - 1), 100 * 30 / np.sqrt(3) / 143
    assert below["DEMix (tempered)"] == f"{change - half:+.1f} to {change + half:+.1f}".replace("-", "−")
    # What is known of the released weights is not of the released scorer.
    assert not below["DEMix (cached prior), released scorer"]
