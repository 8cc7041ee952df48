"""The cost of a config, as the tables that `demix plan --full` prints."""

from collections.abc import Iterable, Sequence

from rich.table import Table

from demix.errors import DemixError
from demix.plan.cost import ScoringCosts, TrainingPlan, plan_training
from demix.plan.flops import HARDWARE, Hardware
from demix.plan.jobs import decimal, short
from demix.run.run import Run

ALIKE = "× 8: eight equal models; the numbers are those of one"


def training_tables(run: Run, ranks: int | None, hardware: str) -> tuple[Table, Table]:
    """Two tables of a completed config's trainings and scoring: work, and memory and hours on `ranks` of `hardware`.

    Without `ranks`, the config sets the number of processes. Raises DemixError for unknown hardware or a bad number.
    """
    if hardware not in HARDWARE:
        raise DemixError(f"--hardware {hardware}", "is not known", f"use one of {', '.join(HARDWARE)}")
    if ranks is not None and ranks < 1:
        raise DemixError("--ranks", f"is {ranks}", "give 1 or more")
    device = HARDWARE[hardware]
    plans, scoring = plan_training(run, ranks, device), ScoringCosts(run, device).of_all[0]
    routed = ", and 4·(16h²(k - 1) + 2hE) per token and MoE layer" if any(m.kind.routed for m in run.trained) else ""
    work = Table(
        title=f"Training of {run.name}",
        caption="FLOPs: matrix products of layers (forward twice, backward) and of the head (Narayanan et al. 2021)"
        f"{routed}; for adaptations a maximum, as they may stop early; a dense warm start counts for its parent and "
        f"for each model that starts from it, but once in the total; {ALIKE}",
        show_footer=True,
    )
    costs = Table(
        title=f"Memory and time of {run.name} on {hardware}",
        caption=f"{device.assumption}; activations: an estimate; {ALIKE}",
        show_footer=True,
    )
    operations = sum(plan.updates * plan.flops for plan in plans)
    spent = device.units * (sum(plan.rank_hours for plan in plans) + scoring)
    heads = ["model", "tokens", "steps", "sequences\na step", "shared", "an expert", "parameters\nin all"]
    _columns(
        work, [*heads, "TFLOPs\nan update", "PFLOPs\nin all"], ["total", *[""] * 7, significant(operations / 1e15)]
    )
    heads = ["model", "ranks", "experts\na rank", "state\na rank", "activations\na rank", "a checkpoint", "hours"]
    _columns(costs, [*heads, f"{device.unit}-hours"], ["total", *[""] * 6, decimal(spent)])
    trainings = [plan for plan in plans if plan.stage == "train" and plan.rule != "sweep"]
    for part in (trainings, [plan for plan in plans if plan not in trainings]):
        for table, cells in ((work, _work), (costs, _costs)):
            table.add_section()
            for row in folded((plan.name, *cells(plan, device)) for plan in part):
                table.add_row(*row)
    costs.add_row("scoring", *[""] * 5, decimal(scoring), decimal(device.units * scoring))
    return work, costs


def _columns(table: Table, heads: list[str], totals: list[str]) -> None:
    """Columns of numbers after one of names, with totals below."""
    for head, total in zip(heads, totals, strict=True):
        table.add_column(head, total, justify="left" if head == heads[0] else "right")


def _work(plan: TrainingPlan, _: Hardware) -> list[str]:
    sizes = plan.shared, plan.expert, plan.shared + plan.experts * plan.expert
    numbers = [short(plan.tokens), f"{plan.steps:,}", f"{plan.sequences:,}", *map(short, sizes)]
    return [*numbers, significant(plan.flops / 1e12), significant(plan.all_flops / 1e15)]


def _costs(plan: TrainingPlan, device: Hardware) -> list[str]:
    sizes = [f"{short(size)}B" for size in (plan.state, plan.activations, plan.checkpoint)]
    hours = [decimal(plan.hours), decimal(device.units * plan.rank_hours)]
    return [str(plan.ranks), str(plan.experts_per_rank), *sizes, *hours]


def too_large(run: Run, ranks: int | None, hardware: str) -> list[str]:
    """Warnings about trainings of a completed config that do not fit a device of `hardware`, and what they need."""
    device = HARDWARE[hardware]
    memory = device.memory or float("inf")
    large = [plan for plan in plan_training(run, ranks, device) if plan.state + plan.activations > memory]
    sizes = ((plan.name, *(f"{short(size)}B" for size in (plan.state, plan.activations, plan.least))) for plan in large)
    lines = [
        f"{name} does not fit {hardware} ({short(device.memory or 0)}B): {state} of weights, gradients and moments, "
        f"{activations} of activations a rank; {least} with shard_optimizer, checkpoint_activations, micro_sequences: 1"
        for name, state, activations, least in folded(sizes)
    ]
    needed = (
        "if that is too much, weights and gradients must also be divided among GPUs (fully sharded or tensor "
        "parallel), which demix does not support: lower architecture.layers or architecture.width"
    )
    return lines + [needed] * any(plan.least > memory for plan in large)


def folded(rows: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """Rows of a name and cells. Rows that differ only in the name's part after the last "-" become one row.

    Eight rows demix-dapt-<domain> of equal cells become `demix-dapt-* × 8` with the cells of one.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in rows:
        stem, dash, _ = name.rpartition("-")
        groups.setdefault((stem + dash or name, *cells), []).append(name)
    return [
        (names[0] if len(names) == 1 else f"{stem}* × {len(names)}", *cells) for (stem, *cells), names in groups.items()
    ]


def significant(number: float) -> str:
    """The number with two decimals; below one, with three significant digits."""
    return f"{number:.2f}" if number >= 1 else f"{number:.3g}"
