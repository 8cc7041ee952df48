"""Adding a domain to a trained model: DEMix-DAPT (a new expert) and Dense-DAPT (all parameters)."""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demix.config.adaptation import PASSES, AdaptationRecipe, RateFactors
from demix.config.models import DENSE_EXPERT
from demix.config.training import LearningRate, Threads, fingerprinted, stated, taken
from demix.data.shards import TokenShard
from demix.errors import DemixError
from demix.files import fingerprint, read_json, write_json_lines
from demix.launch.job import Places
from demix.model.checkpoint import (
    describe,
    expert_lineage,
    expert_names,
    load_model,
    refuse_other_tokenizer,
    refuse_routed,
    save_expert,
    save_shared,
    whole_models,
)
from demix.model.device import set_threads
from demix.model.experts import changing
from demix.model.gpt import GPT
from demix.model.merge import averaged, origins_of
from demix.model.tokenizer import copy_tokenizer, tokenizer_path
from demix.run.placement import place_experts
from demix.run.run import Run
from demix.settings import Positive, Seed, settings, settings_from
from demix.train.batches import balanced_batches
from demix.train.loop import Evaluation, train
from demix.train.metrics import DivergedError, Row
from demix.train.parallel import World, joined
from demix.train.stage import dev_loss, open_shards, optimization
from demix.train.state import remove_states
from demix.train.stopping import EarlyStopping

log = logging.getLogger(__name__)

# What a new expert begins with.
INITS = ("parent", "average")
# The most tokens, by the number of experts, where nothing says how many the model was trained on.
TOKENS = 10_000_000
# The peak learning rate where nothing says with which the model was trained.
LEARNING_RATE = 1e-4


@settings(kw_only=True)
class Adaptation(AdaptationRecipe):
    """How a model is adapted to one novel domain.

    `learning_rate` is the peak where it is no fraction of the model's.
    """

    tokens: Positive
    seed: Seed
    threads: Threads
    learning_rate: LearningRate | None = None

    def bounded(self, text: int) -> "Adaptation":
        """These settings with no more tokens than `passes` over a train split of `text` tokens."""
        return dataclasses.replace(self, tokens=min(self.tokens, self.passes * text)) if self.passes else self

    def steps(self, length: int) -> int:
        """The most optimizer updates, with sequences of `length` tokens."""
        return max(1, self.tokens // (self.sequences * length))

    def trials(self) -> tuple["Adaptation", ...]:
        """One adaptation for each factor of the sweep, or this one where there is none."""
        factors = self.sweep.factors if self.sweep else (self.learning_rate_factor,)
        return tuple(dataclasses.replace(self, learning_rate_factor=one, sweep=None) for one in factors)


def adaptation_of(
    model: Path, tokens: int | None, rate: float | None, learning_rate: float | None = None
) -> Adaptation:
    """The settings of adaptations to `model`: those of its run, else those of an expert that was added, else defaults.

    A sweep of learning rates is left out, and so is a bound of passes where `tokens` is given. A model that demix has
    not trained gets `LEARNING_RATE` where no `learning_rate` is given. Raises DemixError for a `rate` of a model whose
    learning rate nobody knows.
    """
    trained = describe(model).content.get("training") or {}
    if rate and (learning_rate or not trained):
        known = "the learning rate is given, too" if learning_rate else f"{model} does not say its learning rate"
        raise DemixError("--rate", f"is a fraction of the model's, and {known}", "use --learning-rate alone")
    given: dict[str, Any] = {"learning_rate_factor": RateFactors().demix}
    for name in expert_names(model):
        given |= read_json(model / "experts" / f"{name}.json").get("adaptation") or {}
    if whole := Run.of_model(model):
        row = whole.row_of(model.resolve().name)[0]
        parent = next((one for one in whole.planned if one.name == row), None)
        given = taken(AdaptationRecipe, whole.config.adaptation)
        if parent is not None:
            given["learning_rate_factor"] = whole.learning_rate_factor(parent)
    if "tokens" not in given:
        share = max(1, trained.get("tokens", TOKENS) // len(expert_names(model)))
        given = {"tokens": share, "passes": PASSES} | given
    given |= {"seed": trained.get("seed", 1), "threads": trained.get("threads", 1), "sweep": None}
    given |= {"tokens": tokens, "passes": None} if tokens else {}
    given |= {"learning_rate_factor": rate} if rate else {}
    if learning_rate or not trained:
        given |= {"learning_rate": learning_rate or given.get("learning_rate") or LEARNING_RATE}
    return settings_from(Adaptation, given)


def adapt_expert(
    directory: Path,
    shards: tuple[Path, Path],
    chosen: dict[str, Any],
    unchanged: Mapping[str, float],
    adaptation: Adaptation,
    places: Places,
    init: str = "",
) -> None:
    """DEMix-DAPT (paper, section 6): add the expert of a novel domain to the model in `directory`.

    With `init` parent the likeliest parent's own tensors are copied. With average the expert begins as the average of
    all experts, weighted by their posterior on the domain's dev split (Gururangan et al. 2023, section 2.4), which is
    what experts that are whole models do by default. The new expert alone is trained. No other file of the model
    changes. The files of the expert go below the output of `places`, by default `directory`.

    `shards` are the domain's train and dev tokens. `chosen` comes from `demix.evaluate.choice.choose_parent`: its key
    `parent` names the expert to copy. All of it goes into the lineage, but an average has no single parent. `unchanged`
    are the training domains' losses on dev in nats per token, by domain. The training domains keep their experts, so
    these losses hold at every step.
    """
    if init not in ("", *INITS):
        raise DemixError(f"--init {init}", "is not known", f"use {' or '.join(INITS)}")
    refuse_routed(directory, "no expert of a domain can join")
    init = init or ("average" if whole_models(directory) else "parent")
    set_threads(adaptation.threads)
    with joined() as world:
        _, dev_shard = open_shards(list(shards), world)
        domain, parent = shards[0].parent.name, chosen["parent"]
        log.info("%s: %s, likeliest expert %s (posterior %.3f)", domain, init, parent, chosen["parent_prior"])
        others = {f"dev_loss/{name}": loss for name, loss in unchanged.items()}
        average, origin = None, {**chosen}
        if init == "average":
            average, parents = averaged(directory, chosen["priors"])
            origin |= {"parent": None, "parents": origins_of(chosen["priors"], parents)}
            # That of one parent. The weights say it of all.
            del origin["parent_prior"]
        else:
            origin |= {"parent_sha256": expert_lineage(directory, parent).sha256}

        def begin() -> GPT:
            model = load_model(directory, (parent,))
            if average is not None:
                shared = {name: tensor.detach() for name, tensor in model.shared_tensors().items()}
                model.load_state_dict(model.stacked(shared, {parent: average}))
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(model.owned(name))
            return model

        def evaluate(model: GPT) -> tuple[float, dict[str, float]]:
            own = dev_loss(model, dev_shard, adaptation.dev_blocks, domain) if world.takes(0) else 0.0
            (loss,) = world.sum([own])
            return loss, {f"dev_loss/{domain}": loss} | others

        found = _Adapting(directory, shards, origin, places.checkpoints, begin, evaluate, world).best(adaptation)
        if world.rank == 0:
            with changing(places.output or directory):
                save_expert(found.model, parent, directory, found.lineage, domain, places.output)
            found.finish(places.metrics)


def adapt_dense(
    directory: Path, shards: tuple[Path, Path], training: Sequence[Path], adaptation: Adaptation, places: Places
) -> None:
    """Dense-DAPT (paper, section 6): train all parameters of the dense model further on a novel domain.

    `shards` are the novel domain's train and dev tokens. `training` are the dev tokens of the training domains, which
    measure forgetting. The adapted model is written to the output of `places`.
    """
    if places.output is None:
        raise DemixError("--output", "is missing", "name a folder for the adapted model")
    set_threads(adaptation.threads)
    with joined() as world:
        _, dev_shard, *training_shards = open_shards([*shards, *training], world)
        measured = {shards[0].parent.name: (dev_shard, adaptation.dev_blocks)} | {
            path.parent.name: (shard, adaptation.forgetting_blocks)
            for path, shard in zip(training, training_shards, strict=True)
        }

        def evaluate(model: GPT) -> tuple[float, dict[str, float]]:
            each = enumerate(measured.items())
            own = [dev_loss(model, *which, name) if world.takes(n) else 0.0 for n, (name, which) in each]
            losses = world.sum(own)
            return losses[0], {f"dev_loss/{name}": loss for name, loss in zip(measured, losses, strict=True)}

        def begin() -> GPT:
            return load_model(directory, (DENSE_EXPERT,))

        origin = {"parent": DENSE_EXPERT, "parent_sha256": expert_lineage(directory, DENSE_EXPERT).sha256}
        found = _Adapting(directory, shards, origin, places.checkpoints, begin, evaluate, world).best(adaptation)
        if world.rank == 0:
            save_shared(
                found.model, places.output, describe(directory).content | found.lineage | {"kind": "dense_dapt"}
            )
            copy_tokenizer(tokenizer_path(directory), places.output)
            save_expert(found.model, DENSE_EXPERT, places.output, found.lineage)
            found.finish(places.metrics)


@dataclass(frozen=True)
class _Adapted:
    """An adapted model, its metrics, the folders of the training states, and the lineage."""

    model: GPT
    rows: list[Row]
    states: tuple[Path, ...]
    lineage: dict[str, Any]

    @property
    def best(self) -> Row:
        """The evaluation of the lowest loss on dev, whose parameters the model has."""
        return min(
            (row for row in self.rows if "early_stopping_loss" in row), key=lambda row: row["early_stopping_loss"]
        )

    def finish(self, metrics: Path | None) -> None:
        """Write the metrics, and remove the training states that nothing needs any more."""
        if metrics is not None:
            write_json_lines(metrics, self.rows)
        for state in self.states:
            remove_states(state)


@dataclass(frozen=True)
class _Adapting:
    """The adaptation of the model in `directory`, or of one expert of it, to the novel domain of `shards`.

    `begin` makes the model of one expert that each trial begins with. `origin` is what its lineage says of that.
    """

    directory: Path
    shards: tuple[Path, Path]
    origin: dict[str, Any]
    checkpoints: Path
    begin: Callable[[], GPT]
    evaluate: Evaluation
    world: World

    def best(self, adaptation: Adaptation) -> _Adapted:
        """The model trained with the best factor of a sweep on dev.

        The lineage has the dev losses that every factor came to. A factor at which training diverges is left out.
        """
        best: _Adapted | None = None
        states: list[Path] = []
        trials: list[dict[str, Any]] = []
        for one in adaptation.trials():
            trial: dict[str, Any] = {"learning_rate_factor": one.learning_rate_factor}
            trials.append(trial)
            try:
                found = self.trial(one)
            except DivergedError as error:
                if adaptation.sweep is None:
                    raise
                trial["diverged"] = str(error)
                continue
            for when, row in (("start", found.rows[0]), ("best", found.best)):
                trial[when] = {name: loss for name, loss in row.items() if name.startswith("dev_loss/")}
            states += found.states
            if best is None or found.best["early_stopping_loss"] < best.best["early_stopping_loss"]:
                best = found
        if best is None:
            cause = "diverged at every learning-rate factor of the sweep"
            raise DemixError(self.directory, cause, "sweep lower factors")
        return dataclasses.replace(best, states=tuple(states), lineage=best.lineage | {"trials": trials})

    def trial(self, adaptation: Adaptation) -> _Adapted:
        """Train the model on the novel domain. Every rank trains a part of the sequences."""
        domain = self.shards[0].parent.name
        places = place_experts([domain], adaptation.sequences, self.world.size)
        world, model = self.world.placed(places), self.begin()
        needed = () if adaptation.learning_rate else ("training",)
        described, architecture = describe(self.directory, *needed), model.architecture
        shard = TokenShard.open(self.shards[0])
        refuse_other_tokenizer(self.directory, self.shards[0], shard.tokenizer_sha256, shard.vocab_size)
        train_data, dev_data = (read_json(path.with_suffix(".json"))["sha256"] for path in self.shards)
        adaptation = adaptation.bounded(len(shard))
        origin = self.origin | {"adaptation": stated(adaptation)}
        identity = {"adaptation": fingerprinted(adaptation), "shared": described.shared_sha256}
        state = self.checkpoints / fingerprint(origin | identity | {"data": [train_data, dev_data]})
        batches = balanced_batches(
            [shard], [domain], adaptation.sequences, architecture.context, adaptation.seed, places[world.rank],
            architecture.objective,
        )  # fmt: skip
        rate = described.training.learning_rate if described.training else 0.0
        how = optimization(
            adaptation,
            adaptation.steps(architecture.context),
            adaptation.learning_rate or rate * adaptation.learning_rate_factor,
            stopping=EarlyStopping(adaptation.evaluate_every, adaptation.patience),
        )
        rows = train(model, batches, [domain], how, state, world=world, evaluate=self.evaluate)
        made = _Adapted(model, rows, (state,), origin)
        lineage = origin | {
            "steps": made.best["step"],
            "tokens": made.best["tokens"],
            "steps_run": rows[-1]["step"],
            "data_sha256": {domain: train_data},
            "tokenizer_sha256": shard.tokenizer_sha256,
        }
        return dataclasses.replace(made, lineage=lineage)
