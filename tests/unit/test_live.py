"""Metrics that reach MLflow while a training runs, whatever MLflow does, and what `track` makes of them."""

import json
import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from threading import Timer

import pytest
from mlflow.entities import Metric
from mlflow.entities import Run as Stored
from mlflow.tracking import MlflowClient

from demix.errors import StoppedError
from demix.files import read_json_lines, write_json_lines
from demix.run.run import Run
from demix.track import live
from demix.track.live import Sender, streaming
from demix.track.store import track
from support.frozen import copied, with_models


@pytest.fixture(scope="module")
def small(frozen: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two models alone, and few MLflow runs: nothing of further seeds, and few evaluations."""
    return with_models(frozen, tmp_path_factory.mktemp("small") / "run", "demix", "dense", seeds=[])


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


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture
def training(small: Run, uri: str, tmp_path: Path, request: pytest.FixtureRequest) -> Training:
    return Training(copied(small, tmp_path / "results" / "frozen"), uri, request.node.name)


def test_points_arrive_once_in_parts_and_track_completes_the_same_mlflow_run(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that has a point already says nothing of the second one."""
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
    assert (begun.info.status, begun.info.start_time) == ("RUNNING", 1_000_000)
    assert begun.data.tags["demix.run"] == "frozen"
    assert training.curve(begun) == losses(rows[:7])
    file = training.writes(rows[:12])
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
    track(training.run, training.uri, training.experiment)
    (tracked,) = training.stored()
    assert tracked.info.run_id == begun.info.run_id
    assert training.curve(tracked) == losses(rows)
    assert tracked.data.params["model.architecture.width"] == str(training.run.architecture.width)
    assert "mlflow.parentRunId" in tracked.data.tags
    assert " 0 new, 0 replaced" in track(training.run, training.uri, training.experiment)
    assert training.curve(*training.stored()) == losses(rows)


def test_a_resumed_training_goes_on_in_its_mlflow_run_and_track_replaces_it(training: Training) -> None:
    rows = training.rows
    training.writes(rows[:12])
    training.sender().send()
    (begun,) = training.stored()
    # From the checkpoint after 10 updates on all is done again, in another time.
    rows = [*rows[:10], *(row | {"tokens_per_second": row["tokens_per_second"] / 2} for row in rows[10:])]
    again = training.sender(begun=2000.0)
    training.writes(rows[:10])
    again.send()
    training.writes(rows[:15])
    again.send("KILLED")
    (resumed,) = training.stored()
    assert (resumed.info.run_id, resumed.info.status) == (begun.info.run_id, "KILLED")
    assert training.curve(resumed) == losses(rows[:15])
    write_json_lines(training.finished, rows)
    track(training.run, training.uri, training.experiment)
    (tracked,) = training.stored()
    assert tracked.info.run_id != begun.info.run_id
    assert training.curve(tracked, "tokens_per_second") == losses(rows, "tokens_per_second")


def test_a_sweep_whose_last_file_is_another_trials_adds_no_point(training: Training) -> None:
    sending, other = training.sender(), [row | {"loss": row["loss"] + 1} for row in training.rows[:8]]
    file = training.writes(other)
    sending.send()
    # The finished file has the best trial's rows, and more of them.
    file.unlink()
    sending.send("FINISHED")
    (ended,) = training.stored()
    assert ended.info.status == "FINISHED"
    assert training.curve(ended) == losses(other)


def test_other_settings_are_another_mlflow_run(training: Training) -> None:
    rows, sending = training.rows, training.sender()
    training.writes(rows[:5])
    # This file was there before the training.
    training.sender(begun=time.time() + 60).send()
    assert not training.stored()
    sending.send()
    file = training.writes(rows[:3], "4567")
    os.utime(file, (time.time() + 9,) * 2)
    sending.send()
    found = sorted((len(training.curve(one)), one.info.status) for one in training.stored())
    assert found == [(3, "RUNNING"), (5, "FINISHED")]
    track(training.run, training.uri, training.experiment)
    (tracked,) = training.stored()
    assert training.curve(tracked) == losses(rows)


@pytest.mark.parametrize(
    ("error", "status"), [(None, "FINISHED"), (StoppedError("a", "b", "c"), "KILLED"), (ValueError("a"), "FAILED")]
)
def test_the_sender_is_told_how_the_training_ended(
    error: Exception | None, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, told = tmp_path / "python", tmp_path / "told"
    python.write_text(f"#!/bin/sh\ncat > {told}\n")
    python.chmod(0o755)
    monkeypatch.setattr(live.sys, "executable", str(python))
    with pytest.raises(type(error)) if error else nullcontext(), streaming("{}", "training", tmp_path, tmp_path):
        if error:
            raise error
    deadline = time.monotonic() + 30
    while not told.exists() or told.read_text() != status:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("answers", [True, False], ids=["dies", "hangs"])
def test_a_server_that_is_gone_or_hangs_costs_a_training_little_and_is_told_once(
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
