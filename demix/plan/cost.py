"""The cost of a config by domain and by model, before anything runs or is downloaded."""

import glob
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.table import Table

from demix.config.adaptation import AdaptationSection
from demix.config.addresses import local
from demix.config.architecture import parameters
from demix.config.domains import DomainSection, SourceSection
from demix.config.models import RowSettings
from demix.config.training import Sweep
from demix.errors import DemixError
from demix.model.description import read_description, tokens_learned
from demix.plan.cells import decimal, folded, short, significant
from demix.plan.flops import (
    HARDWARE,
    Hardware,
    achieved_tflops,
    activation_bytes,
    checkpoint_bytes,
    hours,
    training_state_bytes,
    update_flops,
)
from demix.plan.muon import muon_cost
from demix.plan.network import Ring, given, rings_of
from demix.run.models import AdaptationJob, Model, rule_of
from demix.run.placement import place_experts
from demix.run.rules import RunRules
from demix.run.run import Run

# Bytes per word of the sample's English in zstd Parquet, raw or anonymized. The disk keeps two copies: documents and
# splits. GPT-2's tokenizer makes 1.3 to 1.5 tokens per word.
TEXT_BYTES = 2.6
TOKENS_PER_WORD = 1.5
# What the captions of tables with folded rows say.
ALIKE = "× 8: the numbers of each of eight that are alike"


@dataclass(frozen=True)
class DomainPlan:
    """The cost of one domain. `words`, `kept` and `passing` are None if no setting bounds them before the text is read.

    `documents`: the approximate number in the source. `words`: the sum of the budgets of the three splits. `jobs`: the
    jobs of the data stage, which read and anonymize each part, in one job or two, split, and tokenize. `kept`: bytes of
    documents, corpus and tokens. `passing`: most bytes of raw text, which is removed after anonymization; the
    downloaded files of a url source are not counted.
    """

    domain: str
    documents: int | None
    words: int | None
    jobs: int
    kept: int | None
    passing: int | None


def plan_domain(name: str, domain: DomainSection, token_bytes: int, apart: bool = False) -> DomainPlan:
    """The plan of one domain of a config. Only local Parquet footers are read.

    `token_bytes` is 2 or 4. With `apart` each part takes two jobs (`demix.run.rules.RunRules.apart`).
    """
    source, budgets = domain.source, domain.words
    words = None if budgets.train is None else budgets.train + budgets.dev + budgets.test
    read = source.words or words
    kept = None
    if words is not None and read is not None:
        kept = round(read * TEXT_BYTES + words * (TEXT_BYTES + TOKENS_PER_WORD * token_bytes))
    passing = None if read is None else round(read * TEXT_BYTES)
    documents = domain.documents or _count(source)
    return DomainPlan(name, documents, words, (1 + apart) * source.parts + 2, kept, passing)


def _count(source: SourceSection) -> int | None:
    """The number of rows of local Parquet files; None for a source that must be read to be counted."""
    paths = [path for pattern in source.paths for path in glob.glob(pattern, recursive=True)]
    if source.kind != "files" or source.where or not paths or not all(path.endswith(".parquet") for path in paths):
        return None
    try:
        return sum(int(pq.read_metadata(path).num_rows) for path in paths)
    except (pa.ArrowException, OSError):
        return None


def plan_domains(run: Run) -> list[DomainPlan]:
    """The plans of the training domains and then the novel ones of a completed config."""
    token_bytes, apart = 4 if run.types > 65536 else 2, RunRules(run).apart
    return [plan_domain(name, domain, token_bytes, apart) for name, domain in run.domains.items()]


def plan_table(run: Run) -> Table:
    """The plans of all domains of a completed config as a table, with totals."""
    table = Table(
        title=f"Data stage of {run.name}",
        caption=f"disk: estimates at {TEXT_BYTES} bytes of compressed text and {TOKENS_PER_WORD} tokens a word; "
        "access: as the config says (nothing was asked)",
        show_footer=True,
    )
    plans = plan_domains(run)
    # The tokenizer and the deduplication across domains are jobs of no single domain.
    total = DomainPlan(
        "total",
        _sum([plan.documents for plan in plans]),
        _sum([plan.words for plan in plans]),
        sum(plan.jobs for plan in plans) + 2,
        _sum([plan.kept for plan in plans]),
        _sum([plan.passing for plan in plans]),
    )
    footers = _shown(total, [plan for plan in plans if None in (plan.documents, plan.words, plan.kept)])
    heads = (
        "",
        "domain",
        "source",
        "anonymized",
        "documents",
        "words",
        "jobs",
        "disk kept",
        "raw, passing",
        "access",
        "licence",
    )
    for head, footer in zip(heads, ("", "total", "", "", *footers, "", ""), strict=True):
        table.add_column(head, footer, justify="right" if head in heads[4:9] else "left", no_wrap=head != "licence")
    by_name = {plan.domain: plan for plan in plans}
    for kind, domains in run.config.domains.kinds.items():
        table.add_section()
        for number, (name, domain) in enumerate(domains.items()):
            where = f"{domain.source.kind} ×{domain.source.parts}"
            anonymized = "yes" if domain.anonymize else "no"
            table.add_row(
                "" if number else kind, name, where, anonymized, *_shown(by_name[name]), _access(domain), domain.licence
            )
    return table


def _access(domain: DomainSection) -> str:
    """How the text of a domain is to be had, as its config says, or its files show."""
    source = domain.source
    there = local(source.paths) if source.kind == "hub" else bool(source.files)
    return "here" if there else "by hand" if source.kind == "files" else domain.access


@dataclass(frozen=True)
class TrainingPlan:
    """The cost of one training or adaptation of a run.

    `sequences`: sequences per step over all domains, divided among the `ranks`. `experts_per_rank`: the most experts
    on one rank. `shared`: parameters outside the experts. `expert`: parameters of one of the `experts`. `flops`:
    floating-point operations per update. `state`: bytes of weights, gradients and optimizer per rank. `activations`
    and `recomputed`: bytes of activations per rank, without and with activation checkpointing. `checkpoint`: bytes of
    one checkpoint on disk, of which `checkpoints` are kept during the training. `weights`: bytes of what the training
    adds to models. `jobs`: the number of jobs of the workflow's `rule`. `tokens`: the most, since an adaptation may
    stop early. `begin` of the `steps` are those of a seed phase, which another training does: `hours` leaves them out.
    `seed_flops` are those of such a step. `rings`: the all-reduces of gradients in an update, and Muon's
    broadcasts. `orthogonalising`: FLOPs of a rank in an update beside `flops`, of Muon. `saved`: bytes of all
    checkpoints that the training writes, those that it removes again too. `in_turn`: the experts that one job trains
    one after the other, each in `steps` updates.
    """

    name: str
    rule: str
    domains: int
    tokens: int
    steps: int
    sequences: int
    shared: int
    expert: int
    experts: int
    flops: float
    ranks: int
    experts_per_rank: int
    state: int
    activations: int
    recomputed: int
    checkpoint: int
    checkpoints: int
    weights: int
    hours: float
    saved: int
    seed_flops: float
    rings: tuple[Ring, ...] = ()
    orthogonalising: float = 0.0
    jobs: int = 1
    begin: int = 0
    in_turn: int = 1

    @property
    def stage(self) -> str:
        """The stage whose resources the training's jobs request."""
        return "adapt" if self.rule.startswith("adapt") else "train"

    @property
    def updates(self) -> int:
        """The updates that the jobs do: of all trainings that follow one another, and none of the seed phase."""
        return self.in_turn * (self.steps - self.begin)

    @property
    def all_flops(self) -> float:
        """The operations of the whole training, with those of the seed phase."""
        return (self.steps - self.begin) * self.flops + self.begin * self.seed_flops

    @property
    def synced(self) -> int:
        """Bytes of gradients that a rank gives to all-reduce in an update."""
        return given(self.rings)

    @property
    def rank_hours(self) -> float:
        """Hours, summed over the ranks."""
        return self.hours * self.ranks


def plan_training(run: Run, ranks: int | None, hardware: Hardware) -> list[TrainingPlan]:
    """The plans of every model, sweep of learning rates and adaptation of a completed run, on `ranks` processes.

    Without `ranks`, the config sets the number of each. Raises DemixError for a number of ranks that does not fit the
    domains, as training does. An adaptation uses at most as many ranks as a step has sequences.
    """
    runs = [_plan_job(run, job, ranks, hardware) for one in run.trained for job in one.jobs]
    sweeps = [_plan_sweep(run, one, one.settings.sweep, ranks, hardware) for one in run.swept if one.settings.sweep]
    section = run.config.adaptation
    usable = min(ranks or section.ranks, section.sequences)
    tried = len(section.sweep.factors) if section.sweep else 1

    def adapting(one: AdaptationJob) -> TrainingPlan:
        work = _Work(one.name, one.rule, one.parent, section, section.tokens, 1, usable, adapts=True)
        return _times(tried, _plan_work(run, work, hardware))

    # The same for every novel domain.
    each = {one.rule: adapting(one) for one in {one.rule: one for one in run.adaptations}.values()}
    return runs + sweeps + [replace(each[one.rule], name=one.name) for one in run.adaptations]


def _times(number: int, plan: TrainingPlan, **more: Any) -> TrainingPlan:
    """The plan of `number` trainings like that of `plan`, one after the other, with the values in `more`."""
    sums = {key: number * getattr(plan, key) for key in ("tokens", "steps", "hours", "saved")}
    return replace(plan, **sums | more)


def _plan_job(run: Run, job: tuple[Model, ...], ranks: int | None, hardware: Hardware) -> TrainingPlan:
    """The plan of one job: of a model, or of experts that are whole models and train one after the other."""
    model, number = job[0], len(job)
    settings, domains = model.settings, len(model.domains)
    work = _Work(
        named(job), rule_of(job), model, settings, settings.tokens // model.share, domains, ranks or settings.ranks,
        begin=model.first_step,
    )  # fmt: skip
    one = _plan_work(run, work, hardware)
    summed = ("domains", "experts", "flops", "seed_flops", "orthogonalising", "weights", "rings")
    sums = {key: number * getattr(one, key) for key in summed}
    return _times(number, one, steps=one.steps, in_turn=number, **sums)


def named(job: tuple[Model, ...]) -> str:
    """The name of a training's job in the plan. Jobs of the experts of one model differ only after the last "-"."""
    model = job[0]
    return f"{model.name}-{'+'.join(part.part for part in job)}" if model.part else model.name


def _plan_sweep(run: Run, model: Model, sweep: Sweep, ranks: int | None, hardware: Hardware) -> TrainingPlan:
    """The sum over all jobs of a model's sweep."""
    settings, domains = model.settings, len(run.training)
    work = _Work(model.name, "sweep", model, settings, sweep.tokens, domains, ranks or settings.ranks)
    one, jobs = _plan_work(run, work, hardware), len(sweep.learning_rates)
    return _times(jobs, one, name=f"{model.name}, {jobs} rates", jobs=jobs, weights=0)


@dataclass(frozen=True)
class _Work:
    """A training or adaptation: `tokens` of `domains` in its steps on `ranks`, which follow `begin` steps of a seed."""

    name: str
    rule: str
    model: Model
    settings: RowSettings | AdaptationSection
    tokens: int
    domains: int
    ranks: int
    adapts: bool = False
    begin: int = 0


def _plan_work(run: Run, work: _Work, hardware: Hardware) -> TrainingPlan:
    """The plan of one training or adaptation on `hardware`."""
    kind, settings, domains = work.model.kind, work.settings, work.domains
    architecture, types = work.model.architecture, run.types
    experts = domains if kind.has_experts else 1
    sequences = domains * settings.sequences
    steps = work.tokens // (sequences * architecture.context)
    if work.adapts:
        steps = max(1, steps)

    places = place_experts([f"expert {number}" for number in range(experts)], sequences // experts, work.ranks)
    experts_per_rank = max(len(place.experts) for place in places)
    largest = max(place.last - place.first for place in places)
    # A rank processes one micro-batch of each of its experts at a time, or all sequences of a step.
    at_once = experts_per_rank * min(largest, settings.micro_sequences or largest)

    domain_tokens = domains if kind.domain_tokens else 0
    shared, expert = parameters(architecture, types, domain_tokens, kind.expert_scope)
    frozen = shared if work.adapts and kind.has_experts else 0
    own = experts_per_rank * expert + shared - frozen
    still = (own if work.adapts else 0) + frozen
    value_bytes = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}[settings.precision]
    activations, recomputed = (
        activation_bytes(architecture, types, at_once, value_bytes, checkpointing=checkpointing)
        for checkpointing in (False, True)
    )
    length = architecture.context + (1 if domain_tokens else 0)
    flops, seed_flops = (update_flops(one, types, sequences, length) for one in (architecture, architecture.unrouted))
    muon = muon_cost(architecture, settings.optimizer, kind.expert_scope, places, frozen=bool(frozen))
    single = experts_per_rank * muon.expert + muon.shared
    whole = checkpoint_bytes(shared + experts * expert, single=experts * muon.expert + muon.shared)
    checkpoint = checkpoint_bytes(own, own, single) if work.adapts else whole
    # The last update ends the training, which then writes the model.
    saves = (steps - 1) // settings.checkpoint_every - work.begin // settings.checkpoint_every
    tflops = achieved_tflops(hardware, architecture, demix=kind.has_experts)
    return TrainingPlan(
        name=work.name,
        rule=work.rule,
        domains=domains,
        tokens=steps * sequences * architecture.context,
        steps=steps,
        sequences=sequences,
        shared=shared,
        expert=expert,
        experts=experts,
        flops=flops,
        ranks=work.ranks,
        experts_per_rank=experts_per_rank,
        state=training_state_bytes(own, still, single),
        activations=activations,
        recomputed=recomputed,
        checkpoint=checkpoint,
        checkpoints=settings.keep_checkpoints,
        weights=4 * (own if work.adapts else shared + experts * expert),
        begin=work.begin,
        seed_flops=seed_flops,
        saved=saves * checkpoint,
        rings=rings_of(4 * (shared - frozen), 4 * expert, places) + muon.rings,
        orthogonalising=muon.flops,
        hours=hours(flops + work.ranks * muon.flops, steps - work.begin, work.ranks, tflops),
    )


def training_tables(run: Run, ranks: int | None, hardware: str) -> tuple[Table, Table]:
    """The training of a completed config as two tables: the work, and memory and time on `ranks` of `hardware`.

    Without `ranks`, the config sets the number of each. Raises DemixError for unknown hardware or a bad number.
    """
    if hardware not in HARDWARE:
        raise DemixError(f"--hardware {hardware}", "is not known", f"use one of {', '.join(HARDWARE)}")
    if ranks is not None and ranks < 1:
        raise DemixError("--ranks", f"is {ranks}", "give 1 or more")
    device = HARDWARE[hardware]
    plans, models = plan_training(run, ranks, device), run.trained
    work = Table(
        title=f"Training of {run.name}",
        caption="FLOPs: of the layers' products forward, twice, and backward, and of the head's (Narayanan et al. 2021)"
        + (", and 4·(16h²(k - 1) + 2hE) a token and routed layer" if any(one.kind.routed for one in models) else "")
        + "; adaptations stop early, so at most"
        + (
            "; a seed phase counts for its parent and for each model that begins with it, and once in the total"
            if any(plan.begin for plan in plans)
            else ""
        )
        + "".join(f"; {told}" for told in _of_folders(run))
        + f"; {ALIKE}",
        show_footer=True,
    )
    total = significant(sum((plan.steps - plan.begin) * plan.flops for plan in plans) / 1e15)
    for head in (
        "model",
        "domains",
        "tokens",
        "steps",
        "sequences\na step",
        "shared",
        "an expert",
        "parameters\nin all",
    ):
        work.add_column(head, "total" if head == "model" else "", justify="left" if head == "model" else "right")
    work.add_column("TFLOPs\nan update", justify="right")
    work.add_column("PFLOPs\nin all", total, justify="right")
    takes = Table(
        title=f"Memory and time of {run.name} on {hardware}",
        caption=f"{device.assumption}; activations: an estimate, recomputed: with activation checkpointing; "
        "sent: gradients given to all-reduce"
        + ("; hours: with Muon's iterations, which no FLOPs count" if any(one.orthogonalising for one in plans) else "")
        + f"; {ALIKE}",
        show_footer=True,
    )
    for head in ("model", "ranks", "experts\na rank", "state\na rank", "activations\na rank", "or, recomputed"):
        takes.add_column(head, "total" if head == "model" else "", justify="left" if head == "model" else "right")
    for head in ("a checkpoint", "sent a rank\nin all", "hours"):
        takes.add_column(head, justify="right")
    spent = device.units * sum(plan.rank_hours for plan in plans)
    takes.add_column(f"{device.unit}-hours", decimal(spent), justify="right")
    trainings = sum(len(one.jobs) for one in models)
    for part in (plans[:trainings], plans[trainings:]):
        for table, row in ((work, _work_row), (takes, lambda plan: _takes_row(plan, device))):
            table.add_section()
            for cells in folded(row(plan) for plan in part):
                table.add_row(*cells)
    return work, takes


def _of_folders(run: Run) -> list[str]:
    """What the models in folders, with which models of a completed config begin, have learned from before."""
    begun: dict[str, list[str]] = {}
    for model in run.trained:
        if folder := model.base.initial:
            begun.setdefault(folder, []).append(model.name)
    told = []
    for folder, names in begun.items():
        path = Path(folder) / "model.json"
        tokens = tokens_learned(read_description(path)) if path.is_file() else None
        known = "are not known" if tokens is None else f"({short(tokens)}) are not counted"
        told.append(f"tokens of the parent {folder} of {', '.join(names)} {known}")
    return told


def _work_row(plan: TrainingPlan) -> tuple[str, ...]:
    return (
        plan.name,
        str(plan.domains),
        short(plan.tokens),
        f"{plan.steps:,}",
        f"{plan.sequences:,}",
        *(short(size) for size in (plan.shared, plan.expert, plan.shared + plan.experts * plan.expert)),
        significant(plan.flops / 1e12),
        significant(plan.all_flops / 1e15),
    )


def _takes_row(plan: TrainingPlan, device: Hardware) -> tuple[str, ...]:
    return (
        plan.name,
        str(plan.ranks),
        str(plan.experts_per_rank),
        *(f"{short(size)}B" for size in (plan.state, plan.activations, plan.recomputed, plan.checkpoint)),
        f"{short((plan.steps - plan.begin) * plan.synced)}B",
        decimal(plan.hours),
        decimal(device.units * plan.rank_hours),
    )


def _sum(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _shown(plan: DomainPlan, partly: Sequence[DomainPlan] = ()) -> tuple[str, str, str, str, str]:
    """The numbers of a plan as text; a + after a sum marks that one of `partly` has an unknown number."""

    def more(key: str) -> str:
        return "+" if any(getattr(part, key) is None for part in partly) else ""

    documents = "?" if plan.documents is None else short(plan.documents) + more("documents")
    words = "all" if plan.words is None else short(plan.words) + more("words")
    kept, passing = ("?" if size is None else f"{short(size)}B{more('kept')}" for size in (plan.kept, plan.passing))
    return documents, words, str(plan.jobs), kept, passing
