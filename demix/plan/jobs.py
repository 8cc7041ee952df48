"""The jobs of a run on a cluster, before anything is submitted: the place and the resources of each."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

from rich.table import Table

from demix.config.architecture import Architecture
from demix.config.counts import parameters
from demix.errors import DemixError
from demix.files import write_text
from demix.launch.job import Cluster, TrainingJob
from demix.plan.cells import decimal, folded
from demix.plan.cost import ALIKE, named, plan_training
from demix.plan.domains import TOKENS_PER_WORD, plan_domains
from demix.plan.flops import HARDWARE, Hardware, achieved_tflops, score_table_bytes, scoring_hours
from demix.run.check import completed_run
from demix.run.contexts import asked_contexts
from demix.run.harness import harnessed
from demix.run.models import job_place
from demix.run.rules import RunRules
from demix.run.run import Run
from demix.run.scoring import ScoringJob, ScoringPart, scoring_jobs
from demix.run.systems import chosen_on_dev, classified, fitted, routed

STAGES = ("download", "anonymize", "corpus", "train", "adapt", "score", "evaluate")


@dataclass(frozen=True)
class Jobs:
    """Jobs of one kind: the number of jobs of each rule of the workflow, by the rule's name.

    `hours` is an estimate for all the jobs, or None, and `disk` the bytes of their score tables. `site` is None for
    rules that run where snakemake does.
    """

    stage: str
    name: str
    rules: dict[str, int]
    site: Cluster | None
    ranks: int = 1
    threads: int = 1
    hours: float | None = None
    disk: int = 0

    @property
    def count(self) -> int:
        """The number of jobs of all rules."""
        return sum(self.rules.values())

    @property
    def nodes(self) -> int:
        """Nodes of one job."""
        return self.site.nodes(self.ranks) if self.site and self.stage in ("train", "adapt") else 1

    @property
    def rank_hours(self) -> float:
        """Hours of all jobs, summed over the ranks."""
        return (self.hours or 0.0) * self.ranks

    @property
    def gpus(self) -> int:
        """GPUs of one job."""
        return self.site.gpus * self.ranks if self.site and self.stage in ("train", "adapt", "score") else 0


def usual_hardware(run: Run) -> str:
    """The hardware that a plan assumes by itself: the paper's where the config gives training GPUs, else cores."""
    return "v100" if run.config.cluster.of("train").gpus else "cpu"


def runs_here(run: Run) -> bool:
    """Whether a run trains on this machine: SLURM is not asked for, and nothing says what a cluster gives a job.

    profiles/slurm asks for SLURM when the run starts, so a config of the paper's sizes has launch: local, and GPUs.
    """
    return run.config.cluster.launch != "slurm" and usual_hardware(run) == "cpu"


def plan_jobs(run: Run, hardware: str, ranks: int | None = None) -> list[Jobs]:
    """All jobs of a completed config in the order of the workflow, with hours of training and scoring on `hardware`.

    Without `ranks`, the config sets the number of each training. The rules are those that `snakemake -n` lists,
    `all` aside.
    """
    sites = {stage: run.config.cluster.of(stage) for stage in STAGES}
    plans, costs = plan_training(run, ranks, HARDWARE[hardware]), ScoringCosts(run, HARDWARE[hardware])
    threads, scoring = run.config.threads, scoring_jobs(run)

    def training(stage: str) -> list[Jobs]:
        return [
            Jobs(stage, plan.name, {plan.rule: plan.jobs}, sites[stage], plan.ranks, threads, plan.hours)
            for plan in plans
            if plan.stage == stage
        ]

    def scored(name: str, *, added: bool) -> Jobs:
        rules = [job for job in scoring if job.added == added]
        hours, disk = zip((0.0, 0), *map(costs.of_job, rules), strict=True)
        counts = {job.rule: job.jobs for job in rules}
        return Jobs("score", name, counts, sites["score"], 1, threads, sum(hours), sum(disk))

    jobs = [
        *_of_text(run, sites),
        *training("train"),
        Jobs("train", "keep seeds", {"seed": len(run.seeds)}, sites["train"], 1, threads),
        scored("score", added=False),
        *training("adapt"),
        scored("score what was adapted", added=True),
        *_of_scores(run, sites),
    ]
    return [job for job in jobs if job.count]


def _of_text(run: Run, sites: dict[str, Cluster]) -> list[Jobs]:
    """The jobs from the raw text to tokens and clusters."""
    novel, number, apart = len(run.novel), len(run.domains), RunRules(run).apart
    parts = sum(domain.source.parts for domain in run.texts.values())
    passes = [run.config.sources[name].source.parts for name in run.shared]
    clustering = {"fit_clusters": len(fitted(run)), "assign": len(run.learned_clusterings)}
    clustering |= {f"cluster_{split}_{name}": 1 for name, split in run.learned_splits}
    together = {"deduplicate": 1, "novel_duplicates": int(novel > 0), "tokenizer": 1, "overlap": 1}
    return [
        Jobs("download", "read", {"read": 0 if apart else parts}, sites["download"]),
        Jobs("download", "download", {"download": parts if apart else 0}, sites["download"]),
        Jobs("download", "divide", {"divide": sum(passes)}, sites["download"]),
        Jobs("anonymize", "anonymize", {"anonymize": parts if apart else 0}, sites["anonymize"]),
        Jobs("download", "import parents", {"import_parent": len(run.parents)}, sites["download"]),
        Jobs("corpus", "deduplicate, tokenizer, overlap", together, sites["corpus"]),
        Jobs("corpus", "split, tokenize", {"split": number, "tokenize": number}, sites["corpus"]),
        Jobs("corpus", "suites", {"hold_out": len(run.suites), "tokenize_suite": len(run.suites)}, sites["corpus"]),
        Jobs("corpus", "clusters", clustering, sites["corpus"]),
        Jobs("", "cards of shared sources", {"source_card": len(passes)}, None),
    ]


def _of_scores(run: Run, sites: dict[str, Cluster]) -> list[Jobs]:
    """The jobs that need trained models: merging them, tasks, arithmetic on scores, the report."""
    number, threads, asked, stage = len(run.domains), run.config.threads, classified(run), run.examples_stage
    joining, harness = {f"join_{model.rule}": 1 for model in run.joined}, harnessed(run)
    averaging = {one.rule: number if one.by_domain else 1 for one in run.merged if not one.token_routed}
    routing = {one.rule: 1 for one in run.routed_merges}
    near = len(routed(run)) * len(run.config.evaluation.routing_context)
    route = {"route": near, "route_novel": len(run.novel) * near}
    evaluating = {"choose_mixing": len(chosen_on_dev(run)), "evaluate": number + len(run.suites)}
    once = {"results": 1, "run_config": 1, "report": 1, "card": 1, "track": 1, "audit": int(bool(run.without))}
    once |= {"choose_rate": len(run.swept), "suites": int(bool(run.suites))}

    def scoring(name: str, rules: dict[str, int]) -> Jobs:
        return Jobs("score", name, rules, sites["score"], 1, threads)

    orders = run.config.evaluation.ngrams or ()
    counting = Jobs("evaluate", "score n-grams", {"score_ngrams": len(orders)}, sites["evaluate"])
    return [
        replace(counting, disk=len(orders) * ScoringCosts(run, HARDWARE["cpu"]).of_ngrams()),
        Jobs("corpus", "join experts", joining, sites["corpus"]),
        Jobs("evaluate", "average", averaging, sites["evaluate"]),
        scoring("merge as routed", routing),
        Jobs("evaluate", "route", route, sites["evaluate"]),
        Jobs("evaluate", "evaluate", evaluating, sites["evaluate"]),
        Jobs("evaluate", "by position", {"contexts": number if asked_contexts(run) else 0}, sites["evaluate"]),
        Jobs(stage, "examples of tasks", {"examples": len(run.config.tasks)}, sites[stage]),
        scoring("score tasks", {"fewshot": len(asked) * len(run.config.tasks)}),
        Jobs("download", "documents of the harness", {"harness_documents": int(bool(harness))}, sites["download"]),
        Jobs("corpus", "contamination", {"contamination": len(run.training) * bool(harness)}, sites["corpus"]),
        scoring("tasks of the harness", {"harness": len(harness)}),
        Jobs("evaluate", "classify", {"classify": int(bool(asked or harness))}, sites["evaluate"]),
        scoring("audit", {f"audit_{model.removed}": 1 for model in run.without}),
        Jobs("", "join, report, track", once, None),
    ]


@dataclass(frozen=True)
class ScoringCosts:
    """What scoring takes under the models of a completed config: hours of one rank, and bytes of score tables."""

    run: Run
    device: Hardware

    @cached_property
    def _architectures(self) -> dict[str, Architecture]:
        """The architectures of the models by their folders."""
        merged = {one.place: one.architecture for one in self.run.merged}
        return merged | {one.name: one.architecture for one in self.run.trained}

    @cached_property
    def _tokens(self) -> Callable[[str, int], dict[str, int]]:
        """The tokens that are scored of a split in blocks of some length, by domain."""
        section, domains = self.run.config.evaluation, self.run.texts

        def of_split(split: str, context: int) -> dict[str, int]:
            most = section.limit(split, context)
            words = {
                name: domain.words.dev if split == "dev" else domain.words.test for name, domain in domains.items()
            }
            there = {name: round(TOKENS_PER_WORD * number) for name, number in words.items()}
            return {name: min(tokens, most or tokens) for name, tokens in there.items()}

        return cache(of_split)

    def of_job(self, job: ScoringJob) -> tuple[float, int]:
        """Hours of one rank, and bytes of score tables before compression, of all jobs of a rule that scores."""
        hours, disk = zip(*(self.of_part(part, job.jobs) for part in job.parts), strict=True)
        return sum(hours), sum(disk)

    def of_part(self, part: ScoringPart, jobs: int) -> tuple[float, int]:
        """What `of_job` sums: the hours and the bytes of one part of a rule, in all `jobs` of the rule."""
        architecture = self._architectures.get(part.model, self.run.architecture)
        routed = architecture.routed
        architecture = replace(
            architecture,
            context=part.context or architecture.context,
            routed=replace(routed, top_k=part.top_k) if routed and part.top_k else routed,
        )
        several = {f"{{{kind}}}": list(domains) for kind, domains in self.run.config.domains.kinds.items()}
        several["{suite}"] = list(self.run.suites)
        names = [name for place in part.domains for name in several.get(place, [place] * jobs)]
        tokens = sum(sum(map(self._tokens(split, architecture.context).__getitem__, names)) for split in part.splits)
        columns = 1 if part.own else len(part.columns)
        tflops = achieved_tflops(self.device, architecture, demix=columns > 1)
        hours = scoring_hours(architecture, self.run.types, columns, tokens, tflops, part.expert_scope)
        return hours, score_table_bytes(columns, tokens) - (0 if part.shared else score_table_bytes(0, tokens))

    def of_ngrams(self) -> int:
        """Bytes of the score tables of the n-grams of one order, of all training text and of each training domain."""
        of_split = (self._tokens(split, self.run.context) for split in ("dev", "test"))
        dev, test = (sum(map(tokens.__getitem__, self.run.domains)) for tokens in of_split)
        return score_table_bytes(1, test) + score_table_bytes(len(self.run.training), dev + test)


_OF_A_CLUSTER = ("nodes\na job", "GPUs\na job", "memory\na node", "limit", "where")
_HEADS = (
    "stage", "jobs", "nodes\na job", "ranks\na job", "GPUs\na job", "cores\na job", "memory\na node", "limit", "hours",
    "where",
)  # fmt: skip


def jobs_table(run: Run, hardware: str, ranks: int | None = None) -> Table:
    """The jobs of a completed config as a table, without what a cluster gives them where they run on this machine."""
    jobs, device = plan_jobs(run, hardware, ranks), HARDWARE[hardware]
    local = "; launch is local: with profiles/slurm training is submitted as jobs of these nodes"
    slurm, here = run.config.cluster.launch == "slurm", runs_here(run)
    given = "" if here else f"each with what the section cluster gives it{'' if slurm else local}; "
    table = Table(title=f"Jobs of {run.name}", caption=given + ALIKE, show_footer=True)
    total = device.units * sum(job.rank_hours for job in jobs)
    footers = {"stage": "total", "jobs": f"{sum(job.count for job in jobs):,}", "hours": decimal(total)}
    shown = [head for head in _HEADS if not (here and head in _OF_A_CLUSTER)]
    for head in shown:
        name = f"{device.unit}-hours\n({hardware})" if head == "hours" else head
        table.add_column(name, footers.get(head, ""), justify="left" if head in ("stage", "where") else "right")
    for cells in folded(_row(job, device) for job in jobs):
        table.add_row(*(cell for head, cell in zip(_HEADS, cells, strict=True) if head in shown))
    return table


def _row(job: Jobs, device: Hardware) -> tuple[str, ...]:
    if job.site is None:
        return (job.name, f"{job.count:,}", *[""] * 7, "where snakemake runs")
    login = job.stage == "download" and job.site.downloads == "login"
    return (
        job.name,
        f"{job.count:,}",
        str(job.nodes),
        str(job.ranks),
        str(job.gpus),
        str(job.ranks * job.threads),
        f"{job.site.memory_mb * job.ranks // job.nodes / 1000:,.1f} GB",
        f"{job.site.minutes / 60:,.1f} h",
        "" if job.hours is None else decimal(device.units * job.rank_hours),
        "login node" if login else job.site.partition or "default partition",
    )


def kept_bytes(run: Run, hardware: str, ranks: int | None = None) -> int:
    """The bytes of a completed config's files but for its checkpoints and for text that no setting bounds.

    They are the text, the weights, the states that seed phases keep, and the score tables before compression.
    """
    by_name = {plan.name: plan for plan in plan_training(run, ranks, HARDWARE[hardware])}
    size = sum((domain.kept or 0) + (domain.passing or 0) for domain in plan_domains(run))
    size += sum(job.disk for job in plan_jobs(run, hardware, ranks))
    size += sum(plan.weights for plan in by_name.values())
    size += sum(by_name[parent].checkpoint for parent, _ in run.seeds)
    return size + sum(4 * sum(parameters(one.architecture, run.types)) for one in run.routed_merges)


def in_one_line(run: Run, hardware: str, ranks: int | None = None) -> str:
    """What a completed config takes in all: hours of GPUs or cores, disk, and days on what its largest job has.

    The disk is the most that is there at once: with the checkpoints of all trainings.
    """
    jobs, device = plan_jobs(run, hardware, ranks), HARDWARE[hardware]
    checkpoints = sum(plan.jobs * plan.checkpoints * plan.checkpoint for plan in plan_training(run, ranks, device))
    unknown = sum(domain.kept is None for domain in plan_domains(run))
    more = f" plus the text of {unknown} domain{'s' * (unknown > 1)}" if unknown else ""
    spent = sum(job.rank_hours for job in jobs)
    largest = max(jobs, key=lambda job: job.ranks)
    here = runs_here(run)
    each = device.units * largest.ranks // (1 if here else largest.nodes)
    days = spent / largest.ranks / 24
    takes = f"{decimal(device.units * spent)} {device.unit}-hours ({hardware}) of training and scoring"
    lasts = f"{decimal(days)} days" if days >= 1 else f"{decimal(24 * days)} hours"
    nodes = "" if here else f"{largest.nodes} nodes with " if largest.nodes > 1 else "1 node with "
    disk = f"at most {(kept_bytes(run, hardware, ranks) + checkpoints) / 1e9:,.1f} GB of disk{more}"
    return f"{run.name} needs {takes}, {disk}, {lasts} on {nodes}{each} {device.unit}{'s' * (each > 1)}"


def lacking(run: Run, hardware: str) -> str:
    """A warning of the keys of a completed config that ask `hardware` for bf16, which it lacks; "" if it has it."""
    sections = {name: getattr(run.config, name) for name in ("training", "adaptation", "evaluation")}
    rows = {f"models.{model.row}": model.settings for model in run.trained}
    given = sections if sections["training"].precision == "bf16" else sections | rows
    keys = [f"{key}.precision" for key, section in given.items() if section.precision == "bf16"]
    if HARDWARE[hardware].bf16 or not keys:
        return ""
    many = (
        f"{', '.join(keys)}: bf16, which {hardware} lacks; set fp16 (fp32 in evaluation), or plan for other --hardware"
    )
    return f"config key{'s' * (len(keys) > 1)} {many}"


def levers(run: Run, hardware: str, ranks: int | None = None) -> list[str]:
    """What can be left out of a completed config by one key: the three that spare most, from 5% of the hours on.

    What a key spares is the difference to the plan without it. A row that others need is no such key.
    """
    values, unit = run.config.values, HARDWARE[hardware].unit
    models = [name for name, row in values["models"].items() if row is not None]
    without = {
        "removal.retrain_without: []": {"removal": values["removal"] | {"retrain_without": []}},
        "seeds: []": {"seeds": []},
        "training.sweep: null": {"training": values["training"] | {"sweep": None}},
        "adaptation.sweep: null": {"adaptation": values["adaptation"] | {"sweep": None}},
        **{f"models.{name}: null": {"models": values["models"] | {name: None}} for name in models},
    }

    def spent(one: Run) -> float:
        return HARDWARE[hardware].units * sum(job.rank_hours for job in plan_jobs(one, hardware, ranks))

    total, spared = spent(run), dict[str, float]()
    for key, change in without.items():
        # A config that is refused is one that needs the key.
        with suppress(DemixError):
            spared[key] = total - spent(completed_run(values | change, Path()))
    most = sorted((key for key in spared if spared[key] >= total / 20), key=spared.__getitem__, reverse=True)
    return [f"{key} spares {decimal(spared[key])} of {decimal(total)} {unit}-hours" for key in most[:3]]


def write_sbatch_files(run: Run, hardware: str, ranks: int | None = None) -> list[Path]:
    """Write the sbatch script of each training below results/<run>/sbatch/, without submitting any."""
    # submitit takes half a second to import, which other plans need not wait for.
    from demix.launch.sbatch import sbatch_text

    known = {named(job): job_place(job) for one in run.trained for job in one.jobs}
    known |= {one.name: one.name for one in run.adaptations}
    written = []
    for job in plan_jobs(run, hardware, ranks):
        if job.name in known and job.site is not None:
            checkpoints = run.folder / "checkpoints" / known[job.name]
            work = TrainingJob((job.stage, job.name), "", {}, job.ranks, job.threads, checkpoints, 0)
            path = run.folder / "sbatch" / f"{known[job.name].replace('/', '-')}.sh"
            write_text(path, sbatch_text(work, job.site))
            written.append(path)
    return written
