"""What a run takes by stage, in hours and bytes: training beyond its FLOPs, and the stages that need no GPU."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from rich.table import Table

from demix.plan.cells import decimal, folded, short
from demix.plan.cost import ALIKE, TrainingPlan, plan_training
from demix.plan.domains import TEXT_BYTES, DomainPlan, plan_domains
from demix.plan.flops import HARDWARE, Hardware
from demix.plan.jobs import ScoringCosts, plan_jobs, runs_here
from demix.plan.network import out_of_a_node, synchronizing
from demix.run.run import Run
from demix.run.scoring import scoring_jobs

# Bytes of a word of the sample and the space after it, in UTF-8.
WORD_BYTES = 6.4
# Bytes of a document where the config does not tell how many there are: a comment's.
SHORT_BYTES = 200


@dataclass(frozen=True)
class Rate:
    """So many of `unit` a second, and how that is known."""

    per_second: float
    unit: str
    source: str

    def hours(self, number: float) -> float:
        """The hours that `number` of the unit take."""
        return number / self.per_second / 3600


# Measured on two shared cores (AMD EPYC with AVX-512 bf16), as CPU time of one, ±30%, on documents of 200 bytes: longer
# ones are up to three times as fast. The rest is assumed.
RATES = {
    "download": Rate(125e6, "bytes", "assumed: a line of 1 Gb/s for all jobs together"),
    "anonymize": Rate(6e6, "bytes of text", "benchmarks/corpus.py --cut 200"),
    "deduplicate": Rate(400e3, "documents", "benchmarks/corpus.py --cut 200"),
    "split": Rate(12e6, "bytes of text", "benchmarks/corpus.py --cut 200"),
    "tokenize": Rate(30e6, "bytes of text", "benchmarks/corpus.py --cut 200"),
    "evaluate": Rate(10e6, "bytes of score tables", "benchmarks/mix.py --tokens 150000"),
    "disk": Rate(2e9, "bytes", "assumed: of the file system that all nodes share, for one training"),
    "sha256": Rate(1.8e9, "bytes", "hashlib on one core"),
}


@dataclass(frozen=True)
class StageCost:
    """What the jobs of a stage take together; None is what no setting bounds, or is not modelled.

    `hours`: of all cores or, with `on_device`, of all devices. `longest`: hours of the longest job, which no number of
    nodes shortens. `network`: bytes from outside, or out of the node that sends most. `written`: bytes on disk, those
    that are removed again too.
    """

    name: str
    jobs: int
    hours: float | None = None
    longest: float | None = None
    network: float | None = None
    written: float | None = None
    on_device: bool = False


def plan_stages(run: Run, hardware: str, ranks: int | None = None) -> list[StageCost]:
    """The stages of a completed config in the order of the workflow, on `ranks` of `hardware` in each training."""
    device, jobs = HARDWARE[hardware], plan_jobs(run, hardware, ranks)
    counts: dict[str, int] = {}
    for job in jobs:
        for rule, number in job.rules.items():
            counts[rule] = counts.get(rule, 0) + number
    # Where one job downloads and anonymizes a part, it is a job of both stages.
    counts |= {name: counts.get(name) or counts["read"] for name in ("download", "anonymize")}
    plans = plan_training(run, ranks, device)
    scored = [job for job in jobs if job.stage == "score" and job.hours is not None]
    costs = ScoringCosts(run, device)
    rules = [(costs.of_job(job)[0] / job.jobs, job.added) for job in scoring_jobs(run)]
    tables = sum(job.disk for job in jobs)

    def training(name: str, some: list[TrainingPlan]) -> StageCost:
        return StageCost(
            name,
            sum(plan.jobs for plan in some),
            device.units * sum(plan.rank_hours for plan in some),
            max((plan.hours / plan.jobs for plan in some), default=0.0),
            sum((plan.steps - plan.begin) * out_of_a_node(plan.rings, _node(run, plan)) for plan in some),
            sum(plan.weights for plan in some),
            on_device=True,
        )

    def scoring(name: str, *, added: bool) -> StageCost:
        some = [job for job in scored if any(rule.startswith("score_adapted") for rule in job.rules) == added]
        longest = max((hours for hours, of_added in rules if of_added == added), default=0.0)
        return StageCost(
            name,
            sum(job.count for job in some),
            device.units * sum(job.rank_hours for job in some),
            longest,
            None,
            sum(job.disk for job in some),
            on_device=True,
        )

    return [
        *_data_stages(run, counts),
        training("train", [plan for plan in plans if plan.stage == "train" and plan.rule != "sweep"]),
        training("try learning rates", [plan for plan in plans if plan.rule == "sweep"]),
        training("adapt", [plan for plan in plans if plan.stage == "adapt"]),
        StageCost(
            "write checkpoints",
            0,
            device.units * sum(saving_hours(plan) * plan.ranks for plan in plans),
            max(saving_hours(plan) / plan.jobs for plan in plans),
            None,
            sum(plan.saved for plan in plans),
            on_device=True,
        ),
        scoring("score", added=False),
        scoring("score what was adapted", added=True),
        StageCost(
            "score n-grams",
            counts.get("score_ngrams", 0),
            written=sum(job.disk for job in jobs if "score_ngrams" in job.rules),
        ),
        StageCost("evaluate", counts["evaluate"], RATES["evaluate"].hours(tables)),
    ]


def _data_stages(run: Run, counts: dict[str, int]) -> list[StageCost]:
    """The stages that make tokens of text, each in bytes that the words of the domains' budgets come to."""
    plans, domains = plan_domains(run), run.domains
    parts = {name: domain.source.parts for name, domain in domains.items()}
    training = [plan for plan in plans if plan.domain in run.training]

    def of(values: Iterable[float | None]) -> list[float]:
        return [value for value in values if value is not None]

    raw, corpus = of(plan.passing for plan in plans), of(_corpus_bytes(plan) for plan in plans)
    tokens = [(plan.kept or 0) - (plan.passing or 0) - (_corpus_bytes(plan) or 0) for plan in plans]
    text = {plan.domain: WORD_BYTES / TEXT_BYTES * (plan.passing or 0) for plan in plans}
    words = {plan.domain: WORD_BYTES * (plan.words or 0) for plan in plans}
    documents = sum(plan.documents or text[plan.domain] / SHORT_BYTES for plan in training)

    def rated(name: str, sizes: dict[str, float], jobs: dict[str, int], written: float) -> StageCost:
        rate = RATES[name]
        longest = max(rate.hours(sizes[domain] / number) for domain, number in jobs.items())
        return StageCost(name, counts[name], rate.hours(sum(sizes.values())) or None, longest or None, None, written)

    one = dict.fromkeys(parts, 1)
    fetching, comparing = (RATES["download"].hours(sum(raw)) or None, RATES["deduplicate"].hours(documents) or None)
    return [
        StageCost("download", counts["download"], None, fetching, sum(raw) or None, sum(raw)),
        rated("anonymize", text, parts, sum(raw)),
        StageCost("deduplicate", counts["deduplicate"], comparing, comparing),
        rated("split", text, one, sum(corpus)),
        rated("tokenize", words, one, sum(tokens)),
    ]


def _corpus_bytes(plan: DomainPlan) -> float | None:
    return None if plan.words is None else TEXT_BYTES * plan.words


def _node(run: Run, plan: TrainingPlan) -> int:
    """The ranks of a node in a training: all of them where they run on this machine."""
    if runs_here(run):
        return plan.ranks
    return run.config.cluster.of(plan.stage).ranks_per_node


def sync_seconds(run: Run, plan: TrainingPlan, device: Hardware) -> float | None:
    """Seconds of an update's all-reduces where nothing hides behind backward; None without a model of the network."""
    if device.network is None:
        return None
    return synchronizing(plan.rings, replace(device.network, node=_node(run, plan)))


def saving_hours(plan: TrainingPlan) -> float:
    """Hours in which all ranks wait for checkpoints: they are written, then read by one rank for their sha256."""
    return RATES["disk"].hours(plan.saved) + RATES["sha256"].hours(plan.saved)


_OF_NODES = ("nodes", "out of a node\na step", "out of a node\nin all")
_SYNC_HEADS = (
    "model", "nodes", "given a rank\na step", "out of a node\na step", "out of a node\nin all", "sync, ms\na step",
    "of a step", "checkpoints\nin all", "hours\nwhile written",
)  # fmt: skip


def sync_table(run: Run, hardware: str, ranks: int | None = None) -> Table:
    """What the trainings of a completed config send and save besides computing, as a table.

    One machine is one node, which nothing leaves: where a config trains on this machine, its table has no such columns.
    """
    device, here = HARDWARE[hardware], runs_here(run)
    network = f"; {device.network.assumption}" if device.network and not here else ""
    plans = plan_training(run, ranks, device)
    more = ", and Muon's broadcasts" if any(plan.orthogonalising for plan in plans) else ""
    table = Table(
        title=f"Gradients and checkpoints of {run.name} on {hardware}",
        caption=f"sync: ring all-reduces{more}, none hidden behind backward, which the achieved TFLOPs include "
        f"(from 100% of a step the hours are too few){network}; "
        f"while written: hours in which all ranks wait, beside those of training; {ALIKE}",
    )
    shown = [head for head in _SYNC_HEADS if not (here and head in _OF_NODES)]
    for head in shown:
        table.add_column(head, justify="left" if head == "model" else "right")
    for row in folded(_sync_row(run, plan, device) for plan in plans):
        table.add_row(*(cell for head, cell in zip(_SYNC_HEADS, row, strict=True) if head in shown))
    return table


def _sync_row(run: Run, plan: TrainingPlan, device: Hardware) -> tuple[str, ...]:
    node, sync = _node(run, plan), sync_seconds(run, plan, device)
    out, steps = out_of_a_node(plan.rings, node), plan.steps - plan.begin
    share = None if sync is None or not plan.hours else sync * steps / (3600 * plan.hours)
    return (
        plan.name,
        str(-(-plan.ranks // node)),
        f"{short(plan.synced)}B",
        f"{short(round(out))}B",
        f"{short(round(out * steps))}B",
        "" if sync is None else decimal(1000 * sync),
        "" if share is None else f"{100 * share:.1f}%",
        f"{short(plan.saved)}B",
        decimal(saving_hours(plan)),
    )


def stages_table(run: Run, hardware: str, ranks: int | None = None) -> Table:
    """The stages of a completed config as a table, with totals."""
    device, stages = HARDWARE[hardware], plan_stages(run, hardware, ranks)
    bounded = all(plan.kept is not None for plan in plan_domains(run))
    here = runs_here(run)
    of_nodes, more = ("", "cores") if here else (", or out of the node that sends most", "nodes")
    table = Table(
        title=f"Stages of {run.name} on {hardware}",
        caption=f"text: {WORD_BYTES} bytes a word; network: from outside{of_nodes}; longest job: no number "
        f"of {more} makes it shorter; the line below has no checkpoints; rates: docs/performance.md"
        + ("" if bounded else "; domains that no setting bounds are left out"),
        show_footer=True,
    )
    on_device = f"{device.unit}-hours\n({hardware})"
    for head, footer in {
        "stage": "total",
        "jobs": "",
        "core-hours": decimal(sum(one.hours or 0.0 for one in stages if not one.on_device)),
        on_device: decimal(sum(one.hours or 0.0 for one in stages if one.on_device)),
        "longest job,\nhours": "",
        "network": "",
        "written": f"{short(round(sum(one.written or 0.0 for one in stages)))}B",
    }.items():
        table.add_column(head, footer, justify="left" if head == "stage" else "right")
    for one in stages:
        if one.jobs or one.hours:
            table.add_row(*_stage_row(one))
    return table


def _stage_row(stage: StageCost) -> tuple[str, ...]:
    hours = "" if stage.hours is None else decimal(stage.hours)
    cells = ("", hours) if stage.on_device else (hours, "")
    return (
        stage.name,
        f"{stage.jobs:,}" if stage.jobs else "",
        *cells,
        "" if stage.longest is None else decimal(stage.longest),
        *("" if size is None else f"{short(round(size))}B" for size in (stage.network, stage.written)),
    )
