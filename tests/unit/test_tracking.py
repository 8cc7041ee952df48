"""Tracking writes to a real MLflow store in SQLite, and is read back through MLflow's own client."""

import json
import os
import shutil
import subprocess
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from mlflow.tracking import MlflowClient

from demix.errors import DemixError
from demix.files import exclusive, read_json, read_json_lines, write_json, write_json_lines
from demix.report import write_report
from demix.run.kept import config_fingerprint, read_run_config
from demix.track import records
from demix.track.client import NETWORK_FILE_SYSTEMS, file_system
from demix.track.records import flatten
from demix.track.store import track
from support.cli import demix
from support.configs import changed
from support.synthetic_run import NOVEL, TRAINING, MadeUp, build_run

MODELS = 4 + 1
# dense, dense_unbalanced, domain_token; demix; minus-…; plus-…; without-law; dense-dapt-…
EVALUATIONS = 3 + 2 + 3 + 2 + 1 + 2
RUNS = 1 + MODELS + 2 * len(NOVEL) + EVALUATIONS


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> MadeUp:
    run = build_run(tmp_path_factory.mktemp("run") / "results" / "made-up")
    write_report(run.run, run.path / "report")
    return run


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/new/mlflow.db"


def stored(uri: str, experiment: str) -> dict[str, "object"]:
    client = MlflowClient(tracking_uri=uri)
    runs = client.search_runs([client.get_experiment_by_name(experiment).experiment_id], max_results=1000)
    assert max(Counter(run.data.tags["demix.key"] for run in runs).values()) == 1
    return {run.data.tags["demix.key"]: run for run in runs}


def history(uri: str, run_id: str, key: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in MlflowClient(tracking_uri=uri).get_metric_history(run_id, key)]


def test_all_is_there_and_a_second_time_changes_nothing(
    run: MadeUp, uri: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    summary = track(run.run, uri, "same")
    assert f"{RUNS} new, 0 replaced, 0 unchanged, 0 deleted" in summary
    assert capsys.readouterr().out == summary + "\n"
    assert list(tmp_path.iterdir()) == []
    before = stored(uri, "same")
    assert len(before) == RUNS

    parent = before["pipeline"]
    assert parent.data.params["training.learning_rate"] == "0.001"
    assert parent.data.params["domains.novel.wiki.source.kind"] == "files"
    artifacts = Path(parent.info.artifact_uri.removeprefix("file://"))
    store = Path(uri.removeprefix("sqlite:///")).parent
    assert artifacts.is_relative_to(store / "mlartifacts")
    for name in (
        "config.json",
        "results.parquet",
        "report/tables/table5.html",
        "report/claims.md",
        "cards/wiki/card.json",
    ):
        assert (artifacts / name).is_file(), name
    for key, nested in before.items():
        assert nested.info.status == "FINISHED"
        assert nested.data.tags["demix.run"] == "made-up"
        assert nested.data.tags["demix.config"] == config_fingerprint(read_run_config(run.path))
        if key != "pipeline":
            assert nested.data.tags["mlflow.parentRunId"] == parent.info.run_id
        # MLflow's page opens the rows below a run that has one of this type below it.
        assert (nested.data.tags.get("mlflow.runType") == "evaluation") == key.startswith("evaluation/")

    asked = ("git", "-C", Path(__file__).parent, "rev-parse", "HEAD")
    commit = subprocess.run(asked, capture_output=True, text=True, check=False)
    if commit.returncode == 0:
        assert {nested.data.tags["mlflow.source.git.commit"] for nested in before.values()} == {commit.stdout.strip()}
    assert f"mlflow=={version('mlflow')}\n" in (artifacts / "environment.txt").read_text()

    training = before["training/demix"]
    lines = read_json_lines(run.path / "metrics" / "demix.jsonl")
    assert history(uri, training.info.run_id, "loss/law") == [(line["step"], line["loss/law"]) for line in lines]
    assert training.data.params["model.architecture.width"] == "128"
    assert training.data.params["model.uri"] == (run.path / "models" / "demix").resolve().as_uri()
    described = Path(training.info.artifact_uri.removeprefix("file://")) / "model"
    assert read_json(described / "experts" / "law.json")["sha256"] == "0" * 64
    assert not (described / "experts" / "wiki.json").exists(), "added later, with a run of its own"
    read = {inputs.dataset.name: json.loads(inputs.dataset.profile) for inputs in training.inputs.dataset_inputs}
    assert read == {name: read_json(run.path / "corpus" / name / "card.json") for name in TRAINING}
    adapted = before["adaptation/demix-dapt-wiki"]
    assert adapted.data.params["model.parent"] == "code"
    assert history(uri, adapted.info.run_id, "dev_loss/wiki")[0] == (0, 5.3)
    evaluated = before["evaluation/demix/all"].data.metrics
    assert evaluated["perplexity/cached.history/wiki"] == pytest.approx(130 * 1.01)
    assert evaluated["perplexity/naive/mean_training"] == pytest.approx(110)
    assert evaluated["perplexity/expert.code/wiki"] == pytest.approx(130 * 1.25)
    table = pd.read_json(f"{before['evaluation/demix/all'].info.artifact_uri}/results.json", orient="split")
    (row,) = table.query("domain == 'wiki' and method == 'cached' and weights == 'history'").to_dict("records")
    assert row["perplexity"] == pytest.approx(130 * 1.01)
    assert row["perplexity_low"] == pytest.approx(0.9 * row["perplexity"])
    minus = before["evaluation/demix/minus-law"].data.metrics
    assert set(minus) == {"perplexity/cached.history/law", "perplexity/cached.released/law"}

    assert f"0 new, 0 replaced, {RUNS} unchanged, 0 deleted" in track(run.run, uri, "same")
    after = stored(uri, "same")
    assert {key: item.info.run_id for key, item in after.items()} == {k: item.info.run_id for k, item in before.items()}
    assert len(history(uri, after["training/demix"].info.run_id, "loss")) == len(lines)


def test_the_first_page_has_headlines_dev_curves_and_times(uri: str, tmp_path: Path) -> None:
    run = build_run(tmp_path / "run", steps=4)
    metrics = run.path / "metrics" / "demix.jsonl"
    lines = [line | {"tokens_per_second": line["tokens"] / line["step"] / 5} for line in read_json_lines(metrics)]
    dev = [{"step": 2, "tokens": lines[1]["tokens"], "dev_loss": 4.5}, {**lines[-1], "dev_loss": 4.0}]
    write_json_lines(metrics, [*lines[:2], dev[0], lines[2], dev[1]])
    os.utime(metrics, (5000, 5000))
    for name, seconds, ended in (("train/demix", 30, 5001), ("score/demix/law", 10, 5040), ("report", 7, 5100)):
        file = run.path / "benchmarks" / f"{name}.tsv"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"s\tcpu_time\tmax_rss\n{seconds}\t1\t1\n")
        os.utime(file, (ended, ended))
    track(run.run, uri, "first page")
    found = stored(uri, "first page")
    spans = {key: (one.info.start_time / 1000, one.info.end_time / 1000) for key, one in found.items()}
    # Four updates of 5 seconds each, in a job of 30.
    assert spans["training/demix"] == (4971, 5000)
    assert spans["evaluation/demix/all"] == (5030, 5040)
    assert spans["pipeline"] == (4971, 5100)
    parent = found["pipeline"]
    assert history(uri, parent.info.run_id, "dev_loss/demix") == [(2, 4.5), (4, 4.0)]
    means = parent.data.metrics
    assert means["perplexity_training/demix.cached.history"] == pytest.approx(110 * 1.01)
    assert means["perplexity_training/dense"] == pytest.approx(110 * 1.3)
    assert means["perplexity_novel/demix.all.cached.history"] == pytest.approx(135 * 1.01)
    (point,) = MlflowClient(tracking_uri=uri).get_metric_history(
        found["evaluation/demix/all"].info.run_id, "perplexity/naive/law"
    )
    assert point.timestamp == 5_040_000


def test_one_command_sends_a_copied_folder(run: MadeUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the store that `make ui` shows, beside the original, into an experiment of the folder's name."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run.path, "results/from-ann")
    for counts in (f"{RUNS} new, 0 replaced, 0 unchanged", f"0 new, 0 replaced, {RUNS} unchanged"):
        assert counts in demix("track", "results/from-ann").output
    assert len(stored("sqlite:///results/mlflow.db", "demix-from-ann")) == RUNS
    there = ("--uri", "sqlite:///other.db", "--experiment", "chosen", "--output", "sent.json")
    assert demix("track", "results/from-ann", *there).exit_code == 0
    assert len(stored("sqlite:///other.db", "chosen")) == RUNS
    assert {**read_json(Path("sent.json")), "sent": ""} == {"uri": there[1], "experiment": "chosen", "sent": ""}


def test_a_change_replaces_and_a_missing_file_deletes(uri: str, tmp_path: Path) -> None:
    run = build_run(tmp_path / "run", steps=5)
    track(run.run, uri, "changing")
    before = stored(uri, "changing")
    metrics = run.path / "metrics" / "dense.jsonl"
    write_json_lines(metrics, read_json_lines(metrics)[:3])
    (run.path / "metrics" / "without-law.jsonl").unlink()
    summary = track(run.run, uri, "changing")
    assert f"0 new, 1 replaced, {RUNS - 2} unchanged, 1 deleted" in summary
    after = stored(uri, "changing")
    assert before.keys() - after.keys() == {"training/without-law"}
    assert {key for key in after if after[key].info.run_id != before[key].info.run_id} == {"training/dense"}
    assert len(history(uri, after["training/dense"].info.run_id, "loss")) == 3

    other = changed(run.run, threads=3)
    assert f"1 replaced, {RUNS - 2} unchanged" in track(other, uri, "changing")
    moved = stored(uri, "changing")
    assert moved["pipeline"].info.run_id != after["pipeline"].info.run_id
    assert {item.data.tags.get("mlflow.parentRunId") for key, item in moved.items() if key != "pipeline"} == {
        moved["pipeline"].info.run_id
    }
    assert config_fingerprint(other.config) != config_fingerprint(run.run.config)
    assert {item.data.tags["demix.config"] for item in moved.values()} == {config_fingerprint(other.config)}


def test_settings_are_those_of_the_kind_of_model(uri: str, tmp_path: Path) -> None:
    run = build_run(tmp_path / "run", steps=2)
    for model in ("demix", "dense"):
        trials = [{"learning_rate": 5e-4, "diverged": None, "parts": [4.0]}]
        write_json(run.path / "sweep" / f"{model}.json", {"learning_rate": 5e-4, "margin": 0.1, "trials": trials})
    write_json_lines(run.path / "metrics" / "demix-seed2.jsonl", read_json_lines(run.path / "metrics" / "demix.jsonl"))
    overrides = {"demix": {"sweep": {"learning_rates": [5e-4], "tokens": 8192}}}
    track(changed(run.run, seeds=[1, 2], models=overrides), uri, "swept")
    found = stored(uri, "swept")
    for name in ("demix", "demix-seed2", "without-law"):
        params = found[f"training/{name}"].data.params
        assert params["sweep.learning_rate"] == "0.0005", name
        assert params["models.demix.sweep.tokens"] == "8192", name
    assert "sweep.learning_rate" not in found["training/dense"].data.params, "left over from an earlier config"


def test_one_process_writes_at_a_time(uri: str, run: MadeUp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("demix.track.client.PATIENCE_SECONDS", 0.0)
    store = Path(uri.removeprefix("sqlite:///"))
    with (
        exclusive(store.with_name(".mlflow.db.lock"), "tests"),
        pytest.raises(DemixError, match=r"another process .* writes to mlflow\.db"),
    ):
        track(run.run, uri, "locked")


def test_an_interrupted_run_is_made_anew_and_other_runs_are_left_alone(uri: str, tmp_path: Path) -> None:
    run = build_run(tmp_path / "run", steps=3)
    track(run.run, uri, "shared")
    client = MlflowClient(tracking_uri=uri)
    client.delete_tag(stored(uri, "shared")["training/demix"].info.run_id, "demix.sha256")
    other = client.create_run(
        client.get_experiment_by_name("shared").experiment_id, tags={"demix.key": "someone else's"}
    )
    assert f"0 new, 1 replaced, {RUNS - 1} unchanged, 0 deleted" in track(run.run, uri, "shared")
    assert stored(uri, "shared")["someone else's"].info.run_id == other.info.run_id


def test_more_metrics_than_one_batch_holds(uri: str, tmp_path: Path) -> None:
    run = build_run(tmp_path / "run", steps=400)
    track(run.run, uri, "long")
    client, item = MlflowClient(tracking_uri=uri), stored(uri, "long")["training/dense"]
    file = run.path / "metrics" / "dense.jsonl"
    rows = read_json_lines(file)
    took = np.cumsum(np.diff([0, *(row["tokens"] for row in rows)]) / [row["tokens_per_second"] for row in rows])
    times = 1000 * (file.stat().st_mtime - took[-1] + took)
    for key in rows[0].keys() - {"step"}:
        found = client.get_metric_history(item.info.run_id, key)
        assert [(point.step, point.value) for point in found] == [(row["step"], row[key]) for row in rows], key
        assert [point.timestamp for point in found] == pytest.approx(times, abs=2, rel=0), key


def test_bad_input_is_one_line(uri: str, tmp_path: Path) -> None:
    run = build_run(tmp_path / "run", steps=1)
    (run.path / "results.parquet").unlink()
    with pytest.raises(DemixError, match=r"results\.parquet: is missing"):
        track(run.run, uri, "bad")
    run = build_run(tmp_path / "run", steps=1)
    (tmp_path / "not.db").write_text("this is no database")
    with pytest.raises(DemixError, match=r"not\.db") as error:
        track(run.run, f"sqlite:///{tmp_path}/not.db", "bad")
    assert "\n" not in str(error.value)
    with pytest.raises(DemixError, match=r"127\.0\.0\.1"):
        track(run.run, "http://127.0.0.1:9", "bad")
    with pytest.raises(DemixError, match="needs the Python package MySQLdb; pip install mysqlclient"):
        track(run.run, "mysql://nobody@127.0.0.1/demix", "bad")


def test_of_many_domains_single_experts_have_their_own_and_means(
    run: MadeUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sent() -> records.Record:
        return next(one for one in records.records(run.run) if one.key == "evaluation/demix/all")

    every = sent()
    assert every.table is not None
    monkeypatch.setattr(records, "PAIRS_SENT", len(TRAINING) + len(NOVEL))
    assert sent().sha256() == every.sha256()
    monkeypatch.setattr(records, "PAIRS_SENT", len(TRAINING) + len(NOVEL) - 1)
    fewer = sent()
    assert fewer.table is not None
    missing = {point[0] for point in every.metrics} - {point[0] for point in fewer.metrics}
    assert fewer.metrics == tuple(point for point in every.metrics if point[0] not in missing)
    assert missing == {
        f"perplexity/expert.{expert}/{domain}"
        for expert in (*TRAINING, *NOVEL)
        for domain in (*TRAINING, *NOVEL)
        if expert != domain
    } & {point[0] for point in every.metrics}
    assert {f"perplexity/expert.{TRAINING[0]}/mean_{kind}" for kind in ("training", "novel")} <= {
        point[0] for point in fewer.metrics
    }
    single = fewer.table.query("method == 'expert'")
    assert len(single)
    assert (single["expert"] == single["domain"]).all()
    others = every.table.query("method != 'expert'").reset_index(drop=True)
    assert fewer.table.query("method != 'expert'").reset_index(drop=True).equals(others)


def test_flatten() -> None:
    nested = {"a": {"b": [1, "x"], "c": None, "d": {}}, "e!": True, "f": ""}
    assert flatten(nested) == {"a.b": '[1, "x"]', "a.c": "null", "a.d": "{}", "e_": "true", "f": ""}


def test_sqlite_on_a_network_file_system_is_warned_of(
    run: MadeUp, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No such file system can be mounted here: the type of a real one is put on the list."""
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    track(run.run, uri, "quiet")
    assert "network file system" not in caplog.text
    assert file_system(Path("/proc/self")) == "proc"
    monkeypatch.setattr("demix.track.client.NETWORK_FILE_SYSTEMS", NETWORK_FILE_SYSTEMS | {file_system(tmp_path)})
    track(run.run, uri, "quiet")
    assert "SQLite on a network file system" in caplog.text
