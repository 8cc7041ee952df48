"""The cost of a config's trainings, before anything runs."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from demix.config.adaptation import AdaptationSection
from demix.config.counts import parameters, sizes
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
from demix.plan.memory import sent_parameters, sharded_moments
from demix.plan.muon import muon_cost
from demix.plan.network import Ring, given, rings_of
from demix.run.models import AdaptationJob, Model, rule_of
from demix.run.placement import Placement, place_experts, ranks_without
from demix.run.run import Run

# What the captions of tables with folded rows say.
ALIKE = "× 8: the numbers of each of eight that are alike"


@dataclass(frozen=True)
class TrainingPlan:
    """The cost of one training or adaptation of a run.

    `sequences`: sequences per step over all domains, divided among the `ranks`. `experts_per_rank`: the most experts
    on one rank. `shared`: parameters outside the experts. `expert`: parameters of one of the `experts`. `flops`:
    floating-point operations per update. `state`: bytes of weights, gradients and optimizer per rank. `activations`
    and `recomputed`: bytes of activations per rank, without and with activation checkpointing. `held`: bytes of state
    and of activations by the config, and `least`: those by settings that spare most (see `too_large`). `checkpoint`:
    bytes of one checkpoint on disk, of which `checkpoints` are kept during the training. `weights`: bytes of what the
    training adds to models. `jobs`: the number of jobs of the workflow's `rule`. `tokens`: the most, since an
    adaptation may stop early. `begin` of the `steps` are those of a seed phase, which another training does: `hours`
    leaves them out. `seed_flops` are those of such a step. `rings`: the all-reduces of gradients in an update, and
    Muon's broadcasts. `orthogonalising`: FLOPs of a rank in an update beside `flops`, of Muon. `saved`: bytes of all
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
    held: tuple[int, int]
    least: tuple[int, int]
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
    if ranks and model.fewer:
        ranks = ranks_without(len(run.training), ranks)
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
    settings, domains = model.settings, len(model.domains)
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


def _places(work: _Work, experts: int, sequences: int) -> tuple[Placement, ...]:
    """The placements of a work with so many experts and `sequences` of each in a step."""
    settings, replicas = work.settings, dict[str, int]()
    # Replicas say how the config's own number of ranks is divided.
    if isinstance(settings, RowSettings) and work.model.kind.has_experts and work.ranks == settings.ranks:
        replicas = settings.replicas
    return place_experts(work.model.domains[:experts], sequences, work.ranks, replicas)


def _plan_work(run: Run, work: _Work, hardware: Hardware) -> TrainingPlan:
    """The plan of one training or adaptation on `hardware`."""
    kind, settings, domains = work.model.kind, work.settings, work.domains
    architecture, types = work.model.architecture, run.types
    experts = domains if kind.has_experts else 1
    sequences = domains * settings.sequences
    steps = max(int(work.adapts), work.tokens // (sequences * architecture.context))
    places = _places(work, experts, sequences // experts)
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
    kept = partial(activation_bytes, architecture, types, value_bytes=value_bytes, dropout=bool(settings.dropout))
    activations, recomputed = (kept(at_once, checkpointing=each) for each in (False, True))
    length = architecture.context + (1 if domain_tokens else 0)
    flops, seed_flops = (update_flops(one, types, sequences, length) for one in (architecture, architecture.unrouted))
    muon = muon_cost(architecture, settings.optimizer, kind.expert_scope, places, frozen=bool(frozen))
    single = experts_per_rank * muon.expert + muon.shared
    state, sent = training_state_bytes(own, still, single), muon.rings
    tensors, of_expert = sizes(architecture, types, domain_tokens, kind.expert_scope)
    trained = [] if frozen else tensors
    sharded = state + sharded_moments(trained, of_expert, places, muon=single > 0) - (8 * own - 4 * single)
    if settings.shard_optimizer:
        state, sent = sharded, sent_parameters(trained, of_expert, places)
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
        state=state,
        activations=activations,
        recomputed=recomputed,
        held=(state, recomputed if settings.checkpoint_activations else activations),
        least=(sharded, kept(experts_per_rank, checkpointing=True)),
        checkpoint=checkpoint,
        checkpoints=settings.keep_checkpoints,
        weights=4 * (own if work.adapts else shared + experts * expert),
        begin=work.begin,
        seed_flops=seed_flops,
        saved=saves * checkpoint,
        rings=rings_of(4 * (shared - frozen), 4 * expert, places) + sent,
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


def too_large(run: Run, ranks: int | None, hardware: str) -> list[str]:
    """Lines of the trainings of a completed config that a device of `hardware` does not hold, and what they need."""
    device, told, never = HARDWARE[hardware], list[tuple[str, str]](), False
    for plan in plan_training(run, ranks, device):
        if not device.memory or sum(plan.held) <= device.memory:
            continue
        (state, activations), least = ((f"{short(size)}B" for size in sizes) for sizes in (plan.held, plan.least))
        line = f"{state} of weights, gradients and moments, {activations} of activations a rank; {' and '.join(least)}"
        told.append((plan.name, f"{line} with shard_optimizer, checkpoint_activations, micro_sequences: 1"))
        never = never or sum(plan.least) > device.memory
    lines = [f"{name} does not fit {hardware} ({short(device.memory or 0)}B): {line}" for name, line in folded(told)]
    needed = (
        "where that is too much, weights and gradients must be divided among GPUs, too (fully sharded or tensor "
        "parallel), which demix does not do: lower architecture.layers or architecture.width"
    )
    return lines + [needed] * never


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
