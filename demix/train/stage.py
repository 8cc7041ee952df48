"""The train stage: it writes a model directory and a metrics file from token shards, with checkpoints meanwhile."""

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from demix.config.adaptation import AdaptationRecipe
from demix.config.architecture import Architecture, architecture_from
from demix.config.counts import parameters
from demix.config.models import DENSE_EXPERT, KINDS, Kind
from demix.config.training import Execution, OptimizerRecipe, Threads, TrainingRecipe, fingerprinted
from demix.data.shards import TokenShard
from demix.errors import DemixError
from demix.files import fingerprint, read_json, sha256_file, write_json_lines
from demix.launch.job import Places
from demix.model.device import set_threads
from demix.model.directory import SHARED, copy_tokenizer, save_expert, save_manifest, save_shared
from demix.model.gpt import GPT
from demix.run.placement import Placement, place
from demix.settings import Integer, Number, Seed, Switch, Text, names_of
from demix.train.batches import batches_of, open_shards
from demix.train.branch import SeedState, anchored, branched, freeze_except, keep_seed, read_seed, upcycled
from demix.train.loop import Evaluation, dev_losses, train
from demix.train.parallel import World, joined
from demix.train.schedule import Optimization
from demix.train.state import State, remove_states, step_folder
from demix.train.trainer import DivergedError

log = logging.getLogger(__name__)


class Training(TrainingRecipe):
    """How a model is trained from scratch. `tokens` is the model's total; `sequences` counts per domain and step."""

    seed: Seed
    architecture: dict[Text, Text | Integer | Number | Switch | dict[Text, Text | Integer | Number] | None]
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


@dataclass(frozen=True)
class ModelTraining:
    """The training of one model of a `kind` (`demix.config.models.KINDS`): everything known before it begins.

    `shards` are one tokens/<domain>/train.arrow per domain, and every domain's dev.arrow if `dev_blocks` is above 0.
    Training starts from the seed (a kept state of a dense training, or a model) in the folder `branch`, if there is
    one. It continues the seed's schedule, or has its own (with `restart`, and always if the model has routers). A model
    that is one of `share` experts of a larger model gets that fraction of the tokens. The states after `keep` updates
    are kept. If `until` is given, training ends after that many updates and writes the seed from which other trainings
    start. An anchored expert also reads the `public` text of all domains at its start.
    """

    kind: str
    settings: Training
    shards: Sequence[Path]
    branch: Path | None = None
    restart: bool = False
    share: int = 1
    keep: tuple[int, ...] = ()
    until: int | None = None
    public: Sequence[Path] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise DemixError(f"kind {self.kind}", "is not known", f"use one of {', '.join(KINDS)}")

    @property
    def row(self) -> Kind:
        """The model type in `KINDS`."""
        return KINDS[self.kind]

    @property
    def train_shards(self) -> list[Path]:
        """The train.arrow of each domain."""
        return [path for path in self.shards if path.stem != "dev"]

    @property
    def domains(self) -> tuple[str, ...]:
        """The domains on which the model trains, in order."""
        return tuple(path.parent.name for path in self.train_shards)

    @property
    def experts(self) -> tuple[str, ...]:
        """The experts of the model."""
        return self.domains if self.row.batches == "by_domain" else (DENSE_EXPERT,)

    @property
    def steps(self) -> int:
        """The optimizer updates of the whole training."""
        return self.settings.steps(len(self.domains) * self.share)

    def of_expert(self, domain: str) -> "ModelTraining":
        """The training of one domain's expert as a whole model, with its share of the tokens."""
        if self.row.expert_scope != "model" or domain not in self.domains:
            cause = f"is not an expert of kind {self.kind} that is trained by itself on its own tokens"
            cure = f"omit --expert, or use kind branched or anchored and one of {', '.join(self.domains)}"
            raise DemixError(f"--expert {domain}", cause, cure)
        own = [path for path in self.shards if path.parent.name == domain]
        public = self.train_shards if self.row.anchored else ()
        return dataclasses.replace(self, shards=own, share=len(self.domains), public=public)

    @cached_property
    def seed(self) -> SeedState | None:
        """The state or model from which training starts.

        Raises DemixError if it does not fit (`train.branch.read_seed`).
        """
        restart = self.restart or self.row.has_routers
        return None if self.branch is None else read_seed(self.branch, self._own_identity, restart)

    @property
    def identity(self) -> dict[str, Any]:
        """The identity of the training. Trainings with the same identity yield the same bits."""
        return self._own_identity | ({} if self.seed is None else {"parent": self.seed.origin})

    @cached_property
    def _own_identity(self) -> dict[str, Any]:
        manifests, public = (
            {path.parent.name: read_json(path.with_suffix(".json")) for path in paths}
            for paths in (self.train_shards, self.public)
        )
        more: dict[str, Any] = {"share": self.share} if self.share > 1 else {}
        more |= {"public": {domain: manifest["sha256"] for domain, manifest in public.items()}} if public else {}
        return {
            "kind": self.kind,
            "training": fingerprinted(self.settings),
            "tokenizer_sha256": manifests[self.domains[0]]["tokenizer_sha256"],
            "data": {domain: manifest["sha256"] for domain, manifest in manifests.items()},
            # The order of the domains is included, because it is the order of the stacked experts.
            "domains": list(manifests),
        } | more


def train_model(training: ModelTraining, places: Places) -> None:
    """Train one model, with checkpoints meanwhile, and at the end write its directory or seed, and its metrics.

    Every rank of a world (`demix.train.parallel.joined`) calls this function and trains its own placement
    (`demix.run.placement.place`).

    If only the metrics are kept, as for a sweep of learning rates, a training that diverges raises no error: its last
    row of metrics has the cause under `diverged`.
    """
    settings, domains, until = training.settings, training.domains, training.until
    set_threads(settings.threads)
    with joined() as world:
        ranks = place(training.row, domains, settings.sequences, world.size)
        world, placement = world.placed(ranks), ranks[world.rank]
        opened = open_shards(training.train_shards, world)
        evaluate = _dev_losses(training, world) if settings.dev_blocks else None
        steps, architecture = training.steps, architecture_from(settings.architecture)
        batches = batches_of(
            training.row.batches, opened, domains, settings.sequences, architecture.context, settings.seed, placement,
            architecture.objective,
        )  # fmt: skip
        model = _initial(training, architecture, opened[0], placement).initialise(settings.seed)
        state = places.checkpoints / fingerprint(training.identity)
        if not state.exists() and any(places.checkpoints.glob("*/step-*")):
            log.info("%s: keeping states of other settings, data or tokenizers", places.checkpoints)
        log.info(
            "%s: %d steps of %d domains, %d sequences each, on %d ranks",
            training.kind, steps, len(domains), settings.sequences, world.size,
        )  # fmt: skip
        first = _begun(training, model, world)
        how = optimization(
            settings, steps, settings.learning_rate, keep=(*training.keep, *([until] if until else [])), until=until,
            begin=first.step if first and training.seed and training.seed.restart else 0,
        )  # fmt: skip
        try:
            rows = train(model, batches, domains, how, state, world=world, first=first, evaluate=evaluate)
        except DivergedError as error:
            if places.output is not None:
                raise
            log.info("%s: %s", error.subject, error.cause)
            rows = error.rows

        if places.output is not None and not until:
            _write_model(training, model, rows[-1]["tokens"], places.output, world)
        if world.rank == 0:
            if places.output is not None and until:
                keep_seed(state / step_folder(until), places.output, training.identity)
            if places.metrics is not None:
                write_json_lines(places.metrics, rows)
            remove_states(state, training.keep)


def _begun(training: ModelTraining, model: GPT, world: World) -> State | None:
    """The state of the seed, converted to one of the initialised `model`; None without a seed.

    Parameters of the model that are not trained are frozen.
    """
    first = None
    if training.seed is not None:
        state = training.seed.load(training.settings.step_tokens(len(training.domains) * training.share))
        first = branched(state, training.experts, training.row.expert_scope)
        first = upcycled(first, model) if training.row.has_routers else first
    if training.settings.trained:
        if first is None:
            cause = "is routers, but this training does not start from experts"
            raise DemixError("--settings.trained", cause, "give --branch with a token-routed model")
        freeze_except(model, first, lambda name: name.endswith(".router"))
    if training.row.anchored:
        if first is None:
            cause = "trains next to a parent, but this training has none"
            raise DemixError(f"kind {training.kind}", cause, "give --branch with a dense model or its warm start")
        read = open_shards(training.public, world)
        first = anchored(model, first, {shard.path.parent.name: shard for shard in read})
    return first


def _initial(training: ModelTraining, architecture: Architecture, shard: TokenShard, placement: Placement) -> GPT:
    """The model with the experts of one rank, before its parameters are initialised; `shard` has its vocabulary."""
    kind = training.row
    if kind.has_routers != bool(architecture.routed):
        cause = f"{'lacks' if kind.has_routers else 'has'} routed, but the model is of kind {kind.name}"
        raise DemixError("--settings.architecture", cause, "copy kind and --settings from snakemake's command")
    # A model without expert tensors also stores its feedforwards in a separate file, as those of its one expert.
    scope = "feedforward" if kind.expert_scope == "none" else kind.expert_scope
    own = tuple(training.experts[number] for number in placement.experts)
    domain_tokens = training.domains if kind.domain_tokens else ()
    return GPT(architecture, shard.vocab_size, own, domain_tokens, scope)


def _write_model(training: ModelTraining, model: GPT, tokens: int, output: Path, world: World) -> None:
    """Write a trained model to `output`: rank 0 writes the shared tensors, and one rank per expert that expert's own.

    At the end, rank 0 writes the manifest.
    """
    shared, own = parameters(model.architecture, model.vocab_size, len(model.domain_tokens), model.expert_scope)
    seed, identity = training.seed, training.identity
    tokenizer_sha256, data = identity["tokenizer_sha256"], identity["data"]
    # All experts were trained on the tokens of the seed.
    before = {} if seed is None else seed.manifest.data_sha256
    begun = seed.manifest.tokens or 0 if seed and seed.manifest.step else 0
    seen = {"steps": training.steps, "tokens": tokens, "data_sha256": before | data}
    if world.rank == 0:
        save_shared(model, output)
        # The path is results/<run>/tokens/<domain>/train.arrow or …/clusters/<clustering>/shards/<cluster>/train.arrow.
        above = (folder / "tokenizer.json" for folder in training.shards[0].resolve().parents[2:5:2])
        copy_tokenizer(next((path for path in above if path.is_file()), None), output, tokenizer_sha256)
    world.wait()
    shared_sha256 = sha256_file(output / SHARED)
    origin: dict[str, Any] = {"parent": None, "tokenizer_sha256": tokenizer_sha256, "shared_sha256": shared_sha256}
    if seed is not None:
        origin |= {"parent": DENSE_EXPERT, "seeds": {seed.origin["state_sha256"]: begun}}
        origin |= {"choices": seed.manifest.choices} if seed.manifest.choices else {}
    for expert in model.experts if world.writes_experts else ():
        learned = seen
        if training.row.batches == "by_domain":
            own_tokens = begun + (tokens - begun) // len(data)
            learned = seen | {"tokens": own_tokens, "data_sha256": before | {expert: data[expert]}}
        save_expert(model, expert, output, origin | learned)
    world.wait()
    if world.rank == 0:
        about = {
            "training": training.settings.as_dict(),
            "tokenizer_sha256": tokenizer_sha256,
            "kind": training.kind,
            "shared_parameters": shared,
            "expert_parameters": own,
        }
        if seed is not None:
            about |= {"parent": seed.origin, "tokens_seed": begun}
        save_manifest(model, output, training.experts, about | seen)


def _dev_losses(training: ModelTraining, world: World) -> Evaluation:
    """The evaluation at checkpoints: the mean over domains of the loss on dev, and the loss of each domain.

    The first rank with a domain's expert evaluates the domain.
    """
    shards = open_shards([path for path in training.shards if path.stem == "dev"], world)
    by_domain = {shard.path.parent.name: shard for shard in shards}
    for domain in training.domains:
        if domain not in by_domain:
            raise DemixError(f"domain {domain}", "has no dev shard", "pass its dev.arrow, or set dev_blocks to 0")

    def mine(model: GPT, domain: str) -> bool:
        return domain in model.experts and world.writes_experts

    measured = {domain: (by_domain[domain], training.settings.dev_blocks) for domain in training.domains}
    by_expert = training.row.batches == "by_domain"
    return dev_losses(measured, world, lambda losses: sum(losses) / len(losses), mine if by_expert else None)


def optimization(
    given: TrainingRecipe | AdaptationRecipe, steps: int, learning_rate: float, **more: Any
) -> Optimization:
    """The loop's settings from those of a training or an adaptation, for `steps` updates at a peak `learning_rate`.

    `more` are settings that only the loop has.
    """
    shared = {name: getattr(given, name) for name in (*names_of(OptimizerRecipe), *names_of(Execution))}
    return Optimization(steps=steps, learning_rate=learning_rate, **shared, **more)
