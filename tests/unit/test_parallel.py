"""Training on several ranks: who trains what, the gradient of a single process, resuming on another number of ranks."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed import TCPStore

from demix.commands import main as cli
from demix.config.architecture import architecture_from
from demix.config.counts import parameters
from demix.config.models import KINDS
from demix.config.training import RateSchedule, Updates
from demix.data.shards import TokenShard
from demix.errors import DemixError
from demix.files import read_json_lines, sha256_file
from demix.launch.local import world_size
from demix.run.placement import place, place_experts
from demix.train import parallel
from demix.train.batches import balanced_batches, mixed_batches
from demix.train.parallel import synced_bytes
from demix.train.stage import Training
from support.cli import said
from support.forks import FORKS
from support.tokens import NOVEL, TRAINING
from support.training import train_model

DOMAINS = TRAINING + NOVEL
SIZES = {"layers": 2, "width": 32, "heads": 2, "context": 16}
ROUTED = {"experts": 4, "top_k": 2, "every": 2, "capacity": 1.0, "balance": 0.1}
STEPS = 20
EXACT = Training(
    seed=1, architecture=SIZES, tokens=16 * 4 * 4 * STEPS, sequences=4, learning_rate=3e-3, warmup=0.1, clip=0.5,
    weight_decay=0.1, precision="fp64", threads=1, checkpoint_every=1000, dev_blocks=2,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """One training: `kind` on the first `domains` by `ranks`."""

    kind: str
    domains: int
    ranks: int
    replicas: tuple[tuple[str, int], ...] = ()
    precision: str = "fp64"
    micro: int | None = None
    seed: int = 0
    options: tuple[tuple[str, str | int | bool], ...] = ()
    muon: bool = False
    dropout: float | None = None
    shard: bool = False

    @property
    def name(self) -> str:
        return "-".join(map(str, dataclasses.astuple(self))).replace(" ", "")

    def run(self, tokens: Path, folder: Path) -> None:
        """Train as the stage does, into `folder`."""
        training = dataclasses.replace(
            EXACT, precision=self.precision, micro_sequences=self.micro, tokens=16 * 4 * self.domains * STEPS,
            architecture=SIZES | dict(self.options),
            optimizer=Updates(kind="muon", matrices=5.0, decay="matrices") if self.muon else None,
            learning_rate_schedule=RateSchedule(kind="wsd", end=0.1) if self.muon else None,
            z_loss=0.01 if self.muon else None, dropout=self.dropout, shard_optimizer=self.shard,
        )  # fmt: skip
        splits = ("train", "dev")
        paths = [
            tokens / "tokens" / domain / f"{split}.arrow" for split in splits for domain in DOMAINS[: self.domains]
        ]
        places = folder / "model", folder / "metrics.jsonl", folder / "checkpoints"
        if self.kind == "routed":
            training = dataclasses.replace(training, architecture=SIZES | dict(self.options) | {"routed": ROUTED})
        seeds = folder.parent / ("muon" if self.muon else "adamw")
        branch = seeds / "dense" / f"step-{self.seed:08d}" if self.seed else None
        if branch and not branch.exists():
            train_model("dense", training, paths, branch, None, folder.parent / "checkpoints", until=self.seed)
        train_model(self.kind, training, paths, *places, dict(self.replicas), branch=branch)


MASKED = (("attention", "bidirectional"), ("objective", "mlm"))
VARIED = (("position", "alibi"), ("head", "clap"))
ROBERTA = (("preset", "roberta"), ("position", "sinusoidal"))
MODERN = (("preset", "llama"), ("key_heads", 1), ("inner", 40), ("query_norm", "all"), ("rope_theta", 100.0))
WITHIN = (("position", "alibi"), ("attention", "documents"))
UNEQUAL = (("scripture", 3), ("parliament", 2))
CASES = [
    Case("demix", 4, 2), Case("demix", 4, 4), Case("demix", 4, 8), Case("demix", 4, 7, UNEQUAL),
    Case("demix", 2, 8), Case("demix", 3, 3), Case("demix", 4, 2, micro=1), Case("demix", 4, 8, precision="fp32"),
    Case("dense", 4, 2), Case("dense", 4, 3), Case("dense", 4, 8, precision="fp32"),
    Case("dense_unbalanced", 3, 5), Case("domain_token", 4, 2),
    Case("routed", 4, 2), Case("routed", 4, 4), Case("routed", 4, 2, micro=1),
    Case("demix", 4, 4, options=VARIED), Case("dense", 4, 2, options=VARIED),
    Case("demix", 4, 8, options=MODERN), Case("routed", 4, 2, options=MODERN),
    Case("demix", 4, 8, muon=True), Case("demix", 4, 7, UNEQUAL, seed=7, muon=True), Case("routed", 4, 2, muon=True),
    Case("demix", 4, 2, options=MASKED), Case("demix", 4, 4, micro=1, options=MASKED),
    Case("dense", 4, 2, micro=1, options=MASKED), Case("routed", 4, 4, options=MASKED),
    Case("demix", 4, 4, options=ROBERTA),
    Case("demix", 4, 2, seed=7), Case("demix", 4, 8, seed=7), Case("demix", 4, 7, UNEQUAL, seed=7),
    Case("demix", 4, 4, micro=1, dropout=0.1), Case("demix", 4, 7, UNEQUAL, dropout=0.1),
    Case("dense_unbalanced", 3, 5, dropout=0.1), Case("domain_token", 4, 2, micro=1, dropout=0.1),
    Case("demix", 4, 4, micro=1, options=WITHIN), Case("domain_token", 4, 2, options=WITHIN),
    Case("demix", 4, 8, shard=True), Case("demix", 4, 8, precision="fp32", shard=True),
    Case("demix", 4, 7, UNEQUAL, seed=7, shard=True), Case("dense", 4, 3, shard=True),
    Case("demix", 4, 8, muon=True, shard=True), Case("routed", 4, 2, muon=True, shard=True),
    Case("routed", 4, 4, dropout=0.1), Case("demix", 4, 2, options=MASKED, dropout=0.1),
]  # fmt: skip


def work(rank: int, tokens: Path, folder: Path, cases: list[Case], ports: list[int]) -> None:
    """One rank of each case that has it."""
    for case, port in zip(cases, ports, strict=True):
        if rank < case.ranks:
            os.environ |= placed(rank, case.ranks, port)
            case.run(tokens, folder / case.name)


def placed(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The environment of a rank."""
    numbers = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    ours = {name: str(number) for name, number in numbers.items()}
    return ours | {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}


@pytest.fixture(scope="module")
def trained(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases trained by real processes over gloo, and by one process: <case>/ and <case of one rank>/."""
    folder = tmp_path_factory.mktemp("parallel")
    for case in {dataclasses.replace(case, ranks=1, replicas=(), micro=None, shard=False) for case in CASES}:
        case.run(tokens, folder / case.name)
    # The ranks of a case wait for one another most of the time: some cases train meanwhile.
    wide = [case for case in CASES if case.ranks > 4]
    narrow = [case for case in CASES if case.ranks <= 4]
    stores = {case: TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for case in CASES}
    ranks = [
        FORKS.Process(target=work, args=(rank, tokens, folder, cases, [stores[case].port for case in cases]))
        for cases in (wide, narrow[::2], narrow[1::2])
        for rank in range(max(case.ranks for case in cases))
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(300)
    assert {rank.exitcode for rank in ranks} == {0}
    return folder


def rows(metrics: Path) -> list[dict]:
    """The rows of steps; that with which a branch begins is none."""
    return [row for row in read_json_lines(metrics) if "loss" in row]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_any_number_of_ranks_trains_as_one_process(trained: Path, case: Case) -> None:
    alone = dataclasses.replace(case, ranks=1, replicas=(), micro=None, shard=False)
    ours, theirs = (rows(trained / which.name / "metrics.jsonl") for which in (case, alone))
    assert len(ours) == len(theirs) == STEPS - case.seed
    tolerance = {"fp64": 1e-9, "fp32": 1e-5}[case.precision]
    on_dev = [read_json_lines(trained / which.name / "metrics.jsonl")[-1] for which in (case, alone)]
    assert sum(key.startswith("dev_loss/") for key in on_dev[1]) == case.domains
    assert on_dev[0] == pytest.approx(on_dev[1], rel=tolerance)
    for mine, other in zip(ours, theirs, strict=True):
        shared = [
            key for key in other if key.startswith(("loss", "router")) or key in ("step", "tokens", "gradient_norm")
        ]
        assert len(shared) >= 4
        assert [mine[key] for key in shared] == pytest.approx([other[key] for key in shared], rel=tolerance)
    files = sorted(path.relative_to(trained / alone.name) for path in (trained / alone.name).rglob("*.safetensors"))
    assert files == sorted(
        path.relative_to(trained / case.name) for path in (trained / case.name).rglob("*.safetensors")
    )
    assert len(files) == (case.domains if case.kind == "demix" else 1) + 1
    if case.precision == "fp64":
        for file in files:
            mine, other = load_file(trained / case.name / file), load_file(trained / alone.name / file)
            assert mine.keys() == other.keys()
            for name, tensor in mine.items():
                assert tensor.dtype == torch.float64
                torch.testing.assert_close(tensor, other[name], rtol=0, atol=1e-9)


def test_a_sharded_optimizer_changes_no_bit(trained: Path) -> None:
    pairs = [(case, dataclasses.replace(case, shard=False)) for case in CASES if case.shard]
    pairs = [pair for pair in pairs if pair[1] in CASES]
    assert [case.name for case, _ in pairs if not case.muon]
    for pair in pairs:
        sharded, whole = (trained / case.name for case in pair)
        files = [path.relative_to(whole) for path in whole.rglob("*.safetensors")]
        assert files
        assert [sha256_file(sharded / file) for file in files] == [sha256_file(whole / file) for file in files]


@pytest.mark.parametrize("case", [case for case in CASES if case.ranks > 1], ids=lambda case: case.name)
def test_the_bytes_sent_are_those_of_the_formula(trained: Path, tokens: Path, case: Case) -> None:
    vocab_size = TokenShard.open(tokens / "tokens" / DOMAINS[0] / "train.arrow").vocab_size
    routed = {"routed": ROUTED} if case.kind == "routed" else {}
    architecture = architecture_from(SIZES | dict(case.options) | routed)
    domain_tokens = case.domains if case.kind == "domain_token" else 0
    shared, expert = parameters(architecture, vocab_size, domain_tokens)
    # The first rank's; the metrics are its.
    first = place(case.kind, DOMAINS[: case.domains], 16, case.ranks, dict(case.replicas))[0]
    expected = synced_bytes(shared, expert, case.ranks, len(first.ranks), {"fp64": 8, "fp32": 4}[case.precision])
    assert {row["synced_bytes"] for row in rows(trained / case.name / "metrics.jsonl")} == {expected}


@given(st.integers(1, 12), st.integers(1, 40), st.integers(1, 9))
def test_placements_part_every_step_without_overlap(count: int, ranks: int, sequences: int) -> None:
    domains = [f"domain{number}" for number in range(count)]
    fits = (ranks % count == 0 and ranks // count <= sequences) or (count % ranks == 0)
    if not fits:
        with pytest.raises(DemixError, match=r"use .*ranks"):
            place_experts(domains, sequences, ranks)
        return
    check_partition(place_experts(domains, sequences, ranks), count, sequences)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.integers(5, 9))
def test_unequal_replicas_part_every_step_without_overlap(numbers: list[int], sequences: int) -> None:
    domains = [f"domain{number}" for number in range(len(numbers))]
    replicas = dict(zip(domains, numbers, strict=True))
    check_partition(place_experts(domains, sequences, sum(numbers), replicas), len(numbers), sequences)
    with pytest.raises(DemixError, match=f"use {sum(numbers)} ranks"):
        place_experts(domains, sequences, sum(numbers) + 1, replicas)


def check_partition(places: tuple, count: int, sequences: int) -> None:
    seen = [(expert, n) for placed in places for expert in placed.experts for n in range(placed.first, placed.last)]
    assert sorted(seen) == [(expert, n) for expert in range(count) for n in range(sequences)]
    for rank, placed in enumerate(places):
        assert rank in placed.ranks
        assert placed.last > placed.first
        assert {places[other].experts for other in placed.ranks} == {placed.experts}


def test_ranks_that_do_not_fit_are_refused_before_a_process_starts(tokens: Path, tmp_path: Path) -> None:
    assert said(command(tokens, tmp_path, 5)[3:]) == (
        "demix: error: ranks: is 5, which does not fit 4 domains; use 1, 2, 4, 8, 12 or 16 ranks"
    )
    assert not list(tmp_path.iterdir())
    unknown = [*command(tokens, tmp_path, 5), "--replicas", "scripture=2,lego=1"]
    assert "replicas.lego: is no training domain" in str(said(unknown[3:]))


def test_ranks_of_a_domain_see_its_sequences_once(tokens: Path) -> None:
    shards = [TokenShard.open(tokens / "tokens" / domain / "train.arrow") for domain in TRAINING]
    whole = balanced_batches(shards, TRAINING, 4, 16, seed=3)
    places = place(KINDS["demix"], TRAINING, 4, 6)
    for step in (0, 7):
        parts = [balanced_batches(shards, TRAINING, 4, 16, 3, place).draw(step) for place in places]
        again = torch.cat([torch.cat([parts[2 * d].inputs, parts[2 * d + 1].inputs], 1) for d in range(3)])
        assert torch.equal(again, whole.draw(step).inputs)
        mixed = mixed_batches(shards, TRAINING, 4, 16, seed=3).draw(step)
        cut = [mixed_batches(shards, TRAINING, 4, 16, 3, place).draw(step) for place in place("dense", TRAINING, 4, 5)]
        assert torch.equal(torch.cat([part.inputs for part in cut], 1), mixed.inputs)
        assert torch.equal(torch.cat([part.domains for part in cut], 1), mixed.domains)


LONG = dataclasses.replace(EXACT, tokens=16 * 4 * 4 * 60, checkpoint_every=5, dev_blocks=0)


def command(tokens: Path, folder: Path, ranks: int, shard: bool = False) -> list[str]:
    settings = dataclasses.asdict(LONG) | {"shard_optimizer": shard}
    return [
        sys.executable, "-m", "demix", "train", "demix",
        *(str(tokens / "tokens" / domain / "train.arrow") for domain in DOMAINS),
        "--settings", json.dumps(settings), "--output", str(folder / "model"),
        "--metrics", str(folder / "metrics.jsonl"), "--checkpoints", str(folder / "checkpoints"), "--ranks", str(ranks),
    ]  # fmt: skip


@contextmanager
def launcher(tokens: Path, folder: Path, ranks: int, shard: bool = False) -> Iterator[BaseProcess]:
    """A process that trains with `ranks`, as it is once it has written a checkpoint; what it says goes to told.log."""
    done = checkpoints(folder)
    process = FORKS.Process(target=tell, args=(folder / "told.log", command(tokens, folder, ranks, shard)))
    process.start()
    deadline = time.monotonic() + 120
    while checkpoints(folder) <= done:
        assert time.monotonic() < deadline
        assert process.is_alive()
        time.sleep(0.001)
    yield process
    process.join(60)
    assert process.exitcode is not None


def tell(log: Path, command: list[str], environment: dict[str, str] | None = None) -> None:
    """Be the command `demix`, whose errors go to `log`."""
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 2)
    os.environ |= environment or {}
    sys.argv = command[2:]
    cli.main()


def train_by_forks(tokens: Path, folder: Path, ranks: int, shard: bool = False) -> str:
    """Train with ranks that have imported all, as those of a launcher have not, and return what the first one says."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    logs = [folder / f"rank-{rank}.log" for rank in range(ranks)]
    processes = [
        FORKS.Process(target=tell, args=(log, command(tokens, folder, ranks, shard), placed(rank, ranks, store.port)))
        for rank, log in enumerate(logs)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert {process.exitcode for process in processes} == {0}, logs[0].read_text()
    return logs[0].read_text()


def checkpoints(folder: Path) -> int:
    """The step of the newest checkpoint, 0 without one."""
    return max((int(path.parent.name[5:]) for path in folder.glob("checkpoints/*/step-*/manifest.json")), default=0)


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in rows(folder / "metrics.jsonl")]


@pytest.fixture(scope="module")
def undisturbed(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    train_by_forks(tokens, folder, 2)
    return losses(folder)


def test_a_killed_rank_ends_all_and_is_named_and_ranks_end_when_their_launcher_is_killed(
    tokens: Path, tmp_path: Path, undisturbed: list[float]
) -> None:
    with launcher(tokens, tmp_path, 2) as process:
        ranks = children(process.pid)
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
    told = (tmp_path / "told.log").read_text()
    assert process.exitcode == 1
    assert "demix: error: rank 1 of 2: was killed by SIGKILL" in told.splitlines()[-1], told
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    with launcher(tokens, tmp_path, 2, shard=True) as process:
        ranks = children(process.pid)
        assert len(ranks) == 2
        process.kill()
    assert "resuming at step" in (tmp_path / "told.log").read_text()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "resuming at step" in train_by_forks(tokens, tmp_path, 2)
    assert losses(tmp_path) == undisturbed


def test_a_signal_saves_the_state_and_another_number_of_ranks_goes_on(
    tokens: Path, tmp_path: Path, undisturbed: list[float]
) -> None:
    step = 0
    for number, ranks, shard in ((signal.SIGUSR2, 4, False), (signal.SIGTERM, 2, True)):
        with launcher(tokens, tmp_path, ranks, shard) as process:
            os.kill(process.pid, number)
        told = (tmp_path / "told.log").read_text()
        assert process.exitcode == 1
        assert "a signal stopped training; its state is saved" in told.splitlines()[-1], told
        assert not step or f"resuming at step {step} of" in told
        assert checkpoints(tmp_path) > step
        step = checkpoints(tmp_path)
    assert f"resuming at step {step} of" in train_by_forks(tokens, tmp_path, 4, shard=True)
    assert losses(tmp_path) == pytest.approx(undisturbed, rel=1e-9)


def test_a_second_process_does_not_train_the_same_run(tokens: Path, tmp_path: Path) -> None:
    with launcher(tokens, tmp_path, 1) as process:
        os.kill(process.pid, signal.SIGSTOP)
        try:
            assert f"{process.pid}) trains this run" in str(said(command(tokens, tmp_path, 1)[3:]))
        finally:
            process.kill()


def children(pid: int) -> list[int]:
    """The processes that `pid` started, in order."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid:
            found.append(int(path.parent.name))
    return sorted(found)


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
    with pytest.raises(DemixError, match=rf"variable WORLD_SIZE: is .*{name} does not fit; unset it, or start"):
        world_size(1)


def test_a_rank_without_others_says_so_and_ends(launched: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    launched.setattr(parallel, "TIMEOUT", timedelta(seconds=1))
    with pytest.raises(DemixError, match="rank 0 of 2: did not meet the other ranks at 127"), parallel.joined():
        pytest.fail("the work began without the other rank")
    assert "rank 0 of WORLD_SIZE=2 waits at 127.0.0.1:0 for the others" in caplog.text


def test_a_rank_that_is_done_does_not_take_down_its_interpreter(tmp_path: Path) -> None:
    """Threads that still run then cannot make a failed rank of one that has done its work."""
    (tmp_path / "sitecustomize.py").write_text("import atexit, os\natexit.register(os.abort)\n")
    environment = {name: value for name, value in os.environ.items() if name != "DEMIX_LAUNCHER"}
    for own, status in (({"DEMIX_LAUNCHER": str(os.getpid())}, 0), ({}, -signal.SIGABRT)):
        ended = subprocess.run(
            [sys.executable, "-m", "demix", "--version"],
            env=environment | own | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert ended.returncode == status
        assert ended.stdout.startswith("demix ")
