"""The train stage: from token shards to a model directory, a metrics file and, meanwhile, checkpoints."""

import dataclasses
import hashlib
import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

from demix.data.shards import TokenShard
from demix.errors import DemixError
from demix.files import read_json
from demix.model.checkpoint import save_expert, save_shared
from demix.model.config import architecture_from, expert_parameters, shared_parameters
from demix.model.gpt import GPT
from demix.train.batches import balanced_batches, mixed_batches, proportional_batches
from demix.train.loop import Optimization, set_threads, train, write_metrics

log = logging.getLogger(__name__)

KINDS = ("demix", "dense", "dense_unbalanced", "domain_token")


@dataclass(frozen=True)
class Training:
    """How a model is trained from scratch. `tokens` is the model's total, `sequences` per domain and step."""

    seed: int
    architecture: dict
    tokens: int
    sequences: int
    learning_rate: float
    warmup: float
    clip: float
    weight_decay: float
    precision: str
    threads: int
    checkpoint_every: int

    def steps(self, domains: int) -> int:
        """Optimizer updates for `domains` training domains: tokens / (D * sequences * T)."""
        step_tokens = domains * self.sequences * architecture_from(self.architecture).context
        if self.tokens < step_tokens:
            raise DemixError(
                "training.tokens", f"{self.tokens} is less than one step of {step_tokens} tokens", "raise it"
            )
        return self.tokens // step_tokens


def train_model(
    kind: str, training: Training, shards: list[Path], output: Path, metrics: Path, checkpoints: Path
) -> None:
    """Train one model of `kind` (demix, dense, dense_unbalanced, domain_token) on the domains of `shards`.

    `shards` are tokens/<domain>/train.arrow, a domain each. Writes the model directory `output` and the
    `metrics` file at the end; state to resume from goes below `checkpoints`.
    """
    set_threads(training.threads)
    domains = tuple(path.parent.name for path in shards)
    opened = open_shards(shards)
    architecture = architecture_from(training.architecture)
    experts = domains if kind == "demix" else ("dense",)
    model = GPT(architecture, opened[0].vocab_size, experts, domains if kind == "domain_token" else ())
    model.initialise(training.seed)

    steps, length = training.steps(len(domains)), architecture.context
    if kind == "dense_unbalanced":
        sequences = len(domains) * training.sequences
        batches = proportional_batches(opened, domains, sequences, length, training.seed)
    else:
        batches = balanced_batches(opened, domains, training.sequences, length, training.seed)
        batches = batches if kind == "demix" else mixed_batches(batches)

    data = {
        domain: read_json(path.with_suffix(".json"))["sha256"] for domain, path in zip(domains, shards, strict=True)
    }
    lineage = {"training": dataclasses.asdict(training), "tokenizer_sha256": opened[0].tokenizer_sha256, "kind": kind}
    # The order of the domains is the order of the stacked experts.
    state = checkpoints / fingerprint(lineage | {"data": data, "domains": domains})
    log.info("%s: %d steps of %d domains, %d sequences each", kind, steps, len(domains), training.sequences)
    rows = train(model, batches, domains, optimization(training, steps), state)

    vocab_size, tokens = opened[0].vocab_size, rows[-1]["tokens"]
    counts = {
        "shared_parameters": shared_parameters(architecture, vocab_size, len(model.domain_tokens)),
        "expert_parameters": expert_parameters(architecture),
    }
    seen = {"steps": steps, "tokens": tokens, "data_sha256": data}
    save_shared(model, output, lineage | counts | seen)
    for expert in experts:
        own = {expert: data[expert]} if kind == "demix" else data
        save_expert(
            model,
            expert,
            output,
            {
                "parent": None,
                "steps": steps,
                "tokens": tokens // len(experts),
                "data_sha256": own,
                "tokenizer_sha256": lineage["tokenizer_sha256"],
            },
        )
    write_metrics(metrics, rows)
    shutil.rmtree(state, ignore_errors=True)


def optimization(training: Training, steps: int) -> Optimization:
    """What the loop needs of `training`, for `steps` updates."""
    names = {field.name for field in dataclasses.fields(Optimization)} - {"steps"}
    return Optimization(steps=steps, **{name: getattr(training, name) for name in names})


def open_shards(paths: list[Path]) -> list[TokenShard]:
    """Open token shards, their sha256 verified, and refuse shards made with different tokenizers."""
    shards = [TokenShard.open(path, verify=True) for path in paths]
    for path, shard in zip(paths, shards, strict=True):
        if shard.tokenizer_sha256 != shards[0].tokenizer_sha256:
            raise DemixError(path, f"was made with another tokenizer than {paths[0]}", "tokenize all domains again")
    return shards


def fingerprint(description: dict) -> str:
    """16 hexadecimal digits that tell runs apart: a checkpoint only ever continues the run that wrote it.

    How often checkpoints are written does not tell runs apart.
    """
    for part in ("training", "adaptation"):
        if part in description:
            kept = {key: value for key, value in description[part].items() if key != "checkpoint_every"}
            description = description | {part: kept}
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:16]
