"""Adding a domain to a trained model: DEMix-DAPT (a new expert) and Dense-DAPT (all parameters)."""

import dataclasses
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from demix.data.shards import TokenShard, blocks
from demix.evaluate.mix import cached_log_prior
from demix.evaluate.score import log_probabilities
from demix.evaluate.tables import read_scores
from demix.files import read_json
from demix.model.checkpoint import describe, expert_lineage, load_model, save_expert, save_shared
from demix.model.gpt import GPT
from demix.train.batches import balanced_batches
from demix.train.loop import EarlyStopping, Optimization, set_threads, train, write_metrics
from demix.train.stage import fingerprint, open_shards

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Adaptation:
    """How a model is adapted to one novel domain.

    `tokens` is the budget of one adaptation, `sequences` a step's; `learning_rate_factor` times the model's own
    rate is the peak rate. `dev_blocks` of the novel domain decide on stopping and `forgetting_blocks` of each
    training domain's dev split show what is forgotten. `parent_blocks` and `parent_decay` make the cached
    posterior that chooses the parent.
    """

    seed: int
    tokens: int
    sequences: int
    learning_rate_factor: float
    warmup: float
    clip: float
    weight_decay: float
    precision: str
    threads: int
    checkpoint_every: int
    evaluate_every: int
    patience: int
    dev_blocks: int
    forgetting_blocks: int
    parent_blocks: int
    parent_decay: float

    def optimization(self, learning_rate: float, length: int) -> Optimization:
        """The restarted schedule for a model that was trained at `learning_rate` on blocks of `length`."""
        return Optimization(
            steps=max(1, self.tokens // (self.sequences * length)),
            learning_rate=learning_rate * self.learning_rate_factor,
            warmup=self.warmup,
            clip=self.clip,
            weight_decay=self.weight_decay,
            precision=self.precision,
            checkpoint_every=self.checkpoint_every,
        )


def choose_parent(scores: Path, domain: str, experts: Sequence[str], adaptation: Adaptation) -> dict:
    """The expert to copy for `domain`: the highest cached posterior (`history`) on its dev split.

    Returns parent, its posterior, and for comparison the expert of lowest dev loss, with all posteriors and
    losses (nats per token) by expert. `scores` is scores/<model>.
    """
    table = read_scores(scores / f"{domain}.dev", experts)
    prior = np.exp(
        cached_log_prior(
            table.scores, table.mask, "history", decay=adaptation.parent_decay, blocks=adaptation.parent_blocks
        )
    )
    losses = -table.scores.sum(axis=(0, 1)) / table.tokens
    return {
        "parent": experts[int(prior.argmax())],
        "parent_prior": float(prior.max()),
        "priors": dict(zip(experts, prior.tolist(), strict=True)),
        "lowest_dev_loss_expert": experts[int(losses.argmin())],
        "dev_losses": dict(zip(experts, losses.tolist(), strict=True)),
    }


def adapt_expert(
    directory: Path,
    shards: tuple[Path, Path],
    training: Sequence[str],
    scores: Path,
    adaptation: Adaptation,
    metrics: Path,
    checkpoints: Path,
) -> None:
    """DEMix-DAPT (paper, section 5): add the expert of a novel domain to the model in `directory`.

    Copies the parent's feedforwards and trains the copy alone; no other file of the model is touched.
    `shards` are the domain's train and dev tokens; `training` names the model's own experts, whose scores lie
    below `scores`.
    """
    set_threads(adaptation.threads)
    _, dev_shard = open_shards(list(shards))
    domain = shards[0].parent.name
    chosen = choose_parent(scores, domain, training, adaptation)
    log.info("%s: parent %s (posterior %.3f)", domain, chosen["parent"], chosen["parent_prior"])
    model = load_model(directory, (chosen["parent"],))

    # The training domains keep their experts, so their losses are those of the score tables, at every step.
    unchanged = {}
    for name in training:
        table = read_scores(scores / f"{name}.dev", (name,))
        kept, mask = table.scores[: adaptation.forgetting_blocks], table.mask[: adaptation.forgetting_blocks]
        unchanged[f"dev_loss/{name}"] = float(-kept.sum() / mask.sum())

    def evaluate(model: GPT) -> tuple[float, dict[str, float]]:
        loss = _dev_loss(model, dev_shard, adaptation.dev_blocks)
        return loss, {f"dev_loss/{domain}": loss} | unchanged

    origin = chosen | {"parent_sha256": expert_lineage(directory, chosen["parent"])["sha256"]}
    rows, state, lineage = _adapt(
        model, directory, shards, adaptation, origin, checkpoints, evaluate, only=lambda name: ".feedforward." in name
    )
    save_expert(model, chosen["parent"], directory, lineage, name=domain)
    write_metrics(metrics, rows)
    shutil.rmtree(state, ignore_errors=True)


def adapt_dense(
    directory: Path,
    shards: tuple[Path, Path],
    training: Sequence[Path],
    adaptation: Adaptation,
    output: Path,
    metrics: Path,
    checkpoints: Path,
) -> None:
    """Dense-DAPT (paper, section 5): go on training all parameters of the dense model on a novel domain.

    `shards` are the novel domain's train and dev tokens, `training` the dev tokens of the training domains, on
    which forgetting is watched. The adapted model is written to `output`.
    """
    set_threads(adaptation.threads)
    _, dev_shard, *training_shards = open_shards([*shards, *training])
    domain = shards[0].parent.name
    model = load_model(directory, ("dense",))

    def evaluate(model: GPT) -> tuple[float, dict[str, float]]:
        loss = _dev_loss(model, dev_shard, adaptation.dev_blocks)
        others = {
            f"dev_loss/{path.parent.name}": _dev_loss(model, shard, adaptation.forgetting_blocks)
            for path, shard in zip(training, training_shards, strict=True)
        }
        return loss, {f"dev_loss/{domain}": loss} | others

    origin = {"parent": "dense", "parent_sha256": expert_lineage(directory, "dense")["sha256"]}
    rows, state, lineage = _adapt(model, directory, shards, adaptation, origin, checkpoints, evaluate)
    save_shared(model, output, describe(directory) | lineage | {"kind": "dense_dapt"})
    save_expert(model, "dense", output, lineage)
    write_metrics(metrics, rows)
    shutil.rmtree(state, ignore_errors=True)


def _adapt(
    model: GPT,
    directory: Path,
    shards: tuple[Path, Path],
    adaptation: Adaptation,
    origin: dict,
    checkpoints: Path,
    evaluate: Callable[[GPT], tuple[float, dict[str, float]]],
    **more: Callable[[str], bool],
) -> tuple[list[dict], Path, dict]:
    """Train a loaded model of one expert on the novel domain; returns its metrics, state and lineage."""
    description, domain, length = describe(directory), shards[0].parent.name, model.architecture.context
    train_shard = TokenShard.open(shards[0])
    train_data, dev_data = (read_json(path.with_suffix(".json"))["sha256"] for path in shards)
    origin = origin | {"adaptation": dataclasses.asdict(adaptation)}
    state = checkpoints / fingerprint(origin | {"data": [train_data, dev_data], "shared": description["shared_sha256"]})
    rows = train(
        model,
        balanced_batches([train_shard], [domain], adaptation.sequences, length, adaptation.seed),
        [domain],
        adaptation.optimization(description["training"]["learning_rate"], length),
        state,
        evaluate=evaluate,
        stopping=EarlyStopping(adaptation.evaluate_every, adaptation.patience),
        **more,
    )
    best = min((row for row in rows if "early_stopping_loss" in row), key=lambda row: row["early_stopping_loss"])
    return (
        rows,
        state,
        origin
        | {
            "steps": best["step"],
            "tokens": best["tokens"],
            "steps_run": rows[-1]["step"],
            "data_sha256": {domain: train_data},
            "tokenizer_sha256": train_shard.tokenizer_sha256,
        },
    )


def _dev_loss(model: GPT, shard: TokenShard, count: int) -> float:
    """Mean nats per token over the first `count` blocks of a dev split, for a model of one expert."""
    length = model.architecture.context
    return float(-log_probabilities(model, *blocks(shard, length, count * length)).mean())
