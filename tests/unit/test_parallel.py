"""Trainings by several ranks over gloo: the results of one process, whatever is combined; lost and refused ranks."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed import TCPStore

from demix.commands import main as cli
from demix.config.training import OptimizerSettings, RateSchedule
from demix.errors import StoppedError
from demix.launch.job import Places
from demix.launch.local import world_size
from demix.run.placement import place_experts
from demix.train import loop, parallel
from demix.train.adapt import adapt
from demix.train.parallel import joined
from demix.train.stage import ModelTraining, Training, train_model
from demix.train.sweep import read_trial
from support.cli import said
from support.disturbed import until
from support.errors import refused
from support.forks import FORKS, rank_environment
from support.tokens import NOVEL, TRAINING
from support.training import (
    ADAPT,
    TRAIN,
    novel_shards,
    places,
    rows,
    shard_paths,
    stop_at,
    tensors,
    train_into,
    updates,
)

DOMAINS = TRAINING + NOVEL
SIZES = {"layers": 2, "width": 32, "heads": 2, "context": 16}
ROUTED = {"routed": {"experts": 4, "top_k": 2, "every": 2, "capacity": 1.0, "balance": 0.1}}
STEPS, SEED = 10, 4
EXACT = Training(
    seed=1,
    architecture=SIZES,
    tokens=16 * 4 * 4 * STEPS,
    sequences=4,
    learning_rate=3e-3,
    warmup=0.1,
    clip=0.5,
    precision="fp64",
    threads=1,
    checkpoint_every=1000,
    dev_blocks=2,
)
MUON = {
    "optimizer": OptimizerSettings(kind="muon", matrices=5.0, decay="matrices"),
    "learning_rate_schedule": RateSchedule(kind="wsd", end=0.1),
}
LLAMA = {"preset": "llama", "key_heads": 1, "inner": 40, "query_norm": "all", "rope_theta": 100.0}
# What each value of a column of CASES stands for: keys of the architecture or of the settings, among others.
COLUMNS: dict[str, dict[str, Any]] = {
    # Those of one type differ in what a step draws or reads.
    "kind": {"demix": "demix", "routed": "routed"}
    | dict.fromkeys(("dense", "dense_unbalanced", "domain_token"), "dense"),
    # Domains and ranks: two experts a rank, one a rank, two and three ranks an expert.
    "ranks": {"halves": (4, 2), "each": (3, 3), "pairs": (2, 4), "triples": (2, 6)},
    "architecture": {
        "gpt2": {},
        "clap": {"position": "alibi", "head": "clap"},
        "llama": LLAMA,
        "compact": {"preset": "compact", "inner": 40},
        "roberta": {"preset": "roberta", "position": "sinusoidal"},
    },
    "attention": {
        "causal": {},
        "masked": {"objective": "mlm"},
    },
    "optimizer": {"adamw": {}, "muon": MUON},
    "precision": {"fp64": {}, "fp32": {"precision": "fp32"}},
    "micro": {"all": {}, "one": {"micro_sequences": 1}},
    "activations": {"kept": {}, "again": {"checkpoint_activations": True}},
    "moments": {"whole": {}, "sharded": {"shard_optimizer": True}},
    "dropout": {"none": {}, "some": {"dropout": 0.1}},
    "begin": {"scratch": 0, "seed": SEED},
}
Case = namedtuple("Case", COLUMNS)
CASES = [
    Case(*line.split())
    for line in """
demix            pairs    clap    causal    muon  fp64 all kept  sharded some scratch
demix            pairs    llama   causal    adamw fp32 one again sharded none seed
dense_unbalanced each     roberta masked    muon  fp32 one kept  whole   none scratch
routed           triples  gpt2    masked    adamw fp64 all again whole   some seed
dense            halves   llama   causal    muon  fp64 all kept  whole   some seed
routed           halves   gpt2    causal    muon  fp32 one again sharded none scratch
dense            each     clap    causal    adamw fp64 all again whole   none seed
routed           triples  clap    causal    adamw fp32 one kept  sharded some scratch
demix            halves   roberta masked    adamw fp64 one again sharded some seed
domain_token     triples  llama   causal    muon  fp32 all kept  sharded none scratch
demix            each     gpt2    causal    muon  fp32 all kept  sharded some seed
routed           pairs    roberta masked    muon  fp32 all kept  whole   some seed
routed           each     llama   causal    muon  fp32 all again whole   none scratch
demix            halves   clap    masked    adamw fp32 all kept  whole   some scratch
dense_unbalanced pairs    gpt2    masked    adamw fp32 one kept  sharded none scratch
demix            triples  roberta masked    muon  fp64 one again whole   some scratch
demix            halves   llama   masked    adamw fp32 all kept  whole   some scratch
demix            pairs    compact causal    muon  fp64 all kept  sharded none seed
demix            halves   compact causal    adamw fp64 one again whole   some scratch
dense            each     compact causal    muon  fp32 one kept  sharded none scratch
domain_token     triples  compact causal    muon  fp64 all again whole   some scratch
    """.strip().splitlines()
]


def settings(case: Case, **changes: str) -> Training:
    """The settings of a case, whose columns may be changed."""
    case = case._replace(**changes)
    domains, _ = COLUMNS["ranks"][case.ranks]
    architecture = SIZES | (ROUTED if case.kind == "routed" else {})
    given = {"architecture": architecture, "tokens": 16 * 4 * domains * STEPS}
    for column in ("optimizer", "precision", "micro", "activations", "moments", "dropout"):
        given |= COLUMNS[column][getattr(case, column)]
    for column in ("architecture", "attention"):
        given["architecture"] |= COLUMNS[column][getattr(case, column)]
    return EXACT.replace(**given)


def by_ranks(ranks: int, work: Callable[..., None], *arguments: Any) -> None:
    """Do `work` with these arguments in so many processes at once, the ranks of a group."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environments = [rank_environment(rank, ranks, store.port) for rank in range(ranks)]
    processes = [FORKS.Process(target=be_rank, args=(each, work, arguments)) for each in environments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert {process.exitcode for process in processes} == {0}


def be_rank(environment: dict[str, str], work: Callable[..., None], arguments: tuple) -> None:
    os.environ |= environment
    torch.set_num_threads(1)
    work(*arguments)


def train_case(case: Case, tokens: Path, folder: Path, name: str, training: Training) -> None:
    """Train as the stage does, by this process or as one rank of several, into the folder `name`."""
    domains, _ = COLUMNS["ranks"][case.ranks]
    shards = [path for split in ("train", "dev") for path in shard_paths(tokens, DOMAINS[:domains], split)]
    branch = None
    if case.begin == "seed":
        branch = folder / "dense" / f"step-{SEED:08d}"
        if not branch.exists():
            architecture = {key: value for key, value in training.architecture.items() if key != "routed"}
            dense = ModelTraining("dense", training.replace(architecture=architecture), shards, until=SEED)
            train_model(dense, Places(branch, None, folder / "checkpoints"))
    train_model(ModelTraining(case.kind, training, shards, branch=branch), places(folder / name))


@pytest.fixture(scope="module")
def trained(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Path]:
    """Trains a case once, by one process and by ranks, and returns the folder of alone/ and together/."""

    @cache
    def train(case: Case) -> Path:
        folder = tmp_path_factory.mktemp("case")
        train_case(case, tokens, folder, "alone", settings(case, micro="all", activations="kept", moments="whole"))
        by_ranks(COLUMNS["ranks"][case.ranks][1], train_case, case, tokens, folder, "together", settings(case))
        return folder

    return train


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_ranks_train_as_one_process(case: Case, trained: Callable[[Case], Path]) -> None:
    ours, theirs = (trained(case) / name for name in ("together", "alone"))
    tolerance = {"fp64": 1e-9, "fp32": 1e-5}[case.precision]
    domains, _ = COLUMNS["ranks"][case.ranks]
    *_, on_dev = rows(theirs)
    assert sum(key.startswith("dev_loss/") for key in on_dev) == domains
    assert rows(ours)[-1] == pytest.approx(on_dev, rel=tolerance)
    assert len(updates(ours)) == len(updates(theirs)) == STEPS - COLUMNS["begin"][case.begin]
    for mine, other in zip(updates(ours), updates(theirs), strict=True):
        shared = [
            key for key in other if key.startswith(("loss", "router")) or key in ("step", "tokens", "gradient_norm")
        ]
        assert len(shared) >= 4
        assert [mine[key] for key in shared] == pytest.approx([other[key] for key in shared], rel=tolerance)

    files = [sorted(path.relative_to(folder) for path in folder.rglob("*.safetensors")) for folder in (ours, theirs)]
    assert files[0] == files[1]
    assert len(files[0]) == (domains if case.kind == "demix" else 1) + 1
    for file in files[0] if case.precision == "fp64" else ():
        mine, other = load_file(ours / file), load_file(theirs / file)
        assert mine.keys() == other.keys()
        for name, tensor in mine.items():
            assert tensor.dtype == torch.float64
            torch.testing.assert_close(tensor, other[name], rtol=0, atol=1e-9)
    assert min(row["synced_bytes"] for row in updates(ours)) > 0


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_sharded_optimizer_changes_no_bit(
    optimizer: str, trained: Callable[[Case], Path], tokens: Path, tmp_path: Path
) -> None:
    case = next(case for case in CASES if (case.optimizer, case.moments, case.ranks) == (optimizer, "sharded", "pairs"))
    by_ranks(4, train_case, case, tokens, trained(case), "whole", settings(case, moments="whole"))
    sharded, whole = (tensors(trained(case) / name) for name in ("together", "whole"))
    assert sharded == whole != {}


def adapt_kind(kind: str, tokens: Path, model: Path, folder: Path) -> None:
    """Adapt a dense model, or add an expert; `folder` gets a file for each dev split and the rank that reads it."""
    how, novel, read = ADAPT.replace(precision="fp64"), novel_shards(tokens), loop.dev_loss

    def recorded(*arguments: Any) -> float:
        (folder / f"{arguments[-1]}.{os.environ.get('RANK', '')}.read").touch()
        return read(*arguments)

    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "dev_loss", recorded)
        if kind == "dense":
            adapt(model, novel, how, places(folder), training=shard_paths(tokens, split="dev"))
        else:
            adapt(model, novel, how, places(folder), chosen={"parent": "scripture", "parent_prior": 0.9})


@pytest.mark.parametrize("kind", ["demix", "dense"])
def test_an_adaptation_by_two_ranks_is_that_of_one(kind: str, tokens: Path, tmp_path: Path) -> None:
    model = train_into(tmp_path, kind, shard_paths(tokens)) / "model"
    adapt_kind(kind, tokens, model, tmp_path / "alone")
    by_ranks(2, adapt_kind, kind, tokens, model, tmp_path / "together")
    readers = [path.name.split(".")[0] for path in tmp_path.glob("together/*.read")]
    assert sorted(readers) == sorted(NOVEL if kind == "demix" else NOVEL + TRAINING), "each by one rank"
    ours, theirs = (
        [value for row in rows(tmp_path / name) for key, value in row.items() if "loss" in key]
        for name in ("together", "alone")
    )
    assert len(ours) > 40
    assert ours == pytest.approx(theirs, rel=1e-9)


def diverge(tokens: Path, folder: Path) -> None:
    """Train at a learning rate of a sweep at which nothing can be learned."""
    training = ModelTraining("demix", TRAIN.replace(learning_rate=1e38), shard_paths(tokens))
    train_model(training, Places(None, folder / "1e38.jsonl", folder / "checkpoints"))


def test_all_ranks_end_a_training_that_diverges(tokens: Path, tmp_path: Path) -> None:
    by_ranks(3, diverge, tokens, tmp_path)
    assert read_trial(tmp_path / "1e38.jsonl").diverged is not None


@given(st.integers(1, 12), st.integers(1, 40), st.integers(1, 9))
def test_placements_part_every_step_without_overlap(count: int, ranks: int, sequences: int) -> None:
    domains = [f"domain{number}" for number in range(count)]
    if not (ranks % count == 0 and ranks // count <= sequences) and count % ranks:
        with refused("ranks"):
            place_experts(domains, sequences, ranks)
        return
    found = place_experts(domains, sequences, ranks)
    seen = [(expert, n) for placed in found for expert in placed.experts for n in range(placed.first, placed.last)]
    assert sorted(seen) == [(expert, n) for expert in range(count) for n in range(sequences)]
    for rank, placed in enumerate(found):
        assert rank in placed.ranks
        assert placed.last > placed.first
        assert {found[other].experts for other in placed.ranks} == {placed.experts}


LONG = EXACT.replace(tokens=16 * 4 * 4 * 60, checkpoint_every=5, dev_blocks=0)


def command(tokens: Path, folder: Path, ranks: int) -> list[str]:
    options = {"output": "model", "metrics": "metrics.jsonl", "checkpoints": "checkpoints"}
    words = [word for option, name in options.items() for word in (f"--{option}", str(folder / name))]
    shards = map(str, shard_paths(tokens, DOMAINS))
    return ["train", "demix", *shards, "--settings", json.dumps(LONG.as_dict()), *words, "--ranks", str(ranks)]


def be_command(log: Path, words: list[str]) -> None:
    """Be the command `demix`, whose errors go to `log`."""
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 2)
    sys.argv = ["demix", *words]
    cli.main()


@contextmanager
def launcher(tokens: Path, folder: Path) -> Iterator[tuple[BaseProcess, list[int]]]:
    """A process that trains with two ranks, and these, once it has written a checkpoint; its errors go to log."""
    done = checkpoints(folder)
    process = FORKS.Process(target=be_command, args=(folder / "log", command(tokens, folder, 2)))
    process.start()
    deadline = time.monotonic() + 120
    while checkpoints(folder)[-1:] <= done[-1:]:
        assert time.monotonic() < deadline
        assert process.is_alive()
        time.sleep(0.001)
    ranks = children(process.pid)
    assert len(ranks) == 2
    yield process, ranks
    process.join(60)
    assert process.exitcode is not None
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks), 60)


def children(pid: int) -> list[int]:
    """The processes that `pid` started, in order."""
    found = (Path("/proc") / str(pid) / "task" / str(pid) / "children").read_text()
    return sorted(map(int, found.split()))


def checkpoints(folder: Path) -> list[int]:
    """The steps of the checkpoints, the newest last."""
    return sorted(int(path.parent.name[5:]) for path in folder.glob("checkpoints/*/step-*/manifest.json"))


def go_on(tokens: Path, folder: Path, shard: bool, stop: int | None = None) -> None:
    """Train until the end, or until one rank gets a signal before the step `stop`."""
    training = ModelTraining("demix", LONG.replace(shard_optimizer=shard), shard_paths(tokens, DOMAINS))
    with pytest.MonkeyPatch.context() as patch:
        if stop is None:
            train_model(training, places(folder))
            return
        if os.environ["RANK"] == "1":
            stop_at(patch, {stop}, DOMAINS)
        with pytest.raises(StoppedError):
            train_model(training, places(folder))


@pytest.fixture(scope="module")
def undisturbed(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    by_ranks(2, go_on, tokens, folder, False)
    return folder


def test_ranks_end_together_and_go_on_to_the_bit(tokens: Path, tmp_path: Path, undisturbed: Path) -> None:
    """After a signal to the launcher, which saves the state, and after the loss of a rank or of the launcher."""
    with launcher(tokens, tmp_path) as (process, _):
        os.kill(process.pid, signal.SIGTERM)
    assert process.exitcode == 1
    with launcher(tokens, tmp_path) as (process, ranks):
        os.kill(ranks[1], signal.SIGKILL)
    assert process.exitcode == 1
    assert "demix: error: rank 1 of 2: " in (tmp_path / "log").read_text().splitlines()[-1]
    with launcher(tokens, tmp_path) as (process, _):
        process.kill()
    # One rank cannot read the newest checkpoint, and both go on from the one before.
    newest = checkpoints(tmp_path)[-1]
    (damaged,) = tmp_path.glob(f"checkpoints/*/step-{newest:08d}/expert-fantasy.safetensors")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    by_ranks(2, go_on, tokens, tmp_path, False)
    assert rows(tmp_path) == rows(undisturbed)
    assert tensors(tmp_path) == tensors(undisturbed)


def test_another_number_of_ranks_goes_on(tokens: Path, tmp_path: Path, undisturbed: Path) -> None:
    """With a sharded optimizer or without."""
    for ranks, shard, stop in ((4, False, 13), (2, True, 31), (4, True, None)):
        by_ranks(ranks, go_on, tokens, tmp_path, shard, stop)
        assert checkpoints(tmp_path)[-1:] == ([stop] if stop else [])
    ours, theirs = ([row["loss"] for row in updates(folder)] for folder in (tmp_path, undisturbed))
    assert ours == pytest.approx(theirs, rel=1e-9)


def test_ranks_that_do_not_fit_are_refused_before_a_process_starts(tokens: Path, tmp_path: Path) -> None:
    words = command(tokens, tmp_path, 5)
    assert str(said(words)).startswith("demix: error: ranks: ")
    assert not list(tmp_path.iterdir())


LAUNCHED = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.mark.parametrize(
    ("name", "value"),
    [*((name, None) for name in LAUNCHED if name != "WORLD_SIZE"), ("RANK", "2"), ("RANK", "-1"), ("WORLD_SIZE", "x")],
)
def test_a_stray_world_size_is_refused(launched: pytest.MonkeyPatch, name: str, value: str | None) -> None:
    assert world_size(1) == world_size(2) == 2
    launched.delenv(name) if value is None else launched.setenv(name, value)
    with refused("WORLD_SIZE"):
        world_size(1)


def test_a_rank_without_others_ends(launched: pytest.MonkeyPatch) -> None:
    launched.setattr(parallel, "TIMEOUT", timedelta(seconds=0.2))
    with refused("rank 0 of 2"), joined():
        pytest.fail("the work began without the other rank")


def be_failing(environment: dict[str, str], log: Path, words: list[str], fault: str) -> None:
    """Be a rank by hand; the second one cannot open files of the name `fault`, and lives on after its end."""
    del environment["DEMIX_LAUNCHER"]
    os.environ |= environment

    def refuse(event: str, arguments: tuple) -> None:
        if event == "open" and fault in str(arguments[0]):
            raise OSError(5, "Input/output error", arguments[0])

    if os.environ["RANK"] == "1":
        sys.addaudithook(refuse)
    try:
        be_command(log, words)
    finally:
        time.sleep(100)


@pytest.mark.parametrize("fault", ["train.arrow", ".partial"])
def test_an_error_of_a_rank_ends_all(tokens: Path, tmp_path: Path, fault: str) -> None:
    """Before the first step and at a checkpoint; another notices nothing of the end by itself, as NCCL's."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = processes = [
        FORKS.Process(
            target=be_failing,
            args=(rank_environment(rank, 2, store.port), tmp_path / f"{rank}.log", command(tokens, tmp_path, 1), fault),
        )
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    first.join(60)
    second.kill()
    assert first.exitcode == 1
    *_, line = (tmp_path / "0.log").read_text().splitlines()
    assert line.startswith("demix: error: rank 1 of 2: ")
    assert "put/output error" in line


def test_a_rank_that_is_done_does_not_take_down_its_interpreter(tmp_path: Path) -> None:
    """Threads that still run then cannot make a failed rank of one that has done its work."""
    (tmp_path / "sitecustomize.py").write_text("import atexit, os\natexit.register(os.abort)\n")
    environment = {name: value for name, value in os.environ.items() if name != "DEMIX_LAUNCHER"}
    environment["PYTHONPATH"] = str(tmp_path)
    for own, status in (({"DEMIX_LAUNCHER": str(os.getpid())}, 0), ({}, -signal.SIGABRT)):
        words = [sys.executable, "-m", "demix", "--version"]
        ended = subprocess.run(words, env=environment | own, capture_output=True, text=True, check=False)
        assert ended.returncode == status
        assert ended.stdout.startswith("demix ")
