"""MLflow: what is tracked, and metrics that reach it while a training runs, read back through its own client."""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from threading import Timer
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
from mlflow.entities import Metric
from mlflow.entities import Run as Stored
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from demix.errors import DemixError, StoppedError
from demix.files import exclusive, read_json, read_json_lines, write_json_lines
from demix.report import report_files
from demix.run.run import Run, config_fingerprint
from demix.track import live, records
from demix.track.client import opened
from demix.track.live import Sender, streaming
from demix.track.store import track
from support.cli import demix, succeeds
from support.configs import changed
from support.disturbed import until
from support.errors import refused
from support.frozen import copied, rows_of, with_models


@pytest.fixture(scope="module")
def run(frozen: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of two models and one seed with a report, whose files are not read; not to be written to."""
    run = with_models(frozen, tmp_path_factory.mktemp("run") / "results" / "small", "demix", "dense", seeds=[])
    for name in report_files(run):
        file = run.folder / "report" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    return run


@pytest.fixture
def own(run: Run, tmp_path: Path) -> Run:
    """A copy of the run, which a test may change."""
    return copied(run, tmp_path / "own")


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store of MLflow, which takes seconds to make one."""
    uri = f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"
    opened(uri)
    return uri


@pytest.fixture(scope="module")
def keys(run: Run) -> set[str]:
    """The keys of the MLflow runs that the files of the run make."""
    trained = {f"{'adaptation' if '-dapt-' in path.stem else 'training'}/{path.stem}"
               for path in run.folder.glob("metrics/*.jsonl")}  # fmt: skip
    return {"pipeline", *trained}


def stored(uri: str, experiment: str) -> dict[str, Stored]:
    client = MlflowClient(tracking_uri=uri)
    runs = client.search_runs([client.get_experiment_by_name(experiment).experiment_id], max_results=1000)
    assert max(Counter(run.data.tags["demix.key"] for run in runs).values()) == 1
    return {run.data.tags["demix.key"]: run for run in runs}


def perplexities(run: Run, model: str, **where: str) -> pd.Series:
    """The test perplexities of a system by domain."""
    rows = rows_of(run)
    rows = rows[(rows["model"] == model) & (rows["variant"] == "") & rows["top_k"].isna() & (rows["split"] == "test")]
    for name, value in where.items():
        rows = rows[rows[name] == value]
    return rows.set_index("domain")["perplexity"]


def by_key(run: Run) -> dict[str, records.Record]:
    return {one.key: one for one in records.records(run)}


def values(record: records.Record) -> dict[str, float]:
    """The last value of each metric."""
    return {name: value for name, value, *_ in record.metrics}


def test_records_of_trainings_are_those_of_their_files(run: Run, keys: set[str]) -> None:
    found = by_key(run)
    assert found.keys() == keys
    training, file = found["training/demix"], run.folder / "metrics" / "demix.jsonl"
    lines = read_json_lines(file)
    took = np.cumsum(np.diff([0, *(row["tokens"] for row in lines)]) / [row["tokens_per_second"] for row in lines])
    times = 1000 * (file.stat().st_mtime - took[-1] + took)
    for key in lines[0].keys() - {"step"}:
        points = [point[1:] for point in training.metrics if point[0] == key]
        assert [(value, step) for value, step, _ in points] == [(row[key], row["step"]) for row in lines], key
        assert [time for *_, time in points] == pytest.approx(times, abs=2, rel=0), key
    tempered = perplexities(run, "demix", experts="training", method="uniform", weights="tempered")
    assert values(training)["perplexity_novel"] == pytest.approx(tempered[[*run.novel]].mean())
    assert {name: values(training)[f"perplexity/{name}"] for name in run.domains} == tempered.to_dict()
    assert training.params["model.architecture.width"] == str(run.architecture.width)
    assert training.params["model.uri"] == (run.folder / "models" / "demix").resolve().as_uri()
    described = [path for path, folder in training.artifacts if folder == "model"]
    assert described == [run.folder / "models/demix/model.json"]
    adapted, expert = found["adaptation/demix-dapt-fantasy"], run.folder / "models/demix/experts/fantasy.json"
    assert adapted.params["model.parent"] == read_json(expert)["parent"]


def test_the_record_of_the_run_has_the_means_of_the_main_table(run: Run) -> None:
    headlines = values(by_key(run)["pipeline"])
    cached = perplexities(run, "demix", experts="all", method="cached", weights="history")
    assert headlines["perplexity_novel/demix.all.cached.history"] == pytest.approx(cached[[*run.novel]].mean())
    dense = perplexities(run, "dense")
    assert headlines["perplexity_training/dense"] == pytest.approx(dense[[*run.training]].mean())


def test_the_store_holds_the_records_and_a_second_time_changes_nothing(
    run: Run, uri: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mlflow.tracking._tracking_service.client.MAX_METRICS_PER_BATCH", 10)
    known, client = by_key(run), MlflowClient(tracking_uri=uri)
    assert f"{len(known)} new, 0 replaced, 0 unchanged, 0 deleted" in track(run, uri, "same")
    assert list(tmp_path.iterdir()) == []
    before = stored(uri, "same")
    assert before.keys() == known.keys()
    parent, store = before["pipeline"].info, Path(uri.removeprefix("sqlite:///")).parent
    for key, one in before.items():
        record, tags = known[key], one.data.tags
        assert one.info.status == "FINISHED"
        assert one.data.params == record.params
        assert (one.info.start_time, one.info.end_time) == (record.begun, record.ended)
        for name in values(record):
            points = client.get_metric_history(one.info.run_id, name)
            sent = {(point.value, point.step, point.timestamp) for point in points}
            assert sent == {point[1:] for point in record.metrics if point[0] == name}, name
        artifacts = Path(one.info.artifact_uri.removeprefix("file://"))
        assert artifacts.is_relative_to(store / "mlartifacts")
        for path, folder in record.artifacts:
            assert (artifacts / folder / path.name).read_bytes() == path.read_bytes()
        assert (tags["demix.run"], tags["demix.config"]) == ("frozen", config_fingerprint(run.config))
        assert tags.get("mlflow.parentRunId") == (None if key == "pipeline" else parent.run_id)
    asked = ("git", "-C", Path(__file__).parent, "rev-parse", "HEAD")
    commit = subprocess.run(asked, capture_output=True, text=True, check=False)
    if commit.returncode == 0:
        assert before["pipeline"].data.tags["mlflow.source.git.commit"] == commit.stdout.strip()
    assert f"0 new, 0 replaced, {len(known)} unchanged, 0 deleted" in track(run, uri, "same")
    assert {key: one.info.run_id for key, one in stored(uri, "same").items()} == {
        key: one.info.run_id for key, one in before.items()
    }


def test_times_are_those_of_the_files(own: Run) -> None:
    metrics = own.folder / "metrics" / "demix.jsonl"
    write_json_lines(metrics, [line | {"tokens_per_second": 192 / 5} for line in read_json_lines(metrics)[:4]])
    os.utime(metrics, (5000, 5000))
    os.utime(own.folder / "results.parquet", (5040, 5040))
    found = by_key(own)
    # Four updates of 5 seconds each.
    assert {found[key].begun for key in ("training/demix", "pipeline")} == {4_980_000}
    assert [found[key].ended for key in ("training/demix", "pipeline")] == [5_000_000, 5_040_000]
    assert {time for *_, time in found["pipeline"].metrics} == {5_040_000}


def test_one_command_sends_a_copied_folder(
    run: Run, keys: set[str], uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the store that `make ui` shows, beside the original, into an experiment of the folder's name."""
    monkeypatch.chdir(tmp_path)
    copied(run, Path("results/from-ann"))
    shutil.copy(uri.removeprefix("sqlite:///"), "results/mlflow.db")
    assert f"{len(keys)} new, 0 replaced, 0 unchanged" in demix("track", "results/from-ann").output
    assert stored("sqlite:///results/mlflow.db", "demix-from-ann").keys() == keys
    there = ("--uri", uri, "--experiment", "chosen", "--output", "sent.json")
    succeeds("track", "results/from-ann", *there)
    assert stored(uri, "chosen").keys() == keys
    assert {**read_json(Path("sent.json")), "sent": ""} == {"uri": there[1], "experiment": "chosen", "sent": ""}


def test_a_change_replaces_and_a_missing_file_deletes(own: Run, uri: str, keys: set[str]) -> None:
    """What was interrupted is completed, and other runs of the experiment stay as they are."""
    track(own, uri, "changing")
    before = stored(uri, "changing")
    metrics = own.folder / "metrics" / "dense.jsonl"
    write_json_lines(metrics, read_json_lines(metrics)[:3])
    (own.folder / "metrics" / "without-scripture.jsonl").unlink()
    client = MlflowClient(tracking_uri=uri)
    client.delete_tag(before["training/demix"].info.run_id, "demix.sha256")
    experiment = client.get_experiment_by_name("changing").experiment_id
    other = client.create_run(experiment, tags={"demix.key": "someone else's"})
    summary = track(own, uri, "changing")
    assert f"0 new, 1 replaced, {len(keys) - 3} unchanged, 1 deleted, 1 completed" in summary
    after = stored(uri, "changing")
    assert after.pop("someone else's").info.run_id == other.info.run_id
    assert before.keys() - after.keys() == {"training/without-scripture"}
    replaced = {key for key in after if after[key].info.run_id != before[key].info.run_id}
    assert replaced == {"training/dense"}
    assert after["training/demix"].data.tags["demix.sha256"] == before["training/demix"].data.tags["demix.sha256"]
    assert after["training/dense"].data.metrics["tokens"] == 3 * 192

    changes = changed(own, threads=3)
    assert f"1 replaced, {len(keys) - 2} unchanged" in track(changes, uri, "changing")
    moved = stored(uri, "changing")
    del moved["someone else's"]
    parent = moved.pop("pipeline").info.run_id
    assert parent != after["pipeline"].info.run_id
    assert {one.data.tags["mlflow.parentRunId"] for one in moved.values()} == {parent}
    assert {one.data.tags["demix.config"] for one in moved.values()} == {config_fingerprint(changes.config)}


def test_experts_that_were_trained_by_themselves_are_sent_too(frozen: Run) -> None:
    found = by_key(frozen)
    for file in ("btm/licenses", "btm-seed2/scripture", "cbtm_2/c01", "flexolmo/parliament"):
        rows = read_json_lines(frozen.folder / f"metrics/{file}.jsonl")
        points = [point[2:0:-1] for point in found[f"training/{file}"].metrics if point[0] == "loss"]
        assert points == [(row["step"], row["loss"]) for row in rows if "loss" in row]


def test_one_process_writes_at_a_time(uri: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("demix.track.client.PATIENCE_SECONDS", 0.0)
    store = Path(uri.removeprefix("sqlite:///"))
    with exclusive(store.with_name(".mlflow.db.lock"), "tests"), pytest.raises(DemixError):
        track(run, uri, "locked")


def test_what_a_killed_process_left_beside_the_store_goes(uri: str) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = Path(uri.removeprefix("sqlite:///")).with_name(f".mlflow.db.{os.uname().nodename}.{ended.pid}.x.partial")
    left.mkdir()
    opened(uri)
    assert not left.exists()


def test_bad_input_is_refused(run: Run, own: Run, tmp_path: Path) -> None:
    (own.folder / "results.parquet").unlink()
    with refused(own.folder / "results.parquet"):
        track(own, f"sqlite:///{tmp_path}/mlflow.db", "bad")
    for uri in ("http://127.0.0.1:9", "mysql://nobody@127.0.0.1/demix"):
        with refused(uri) as error:
            track(run, uri, "bad")
    assert "mysqlclient" in error.value.cure


class Training:
    """The training of DEMix in a copy of a run, whose metrics a test writes, and an MLflow experiment for them."""

    def __init__(self, run: Run, uri: str, experiment: str) -> None:
        self.run, self.uri, self.experiment = run, uri, experiment
        self.checkpoints = run.folder / "checkpoints" / "demix"
        self.finished = run.folder / "metrics" / "demix.jsonl"
        self.rows = read_json_lines(self.finished)

    def tracking(self, uri: str | None = None) -> str:
        return json.dumps({"uri": uri or self.uri, "experiment": self.experiment, "run": "frozen", "config": "digest"})

    def sender(self, begun: float = 1000.0) -> Sender:
        return Sender(self.tracking(), "training", str(self.checkpoints), str(self.finished), begun)

    def writes(self, rows: list[dict], training: str = "0123") -> Path:
        file = self.checkpoints / training / "metrics.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 99, "tok')
        return file

    def stored(self) -> list[Stored]:
        client = MlflowClient(tracking_uri=self.uri)
        found = client.get_experiment_by_name(self.experiment)
        return client.search_runs([found.experiment_id], "tags.`demix.key` = 'training/demix'") if found else []

    def curve(self, one: Stored, key: str = "loss") -> list[tuple[int, float]]:
        points = MlflowClient(tracking_uri=self.uri).get_metric_history(one.info.run_id, key)
        return [(point.step, point.value) for point in points]


def losses(rows: list[dict], key: str = "loss") -> list[tuple[int, float]]:
    return [(row["step"], row[key]) for row in rows]


@pytest.fixture
def training(run: Run, uri: str, tmp_path: Path, request: pytest.FixtureRequest) -> Training:
    return Training(copied(run, tmp_path / "results" / "frozen"), uri, request.node.name)


def test_points_arrive_once_in_parts_and_track_sends_the_whole_training(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that has a point already says nothing of the second one. A batch that failed is sent again."""
    rows, sending, sent = training.rows, training.sender(), list[tuple[str, int]]()
    log_batch = MlflowClient.log_batch

    def counted(client: MlflowClient, run_id: str, metrics: Sequence[Metric] = (), **more: object) -> object:
        sent.extend((metric.key, metric.step) for metric in metrics if metric.key == "loss")
        return log_batch(client, run_id, metrics=metrics, **more)

    monkeypatch.setattr(MlflowClient, "log_batch", counted)
    sending.send()
    training.writes(rows[:7])
    sending.send()
    (begun,) = training.stored()
    assert begun.info.status == "RUNNING"
    assert begun.data.tags["demix.run"] == "frozen"
    assert training.curve(begun) == losses(rows[:7])
    file = training.writes(rows[:12])
    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_batch", Mock(side_effect=MlflowException("hangs")))
        with pytest.raises(MlflowException):
            sending.send()
    sending.send()
    sending.send()
    assert training.curve(begun) == losses(rows[:12])
    # The training has ended: its rows are in the finished file, all but the last of which were sent.
    file.unlink()
    write_json_lines(training.finished, rows[:-1])
    sending.send("FINISHED")
    (ended,) = training.stored()
    assert (ended.info.run_id, ended.info.status) == (begun.info.run_id, "FINISHED")
    assert training.curve(ended) == losses(rows[:-1])
    assert sent == [("loss", row["step"]) for row in rows[:-1]]

    write_json_lines(training.finished, rows)
    assert ", 1 completed" in track(training.run, training.uri, training.experiment)
    (tracked,) = training.stored()
    assert tracked.info.run_id == begun.info.run_id
    assert training.curve(tracked) == losses(rows)
    assert tracked.data.params["model.architecture.width"] == str(training.run.architecture.width)
    assert "mlflow.parentRunId" in tracked.data.tags
    assert " 0 new, 0 replaced" in track(training.run, training.uri, training.experiment)
    assert training.curve(*training.stored()) == losses(rows)


def test_a_resumed_training_has_one_mlflow_run_with_the_updates_that_count(training: Training) -> None:
    rows = training.rows
    training.writes(rows[:12])
    training.sender().send()
    (first,) = training.stored()
    # From the checkpoint on all is done again, in another time.
    rows = [*rows[:10], *(row | {"tokens_per_second": row["tokens_per_second"] / 2} for row in rows[10:])]
    resumed = training.sender(begun=2000.0)
    training.writes(rows[:10])
    resumed.send()
    training.writes(rows[:15])
    resumed.send("KILLED")
    (second,) = training.stored()
    assert second.info.run_id != first.info.run_id
    assert second.info.status == "KILLED"
    assert training.curve(second, "tokens_per_second") == losses(rows[:15], "tokens_per_second")
    write_json_lines(training.finished, rows)
    track(training.run, training.uri, training.experiment)
    (tracked,) = training.stored()
    assert tracked.info.run_id == second.info.run_id
    assert training.curve(tracked, "tokens_per_second") == losses(rows, "tokens_per_second")


def test_the_next_trial_of_a_sweep_is_another_mlflow_run(training: Training) -> None:
    rows, sending = training.rows, training.sender()
    first = training.writes(rows[:5])
    # This file was there before the training.
    training.sender(begun=time.time() + 60).send()
    assert not training.stored()
    sending.send()
    other = [row | {"loss": row["loss"] + 1} for row in rows[:3]]
    file = training.writes(other, "4567")
    os.utime(file, (time.time() + 9,) * 2)
    sending.send()
    (found,) = training.stored()
    assert (training.curve(found), found.info.status) == (losses(other), "RUNNING")
    # The finished file has the best trial's rows, and more of them.
    for gone in (first, file):
        gone.unlink()
    sending.send("FINISHED")
    (ended,) = training.stored()
    assert (training.curve(ended), ended.info.status) == (losses(other), "FINISHED")
    track(training.run, training.uri, training.experiment)
    (tracked,) = training.stored()
    assert training.curve(tracked) == losses(rows)


@pytest.mark.parametrize(
    ("error", "status"), [(None, "FINISHED"), (StoppedError("a", "b", "c"), "KILLED"), (ValueError("a"), "FAILED")]
)
def test_the_sender_gets_the_status_with_which_the_training_ended(
    error: Exception | None, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, sent = tmp_path / "python", tmp_path / "sent"
    python.write_text(f"#!/bin/sh\ncat > {sent}\n")
    python.chmod(0o755)
    monkeypatch.setattr(live.sys, "executable", str(python))
    with pytest.raises(type(error)) if error else nullcontext(), streaming("{}", "training", tmp_path, tmp_path):
        if error:
            raise error
    until(lambda: sent.exists() and sent.read_text() == status, 30)


@pytest.mark.parametrize("answers", [True, False], ids=["dies", "hangs"])
def test_a_server_that_is_gone_or_hangs_costs_a_training_little_and_is_named_once(
    answers: bool, training: Training, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live, "SECONDS_BEFORE_BATCHES", 0.01)
    monkeypatch.setattr(live, "SECONDS_AT_END", 0.5)
    heard: list[str] = []
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        uri, said = f"http://127.0.0.1:{server.getsockname()[1]}", ""
        with streaming(training.tracking(uri), "training", training.checkpoints, training.finished):
            training.writes(training.rows)
            # MLflow is loaded, and asks the server.
            connection, _ = server.accept()
            if answers:
                server.close()
                connection.close()
                while not said:
                    time.sleep(0.05)
                    said = capfd.readouterr().err
            else:
                # The results are there, the checkpoints are not: no signal must undo the training.
                signal.signal(signal.SIGUSR2, lambda *_: heard.append("signal"))
                Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR2)).start()
            ended = time.monotonic()
        # The sender itself waits for 20 s and tries again.
        assert time.monotonic() - ended < 15
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        assert not heard
    lines = (said + capfd.readouterr().err).splitlines()
    assert [line.startswith(f"{uri}: ") for line in lines] == [True] * answers


def test_without_a_store_and_on_other_ranks_nothing_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live.subprocess, "Popen", None)
    with streaming("", "training", tmp_path, tmp_path):
        pass
    monkeypatch.setenv("RANK", "1")
    with streaming("{}", "training", tmp_path, tmp_path):
        pass
