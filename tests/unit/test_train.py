"""Training: the order of data, the schedule, the loop, its precisions, its best state."""

import dataclasses
import itertools
import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from demix.config.architecture import Architecture
from demix.data.shards import TokenShard, blocks
from demix.errors import DemixError
<<<<<<< HEAD
from demix.files import read_json
from demix.model.checkpoint import load_model
=======
from demix.evaluate.parent import choose_parent, own_dev_losses
from demix.evaluate.score import Scoring, score
from demix.files import read_json, read_json_lines, sha256_file, write_json
from demix.model.checkpoint import expert_names, load_model
>>>>>>> seals
from demix.model.gpt import GPT
from demix.model.scoring import log_probabilities
from demix.train import loop, stage
from demix.train.batches import balanced_batches, mixed_batches, proportional_batches
from demix.train.loop import EarlyStopping, Optimization, learning_rate_at, train
from demix.train.stage import train_model
from support.tokens import TRAINING
from support.training import SIZES, TRAIN, opened, shard_paths


def test_every_block_is_seen_once_an_epoch_and_the_order_depends_on_step_alone(tokens: Path) -> None:
    shards = opened(tokens)
    length, sequences = 32, 3
    batches = balanced_batches(shards, TRAINING, sequences, length, seed=5)
    for d, shard in enumerate(shards):
        cut, targets, mask = blocks(shard, length)
        whole = Counter(tuple(row) for row in np.concatenate([cut, targets], 1)[mask.all(1)].tolist())
        steps = sum(whole.values()) // sequences + 2
        seen: list[tuple[int, ...]] = []
        for step in range(steps):
            batch = batches.draw(step)
            seen += map(tuple, torch.cat([batch.inputs[d], batch.targets[d]], 1).tolist())
        assert Counter(seen[: sum(whole.values())]) == whole  # an epoch is a permutation of the full blocks
    again = balanced_batches(shards, TRAINING, sequences, length, seed=5)
    assert torch.equal(again.draw(17).inputs, batches.draw(17).inputs)
    assert torch.equal(again.draw(3).inputs, batches.draw(3).inputs)
    assert not torch.equal(
        balanced_batches(shards, TRAINING, sequences, length, seed=6).draw(3).inputs, again.draw(3).inputs
    )
    # The order of one domain does not depend on which other domains there are.
    alone = balanced_batches(shards[1:2], TRAINING[1:2], sequences, length, seed=5)
    assert torch.equal(alone.draw(9).inputs[0], again.draw(9).inputs[1])
    mixed = mixed_batches(shards, TRAINING, sequences, length, seed=5).draw(4)
    assert torch.equal(mixed.inputs[0], again.draw(4).inputs.flatten(0, 1))
    assert mixed.domains[0].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_unbalanced_batches_follow_the_sizes_of_the_domains(tokens: Path) -> None:
    shards = opened(tokens)
    small = dataclasses.replace(shards[0], files=(shards[0].read(0, 32 * 10),))
    counts = [len(shard) // 32 for shard in (small, *shards[1:])]
    batches = proportional_batches([small, *shards[1:]], TRAINING, 1, 32, seed=1)
    drawn = np.concatenate([batches.draw(step).domains[0].numpy() for step in range(sum(counts) // 3)])
    found = np.bincount(drawn, minlength=3)
    assert np.abs(found - counts).max() < 3  # one epoch but for its last incomplete step
    assert found[0] <= 10


def test_learning_rate_warms_up_and_decays_to_zero() -> None:
    optimization = Optimization(steps=100, learning_rate=2.0, warmup=0.08)
    rates = [learning_rate_at(step, optimization) for step in range(101)]
    assert rates[:8] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0])
    assert rates[8:] == pytest.approx(np.linspace(2.0, 0.0, 93))


def test_the_loop_is_the_obvious_one(tokens: Path) -> None:
    """Ten steps against a loop written here: autograd on the mean loss, torch's clipping and AdamW."""
    shards = opened(tokens)
    batches = balanced_batches(shards, TRAINING, 2, 32, seed=1)
    optimization = Optimization(steps=10, learning_rate=3e-3, warmup=0.1, clip=0.5, precision="fp64")
    ours = GPT(Architecture(**SIZES), shards[0].vocab_size, TRAINING).initialise(1)
    rows = train(ours, batches, TRAINING, optimization, tokens / "none")

    theirs = GPT(Architecture(**SIZES), shards[0].vocab_size, TRAINING).initialise(1).double()
    optimizer = torch.optim.AdamW(theirs.parameters(), betas=(0.9, 0.95), eps=1e-7, weight_decay=0.1)
    for step in range(10):
        batch = batches.draw(step)
        logits = theirs(batch.inputs) @ theirs.token_embedding.T
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 2), batch.targets.flatten(), reduction="none")
        optimizer.zero_grad()
        losses.mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, optimization)
        optimizer.step()
        by_domain = losses.view(3, -1).mean(1).tolist()
        assert rows[step]["loss"] == pytest.approx(losses.mean().item(), rel=1e-9)
        assert [rows[step][f"loss/{domain}"] for domain in TRAINING] == pytest.approx(by_domain, rel=1e-9)
        assert rows[step]["gradient_norm"] == pytest.approx(norm.item(), rel=1e-9)
        assert rows[step]["tokens"] == (step + 1) * 3 * 2 * 32
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, dict(theirs.named_parameters())[name], rtol=0, atol=1e-9)
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.1


<<<<<<< HEAD
=======
def train_command(kind: str, tokens: Path, folder: Path, settings: Training = TRAIN) -> list[str]:
    return [
        sys.executable, "-m", "demix", "train", kind, *map(str, shard_paths(tokens)),
        "--settings", json.dumps(dataclasses.asdict(settings)), "--output", str(folder / "model"),
        "--metrics", str(folder / "metrics.jsonl"), "--checkpoints", str(folder / "checkpoints"),
    ]  # fmt: skip


def train_until_killed(command: list[str], folder: Path, checkpoints: int = 1) -> None:
    """Run a training until it has so many checkpoints, then kill it."""
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(list(folder.glob("checkpoints/*/step-*/manifest.json"))) < checkpoints and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (folder / "metrics.jsonl").exists(), "it finished before it was killed"


def losses(metrics: Path) -> list[tuple[int, float, float]]:
    rows = read_json_lines(metrics)
    return [(row["step"], row["loss"], row["gradient_norm"]) for row in rows]


def test_a_killed_run_resumes_to_the_bit(tokens: Path, tmp_path: Path) -> None:
    subprocess.run(train_command("demix", tokens, tmp_path / "whole"), check=True, capture_output=True)
    killed = tmp_path / "killed"
    for wanted in (1, 2):
        train_until_killed(train_command("demix", tokens, killed), killed, wanted)
    log = subprocess.run(train_command("demix", tokens, killed), check=True, capture_output=True, text=True).stderr
    assert "resuming at step" in log
    assert losses(killed / "metrics.jsonl") == losses(tmp_path / "whole" / "metrics.jsonl")
    files = sorted(path.relative_to(killed) for path in (killed / "model").rglob("*.safetensors"))
    assert len(files) == 4
    for file in files:
        assert sha256_file(killed / file) == sha256_file(tmp_path / "whole" / file)
    assert not list((killed / "checkpoints").glob("*/*")), "a finished run leaves no state behind"


def train_and_die(tokens: Path, folder: Path, step: int | None, write: int | None) -> None:
    """Train in this process, which kills itself when it draws the data of `step`, or at its `write`-th fsync."""
    draw, fsync, written = stage.balanced_batches, state.fsync, []

    def dying_batches(*arguments: object) -> Batches:
        batches = draw(*arguments)

        def batch(number: int) -> Batch:
            if number == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return batches.draw(number)

        return dataclasses.replace(batches, draw=batch)

    def dying_fsync(path: Path) -> None:
        fsync(path)
        written.append(path)
        if len(written) == write:
            os.kill(os.getpid(), signal.SIGKILL)

    stage.balanced_batches, state.fsync = dying_batches, dying_fsync
    places = folder / "model", folder / "metrics.jsonl", folder / "checkpoints"
    train_model("demix", TRAIN, shard_paths(tokens), *places)


def test_sigkill_at_any_step_and_inside_the_write_loses_nothing(tokens: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["demix.train.stage"])
    chance = random.Random(1)
    # A checkpoint is four files and two folders; the run writes four of them.
    moments = [(chance.randrange(24), None) for _ in range(20)] + [(None, write) for write in range(1, 9)]
    chance.shuffle(moments)
    died = 0
    for moment in [*moments, (None, None)]:
        process = context.Process(target=train_and_die, args=(tokens, tmp_path, *moment))
        process.start()
        process.join(120)
        # The last one, and any that began beyond its step, ran through.
        assert process.exitcode in (-signal.SIGKILL, 0)
        died += process.exitcode != 0
        if process.exitcode == 0:
            found = losses(tmp_path / "metrics.jsonl")
            shutil.rmtree(tmp_path)
            tmp_path.mkdir()
            places = tmp_path / "model", tmp_path / "metrics.jsonl", tmp_path / "checkpoints"
            train_model("demix", TRAIN, shard_paths(tokens), *places)
            assert found == losses(tmp_path / "metrics.jsonl")
            shutil.rmtree(tmp_path)
            tmp_path.mkdir()
    assert died >= 15


>>>>>>> seals
@pytest.mark.parametrize("kind", ["demix", "dense", "domain_token"])
def test_the_best_checkpoint_on_dev_is_kept(tokens: Path, tmp_path: Path, kind: str) -> None:
    training = dataclasses.replace(TRAIN, learning_rate=0.05, dev_blocks=3, checkpoint_every=3, keep_checkpoints=1)
    paths = [*shard_paths(tokens), *shard_paths(tokens, split="dev")]
    train_model(kind, training, paths, tmp_path / "model", tmp_path / "metrics.jsonl", tmp_path / "checkpoints")
    rows = read_json_lines(tmp_path / "metrics.jsonl")
    measured = {row["step"]: row["dev_loss"] for row in rows if "dev_loss" in row}
    assert list(measured) == [3, 6, 9, 12, 15, 18, 21, 24]
    # The last is the model itself.
    del measured[24]
    (kept,) = tmp_path.glob("checkpoints/*/step-*")
    assert int(kept.name[5:]) == min(measured, key=measured.__getitem__)
    assert read_json(kept / "manifest.json")["dev_loss"] == min(measured.values())
    for row in rows:
        if "dev_loss" in row:
            assert row["dev_loss"] == pytest.approx(np.mean([row[f"dev_loss/{domain}"] for domain in TRAINING]))
    model = load_model(tmp_path / "model", TRAINING if kind == "demix" else None)
    for number, path in enumerate(shard_paths(tokens, split="dev")):
        shard = TokenShard.open(path)
        table = log_probabilities(model, *blocks(shard, 32, 3 * 32))
        expected = -table[number if len(table) > 1 else 0].mean()
        assert stage.dev_loss(model, shard, 3, TRAINING[number]) == pytest.approx(expected, rel=1e-6)


def trained_rows(tokens: Path, folder: Path, **changes: object) -> list[dict]:
    training = dataclasses.replace(TRAIN, **changes)
    train_model(
        "demix", training, shard_paths(tokens), folder / "model", folder / "metrics.jsonl", folder / "checkpoints"
    )
    return read_json_lines(folder / "metrics.jsonl")


def test_how_a_step_is_computed_does_not_change_it(tokens: Path, tmp_path: Path) -> None:
    plain = trained_rows(tokens, tmp_path / "plain", precision="fp64")
    saving = {"micro_sequences": 1, "checkpoint_activations": True}
    other = trained_rows(tokens, tmp_path / "other", precision="fp64", **saving)
    assert [row["loss"] for row in other] == pytest.approx([row["loss"] for row in plain], rel=1e-12)
    # Coarser types: near, and not the same.
    for precision in ("fp32", "bf16", "fp16"):
        rows = trained_rows(tokens, tmp_path / precision, precision=precision)
        assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in plain], rel=5e-3)
        assert rows != plain
        assert load_model(tmp_path / precision / "model").token_embedding.dtype == torch.float32


def test_fp16_skips_updates_that_overflow_and_resumes_to_the_bit(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "FIRST_SCALE", 2.0**36)
    monkeypatch.setattr(loop, "GROW_AFTER", 4)
    whole = trained_rows(tokens, tmp_path / "whole", precision="fp16")
    scales = [row["loss_scale"] for row in whole]
    skipped = [row["gradient_norm"] is None for row in whole]
    assert skipped[:3] == [True] * 3
    assert not all(skipped)
    assert scales[0] == 2.0**35
    for before, after, skip in zip(scales, scales[1:], skipped[1:], strict=False):
        assert after in ([before / 2] if skip else [before, before * 2])
    assert any(after > before for before, after in itertools.pairwise(scales))
    assert whole[-1]["loss"] < whole[0]["loss"]
    # From the last checkpoint but one.
    kept = dataclasses.replace(TRAIN, precision="fp16", keep_checkpoints=100)
    monkeypatch.setattr(stage, "remove_states", lambda *_: None)
    folder = tmp_path / "resumed"
    places = folder / "model", folder / "metrics.jsonl", folder / "checkpoints"
    train_model("demix", kept, shard_paths(tokens), *places)
    for path in sorted(folder.glob("checkpoints/*/step-*"))[2:]:
        shutil.rmtree(path)
    train_model("demix", kept, shard_paths(tokens), *places)
    again = read_json_lines(folder / "metrics.jsonl")
    keys = ("step", "loss", "gradient_norm", "loss_scale")
    assert [[row[key] for key in keys] for row in again] == [[row[key] for key in keys] for row in whole]


<<<<<<< HEAD
=======
def numbered(step: int, dev_loss: float | None = None) -> state.State:
    return state.State(step, {"a": torch.full((2,), float(step))}, {"x": {"b": torch.zeros(1)}}, [], dev_loss)


def test_damaged_checkpoints_are_neither_kept_nor_in_the_way(tmp_path: Path) -> None:
    world = World()
    for step, dev_loss in ((5, 3.0), (10, 2.0), (15, 4.0), (20, 5.0)):
        state.save_state(tmp_path, numbered(step, dev_loss), world, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000015", "step-00000020"]
    for step in (10, 20):
        manifest = tmp_path / f"step-{step:08d}" / "manifest.json"
        manifest.write_text(manifest.read_text()[:20])
    assert state.newest_state(tmp_path, ("x",), world).step == 15
    # Newer than what was resumed from, and damaged: not the newest of those to keep.
    state.save_state(tmp_path, numbered(17), world, keep=1)
    assert state.newest_state(tmp_path, ("x",), world).step == 17
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000015", "step-00000017"]
    state.remove_states(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000015"]


def test_a_signal_after_a_checkpoint_leaves_that_as_it_is(tokens: Path, tmp_path: Path) -> None:
    training = dataclasses.replace(TRAIN, dev_blocks=2)
    paths = [*shard_paths(tokens), *shard_paths(tokens, split="dev")]
    places = tmp_path / "model", tmp_path / "metrics.jsonl", tmp_path / "checkpoints"

    def dying_after(original: object, wanted: int) -> object:
        def draw(*arguments: object) -> Batches:
            batches = original(*arguments)

            def batch(number: int) -> Batch:
                if number == wanted:
                    os.kill(os.getpid(), signal.SIGTERM)
                return batches.draw(number)

            return dataclasses.replace(batches, draw=batch)

        return draw

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "balanced_batches", dying_after(balanced_batches, 10))
        with pytest.raises(loop.StoppedError, match="step 10: a signal stopped training"):
            train_model("demix", training, paths, *places)
    (kept,) = tmp_path.glob("checkpoints/*/step-00000010")
    assert read_json(kept / "manifest.json")["dev_loss"] is not None


@pytest.mark.parametrize("ranks", [2, 4])
def test_adaptation_on_several_ranks_is_that_of_one(tokens: Path, trained: Path, tmp_path: Path, ranks: int) -> None:
    shards = [tokens / "tokens" / "fantasy" / f"{split}.arrow" for split in ("train", "dev")]
    command = [
        sys.executable, "-m", "demix", "adapt-dense", str(trained / "dense"), *map(str, shards),
        *map(str, shard_paths(tokens, split="dev")),
        "--settings", json.dumps(dataclasses.asdict(dataclasses.replace(ADAPT, precision="fp64"))),
    ]  # fmt: skip
    found = []
    for number in (1, ranks):
        folder = tmp_path / str(number)
        more = ["--output", folder / "model", "--metrics", folder / "m.jsonl", "--checkpoints", folder / "checkpoints"]
        subprocess.run([*command, *map(str, more), "--ranks", str(number)], check=True, capture_output=True)
        rows = read_json_lines(folder / "m.jsonl")
        found.append([value for row in rows for key, value in row.items() if "loss" in key or key == "step"])
    assert len(found[0]) > 40
    assert found[1] == pytest.approx(found[0], rel=1e-9)


def test_a_checkpoint_never_continues_another_run(tokens: Path, tmp_path: Path) -> None:
    other = dataclasses.replace(TRAIN, learning_rate=1e-3)
    train_until_killed(train_command("dense", tokens, tmp_path), tmp_path)
    log = subprocess.run(train_command("dense", tokens, tmp_path, other), check=True, capture_output=True, text=True)
    assert "resuming" not in log.stderr
    assert f"{tmp_path / 'checkpoints'}: holds states of other settings" in log.stderr
    assert list(tmp_path.glob("checkpoints/*/step-*")), "the other run's state is kept"


def test_domains_in_another_order_are_another_run(tokens: Path, tmp_path: Path) -> None:
    """The stacked experts come in the order of the domains: state of another order would swap them."""
    train_until_killed(train_command("demix", tokens, tmp_path), tmp_path)
    command = train_command("demix", tokens, tmp_path)
    paths = [*map(str, shard_paths(tokens))]
    turned = [paths[::-1][paths.index(word)] if word in paths else word for word in command]
    log = subprocess.run(turned, check=True, capture_output=True, text=True)
    assert "resuming" not in log.stderr


@pytest.mark.parametrize("name", ["metrics.jsonl", "shared.safetensors", "expert-dense.safetensors", "manifest.json"])
def test_damaged_state_is_named_and_the_one_before_taken(tokens: Path, tmp_path: Path, name: str) -> None:
    train_until_killed(train_command("dense", tokens, tmp_path), tmp_path, checkpoints=2)
    before, newest = sorted(path.parent for path in tmp_path.glob("checkpoints/*/step-*/manifest.json"))
    content = (newest / name).read_bytes()
    flipped = content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]
    (newest / name).write_bytes(flipped if name != "manifest.json" else content[:40])
    done = subprocess.run(train_command("dense", tokens, tmp_path), capture_output=True, text=True, check=True)
    assert f"{newest / name}" in done.stderr
    assert f"resuming at step {int(before.name[5:])} of" in done.stderr
    subprocess.run(train_command("dense", tokens, tmp_path / "whole"), check=True, capture_output=True)
    assert losses(tmp_path / "metrics.jsonl") == losses(tmp_path / "whole" / "metrics.jsonl")


def test_a_killed_adaptation_resumes_to_the_bit(tokens: Path, trained: Path, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "demix", "adapt-dense", str(trained / "dense"),
        *map(str, [tokens / "tokens" / "fantasy" / f"{split}.arrow" for split in ("train", "dev")]),
        *map(str, shard_paths(tokens, split="dev")), "--settings", json.dumps(dataclasses.asdict(ADAPT)),
    ]  # fmt: skip

    def into(folder: Path) -> list[str]:
        places = {"output": "model", "metrics": "metrics.jsonl", "checkpoints": "checkpoints"}
        return command + [word for key, name in places.items() for word in (f"--{key}", str(folder / name))]

    subprocess.run(into(tmp_path / "whole"), check=True, capture_output=True)
    train_until_killed(into(tmp_path / "killed"), tmp_path / "killed")
    log = subprocess.run(into(tmp_path / "killed"), check=True, capture_output=True, text=True).stderr
    assert "resuming at step" in log

    def rows(folder: Path) -> list[dict]:
        found = read_json_lines(folder / "metrics.jsonl")
        return [{key: value for key, value in row.items() if key != "tokens_per_second"} for row in found]

    assert rows(tmp_path / "killed") == rows(tmp_path / "whole")
    for file in ("shared.safetensors", "experts/dense.safetensors"):
        assert sha256_file(tmp_path / "killed" / "model" / file) == sha256_file(tmp_path / "whole" / "model" / file)


>>>>>>> seals
def test_a_loss_that_is_not_finite_stops_before_the_update(tokens: Path, tmp_path: Path) -> None:
    shards = opened(tokens)
    model = GPT(Architecture(**SIZES), shards[0].vocab_size, TRAINING).initialise(1)
    with torch.no_grad():
        model.blocks[0].feedforward.down_bias[1] = float("nan")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(DemixError, match=r"step 1: the loss of scripture is not finite"):
        train(
            model,
            balanced_batches(shards, TRAINING, 2, 32, 1),
            TRAINING,
            Optimization(steps=5, learning_rate=1e-3, warmup=0.1, clip=1.0, checkpoint_every=5),
            tmp_path,
        )
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.nan_to_num(7.0), before[name].nan_to_num(7.0))


def test_early_stopping_keeps_the_best_parameters(tokens: Path, tmp_path: Path) -> None:
    shards = opened(tokens)
    model = GPT(Architecture(**SIZES), shards[0].vocab_size, TRAINING).initialise(1)
    told = iter([5.0, 4.0, 3.0, 3.5, 3.6, 3.7])
    seen: list[dict] = []

    def evaluate(model: GPT) -> tuple[float, dict[str, float]]:
        seen.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        return next(told), {}

    rows = train(
        model,
        balanced_batches(shards, TRAINING, 2, 32, 1),
        TRAINING,
        Optimization(steps=100, learning_rate=1e-3, warmup=0.1, clip=1.0, checkpoint_every=1000),
        tmp_path,
        evaluate=evaluate,
        stopping=EarlyStopping(every=3, patience=2),
    )
    assert [row["step"] for row in rows if "early_stopping_loss" in row] == [0, 3, 6, 9, 12]
    assert max(row["step"] for row in rows) == 12
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, seen[2][name])
<<<<<<< HEAD
=======


@pytest.fixture(scope="module")
def trained(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DEMix and a dense model, and the DEMix model's score tables."""
    run = tmp_path_factory.mktemp("trained")
    scoring = Scoring(dev_blocks=10, test_tokens=500, precision="fp32", threads=1)
    longer = dataclasses.replace(TRAIN, tokens=10 * TRAIN.tokens)
    for kind in ("demix", "dense"):
        train_model(kind, longer, shard_paths(tokens), run / kind, run / f"{kind}.jsonl", run / "checkpoints" / kind)
    score(run / "demix", TRAINING, shard_paths(tokens, TRAINING + NOVEL, "dev"), scoring, run / "scores")
    return run


def test_experts_learn_their_domains(tokens: Path, trained: Path) -> None:
    model = load_model(trained / "demix", TRAINING)
    for number, path in enumerate(shard_paths(tokens, split="test")):
        shard = TokenShard.open(path)
        table = log_probabilities(model, *blocks(shard, 32)).sum(1)
        assert table.argmax() == number, path


def test_demix_dapt_adds_a_file_and_changes_no_other(tokens: Path, trained: Path) -> None:
    before = {path: sha256_file(path) for path in (trained / "demix").rglob("*") if path.is_file()}
    scores = trained / "scores"
    chosen = choose_parent(scores, "fantasy", TRAINING, blocks=ADAPT.parent_blocks, decay=ADAPT.parent_decay)
    adapt_expert(
        trained / "demix",
        tuple(tokens / "tokens" / "fantasy" / f"{split}.arrow" for split in ("train", "dev")),
        chosen,
        own_dev_losses(scores, TRAINING, ADAPT.forgetting_blocks),
        ADAPT,
        trained / "demix",
        trained / "adapted.jsonl",
        trained / "checkpoints" / "adapted",
    )
    after = {path: sha256_file(path) for path in (trained / "demix").rglob("*") if path.is_file()}
    new = {trained / "demix" / "experts" / f"fantasy.{kind}" for kind in ("safetensors", "json")}
    assert set(after) - set(before) == new
    assert {path: after[path] for path in before} == before
    assert expert_names(trained / "demix") == ("fantasy", *sorted(TRAINING))

    lineage = read_json(trained / "demix" / "experts" / "fantasy.json")
    assert lineage["parent"] == chosen["parent"] == max(chosen["priors"], key=chosen["priors"].__getitem__)
    assert sum(chosen["priors"].values()) == pytest.approx(1.0)
    assert lineage["lowest_dev_loss_expert"] == min(chosen["dev_losses"], key=chosen["dev_losses"].__getitem__)
    assert lineage["parent_sha256"] == before[trained / "demix" / "experts" / f"{chosen['parent']}.safetensors"]

    # The eight experts' scores are what they were, and the new expert knows its domain better than its parent.
    shard = TokenShard.open(tokens / "tokens" / "fantasy" / "dev.arrow")
    cut = blocks(shard, 32, 6 * 32)
    table = log_probabilities(load_model(trained / "demix", (*TRAINING, "fantasy")), *cut)
    old = log_probabilities(load_model(trained / "demix", TRAINING), *cut)
    np.testing.assert_array_equal(table[:3], old)
    parent = TRAINING.index(chosen["parent"])
    assert -table[3].mean() < -table[parent].mean()
    evaluations = read_json_lines(trained / "adapted.jsonl")
    evaluations = [row for row in evaluations if "dev_loss/fantasy" in row]
    assert evaluations[0]["dev_loss/fantasy"] == pytest.approx(-table[parent].mean(), rel=1e-5)
    assert min(row["dev_loss/fantasy"] for row in evaluations) == pytest.approx(-table[3].mean(), rel=1e-5)
    assert len({row["dev_loss/scripture"] for row in evaluations}) == 1


def test_dense_dapt_writes_its_own_model(tokens: Path, trained: Path) -> None:
    before = {path: sha256_file(path) for path in (trained / "dense").rglob("*") if path.is_file()}
    adapt_dense(
        trained / "dense",
        tuple(tokens / "tokens" / "fantasy" / f"{split}.arrow" for split in ("train", "dev")),
        shard_paths(tokens, split="dev"),
        ADAPT,
        trained / "dense-dapt-fantasy",
        trained / "dense-adapted.jsonl",
        trained / "checkpoints" / "dense-adapted",
    )
    assert {path: sha256_file(path) for path in before} == before
    old, new = load_model(trained / "dense"), load_model(trained / "dense-dapt-fantasy")
    assert not torch.equal(old.token_embedding, new.token_embedding)
    rows = read_json_lines(trained / "dense-adapted.jsonl")
    rows = [row for row in rows if "dev_loss/fantasy" in row]
    assert min(row["dev_loss/fantasy"] for row in rows) < rows[0]["dev_loss/fantasy"]
    assert len({row["dev_loss/scripture"] for row in rows}) > 1


def test_scoring_refuses_another_tokenizer(tokens: Path, trained: Path, tmp_path: Path) -> None:
    description = read_json(trained / "dense" / "model.json")
    other = tmp_path / "dense"
    (other / "experts").mkdir(parents=True)
    for path in (trained / "dense").rglob("*"):
        if path.is_file():
            (other / path.relative_to(trained / "dense")).write_bytes(path.read_bytes())
    write_json(other / "model.json", description | {"tokenizer_sha256": "0" * 64})
    with pytest.raises(DemixError, match="another tokenizer"):
        score(
            other,
            ("dense",),
            shard_paths(tokens, NOVEL, "dev"),
            Scoring(dev_blocks=2, test_tokens=None, precision="fp32", threads=1),
            tmp_path / "scores",
        )
    assert not (tmp_path / "scores").exists()
>>>>>>> seals
