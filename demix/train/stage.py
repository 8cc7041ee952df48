"""The train stage: it turns token shards into a model directory and a metrics file, with checkpoints on the way."""

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from demix.config.adaptation import AdaptationRecipe
from demix.config.architecture import Architecture, architecture_from, parameters
from demix.config.models import DENSE_EXPERT, KINDS, Kind
from demix.config.training import Execution, Optimizer, Threads, TrainingRecipe, fingerprinted
from demix.data.shards import TokenShard, blocks
from demix.errors import DemixError
from demix.files import fingerprint, read_json, write_json_lines
from demix.model.checkpoint import save_expert, save_shared
from demix.model.device import set_threads
from demix.model.gpt import GPT
from demix.model.scoring import log_probabilities
from demix.model.tokenizer import copy_tokenizer
from demix.run.placement import Placement, place
from demix.settings import Integer, Number, Seed, Text, names_of, settings
from demix.train.batches import batches_of
from demix.train.branch import SeedState, branched, keep_seed, read_seed, upcycled
from demix.train.loop import DivergedError, Evaluation, train
from demix.train.parallel import World, joined
from demix.train.schedule import Optimization
from demix.train.state import remove_states, step_folder

log = logging.getLogger(__name__)


@settings(kw_only=True)
class Training(TrainingRecipe):
    """How a model is trained from scratch. `tokens` is the model's total; `sequences` counts per domain and step."""

    seed: Seed
    architecture: dict[Text, Text | Integer | dict[Text, Integer | Number]]
    threads: Threads

    def step_tokens(self, domains: int) -> int:
        """The tokens of one optimizer update on `domains` training domains: D * sequences * T."""
        return domains * self.sequences * architecture_from(self.architecture).context

    def steps(self, domains: int) -> int:
        """The optimizer updates for `domains` training domains: tokens / (D * sequences * T), rounded down."""
        step_tokens = self.step_tokens(domains)
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
    metrics: Path | None,
    checkpoints: Path,
    replicas: Mapping[str, int] | None = None,
    *,
    branch: Path | None = None,
    keep: tuple[int, ...] = (),
    until: int | None = None,
    share: int = 1,
    schedule: str = "continue",
) -> None:
    """Train one model of `kind` (`demix.config.models.KINDS`) on the domains of `shards`.

    `shards` are one tokens/<domain>/train.arrow per domain, and every domain's dev.arrow if `dev_blocks` is above 0.
    The model directory `output` and the `metrics` file are written at the end. Checkpoints go below `checkpoints`,
    where the states after `keep` updates stay. Training begins with the seed in the folder `branch`, if it is given,
    and has its schedule or one of its own (`demix.train.branch.read_seed`). It ends after `until` updates, if that is
    given; `output` is then the seed that other trainings begin with (`demix.train.branch`). Every rank of a world
    (`demix.train.parallel.joined`) calls this function and trains its own placement. `replicas` gives the experts of
    some domains more ranks (`demix.run.placement.place`); by default all experts have equally many. A model that is
    one of `share` experts of a larger model gets that part of the tokens.

    Without `output` only the metrics are kept, as a sweep of learning rates needs. A run that diverges then raises no
    error: its last row of metrics has the cause under `diverged`.
    """
    set_threads(training.threads)
    row = KINDS[kind]
    dev, shards = [path for path in shards if path.stem == "dev"], [path for path in shards if path.stem != "dev"]
    domains = tuple(path.parent.name for path in shards)
    with joined() as world:
        places = place(row, domains, training.sequences, world.size, replicas)
        world, placement = world.placed(places), places[world.rank]
        opened = open_shards(shards, world)
        evaluate = _dev_losses(row, training, open_shards(dev, world), domains, world) if training.dev_blocks else None
        steps, architecture = training.steps(len(domains) * share), architecture_from(training.architecture)
        batches = batches_of(
            row, opened, domains, training.sequences, architecture.context, training.seed, placement,
            architecture.objective,
        )  # fmt: skip
        model = _initial(row, architecture, opened[0].vocab_size, domains, placement).initialise(training.seed)

        seed = None if branch is None else read_seed(branch, identity_of(kind, training, shards, share=share), schedule)
        identity = identity_of(kind, training, shards, seed, share)
        tokenizer_sha256, data = identity["tokenizer_sha256"], identity["data"]
        lineage = {"training": dataclasses.asdict(training), "tokenizer_sha256": tokenizer_sha256, "kind": kind}
        state = checkpoints / fingerprint(identity)
        if not state.exists() and any(checkpoints.glob("*/step-*")):
            log.info("%s: holds states of other settings, data or tokenizers, which are left alone", checkpoints)
        log.info(
            "%s: %d steps of %d domains, %d sequences each, on %d ranks",
            kind, steps, len(domains), training.sequences, world.size,
        )  # fmt: skip
        update = training.step_tokens(len(domains) * share)
        first = None if seed is None else seed.load(update)
        if first is not None:
            first = upcycled(first, model) if row.routed else branched(first, _experts(row, domains), row.expert_scope)
        keeping = (*keep, *([until] if until else []))
        begin = first.step if first and seed and seed.restart else 0
        try:
            rows = train(
                model,
                batches,
                domains,
                optimization(training, steps, training.learning_rate, keep=keeping, begin=begin, until=until),
                state,
                world=world,
                first=first,
                evaluate=evaluate,
            )
        except DivergedError as error:
            if output is not None:
                raise
            log.info("%s: %s", error.subject, error.cause)
            tokens = error.metrics[-1]["tokens"] if error.metrics else 0
            rows = [*error.metrics, {"step": error.step, "tokens": tokens, "diverged": error.cause}]

        if output is not None and not until:
            # Of results/<run>/tokens/<domain>/train.arrow, or of clusters/<clustering>/shards/<cluster>/train.arrow.
            above = (folder / "tokenizer.json" for folder in shards[0].resolve().parents[2:5:2])
            tokenizer = next((path for path in above if path.is_file()), None)
            _write_model(row, model, lineage, data, steps, rows[-1]["tokens"], output, tokenizer, world, seed)
        if world.rank == 0:
            if output is not None and until:
                keep_seed(state / step_folder(until), output, identity)
            if metrics is not None:
                write_json_lines(metrics, rows)
            remove_states(state, keep, rows[-1].get("dev_loss", math.inf))


def identity_of(
    kind: str, training: Training, shards: list[Path], seed: SeedState | None = None, share: int = 1
) -> dict[str, Any]:
    """What identifies a training on the train.arrow of `shards`: the same identity is the same training."""
    more = {"share": share} if share > 1 else {}
    manifests = {path.parent.name: read_json(path.with_suffix(".json")) for path in shards}
    return {
        "kind": kind,
        "training": fingerprinted(training),
        "tokenizer_sha256": manifests[shards[0].parent.name]["tokenizer_sha256"],
        "data": {domain: manifest["sha256"] for domain, manifest in manifests.items()},
        # The order of the domains counts too, because it is the order of the stacked experts.
        "domains": list(manifests),
    } | (more if seed is None else more | {"parent": seed.origin})


def take_seed(kind: str, training: Training, shards: list[Path], step: int, kept: Path, output: Path) -> bool:
    """Move the state after `step` updates that a training kept below `kept` to `output`; returns whether there was one.

    `shards` are those of `train_model` without dev.
    """
    identity = identity_of(kind, training, shards)
    checkpoint = kept / fingerprint(identity) / step_folder(step)
    try:
        keep_seed(checkpoint, output, identity)
    except DemixError as error:
        again = f"{kept.name}: training it again to step {step}, after which it kept no state ({error.cause})"
        print(again, flush=True)
        return False
    return True


def _experts(kind: Kind, domains: tuple[str, ...]) -> tuple[str, ...]:
    return domains if kind.batches == "by_domain" else (DENSE_EXPERT,)


def _initial(
    kind: Kind, architecture: Architecture, vocab_size: int, domains: tuple[str, ...], placement: Placement
) -> GPT:
    """The model of `kind` with the experts of one rank, before its parameters are initialised."""
    if kind.routed != bool(architecture.routed):
        cause = f"{'lacks' if kind.routed else 'has'} routed, and the kind of the model is {kind.name}"
        raise DemixError("--settings.architecture", cause, "copy both from the command that snakemake prints")
    experts = _experts(kind, domains)
    # A model without expert tensors still stores its feedforwards in a separate file, as those of its one expert.
    scope = "feedforward" if kind.expert_scope == "none" else kind.expert_scope
    own = tuple(experts[number] for number in placement.experts)
    return GPT(architecture, vocab_size, own, domains if kind.domain_tokens else (), scope)


def _write_model(
    kind: Kind,
    model: GPT,
    lineage: dict[str, Any],
    data: dict[str, str],
    steps: int,
    tokens: int,
    output: Path,
    tokenizer: Path | None,
    world: World,
    seed: SeedState | None,
) -> None:
    """Write a trained model to `output`: rank 0 what its experts share, and one rank per expert the expert's own."""
    shared, own = parameters(model.architecture, model.vocab_size, len(model.domain_tokens), model.expert_scope)
    # All experts have learned from what the seed has seen.
    before = {} if seed is None else seed.manifest.data_sha256
    begun = seed.manifest.tokens or 0 if seed and seed.manifest.step else 0
    seen = {"steps": steps, "tokens": tokens, "data_sha256": before | data}
    if world.rank == 0:
        counts = {"shared_parameters": shared, "expert_parameters": own}
        if seed is not None:
            lineage = lineage | {"parent": seed.origin, "tokens_seed": begun, "tokens_branch": tokens - begun}
        save_shared(model, output, lineage | counts | seen)
        copy_tokenizer(tokenizer, output)
    world.wait()
    origin: dict[str, Any] = {"parent": None, "tokenizer_sha256": lineage["tokenizer_sha256"]}
    if seed is not None:
        origin |= {"parent": DENSE_EXPERT, "seeds": {seed.origin["state_sha256"]: begun}}
    for expert in model.experts if world.writes_experts else ():
        if kind.batches == "by_domain":
            own_tokens = begun + (tokens - begun) // len(data)
            seen = seen | {"tokens": own_tokens, "data_sha256": before | {expert: data[expert]}}
        save_expert(model, expert, output, origin | seen)
    world.wait()


def _dev_losses(
    kind: Kind, training: Training, shards: list[TokenShard], domains: Sequence[str], world: World
) -> Evaluation:
    """The evaluation at checkpoints: the mean over domains of the loss on dev, and the loss of each domain.

    The first rank with a domain's expert evaluates the domain. The ranks take turns with the domains of a
    dense model.
    """
    by_domain = {shard.path.parent.name: shard for shard in shards}
    for domain in domains:
        if domain not in by_domain:
            raise DemixError(f"domain {domain}", "has no dev shard", "pass its dev.arrow, or set dev_blocks to 0")

    def mine(model: GPT, number: int) -> bool:
        if kind.batches == "by_domain":
            return domains[number] in model.experts and world.writes_experts
        return number % world.size == world.rank

    def evaluate(model: GPT) -> tuple[float, dict[str, float]]:
        measured = [
            dev_loss(model, by_domain[domain], training.dev_blocks, domain) if mine(model, number) else 0.0
            for number, domain in enumerate(domains)
        ]
        losses = dict(zip(domains, world.sum(measured), strict=True))
        return sum(losses.values()) / len(losses), {f"dev_loss/{name}": loss for name, loss in losses.items()}

    return evaluate


def dev_loss(model: GPT, shard: TokenShard, count: int, domain: str) -> float:
    """Mean nats per token over the first `count` blocks of a dev split, under the expert or domain token of `domain`.

    A model with one expert is evaluated with that expert.
    """
    length = model.architecture.context
    if len(model.experts) > 1:
        model = model.only(domain)
    (scored,) = log_probabilities(model, *blocks(shard, length, count * length), domain_tokens=(domain,))
    return float(-scored.mean())


def optimization(
    given: TrainingRecipe | AdaptationRecipe, steps: int, learning_rate: float, **more: Any
) -> Optimization:
    """The loop's settings from those of a training or an adaptation, for `steps` updates at a peak `learning_rate`.

    `more` are those that only the loop has.
    """
    shared = {name: getattr(given, name) for name in (*names_of(Optimizer), *names_of(Execution))}
    return Optimization(steps=steps, learning_rate=learning_rate, **shared, **more)


def open_shards(paths: list[Path], world: World) -> list[TokenShard]:
    """Open token shards. One rank verifies the sha256 of each. Raises DemixError where their tokenizers differ."""
    shards = [TokenShard.open(path, verify=number % world.size == world.rank) for number, path in enumerate(paths)]
    for path, shard in zip(paths, shards, strict=True):
        if shard.tokenizer_sha256 != shards[0].tokenizer_sha256:
            raise DemixError(path, f"was made with another tokenizer than {paths[0]}", "tokenize all domains again")
    return shards
