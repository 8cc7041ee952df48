"""Checkpoints: which of them are kept, what each holds, and who may write them."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from demix.files import read_json, sha256_file, write_json
from demix.train import state
from demix.train.parallel import World
from support.errors import refused


def saved(step: int, experts: tuple[str, ...] = ("x",)) -> state.State:
    tensors = {name: {"b": torch.full((3,), float(step) + place_of)} for place_of, name in enumerate(experts)}
    return state.State(step, {"a": torch.full((2,), float(step))}, tensors, [{"step": step, "tokens": 9}])


def numbers_in(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir())


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 7), st.integers(1, 3), st.sets(st.integers(1, 7)))
def test_the_newest_and_those_asked_for_are_kept(tmp_path_factory, last, keep, steps) -> None:
    folder = tmp_path_factory.mktemp("checkpoints")
    kept: list[int] = []
    for step in range(1, last + 1):
        state.save_state(folder, saved(step), World(), keep, sorted(steps))
        kept.append(step)
        newest = [n for n in kept if n not in steps or n == step][-keep:]
        kept = [n for n in kept if n in newest or n in steps]
        assert numbers_in(folder) == kept
    found = state.newest_state(folder, ("x",), World())
    assert found.step == last
    assert found.metrics == [{"step": last, "tokens": 9}]
    assert found.shared["a"].tolist() == [last] * 2
    assert found.experts["x"]["b"].tolist() == [last] * 3
    state.remove_states(folder, sorted(steps))
    left = {n for n in kept if n in steps}
    assert (numbers_in(folder) if folder.exists() else []) == sorted(left)
    assert folder.exists() == bool(left)


def test_a_checkpoint_has_a_file_for_each_expert_and_their_digests(tmp_path: Path) -> None:
    (tmp_path / ".step-00000012.partial").mkdir()
    (tmp_path / ".step-00000012.partial" / "of a killed process").touch()
    state.save_state(tmp_path, saved(12, ("x", "y")), World(), 1)
    assert state.step_folder(12) == "step-00000012"
    folder = tmp_path / "step-00000012"
    files = {"shared.safetensors", "expert-x.safetensors", "expert-y.safetensors", "metrics.jsonl"}
    assert {path.name for path in folder.iterdir()} == files | {"manifest.json"}
    manifest = read_json(folder / "manifest.json")
    assert manifest == {"step": 12, "sha256": {name: sha256_file(folder / name) for name in files}}
    found = state.load_state(folder, ("y", "x"))
    assert {name: tensors["b"].tolist() for name, tensors in found.experts.items()} == {"y": [13] * 3, "x": [12] * 3}
    with refused("step-00000012"):
        state.load_state(folder, ("z",))
    (folder / "metrics.jsonl").write_text("{}\n")
    with refused("metrics.jsonl"):
        state.load_state(folder, ())
    for lacking in ("sha256", "step"):
        write_json(folder / "manifest.json", {key: value for key, value in manifest.items() if key != lacking})
        with refused("step-00000012"):
            state.load_state(folder, ())


def test_ranks_write_their_parts_of_a_checkpoint(tmp_path: Path) -> None:
    """Two ranks: the folder is made before the second one writes, and gets its manifest and name after that."""
    waits = []

    class First(World):
        def wait(self) -> None:
            waits.append(sorted(path.name for path in tmp_path.rglob("*")))
            if len(waits) == 1:
                rank = Second(rank=1, size=2, writes_experts=True)
                state.save_state(tmp_path, saved(3, experts=("y",)), rank, 1)

    class Second(World):
        def wait(self) -> None:
            return None

    state.save_state(tmp_path, saved(3, experts=("x",)), First(rank=0, size=2), 1)
    partial, final = ".step-00000003.partial", "step-00000003"
    assert waits[0] == [partial]
    assert {*waits[1]} == {
        partial,
        "expert-x.safetensors",
        "expert-y.safetensors",
        "shared.safetensors",
        "metrics.jsonl",
    }
    assert final in waits[2]
    assert partial not in waits[2]
    assert "manifest.json" in waits[2]
    # A rank that does not write experts writes nothing.
    state.save_state(tmp_path / "none", saved(3), Second(rank=1, size=2, writes_experts=False), 1)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "shared.safetensors", "expert-x.safetensors", "manifest.json"])
def test_damaged_checkpoints_are_named_passed_over_and_replaced(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (5, 10):
        state.save_state(tmp_path, saved(step), World(), 3)
    damaged = tmp_path / "step-00000010" / name
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    (tmp_path / "step-00000020").mkdir()
    (tmp_path / ".other.partial").mkdir()
    assert state.newest_state(tmp_path, ("x",), World()).step == 5
    assert str(damaged) in caplog.text
    assert state.newest_state(tmp_path / "none", ("x",), World()) is None
    # Trained once more, the step takes the place of what was damaged.
    state.save_state(tmp_path, saved(10), World(), 3)
    assert state.newest_state(tmp_path, ("x",), World()).step == 10
    assert not [*tmp_path.glob(".*.partial")]
    # What is newer than the state resumed from could not be read.
    state.save_state(tmp_path, saved(7), World(), 3)
    assert [path.name for path in state._steps(tmp_path)] == ["step-00000005", "step-00000007"]


def test_all_ranks_go_back_to_the_checkpoint_that_each_of_them_has(tmp_path: Path) -> None:
    for step in (5, 10):
        state.save_state(tmp_path, saved(step), World(), 3)

    lost = [1.0, 0.0]

    class First(World):
        """Another rank has lost its part of the newest checkpoint."""

        def sum(self, values: list) -> list[float]:
            return [values[0] + lost.pop(0)]

    assert state.newest_state(tmp_path, ("x",), First(size=2)).step == 5


def test_a_job_of_slurm_waits_for_the_one_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a lock is waited for; that it is, test_locks shows."""
    waits = []
    monkeypatch.setattr(state, "exclusive", lambda *asked: nullcontext(waits.append(asked[-1])))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with state.training_lock(tmp_path, World()):
        monkeypatch.setenv("SLURM_JOB_ID", "7")
    with state.training_lock(tmp_path, World()):
        pass
    assert waits == [0.0, 600.0]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused("file/step-00000001"):
        state.save_state(tmp_path / "file", saved(1), World(), 1)


def test_one_process_trains_a_run(tmp_path: Path) -> None:
    """The first rank locks the folder and removes what killed ones left."""
    (tmp_path / ".step-00000003.partial" / "inside").mkdir(parents=True)
    with state.training_lock(tmp_path, World()):
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]
        with refused(tmp_path), state.training_lock(tmp_path, World()):
            pytest.fail("two train one run")
        with state.training_lock(tmp_path, World(rank=1, size=2)):
            pass


def test_a_checkpoint_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, fsync = [], state.fsync

    def noted(path: Path) -> None:
        synced.append((path.name, [*tmp_path.glob("step-*")] != [], [*tmp_path.glob("*/manifest.json")] != []))
        fsync(path)

    monkeypatch.setattr(state, "fsync", noted)
    state.save_state(tmp_path, saved(3, experts=("x", "y")), World(), 1)
    files = ["expert-x.safetensors", "expert-y.safetensors", "shared.safetensors", "metrics.jsonl"]
    assert synced[:4] == [(name, False, False) for name in files]
    assert synced[4:] == [(".step-00000003.partial", False, True), (tmp_path.name, True, True)]


def test_who_waits_for_a_job_learns_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "output" / "experts").mkdir(parents=True)
    (tmp_path / "output" / "experts" / "x").write_text("abc")
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.delenv("DEMIX_DONE", raising=False)
    state.remove_states(tmp_path / "checkpoints")
    assert {path.name for path in tmp_path.iterdir()} == {"output"}
    monkeypatch.setenv("DEMIX_DONE", str(tmp_path / "done.json"))
    state.save_state(tmp_path / "checkpoints", saved(1), World(), 1)
    (tmp_path / "checkpoints" / "metrics.jsonl").touch()
    state.remove_states(tmp_path / "checkpoints")
    files = read_json(tmp_path / "done.json")["files"]
    assert files["output/experts/x"] == 3
    assert "checkpoints/step-00000001/shared.safetensors" in files, "it is told before the states go"
    assert not (tmp_path / "checkpoints").exists()


def test_a_finished_run_keeps_no_metrics_beside_its_states(tmp_path: Path) -> None:
    state.save_state(tmp_path, saved(1), World(), 1)
    (tmp_path / "metrics.jsonl").touch()
    state.remove_states(tmp_path, [1])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
