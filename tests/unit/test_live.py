"""Metrics that reach MLflow while a training runs, whatever MLflow does, and what `track` makes of them."""

import json
import os
import signal
import socket
import time
from contextlib import nullcontext
from pathlib import Path
from threading import Timer

import pytest
from mlflow.entities import Metric
from mlflow.entities import Run as Stored
from mlflow.tracking import MlflowClient

from demix.errors import StoppedError
from demix.files import read_json_lines, write_json_lines
from demix.track import live
from demix.track.live import Sender, streaming
from demix.track.store import track
from support.synthetic_run import MadeUp, build_run


@pytest.fixture
def run(tmp_path: Path) -> MadeUp:
    return build_run(tmp_path / "results" / "made-up", steps=20)


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture(autouse=True)
def experiment(request: pytest.FixtureRequest) -> None:
    """One for each test."""
    global EXPERIMENT  # noqa: PLW0603
    EXPERIMENT = request.node.name


def tracking(uri: str) -> str:
    return json.dumps({"uri": uri, "experiment": EXPERIMENT, "run": "made-up", "config": "digest"})


def sender(run: MadeUp, uri: str, begun: float = 1000.0) -> Sender:
    place = run.path / "checkpoints" / "demix"
    return Sender(tracking(uri), "training", str(place), str(run.path / "metrics" / "demix.jsonl"), begun)


def written(run: MadeUp, rows: list[dict], training: str = "0123") -> Path:
    file = run.path / "checkpoints" / "demix" / training / "metrics.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 99, "tok')
    return file


def stored(uri: str) -> list[Stored]:
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    return client.search_runs([experiment.experiment_id], "tags.`demix.key` = 'training/demix'") if experiment else []


def curve(uri: str, one: Stored, key: str = "loss") -> list[tuple[int, float]]:
    return [
        (point.step, point.value) for point in MlflowClient(tracking_uri=uri).get_metric_history(one.info.run_id, key)
    ]


def test_points_arrive_in_parts_and_track_completes_the_same_mlflow_run(run: MadeUp, uri: str) -> None:
    rows = read_json_lines(run.path / "metrics" / "demix.jsonl")
    wanted = [(row["step"], row["loss"]) for row in rows]
    sending = sender(run, uri)
    sending.send()
    written(run, rows[:7])
    sending.send()
    (begun,) = stored(uri)
    assert (begun.info.status, begun.info.start_time) == ("RUNNING", 1_000_000)
    assert begun.data.tags["demix.run"] == "made-up"
    assert curve(uri, begun) == wanted[:7]
    file = written(run, rows[:12])
    sending.send()
    sending.send()
    assert curve(uri, begun) == wanted[:12]
    # The training has ended: its rows are in the finished file, all but the last of which were sent.
    file.unlink()
    finished = run.path / "metrics" / "demix.jsonl"
    write_json_lines(finished, rows[:19])
    sending.send("FINISHED")
    (ended,) = stored(uri)
    assert (ended.info.run_id, ended.info.status) == (begun.info.run_id, "FINISHED")
    assert curve(uri, ended) == wanted[:19]

    write_json_lines(finished, rows)
    track(run.run, uri, EXPERIMENT)
    (tracked,) = stored(uri)
    assert tracked.info.run_id == begun.info.run_id
    assert curve(uri, tracked) == wanted
    assert tracked.data.params["model.architecture.width"] == "128"
    assert "mlflow.parentRunId" in tracked.data.tags
    assert " 0 new, 0 replaced" in track(run.run, uri, EXPERIMENT)
    assert curve(uri, *stored(uri)) == wanted


def test_each_point_is_sent_once(run: MadeUp, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that has a point already says nothing of the second one."""
    sent: list[tuple[str, int]] = []
    log_batch = MlflowClient.log_batch

    def counted(client: MlflowClient, run_id: str, metrics: list[Metric]) -> object:
        sent.extend((metric.key, metric.step) for metric in metrics)
        return log_batch(client, run_id, metrics=metrics)

    monkeypatch.setattr(MlflowClient, "log_batch", counted)
    rows = read_json_lines(run.path / "metrics" / "demix.jsonl")
    sending = sender(run, uri)
    for count in (7, 12):
        written(run, rows[:count])
        sending.send()
    assert len([step for key, step in sent if key == "loss"]) == 12
    assert len(sent) == len(set(sent))


def test_a_resumed_training_goes_on_in_its_mlflow_run_and_track_replaces_it(run: MadeUp, uri: str) -> None:
    rows = read_json_lines(run.path / "metrics" / "demix.jsonl")
    written(run, rows[:12])
    sender(run, uri).send()
    (begun,) = stored(uri)
    # From the checkpoint after 10 updates on all is done again, in another time.
    rows = [*rows[:10], *(row | {"tokens_per_second": row["tokens_per_second"] / 2} for row in rows[10:])]
    again = sender(run, uri, begun=2000.0)
    written(run, rows[:10])
    again.send()
    written(run, rows[:15])
    again.send("KILLED")
    (resumed,) = stored(uri)
    assert (resumed.info.run_id, resumed.info.status) == (begun.info.run_id, "KILLED")
    assert [step for step, _ in curve(uri, resumed)] == [row["step"] for row in rows[:15]]
    write_json_lines(run.path / "metrics" / "demix.jsonl", rows)
    track(run.run, uri, EXPERIMENT)
    (tracked,) = stored(uri)
    assert tracked.info.run_id != begun.info.run_id
    speeds = [(row["step"], row["tokens_per_second"]) for row in rows]
    assert curve(uri, tracked, "tokens_per_second") == speeds


def test_a_sweep_whose_last_file_is_another_trials_adds_no_point(run: MadeUp, uri: str) -> None:
    rows = read_json_lines(run.path / "metrics" / "demix.jsonl")
    sending = sender(run, uri)
    file = written(run, [row | {"loss": row["loss"] + 1} for row in rows[:8]])
    sending.send()
    (begun,) = stored(uri)
    sent = curve(uri, begun)
    # The finished file has the best trial's rows, and more of them.
    file.unlink()
    sending.send("FINISHED")
    (ended,) = stored(uri)
    assert ended.info.status == "FINISHED"
    assert curve(uri, ended) == sent == [(row["step"], row["loss"] + 1) for row in rows[:8]]


@pytest.mark.parametrize(
    ("error", "status"), [(None, "FINISHED"), (StoppedError("a", "b", "c"), "KILLED"), (ValueError("a"), "FAILED")]
)
def test_the_sender_is_told_how_the_training_ended(
    error: Exception | None, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ncat > {tmp_path}/told\n")
    python.chmod(0o755)
    monkeypatch.setattr(live.sys, "executable", str(python))
    with pytest.raises(type(error)) if error else nullcontext(), streaming("{}", "training", tmp_path, tmp_path):
        if error:
            raise error
    deadline = time.monotonic() + 30
    while not (tmp_path / "told").exists() or (tmp_path / "told").read_text() != status:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_other_settings_are_another_mlflow_run(run: MadeUp, uri: str) -> None:
    rows = read_json_lines(run.path / "metrics" / "demix.jsonl")
    sending = sender(run, uri)
    written(run, rows[:5])
    # This file was there before the training.
    sender(run, uri, begun=time.time() + 60).send()
    assert not stored(uri)
    sending.send()
    file = written(run, rows[:3], "4567")
    os.utime(file, (time.time() + 9,) * 2)
    sending.send()
    assert sorted((len(curve(uri, one)), one.info.status) for one in stored(uri)) == [(3, "RUNNING"), (5, "FINISHED")]
    track(run.run, uri, EXPERIMENT)
    (tracked,) = stored(uri)
    assert len(curve(uri, tracked)) == len(rows)


@pytest.mark.parametrize("answers", [True, False], ids=["dies", "hangs"])
def test_a_server_that_is_gone_or_hangs_costs_a_training_little_and_is_told_once(
    answers: bool, run: MadeUp, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live, "SECONDS_BEFORE_BATCHES", 0.01)
    monkeypatch.setattr(live, "SECONDS_AT_END", 0.5)
    heard: list[str] = []
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        said, places = "", (run.path / "checkpoints" / "demix", run.path / "metrics" / "demix.jsonl")
        with streaming(tracking(uri), "training", *places):
            written(run, read_json_lines(run.path / "metrics" / "demix.jsonl"))
            # MLflow is loaded, and asks the server.
            connection, _ = server.accept()
            if answers:
                server.close()
                connection.close()
                while not said:
                    time.sleep(0.1)
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
    assert len(lines) == answers
    if answers:
        assert lines[0].startswith(f"{uri}: takes no metrics now (")


def test_without_a_store_and_on_other_ranks_nothing_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live.subprocess, "Popen", None)
    with streaming("", "training", tmp_path, tmp_path):
        pass
    monkeypatch.setenv("RANK", "1")
    with streaming("{}", "training", tmp_path, tmp_path):
        pass
