"""The figures: the data they carry, files that other programs can open, and the order of domains."""

import itertools
import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr

from demix.errors import DemixError
from demix.files import write_json_lines
from demix.report import heatmaps
from demix.report.affinity import relations
from demix.report.curves import adaptation_curves, training_curves
from demix.report.item import Group
from demix.report.items import all_items
from demix.report.material import Material
from demix.report.read import read_posteriors
from demix.run.run import Run
from support.configs import changed, domains, small_run
from support.report import drawn, names_of
from support.synthetic_run import NOVEL, TRAINING, MadeUp, build_run

FIGURES = names_of(Group.FIGURES)


def write_figures(material: Material, output: Path) -> None:
    for name in FIGURES:
        all_items()[name].write(material, output.parent)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> MadeUp:
    run = build_run(tmp_path_factory.mktemp("run"))
    write_figures(run.material(), run.path / "figures")
    return run


def chart(run: MadeUp, name: str) -> dict[str, Any]:
    return json.loads((run.path / "figures" / f"{name}.json").read_text())


def values(chart: dict[str, Any]) -> list[dict[str, Any]]:
    """All data rows of a Vega-Lite specification."""
    return [row for rows in chart["datasets"].values() for row in rows]


@pytest.mark.parametrize("name", FIGURES)
def test_files_open(run: MadeUp, name: str) -> None:
    folder = run.path / "figures"
    assert "vega-lite/v6" in chart(run, name)["$schema"]
    assert ElementTree.parse(folder / f"{name}.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"
    png = (folder / f"{name}.png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    assert width > 600
    assert height > 300


def cells(chart: dict[str, Any], part: dict[str, Any]) -> dict[tuple[str, str], float | None]:
    """The values of a row of heatmaps by domain and expert."""
    rows = [row for panel in part["hconcat"] for row in chart["datasets"][panel["data"]["name"]]]
    return {(row["domain"], row["expert"]): row["value"] for row in rows}


def test_figure2_is_relative_to_the_own_or_the_best_expert(run: MadeUp) -> None:
    figure = chart(run, "figure2")
    ratios, shares = (cells(figure, part) for part in figure["vconcat"][:2])
    assert len(ratios) == len(shares) == (len(TRAINING) + len(NOVEL)) * len(TRAINING)
    assert ratios["law", "law"] == 1
    assert ratios["law", "code"] == pytest.approx(1.5)
    assert ratios["wiki", "code"] == 1
    assert ratios["wiki", "news"] == pytest.approx(1.6 / 1.25, rel=1e-5)
    assert shares["law", "code"] == pytest.approx(0.8)
    assert shares["wiki", "news"] == pytest.approx(0.8)


def test_figure2_draws_a_point_a_pair_without_own_experts(run: MadeUp) -> None:
    figure = chart(run, "figure2")
    points = [figure["datasets"][panel["data"]["name"]] for panel in figure["vconcat"][2]["hconcat"]]
    assert [len(rows) for rows in points] == [6, 6]
    assert not [row for row in points[0] if row["domain"] == row["expert"]]


def made(ratio: Callable[[int, int], float], shared: Callable[[int, int], float], domains: int = 5) -> pd.DataFrame:
    names = [f"d{number}" for number in range(domains)]
    rows = [("training", names[i], names[j], ratio(i, j), shared(i, j)) for i in range(domains) for j in range(domains)]
    return pd.DataFrame(rows, columns=["kind", "domain", "expert", "ratio", "overlap"])


def test_the_relation_leaves_own_experts_out_and_counts_domains() -> None:
    """Falling strictly with the overlap off the diagonal, whatever the diagonal says."""
    shared = lambda i, j: 0.01 * ((3 * i + 5 * j + i * j) % 23)  # noqa: E731
    (found,) = relations(made(lambda i, j: 99.0 if i == j else math.exp(-shared(i, j)), shared))
    assert (found.domains, found.pairs) == (5, 20)
    assert found.spearman == pytest.approx(-1)
    assert found.pearson == pytest.approx(-1)
    assert found.permutation_p < 0.05


def test_p_by_domains_is_milder_than_p_by_pairs() -> None:
    """Where a domain alone decides both, its pairs tell one thing over and over."""
    level = [0.1, 0.5, 0.2, 0.4]
    pairs = made(lambda i, j: 1 + level[i] + 0.001 * j, lambda i, j: level[i] + 0.002 * j, domains=4)
    (found,) = relations(pairs)
    others = pairs[pairs["domain"] != pairs["expert"]]
    assert spearmanr(others["ratio"], others["overlap"]).pvalue < 0.001
    assert found.permutation_p > 0.01


def test_p_is_that_of_all_orders_of_the_domains() -> None:
    pairs = made(lambda i, j: 1 + (7 * i + 3 * j + i * j) % 11 / 10, lambda i, j: (5 * i + 2 * j * j + i * j) % 13 / 13)
    (found,) = relations(pairs)
    ratio, shared = (
        pairs.pivot(index="domain", columns="expert", values=name).to_numpy() for name in ("ratio", "overlap")
    )
    used = ~np.eye(5, dtype=bool)
    told = [
        spearmanr(ratio[np.ix_(order, order)][used], shared[used]).statistic
        for order in map(list, itertools.permutations(range(5)))
    ]
    assert found.spearman == pytest.approx(told[0])
    above, below = (sum(sign * np.array(told) >= sign * told[0] - 1e-9) / len(told) for sign in (1, -1))
    assert found.permutation_p == pytest.approx(min(1, 2 * min(above, below)))


def test_a_relation_that_cannot_be_told_is_nan(run: MadeUp) -> None:
    pairs = run.material(overlap=run.overlap.iloc[:3]).pairs
    assert all(math.isnan(found.spearman) for found in relations(pairs))


def test_posteriors_are_drawn_block_by_block(run: MadeUp) -> None:
    for name, names in (("figure7", TRAINING), ("figure8", NOVEL)):
        figure = chart(run, name)
        assert [panel["title"]["text"] for panel in figure["concat"]] == list(names)
        for panel, domain in zip(figure["concat"], names, strict=True):
            rows = figure["datasets"][panel["data"]["name"]]
            assert len([row for row in rows if row["start"] == 0]) == len(TRAINING)
            chosen = domain if name == "figure7" else TRAINING[0]
            # Blocks 1 to 3 say the same: one rectangle has no seams.
            assert [row for row in rows if row["start"] > 0] == [{"expert": chosen, "start": 1, "end": 4, "value": 1.0}]
            assert {row["end"] for row in rows if row["start"] == 0} == {1}
            assert panel["width"] % 4 == 0


def test_figure4_holds_the_history_priors(run: MadeUp) -> None:
    figure = chart(run, "figure4")
    found = cells(figure, figure["vconcat"][0])
    for domain in (*TRAINING, *NOVEL):
        assert sum(found[domain, expert] for expert in TRAINING) == pytest.approx(1)
    assert found["songs", "law"] == pytest.approx(0.8)
    assert "after the first 100 blocks" in " ".join(figure["title"]["subtitle"])


def test_figure4_shows_the_prior_by_its_decay(run: MadeUp) -> None:
    """The posterior is even after block 0 and certain after blocks 1 to 3."""
    figure = chart(run, "figure4")
    panels = figure["vconcat"][1]["concat"]
    assert [panel["title"]["text"] for panel in panels] == list(NOVEL)
    rows = figure["datasets"][panels[0]["data"]["name"]]
    chosen = {row["decay"]: row["value"] for row in rows if row["expert"] == TRAINING[0]}
    assert list(chosen) == [0.1, 0.3, 0.5, 0.7, 0.9, 1.0]
    for decay, value in chosen.items():
        weights = [decay**3, decay**2, decay, 1]
        assert value == pytest.approx((weights[0] / 3 + sum(weights[1:])) / sum(weights), rel=1e-5)
    assert panels[0]["encoding"]["x"]["title"] == "λ"


def test_heatmaps_keep_the_order_of_the_config(run: MadeUp) -> None:
    for name in ("figure2", "figure4"):
        figure = chart(run, name)
        panels = figure["vconcat"][0]["hconcat"]
        for panel, names in zip(panels, (TRAINING, NOVEL), strict=True):
            encoding = panel["layer"][0]["encoding"]
            assert encoding["y"]["sort"] == list(names)
            assert encoding["x"]["sort"] == list(TRAINING)


def test_figures_of_many_domains_show_the_first_and_say_so(run: MadeUp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heatmaps, "MOST_SHOWN", 2)
    figures = {name: all_items()[name].drawn(run.material()).to_dict() for name in ("figure2", "figure4", "figure7")}
    pairs = {(domain, expert) for domain in (*TRAINING[:2], *NOVEL[:2]) for expert in TRAINING[:2]}
    for name in ("figure2", "figure4"):
        part = figures[name]["vconcat"][0]
        assert cells(figures[name], part).keys() == pairs
        assert part["hconcat"][0]["title"]["text"].endswith(
            f"domains (the first 2 of {len(TRAINING)} rows, the first 2 of {len(TRAINING)} columns)"
        )
    figure = figures["figure2"]
    points = [figure["datasets"][panel["data"]["name"]] for panel in figure["vconcat"][2]["hconcat"]]
    assert [len(rows) for rows in points] == [2, 4]
    assert f"over {len(TRAINING) * (len(TRAINING) - 1)} pairs" in str(figure["vconcat"][2]), "all pairs are told of"
    traces = figures["figure7"]
    assert [panel["title"]["text"] for panel in traces["concat"]] == list(TRAINING[:2])
    assert {row["expert"] for row in values(traces)} == {*TRAINING[:2]}
    assert f"Shown: the first 2 of {len(TRAINING)} domains, the first 2 of {len(TRAINING)} experts." in " ".join(
        traces["title"]["subtitle"]
    )


def test_figure6_averages_perplexities_not_losses(run: MadeUp) -> None:
    curves = adaptation_curves(run.path / "metrics", run.run)
    start = curves[(curves["domain"] == "wiki") & (curves["kind"] == "DEMix-DAPT") & (curves["tokens"] == 0)].iloc[0]
    assert start["training"] == pytest.approx(sum(math.exp(5.0 + 0.05 * i) for i in range(3)) / 3, rel=1e-5)
    assert start["own"] == pytest.approx(math.exp(5.3), rel=1e-5)
    assert len(curves) == 2 * 2 * 6
    figure = chart(run, "figure6")
    told = " ".join(figure["title"]["subtitle"])
    assert "On the domain adapted to, Dense-DAPT ends lower for 2 of 2" in told
    assert "on the training domains, DEMix-DAPT ends lower for 2 of 2 domains (mean 156.2, Dense-DAPT 217.1)" in told
    for part, column in zip(figure["vconcat"], ("own", "training"), strict=True):
        assert [panel["title"]["text"] for panel in part["concat"]] == list(NOVEL)
        for panel, domain in zip(part["concat"], NOVEL, strict=True):
            rows = figure["datasets"][panel["data"]["name"]]
            assert [row["perplexity"] for row in rows] == curves.loc[curves["domain"] == domain, column].tolist()
            last = {row["last"]: row for row in rows if row["last"]}
            assert [one["tokens"] for one in last.values()] == [51200, 51200]
            assert last["upper"]["perplexity"] > last["lower"]["perplexity"]
            texts = [(layer["transform"][0]["filter"], layer["mark"]["dy"]) for layer in panel["layer"][1:]]
            assert texts == [("datum.last == 'upper'", -5), ("datum.last == 'lower'", 5)]
            assert panel["layer"][0]["encoding"]["y"]["scale"]["domain"] == [0, pytest.approx(curves[column].max())]


SMALL = small_run(domains=domains(("law",)))


def test_training_curves_are_thinned_to_means(tmp_path: Path) -> None:
    lines = [{"step": i, "tokens": 10 * i, "loss": float(i)} for i in range(1000)]
    write_json_lines(tmp_path / "demix.jsonl", lines)
    curves = training_curves(tmp_path, SMALL)
    assert len(curves) == 40
    assert curves["loss"].tolist() == [25 * i + 12 for i in range(40)]
    assert curves["tokens"].iloc[0] == 120


def drawn_losses(metrics: Path, run: Run) -> tuple[str, dict[str, list[float]]]:
    figure = drawn("training", Material(run, {"metrics": metrics}))
    found: dict[str, list[float]] = {}
    for row in values(figure):
        found.setdefault(row["model"], []).append(row["loss"])
    assert figure["title"]["text"] == "Loss of each model in training", "the name of the entry, whichever loss it is"
    return figure["vconcat"][0]["encoding"]["y"]["title"], found


def test_dev_losses_are_drawn_where_all_models_have_them(tmp_path: Path) -> None:
    run = changed(SMALL, models={"dense_unbalanced": None, "domain_token": None}, seeds=[1, 2])
    for name in ("demix", "dense", "demix-seed2", "dense-seed2"):
        steps = [{"step": i, "tokens": 10 * i, "loss": 3.0} for i in range(20)]
        write_json_lines(tmp_path / f"{name}.jsonl", [*steps, {"step": 20, "tokens": 200, "dev_loss": 2.0}])
    assert drawn_losses(tmp_path, run) == ("dev loss (nats a token)", {"DEMix": [2.0], "Dense (Balanced)": [2.0]})
    write_json_lines(tmp_path / "dense.jsonl", steps)
    axis, found = drawn_losses(tmp_path, run)
    assert axis == "training loss (nats a token)"
    # Without the first tenth of the tokens.
    assert found == {"DEMix": [3.0] * 18, "Dense (Balanced)": [3.0] * 18}


def test_the_loss_is_that_of_the_domains_that_all_models_train_on(tmp_path: Path) -> None:
    run = small_run(
        domains=domains(("law", "news"), ("songs",)),
        models={"dense_unbalanced": None, "domain_token": None},
        removal={"retrain_without": ["law"], "replacement": "songs"},
    )
    lost = {"demix": {"law": 9.0, "news": 2.0}, "dense": {"law": 9.0, "news": 4.0}}
    lost["without-law"] = {"songs": 1.0, "news": 3.0}
    for name, losses in lost.items():
        by_domain = {f"dev_loss/{domain}": loss for domain, loss in losses.items()}
        line = {"step": 1, "tokens": 100, "dev_loss": sum(losses.values()) / 2}
        write_json_lines(tmp_path / f"{name}.jsonl", [line | by_domain])
    _, found = drawn_losses(tmp_path, run)
    assert found == {"DEMix": [2.0], "Dense (Balanced)": [4.0], "DEMix without law": [3.0]}
    figure = drawn("training", Material(run, {"metrics": tmp_path}))
    assert "'DEMix')" in figure["vconcat"][0]["encoding"]["strokeWidth"]["condition"]["test"]


def test_a_run_without_metrics_or_evaluations_still_draws(tmp_path: Path) -> None:
    run = build_run(tmp_path, change=lambda key, value: value if key.model == "dense" else None)
    posteriors = read_posteriors(run.path / "posteriors.parquet")
    nothing = {"priors": run.priors.iloc[:0], "overlap": run.overlap.iloc[:0], "posteriors": posteriors.iloc[:0]}
    write_figures(run.material(**nothing, metrics=tmp_path / "nothing"), tmp_path / "figures")
    assert all((tmp_path / "figures" / f"{name}.png").stat().st_size for name in FIGURES)
    assert all(row["value"] is None for row in values(json.loads((tmp_path / "figures" / "figure4.json").read_text())))


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "demix.jsonl", [{"step": 1, "tokens": 2, "loss": 3}, {"step": 2}])
    with pytest.raises(DemixError, match=r"demix\.jsonl:2: has no tokens"):
        training_curves(tmp_path, SMALL)


def test_files_of_earlier_configs_are_not_drawn(run: MadeUp) -> None:
    old = run.path / "metrics" / "without-novels.jsonl"
    old.write_text('{"step": 1, "tokens": 2, "loss": 3}\n')
    try:
        assert "without-novels" not in set(training_curves(run.path / "metrics", run.run)["model"])
        assert "without-law" in set(training_curves(run.path / "metrics", run.run)["model"])
    finally:
        old.unlink()
