"""The train stage: from token shards to a model directory, a metrics file and, meanwhile, checkpoints."""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from demix.config.architecture import architecture_from, expert_parameters, shared_parameters
from demix.config.placement import placement
from demix.config.sections import (
    AdaptationRecipe,
    Execution,
    Optimizer,
    Seed,
    Threads,
    TrainingRecipe,
    fingerprinted,
)
from demix.data.shards import TokenShard, blocks
from demix.errors import DemixError
from demix.files import fingerprint, read_json
from demix.model.checkpoint import save_expert, save_shared
from demix.model.device import set_threads
from demix.model.gpt import GPT
from demix.model.scoring import log_probabilities
from demix.settings import Integer, Text, names_of, settings
from demix.train.batches import balanced_batches, mixed_batches, proportional_batches
from demix.train.loop import DivergedError, Optimization, train, write_metrics
from demix.train.parallel import World, joined
from demix.train.state import remove_states

log = logging.getLogger(__name__)

KINDS = ("demix", "dense", "dense_unbalanced", "domain_token")


@settings(kw_only=True)
class Training(TrainingRecipe):
    """How a model is trained from scratch. `tokens` is the model's total, `sequences` per domain and step."""

    seed: Seed
    architecture: dict[Text, Text | Integer]
    threads: Threads

    def steps(self, domains: int) -> int:
        """Optimizer updates for `domains` training domains: tokens / (D * sequences * T)."""
        step_tokens = domains * self.sequences * architecture_from(self.architecture).context
        if self.tokens < step_tokens:
            raise DemixError(
                "training.tokens", f"{self.tokens} is less than one step of {step_tokens} tokens", "raise it"
            )
        return self.tokens // step_tokens


def train_model(
    kind: str,
    training: Training,
    shards: list[Path],
    output: Path | None,
    metrics: Path,
    checkpoints: Path,
    replicas: Mapping[str, int] | None = None,
) -> None:
    """Train one model of `kind` (demix, dense, dense_unbalanced, domain_token) on the domains of `shards`.

    `shards` are tokens/<domain>/train.arrow, a domain each, and where `dev_blocks` are wanted the dev.arrow of all.
    Writes the model directory `output` and the `metrics` file at the end; state to resume from goes below
    `checkpoints`. Called by every rank of a world (`demix.train.parallel.joined`), each trains its share: `replicas`
    of some domains' experts, or as many of each.

    Without `output` only the metrics are kept, as for a sweep of learning rates: a run that diverges is then no error
    but ends its metrics with a row that says so (`diverged`).
    """
    set_threads(training.threads)
    dev, shards = [path for path in shards if path.stem == "dev"], [path for path in shards if path.stem != "dev"]
    domains = tuple(path.parent.name for path in shards)
    with joined() as world:
        places = placement(kind, domains, training.sequences, world.size, replicas)
        world, share = world.placed(places), places[world.rank]
        opened = open_shards(shards, world)
        evaluate = _dev_losses(kind, training, open_shards(dev, world), domains, world) if training.dev_blocks else None
        architecture = architecture_from(training.architecture)
        experts = tuple(domains[d] for d in share.experts) if kind == "demix" else ("dense",)
        model = GPT(architecture, opened[0].vocab_size, experts, domains if kind == "domain_token" else ())
        model.initialise(training.seed)

        steps, length = training.steps(len(domains)), architecture.context
        if kind == "dense_unbalanced":
            sequences = len(domains) * training.sequences
            batches = proportional_batches(opened, domains, sequences, length, training.seed, share)
        else:
            arrange = balanced_batches if kind == "demix" else mixed_batches
            batches = arrange(opened, domains, training.sequences, length, training.seed, share)

        data = {
            domain: read_json(path.with_suffix(".json"))["sha256"] for domain, path in zip(domains, shards, strict=True)
        }
        tokenizer_sha256 = opened[0].tokenizer_sha256
        lineage = {"training": dataclasses.asdict(training), "tokenizer_sha256": tokenizer_sha256, "kind": kind}
        # The order of the domains is the order of the stacked experts.
        state = checkpoints / fingerprint(
            lineage | {"training": fingerprinted(training), "data": data, "domains": domains}
        )
        if not state.exists() and any(checkpoints.glob("*/step-*")):
            log.info("%s: holds states of other settings, data or tokenizers, which are left alone", checkpoints)
        log.info(
            "%s: %d steps of %d domains, %d sequences each, on %d ranks",
            kind, steps, len(domains), training.sequences, world.size,
        )  # fmt: skip
        try:
            rows = train(
                model,
                batches,
                domains,
                optimization(training, steps, training.learning_rate),
                state,
                world=world,
                evaluate=evaluate,
            )
        except DivergedError as error:
            if output is not None:
                raise
            log.info("%s: %s", error.subject, error.cause)
            tokens = error.metrics[-1]["tokens"] if error.metrics else 0
            rows = [*error.metrics, {"step": error.step, "tokens": tokens, "diverged": error.cause}]

        if output is not None:
            vocab_size, tokens = opened[0].vocab_size, rows[-1]["tokens"]
            counts = {
                "shared_parameters": shared_parameters(architecture, vocab_size, len(model.domain_tokens)),
                "expert_parameters": expert_parameters(architecture),
            }
            seen = {"steps": steps, "tokens": tokens, "data_sha256": data}
            if world.rank == 0:
                save_shared(model, output, lineage | counts | seen)
            world.wait()
            for expert in experts if world.speaks else ():
                own = {expert: data[expert]} if kind == "demix" else data
                tokens_seen = tokens // len(domains) if kind == "demix" else tokens
                history = {"parent": None, "steps": steps, "tokens": tokens_seen, "data_sha256": own}
                save_expert(model, expert, output, history | {"tokenizer_sha256": tokenizer_sha256})
            world.wait()
        if world.rank == 0:
            write_metrics(metrics, rows)
            remove_states(state)


def _dev_losses(
    kind: str, training: Training, shards: list[TokenShard], domains: Sequence[str], world: World
) -> Callable[[GPT], tuple[float, dict[str, float]]]:
    """What the loop asks for at checkpoints: the mean over domains of the loss on dev, and the domains' own.

    A domain is evaluated by the first rank with its expert; a dense model's domains go round the ranks.
    """
    by_domain = {shard.path.parent.name: shard for shard in shards}
    for domain in domains:
        if domain not in by_domain:
            raise DemixError(f"domain {domain}", "has no dev shard", "give its dev.arrow, or dev_blocks 0")

    def evaluate(model: GPT) -> tuple[float, dict[str, float]]:
        found = [0.0] * len(domains)
        for number, domain in enumerate(domains):
            mine = domain in model.experts and world.speaks if kind == "demix" else number % world.size == world.rank
            if mine:
                found[number] = dev_loss(model, by_domain[domain], training.dev_blocks, domain)
        losses = dict(zip(domains, world.sum(found), strict=True))
        return sum(losses.values()) / len(losses), {f"dev_loss/{name}": loss for name, loss in losses.items()}

    return evaluate


def dev_loss(model: GPT, shard: TokenShard, count: int, domain: str) -> float:
    """Mean nats per token over the first `count` blocks of a dev split, under the expert (or token) of `domain`.

    A model of one expert is evaluated as it is.
    """
    length = model.architecture.context
    if len(model.experts) > 1:
        model = _single(model, domain)
    scored = log_probabilities(model, *blocks(shard, length, count * length))
    return float(-scored[model.domain_tokens.index(domain) if model.domain_tokens else 0].mean())


def _single(model: GPT, expert: str) -> GPT:
    """The model with one of its experts alone, on the same memory."""
    with torch.device("meta"):
        single = GPT(model.architecture, model.vocab_size, (expert,))
    number = model.experts.index(expert)
    experts = {name: tensor.detach()[number : number + 1] for name, tensor in model.expert_tensors().items()}
    single.load_state_dict(model.shared_tensors() | experts, assign=True)
    return single


def optimization(given: TrainingRecipe | AdaptationRecipe, steps: int, learning_rate: float) -> Optimization:
    """What the loop needs of the settings of a training or an adaptation, for `steps` updates at a peak rate."""
    shared = {name: getattr(given, name) for name in (*names_of(Optimizer), *names_of(Execution))}
    return Optimization(steps=steps, learning_rate=learning_rate, **shared)


def open_shards(paths: list[Path], world: World) -> list[TokenShard]:
    """Open token shards, the sha256 of each verified by one rank, and refuse those made with different tokenizers."""
    shards = [TokenShard.open(path, verify=number % world.size == world.rank) for number, path in enumerate(paths)]
    for path, shard in zip(paths, shards, strict=True):
        if shard.tokenizer_sha256 != shards[0].tokenizer_sha256:
            raise DemixError(path, f"was made with another tokenizer than {paths[0]}", "tokenize all domains again")
    return shards
