"""The figures: the data they carry, files that other programs can open, and the order of domains."""

import json
import math
import struct
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from synthetic_run import NOVEL, TRAINING, Run, build_run

from demix.errors import DemixError
from demix.report import FIGURES
from demix.report.figures import adaptation_curves, training_curves, write_figures


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = build_run(tmp_path_factory.mktemp("run"))
    write_figures(run.results, run.priors, run.path / "metrics", run.config, run.path / "figures")
    return run


def chart(run: Run, name: str) -> dict[str, Any]:
    return json.loads((run.path / "figures" / f"{name}.json").read_text())


def values(chart: dict[str, Any]) -> list[dict[str, Any]]:
    """All data rows of a Vega-Lite specification."""
    return [row for rows in chart["datasets"].values() for row in rows]


@pytest.mark.parametrize("name", FIGURES)
def test_files_open(run: Run, name: str) -> None:
    folder = run.path / "figures"
    assert "vega-lite/v6" in chart(run, name)["$schema"]
    assert ElementTree.parse(folder / f"{name}.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"
    png = (folder / f"{name}.png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    assert width > 600
    assert height > 300


def test_figure2_is_relative_to_the_own_or_the_best_expert(run: Run) -> None:
    cells = {(row["domain"], row["expert"]): row["value"] for row in values(chart(run, "figure2"))}
    assert len(cells) == (len(TRAINING) + len(NOVEL)) * len(TRAINING)
    assert cells["law", "law"] == 1
    assert cells["law", "code"] == pytest.approx(1.5)
    assert cells["wiki", "code"] == 1
    assert cells["wiki", "news"] == pytest.approx(1.6 / 1.25, rel=1e-5)


def test_figure4_holds_the_history_priors(run: Run) -> None:
    cells = {(row["domain"], row["expert"]): row["value"] for row in values(chart(run, "figure4"))}
    for domain in (*TRAINING, *NOVEL):
        assert sum(cells[domain, expert] for expert in TRAINING) == pytest.approx(1)
    assert cells["songs", "law"] == pytest.approx(0.8)


def test_heatmaps_keep_the_order_of_the_config(run: Run) -> None:
    for name in ("figure2", "figure4"):
        panels = chart(run, name)["hconcat"]
        for panel, domains in zip(panels, (TRAINING, NOVEL), strict=True):
            encoding = panel["layer"][0]["encoding"]
            assert encoding["y"]["sort"] == list(domains)
            assert encoding["x"]["sort"] == list(TRAINING)


def test_figure6_averages_perplexities_not_losses(run: Run) -> None:
    curves = adaptation_curves(run.path / "metrics", run.config)
    start = curves[(curves["domain"] == "wiki") & (curves["kind"] == "DEMix-DAPT") & (curves["tokens"] == 0)].iloc[0]
    assert start["training"] == pytest.approx(sum(math.exp(5.0 + 0.05 * i) for i in range(3)) / 3, rel=1e-5)
    assert start["own"] == pytest.approx(math.exp(5.3), rel=1e-5)
    assert len(curves) == 2 * 2 * 6
    figure = chart(run, "figure6")
    for part, column in zip(figure["vconcat"], ("training", "own"), strict=True):
        assert [panel["title"]["text"] for panel in part["concat"]] == list(NOVEL)
        for panel, domain in zip(part["concat"], NOVEL, strict=True):
            drawn = [row["perplexity"] for row in figure["datasets"][panel["data"]["name"]]]
            assert drawn == curves.loc[curves["domain"] == domain, column].tolist()


CONFIG = {"removal": {"retrain_without": []}}


def test_training_curves_are_thinned_to_means(tmp_path: Path) -> None:
    lines = [{"step": i, "tokens": 10 * i, "loss": float(i)} for i in range(1000)]
    (tmp_path / "demix.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    curves = training_curves(tmp_path, CONFIG)
    assert len(curves) == 100
    assert curves["loss"].tolist() == [10 * i + 4.5 for i in range(100)]
    assert curves["tokens"].iloc[0] == 45


def test_a_run_without_metrics_or_evaluations_still_draws(tmp_path: Path) -> None:
    run = build_run(tmp_path, change=lambda key, value: value if key.model == "dense" else None)
    none = run.priors.iloc[:0]
    write_figures(run.results, none, tmp_path / "nothing", run.config, tmp_path / "figures")
    assert all((tmp_path / "figures" / f"{name}.png").stat().st_size for name in FIGURES)
    assert all(row["value"] is None for row in values(json.loads((tmp_path / "figures" / "figure4.json").read_text())))


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "demix.jsonl").write_text('{"step": 1, "tokens": 2, "loss": 3}\n{"step": \n')
    with pytest.raises(DemixError, match=r"demix\.jsonl:2: is not JSON"):
        training_curves(tmp_path, CONFIG)


def test_files_of_earlier_configs_are_not_drawn(run: Run) -> None:
    old = run.path / "metrics" / "without-novels.jsonl"
    old.write_text('{"step": 1, "tokens": 2, "loss": 3}\n')
    try:
        assert "without-novels" not in set(training_curves(run.path / "metrics", run.config)["model"])
        assert "without-law" in set(training_curves(run.path / "metrics", run.config)["model"])
    finally:
        old.unlink()
