"""The cost of a config's trainings, scoring and text, estimated before anything runs."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

from demix.config.architecture import Architecture
from demix.config.counts import Size, parameters, sizes
from demix.config.domains import DomainSection
from demix.config.models import EntrySettings
from demix.plan.flops import (
    Hardware,
    achieved_tflops,
    activation_bytes,
    checkpoint_bytes,
    hours,
    score_table_bytes,
    scoring_flops,
    training_state_bytes,
    update_flops,
)
from demix.run.models import Model
from demix.run.placement import owners_of, place_experts
from demix.run.run import Run
from demix.run.scoring import ScoringJob, ScoringPart, scoring_jobs

# Bytes per word of the sample in UTF-8, with the space after it; and in zstd Parquet (English, raw or anonymized). The
# disk keeps two copies: documents and splits. GPT-2's tokenizer yields 1.3 to 1.5 tokens per word.
WORD_BYTES = 6.4
TEXT_BYTES = 2.6
TOKENS_PER_WORD = 1.5
# Local files with one of these endings are plain text. In other files, the text is this many times the file's bytes.
PLAIN = (".txt", ".json", ".jsonl", ".csv", ".tar")
PACKED = 2.5


@dataclass(frozen=True)
class TrainingPlan:
    """The cost of one training or adaptation of a run.

    `sequences`: sequences per step over all domains, divided among the `ranks`. `experts_per_rank`: the maximum number
    of experts on one rank. `shared`: parameters outside the experts. `expert`: parameters of one of the `experts`.
    `flops`: floating-point operations per update, without those of Muon's iterations. `state`: bytes of weights,
    gradients and optimizer per rank. `activations`: bytes of activations per rank. `least`: bytes of state and
    activations with the settings that save most memory (see `too_large`). `checkpoint`: bytes of one checkpoint on
    disk. `weights`: bytes that the training adds to models. `jobs`: the number of jobs of the workflow's `rule`.
    `tokens`: a maximum, because an adaptation may stop early. The first `begin` of the `steps` are the dense warm
    start, which another training does; `hours` omits them. `seed_flops` are the operations of one of these steps.
    """

    name: str
    rule: str
    tokens: int
    steps: int
    sequences: int
    shared: int
    expert: int
    experts: int
    flops: float
    seed_flops: float
    ranks: int
    experts_per_rank: int
    state: int
    activations: int
    least: int
    checkpoint: int
    weights: int
    hours: float
    jobs: int = 1
    begin: int = 0

    @property
    def stage(self) -> str:
        """The stage of the section `cluster` whose resources the training's jobs request."""
        return "adapt" if self.rule.startswith("adapt") else "train"

    @property
    def updates(self) -> int:
        """The updates that the jobs do, without those of the dense warm start."""
        return self.steps - self.begin

    @property
    def all_flops(self) -> float:
        """The operations of the whole training, including those of the dense warm start."""
        return (self.steps - self.begin) * self.flops + self.begin * self.seed_flops

    @property
    def rank_hours(self) -> float:
        """Hours, summed over the ranks."""
        return self.hours * self.ranks


def plan_training(run: Run, ranks: int | None, hardware: Hardware) -> list[TrainingPlan]:
    """The plan of each training (of models, sweeps of learning rates, adaptations) of `run` on `ranks` processes.

    Without `ranks`, the config sets the number of processes for each. Like training, raises DemixError for a number of
    ranks that does not fit the domains. An adaptation uses at most as many ranks as a step has sequences.
    """
    plan, section = partial(_plan, run, hardware), run.config.adaptation
    plans = []
    for model in (part for one in run.trained for part in one.trainings):
        one = plan(model, model.settings, model.settings.tokens // model.share, ranks, begin=model.first_step)
        plans.append(replace(one, name=named(model), rule="train_expert" if model.part else "train"))
    for model in run.swept:
        if sweep := model.settings.sweep:
            jobs, one = len(sweep.learning_rates), plan(model, model.settings, sweep.tokens, ranks)
            plans.append(_times(jobs, one, name=f"{model.name}, {jobs} rates", rule="sweep", jobs=jobs, weights=0))
    usable = min(ranks or section.ranks, section.sequences)
    tried = len(section.sweep.factors) if section.sweep else 1
    for adapted in run.adaptations:
        one = plan(adapted.parent, run.adapting(adapted.parent), section.tokens, usable, adapts=True)
        plans.append(_times(tried, one, name=adapted.name, rule=adapted.rule))
    return plans


def _times(number: int, plan: TrainingPlan, **more: Any) -> TrainingPlan:
    """The plan of `number` trainings like `plan`, one after another, with the values in `more`."""
    sums = {key: number * getattr(plan, key) for key in ("tokens", "steps", "hours")}
    return replace(plan, **sums | more)


def named(model: Model) -> str:
    """The name of a training in the plan. The names of one model's experts differ only after the last "-"."""
    return f"{model.name}-{model.part}" if model.part else model.name


def _plan(
    run: Run,
    hardware: Hardware,
    model: Model,
    settings: EntrySettings,
    tokens: int,
    ranks: int | None,
    *,
    begin: int = 0,
    adapts: bool = False,
) -> TrainingPlan:
    """The plan of a training of `tokens` on `ranks`. Its first `begin` steps are a dense warm start."""
    kind, domains, ranks = model.kind, 1 if adapts else len(model.domains), ranks or settings.ranks
    architecture, types = model.architecture, run.types
    experts = domains if kind.has_experts else 1
    sequences = domains * settings.sequences
    steps = max(int(adapts), tokens // (sequences * architecture.context))
    places = place_experts(model.domains[:experts], sequences // experts, ranks)
    experts_per_rank = len(places[0].experts)
    largest = max(place.last - place.first for place in places)
    # A rank processes one micro-batch of each of its experts at a time, or all sequences of a step.
    at_once = experts_per_rank * min(largest, settings.micro_sequences or largest)

    domain_tokens = domains if kind.domain_tokens else 0
    shared, expert = parameters(architecture, types, domain_tokens, kind.expert_scope)
    frozen = shared if adapts and kind.has_experts else 0
    own = experts_per_rank * expert + shared - frozen
    still = (own if adapts else 0) + frozen
    muon = settings.optimizer is not None and settings.optimizer.kind == "muon"
    of_shared, of_expert = (
        _moments(some, muon) for some in sizes(architecture, types, domain_tokens, kind.expert_scope)
    )
    of_shared = [] if frozen else of_shared
    moments = sum(of_shared) + experts_per_rank * sum(of_expert)
    fullest = _fullest(of_shared, [experts_per_rank * size for size in of_expert], ranks, len(places[0].ranks))
    state, least = (training_state_bytes(own, still, some) for some in (moments, fullest))
    value_bytes = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}[settings.precision]
    kept = partial(activation_bytes, architecture, types, value_bytes=value_bytes, dropout=bool(settings.dropout))
    length = architecture.context + (1 if domain_tokens else 0)
    flops, seed_flops = (update_flops(one, types, sequences, length) for one in (architecture, architecture.unrouted))
    whole = checkpoint_bytes(shared + experts * expert, moments=sum(of_shared) + experts * sum(of_expert))
    return TrainingPlan(
        name=model.name,
        rule="",
        tokens=steps * sequences * architecture.context,
        steps=steps,
        sequences=sequences,
        shared=shared,
        expert=expert,
        experts=experts,
        flops=flops,
        seed_flops=seed_flops,
        ranks=ranks,
        experts_per_rank=experts_per_rank,
        state=least if settings.shard_optimizer else state,
        activations=kept(at_once, checkpointing=settings.checkpoint_activations),
        least=least + kept(experts_per_rank, checkpointing=True),
        checkpoint=checkpoint_bytes(own, own, moments) if adapts else whole,
        weights=4 * (own if adapts else shared + experts * expert),
        hours=hours(flops, steps - begin, ranks, achieved_tflops(hardware, architecture, demix=kind.has_experts)),
        begin=begin,
    )


def _moments(tensors: Sequence[Size], muon: bool) -> list[int]:
    """Bytes of moments per tensor, in fp32: Adam's two, or Muon's one for the matrices of layers."""
    return [4 * size * (1 if muon and matrix else 2) for size, matrix in tensors]


def _fullest(shared: list[int], expert: list[int], ranks: int, replicas: int) -> int:
    """The maximum bytes of moments on one rank if each tensor's moments are on only one rank (`train.optimizers`)."""

    def most(moments: list[int], ranks: int) -> int:
        loads = [0] * ranks
        for size, owner in zip(moments, owners_of(moments, ranks), strict=True):
            loads[owner] += size
        return max(loads)

    return most(shared + expert, ranks) if replicas == ranks else most(shared, ranks) + most(expert, replicas)


@dataclass(frozen=True)
class ScoringCosts:
    """The cost of scoring with the models of a completed config: hours of one rank, and bytes of score tables."""

    run: Run
    device: Hardware

    @property
    def of_all(self) -> tuple[float, int]:
        """Hours of one rank, and bytes of score tables before compression, of all rules that score."""
        orders = self.run.config.evaluation.ngrams or ()
        hours, disk = zip((0.0, len(orders) * self.of_ngrams()), *map(self.of_job, scoring_jobs(self.run)), strict=True)
        return sum(hours), sum(disk)

    @cached_property
    def _architectures(self) -> dict[str, Architecture]:
        """The architectures of the models by their folders."""
        merged = {one.place: one.architecture for one in self.run.merged}
        return merged | {one.name: one.architecture for one in self.run.trained}

    def _tokens(self, domains: Iterable[str], splits: Iterable[str], context: int) -> int:
        """The number of scored tokens in the `splits` of `domains`, with blocks of `context` tokens."""
        found = 0
        for name, split in product(domains, splits):
            there = round(TOKENS_PER_WORD * getattr(self.run.texts[name].words, split))
            found += min(there, self.run.config.evaluation.limit(split, context) or there)
        return found

    def of_job(self, job: ScoringJob) -> tuple[float, int]:
        """Hours of one rank, and bytes of score tables before compression, of a job that scores."""
        hours, disk = zip(*map(self.of_part, job.parts), strict=True)
        return sum(hours), sum(disk)

    def of_part(self, part: ScoringPart) -> tuple[float, int]:
        """The hours and the bytes of one part of a job; `of_job` sums them."""
        architecture = self._architectures.get(part.model, self.run.architecture)
        routed = architecture.routed
        architecture = architecture.replace(
            context=part.context or architecture.context,
            routed=routed.replace(top_k=part.top_k) if routed and part.top_k else routed,
        )
        tokens = self._tokens(part.domains, part.splits, architecture.context)
        columns = len(part.experts) or 1
        tflops = achieved_tflops(self.device, architecture, demix=columns > 1)
        flops = scoring_flops(architecture, self.run.types, columns, part.expert_scope)
        disk = score_table_bytes(columns, tokens) - (0 if part.shared else score_table_bytes(0, tokens))
        return hours(flops, tokens, 1, tflops), disk

    def of_ngrams(self) -> int:
        """Bytes of the score tables of the n-grams of one order: of all training text, and per training domain."""
        tokens = self._tokens(self.run.domains, ("dev", "test"), self.run.context)
        return score_table_bytes(1, tokens) + score_table_bytes(len(self.run.training), tokens)


@dataclass(frozen=True)
class DomainPlan:
    """The cost of one domain; its numbers are None if neither the config nor a local file bounds them.

    `words`: the budgets of the three splits, or the words in local files. `read`: the words that are read from the
    source to fill the splits. `disk`: maximum bytes of raw text (removed after anonymization), plus bytes of documents,
    corpus and tokens. Downloaded files of a url source are not counted.
    """

    domain: str
    words: int | None
    read: int | None
    disk: int | None


def plan_domain(name: str, domain: DomainSection, token_bytes: int, sharing: int = 1) -> DomainPlan:
    """The plan of one domain of a config, with token ids of `token_bytes` bytes (2 or 4).

    `sharing` domains share the domain's source. How much text each of them has is unknown, so equal parts are assumed.
    """
    source, budgets = domain.source, domain.words
    words = None if budgets.train is None else budgets.train + budgets.dev + budgets.test
    read = source.words or words
    files = [file for file in source.names if os.path.isfile(file)] if source.kind == "files" else []
    if files:
        there = sum(os.path.getsize(file) * (1 if file.endswith(PLAIN) else PACKED) for file in files)
        found = round(there / WORD_BYTES / sharing)
        read = min(read or found, found)
        words = min(words or read, read)
    if words is None or read is None:
        return DomainPlan(name, words, read, None)
    kept = read * TEXT_BYTES + words * (TEXT_BYTES + TOKENS_PER_WORD * token_bytes)
    return DomainPlan(name, words, read, round(read * TEXT_BYTES) + round(kept))


def plan_domains(run: Run) -> list[DomainPlan]:
    """The plans of the training domains and then the novel ones of a completed config."""
    sharing = {name: len(run.shared.get(domain.shared or "", ())) or 1 for name, domain in run.domains.items()}
    return [plan_domain(name, domain, _token_bytes(run), sharing[name]) for name, domain in run.domains.items()]


def cluster_bytes(run: Run) -> int:
    """The bytes of the token files of clusters.

    Each clustering stores the tokens of all training domains again, in the splits that models read.
    """
    found = {plan.domain: plan.words or 0 for plan in plan_domains(run) if plan.domain in run.training}
    words = 0
    for _, split in run.learned_splits:
        for name, known in found.items():
            words += min(getattr(run.domains[name].words, split) or known, known)
    return round(words * TOKENS_PER_WORD * _token_bytes(run))


def _token_bytes(run: Run) -> int:
    return 4 if run.types > 65536 else 2
