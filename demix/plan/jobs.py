"""The number of a run's jobs and their total cost, before anything is submitted."""

import os
from collections import Counter

from demix.config.counts import parameters
from demix.config.training import KEPT_CHECKPOINTS
from demix.plan.cost import WORD_BYTES, ScoringCosts, TrainingPlan, cluster_bytes, plan_domains, plan_training
from demix.plan.flops import HARDWARE
from demix.run.evaluated import asked_contexts, chosen_on_dev, fitted, routed
from demix.run.harness import harnessed
from demix.run.run import Run
from demix.run.scoring import scoring_jobs
from demix.run.systems import classified

# Core-seconds to start a job: 0.6 without torch and 2.2 with it (benchmarks/starts.py at 37803530), and 1.0 of
# snakemake's (8% of the demo's core-seconds, for 110 jobs).
START, START_WITH_TORCH = 1.6, 3.2
# Core-seconds that an update needs in addition to its FLOPs: more than measured in a run of three small files and in
# the demo, less than the 0.08 of config/families.yaml.
UPDATE = 0.01
# Seconds during which nothing else runs: snakemake's start, the report (10) and tracking (6). Bytes of the last two.
OVERHEAD_SECONDS, REPORT_BYTES = 21.0, 10_000_000
# Bytes per second of CPU time, ±30%, on one of two shared cores (AMD EPYC with AVX-512 bf16): to anonymize (6 MB),
# split (12) and tokenize (30) documents of 200 bytes (benchmarks/corpus.py --cut 200 at 37803530), and to evaluate
# score tables (benchmarks/mix.py --tokens 150000).
TEXT_RATE, TABLES_RATE = 3.5e6, 10e6


def usual_hardware(run: Run) -> str:
    """The default hardware of a plan: the paper's if the config has GPUs for training, else CPU cores."""
    return "v100" if run.config.cluster.of("train").gpus else "cpu"


def runs_here(run: Run) -> bool:
    """Whether a run trains on this machine: the config does not set SLURM, and has no resources of cluster jobs.

    profiles/slurm sets SLURM only when the run starts, so a config of the paper's sizes has launch: local, and GPUs.
    """
    return run.config.cluster.launch != "slurm" and usual_hardware(run) == "cpu"


def count_jobs(run: Run) -> dict[str, int]:
    """The number of jobs per rule of the workflow, as in `snakemake -n` before any has run, without the rule `all`."""
    config, number, suites = run.config, len(run.domains), len(run.suites)
    parts = sum(domain.source.parts for domain in run.texts.values())
    passes = [config.sources[name].source.parts for name in run.shared]
    asked, harness, near = classified(run), harnessed(run), len(routed(run)) * len(config.evaluation.routing_context)
    counts = {
        **(dict.fromkeys(("download", "anonymize"), parts) if run.submitted else {"read": parts}),
        "divide": sum(passes),
        **dict.fromkeys(("deduplicate", "tokenizer", "overlap", "run_config", "report", "track"), 1),
        **dict.fromkeys(("split", "tokenize"), number),
        **dict.fromkeys(("hold_out", "tokenize_suite"), suites),
        "fit_clusters": len(fitted(run)),
        "assign": len(run.learned_clusterings),
        "cluster_shards": len(run.learned_splits),
        **Counter("train_expert" if part.part else "train" for model in run.trained for part in model.trainings),
        "sweep": sum(len(model.swept_rates) for model in run.swept),
        "choose_rate": len(run.swept),
        "seed": len(run.seeds),
        **Counter(one.rule for one in run.adaptations),
        "join": len(run.joined),
        "average": sum(number if one.by_domain else 1 for one in run.merged if not one.token_routed),
        "merge_routed": len(run.routed_merges),
        "score": len(scoring_jobs(run)),
        "score_ngrams": len(config.evaluation.ngrams or ()),
        "combine": len(config.evaluation.mixed),
        "route": number * near,
        "choose_mixing": len(chosen_on_dev(run)),
        "evaluate": number + suites,
        "table": 4 + bool(suites) + bool(run.without),
        "contexts": number if asked_contexts(run) else 0,
        "examples": len(config.tasks),
        "fewshot": len(asked) * len(config.tasks),
        "harness_documents": int(bool(harness)),
        "contamination": len(run.training) * bool(harness),
        "harness": len(harness),
        "classify": int(bool(asked or harness)),
        "audit_domain": len(run.without),
    }
    return {rule: jobs for rule, jobs in counts.items() if jobs}


def disk_bytes(run: Run, plans: list[TrainingPlan]) -> int:
    """The bytes of a completed config's files, without checkpoints and text of unknown size.

    They are the text, the tokens (again by cluster, for trainings on clusters), the weights, the states that are kept
    for dense warm starts, and the score tables before compression.
    """
    by_name = {plan.name: plan for plan in plans}
    size = sum(domain.disk or 0 for domain in plan_domains(run)) + cluster_bytes(run)
    size += sum(plan.weights for plan in plans) + sum(by_name[parent].checkpoint for parent, _ in run.seeds)
    size += ScoringCosts(run, HARDWARE["cpu"]).of_all[1]
    copies = {one: len(run.domains) if one.by_domain else 1 for one in (*run.routed_merges, *run.merged)}
    return size + sum(4 * number * sum(parameters(one.architecture, run.types)) for one, number in copies.items())


def in_one_line(run: Run, hardware: str, ranks: int | None = None) -> str:
    """The total cost of a completed config: GPU-hours or core-hours, disk, and days with its largest job's resources.

    The disk is the maximum at any time, with the checkpoints of all trainings.
    """
    device = HARDWARE[hardware]
    plans = plan_training(run, ranks, device)
    disk = disk_bytes(run, plans) + sum(plan.jobs * KEPT_CHECKPOINTS * plan.checkpoint for plan in plans)
    spent = sum(plan.rank_hours for plan in plans) + ScoringCosts(run, device).of_all[0]
    largest = max(plans, key=lambda plan: plan.ranks)
    nodes = 0 if runs_here(run) else run.config.cluster.of(largest.stage).nodes(largest.ranks)
    each = device.units * largest.ranks // (nodes or 1)
    days = spent / largest.ranks / 24
    costs = f"{decimal(device.units * spent)} {device.unit}-hours ({hardware}) of training and scoring"
    lasts = f"{decimal(days)} days" if days >= 1 else f"{decimal(24 * days)} hours"
    where = f"{nodes} node{'s' * (nodes > 1)} with " if nodes else ""
    size = f"at most {disk / 1e9:,.1f} GB of disk{_unknown(run)}"
    return f"{run.name} needs {costs}, {size}, {lasts} on {where}{each} {device.unit}{'s' * (each > 1)}"


def _unknown(run: Run) -> str:
    unknown = sum(domain.disk is None for domain in plan_domains(run))
    return f" plus the text of {unknown} domain{'s' * (unknown > 1)}" if unknown else ""


def seconds_here(run: Run, cores: int, ranks: int | None = None) -> float:
    """Seconds that a run of a completed config needs on `cores` cores, without text of unknown size.

    This is the time of all jobs in parallel, but at least the time of the longest training.
    """
    device = HARDWARE["cpu"]
    plans = plan_training(run, ranks, device)
    hours, tables = ScoringCosts(run, device).of_all
    trainings = [3600 * device.units * plan.rank_hours + UPDATE * plan.updates * plan.ranks for plan in plans]
    rules = {"score"} | {plan.rule for plan in plans}
    starts = sum(jobs * (START_WITH_TORCH if rule in rules else START) for rule, jobs in count_jobs(run).items())
    text = sum(WORD_BYTES * (domain.read or 0) for domain in plan_domains(run))
    work = sum(trainings) + 3600 * device.units * hours + starts + text / TEXT_RATE + tables / TABLES_RATE
    longest = max(hours / min(cores, plan.ranks * device.units) for hours, plan in zip(trainings, plans, strict=True))
    return OVERHEAD_SECONDS + max(work / cores, longest)


def here_line(run: Run, ranks: int | None = None) -> str:
    """The time and the disk that a completed config needs on the cores of this machine, in one line."""
    cores, plans = len(os.sched_getaffinity(0)), plan_training(run, ranks, HARDWARE["cpu"])
    # A training removes its checkpoints when it ends, and a run on few cores trains few models at a time.
    saved = max(KEPT_CHECKPOINTS * plan.checkpoint for plan in plans)
    disk = f"{short(disk_bytes(run, plans) + saved + REPORT_BYTES)}B of disk{_unknown(run)}"
    seconds = seconds_here(run, cores, ranks)
    units = (("days", 86400), ("hours", 3600), ("minutes", 60))
    fitting = [f"{seconds / size:.0f} {unit}" for unit, size in units if seconds >= 1.5 * size]
    about = [*fitting, f"{max(10, round(seconds, -1)):.0f} seconds"][0]
    return f"{run.name} needs about {about} on {cores} cores and {disk}"


def decimal(number: float) -> str:
    """Two significant digits; more would not be justified by assumed rates."""
    if number < 1:
        return f"{number:.2g}"
    rounded = float(f"{number:.2g}")
    return f"{rounded:.1f}" if rounded < 10 else f"{rounded:,.0f}"


def short(number: int) -> str:
    """A number with a suffix for thousands to trillions: 1234567 becomes 1.2M."""
    value, letters = float(number), iter(("", "k", "M", "G", "T"))
    letter = next(letters)
    while value >= 999.5 and letter != "T":
        value, letter = value / 1000, next(letters)
    return f"{value:.0f}{letter}" if value >= 99.5 or not letter else f"{value:.1f}{letter}"
