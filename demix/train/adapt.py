"""Adding a domain to a trained model: DEMix-DAPT (a new expert) and Dense-DAPT (all parameters)."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from demix.config.adaptation import AdaptationRecipe
from demix.config.models import DENSE_EXPERT
from demix.config.training import LearningRate, Threads, fingerprinted, stated
from demix.data.shards import TokenShard
from demix.errors import DemixError
from demix.files import fingerprint, read_json, write_json_lines
from demix.launch.job import Places
from demix.model.device import set_threads
from demix.model.directory import (
    copy_tokenizer,
    describe,
    expert_lineage,
    load_model,
    refuse_other_tokenizer,
    refuse_routed,
    save_expert,
    save_files,
    tokenizer_path,
    whole_models,
)
from demix.model.experts import changing
from demix.model.gpt import GPT
from demix.model.merge import averaged, origins_of, parents_of
from demix.run.placement import place_experts
from demix.settings import Positive, Seed
from demix.train.batches import batches_of, open_shards
from demix.train.loop import Evaluation, dev_losses, train
from demix.train.parallel import World, joined
from demix.train.stage import optimization
from demix.train.state import Row, remove_states
from demix.train.trainer import DivergedError

log = logging.getLogger(__name__)


class Adaptation(AdaptationRecipe):
    """How a model is adapted to one novel domain.

    `learning_rate` is the peak, if it is not given as a fraction of the model's.
    """

    tokens: Positive
    seed: Seed
    threads: Threads
    learning_rate: LearningRate | None = None

    def bounded(self, text: int) -> "Adaptation":
        """These settings with no more tokens than `passes` over a train split of `text` tokens."""
        return self.replace(tokens=min(self.tokens, self.passes * text)) if self.passes else self

    def steps(self, length: int) -> int:
        """The maximum number of optimizer updates, with sequences of `length` tokens."""
        return max(1, self.tokens // (self.sequences * length))

    def trials(self) -> tuple["Adaptation", ...]:
        """One adaptation for each factor of the sweep, or only this one if there is no sweep."""
        factors = self.sweep.factors if self.sweep else (self.learning_rate_factor,)
        return tuple(self.replace(learning_rate_factor=one, sweep=None) for one in factors)


def adapt(
    directory: Path,
    shards: tuple[Path, Path],
    adaptation: Adaptation,
    places: Places,
    *,
    chosen: Mapping[str, Any] | None = None,
    unchanged: Mapping[str, float] = MappingProxyType({}),
    training: Sequence[Path] = (),
) -> None:
    """Adapt the model in `directory` to the novel domain of `shards`, its train and dev tokens (paper, section 6).

    With `chosen`, from `demix.evaluate.choice.choose_parent`, this is DEMix-DAPT: only a new expert (`_beginning`) is
    trained, and no other file of the model changes. The expert's files are written below the output of `places`.
    `chosen` is recorded in the lineage, except for an average, which has no single parent. `unchanged` are the training
    domains' losses on dev in nats per token, by domain. These domains keep their experts, so these losses do not
    change.

    Otherwise this is Dense-DAPT: all parameters of the dense model (or, by `trained`, only its feedforwards) are
    trained further, and the adapted model is written to the output. `training` are the dev tokens of the training
    domains, on which forgetting is measured.
    """
    output, domain = places.output, shards[0].parent.name
    assert output is not None
    set_threads(adaptation.threads)
    with joined() as world:
        _, dev, *others = open_shards([*shards, *training], world)
        measured = {domain: (dev, adaptation.dev_blocks)}
        measured |= {one.path.parent.name: (one, adaptation.forgetting_blocks) for one in others}
        evaluate = dev_losses(measured, world, itemgetter(0), known=unchanged)
        begin, origin = _beginning(directory, domain, chosen, adaptation.trained)
        adapting = _Adapting(directory, shards, origin, places.checkpoints, begin, evaluate, world)
        found, states = adapting.best(adaptation)
        if world.rank:
            return
        if chosen is None:
            described = describe(directory)
            copy_tokenizer(tokenizer_path(directory), output, described.tokenizer_sha256)
            save_files(found.model, output, described.content | found.lineage | {"kind": "dense_dapt"}, found.lineage)
        else:
            belongs = {"shared_sha256": describe(directory).shared_sha256}
            with changing(output):
                save_expert(found.model, chosen["parent"], output, found.lineage | belongs, domain)
        if places.metrics is not None:
            write_json_lines(places.metrics, found.rows)
        for state in states:
            remove_states(state)


# A function that builds the model of one expert from which each trial starts.
_Begin = Callable[[], GPT]


def _beginning(
    directory: Path, domain: str, chosen: Mapping[str, Any] | None, trained: str
) -> tuple[_Begin, dict[str, Any]]:
    """The model from which an adaptation starts, and its record in the lineage.

    Dense-DAPT starts from the dense model. The expert of a novel domain starts from its likeliest parent's own tensors.
    An expert that is a whole model starts from the average of all experts, weighted by their posterior on the domain's
    dev split (Gururangan et al. 2023, section 2.4).
    """
    parent, priors, own_only = DENSE_EXPERT, dict[str, float](), trained == "feedforwards"
    origin: dict[str, Any] = {"parent": parent}
    if chosen is not None:
        refuse_routed(directory, "cannot get a domain's expert")
        parent, own_only, origin = chosen["parent"], True, {**chosen}
        log.info("%s: likeliest expert %s (posterior %.3f)", domain, parent, chosen["parent_prior"])
        priors = chosen["priors"] if whole_models(directory) else {}
    if priors:
        origin |= {"parent": None, "parents": origins_of(priors, parents_of(directory, priors))}
        # This is the prior of one parent; the weights contain those of all experts.
        del origin["parent_prior"]
    else:
        origin |= {"parent_sha256": expert_lineage(directory, parent).sha256}

    def begin() -> GPT:
        model = averaged(directory, priors, parent) if priors else load_model(directory, (parent,))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not own_only or model.owned(name))
        return model

    return begin, origin


class _Adapted(NamedTuple):
    """An adapted model, its metrics, the lineage, and the folder of its training states.

    `best` is the evaluation with the lowest loss on dev; the model has the parameters of that step.
    """

    model: GPT
    rows: list[Row]
    best: Row
    lineage: dict[str, Any]
    state: Path


@dataclass(frozen=True)
class _Adapting:
    """The adaptation of the model in `directory`, or of one expert of it, to the novel domain of `shards`.

    `begin` builds the model from which each trial starts; `origin` is its record in the lineage.
    """

    directory: Path
    shards: tuple[Path, Path]
    origin: dict[str, Any]
    checkpoints: Path
    begin: _Begin
    evaluate: Evaluation
    world: World

    def best(self, adaptation: Adaptation) -> tuple[_Adapted, list[Path]]:
        """The model trained with the factor of a sweep that is best on dev, and the folders of all training states.

        The lineage has the dev loss of every factor. A factor at which training diverges is left out.
        """
        best: _Adapted | None = None
        states: list[Path] = []
        trials: list[dict[str, Any]] = []
        for one in adaptation.trials():
            trials.append({"learning_rate_factor": one.learning_rate_factor})
            try:
                found = self.trial(one)
            except DivergedError as error:
                if adaptation.sweep is None:
                    raise
                trials[-1]["diverged"] = str(error)
                continue
            states.append(found.state)
            for when, row in (("start", found.rows[0]), ("best", found.best)):
                trials[-1][when] = {name: loss for name, loss in row.items() if name.startswith("dev_loss/")}
            if best is None or found.best["early_stopping_loss"] < best.best["early_stopping_loss"]:
                best = found
        if best is None:
            cause = "diverged at every learning-rate factor of the sweep"
            raise DemixError(self.directory, cause, "use lower values of adaptation.sweep.factors")
        return best._replace(lineage=best.lineage | {"trials": trials}), states

    def trial(self, adaptation: Adaptation) -> _Adapted:
        """Train the model on the novel domain. Every rank trains on a part of the sequences."""
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
        batches = batches_of(
            "by_domain", [shard], [domain], adaptation.sequences, architecture.context, adaptation.seed,
            places[world.rank], architecture.objective,
        )  # fmt: skip
        rate = described.training.learning_rate if described.training else 0.0
        how = optimization(
            adaptation,
            adaptation.steps(architecture.context),
            adaptation.learning_rate or rate * adaptation.learning_rate_factor,
            evaluate_every=adaptation.evaluate_every,
            patience=adaptation.patience,
        )
        rows = train(model, batches, [domain], how, state, world=world, evaluate=self.evaluate)
        best = min((row for row in rows if "early_stopping_loss" in row), key=itemgetter("early_stopping_loss"))
        lineage = origin | {
            "steps": best["step"],
            "tokens": best["tokens"],
            "steps_run": rows[-1]["step"],
            "data_sha256": {domain: train_data},
            "tokenizer_sha256": shard.tokenizer_sha256,
        }
        return _Adapted(model, rows, best, lineage, state)
