"""What a run takes on the cores of this machine: the time, with starts and updates, and the disk, with local text."""

import os
from itertools import groupby

from demix.plan.cells import short
from demix.plan.cost import plan_training
from demix.plan.domains import TEXT_BYTES, TOKENS_PER_WORD, plan_domains
from demix.plan.flops import HARDWARE
from demix.plan.jobs import Jobs, kept_bytes, plan_jobs
from demix.plan.stages import RATES, WORD_BYTES
from demix.run.run import Run

# Seconds of a core in which a job starts: 0.6 without torch and 2.2 with it (benchmarks/starts.py), and 1.0 of
# snakemake's (8% of those of the demo, for 110 jobs).
STARTS = {"train": 3.2, "adapt": 3.2, "score": 3.2}
START = 1.6
# Seconds of a core that an update takes besides its FLOPs: more than in a run of three small files or in the demo, less
# than the 0.08 of config/families.yaml.
UPDATE = 0.01
# Seconds in which nothing else runs: of snakemake's start, the report (10) and tracking (6). Bytes of the last two.
ALONE, REPORT_BYTES = 21.0, 10_000_000
# Text in a compressed file or a Parquet file takes so many times its bytes.
PACKED = 2.5


def seconds_here(run: Run, cores: int, ranks: int | None = None) -> float:
    """Seconds that a run of a completed config takes on `cores` cores. Text of unknown size is left out.

    A stage takes as long as its jobs side by side, and at least as long as the longest of them.
    """
    updates = {plan.name: plan.updates * plan.ranks for plan in plan_training(run, ranks, HARDWARE["cpu"])}
    jobs = plan_jobs(run, "cpu", ranks)
    tables = RATES["evaluate"].hours(sum(job.disk for job in jobs))

    def core_seconds(job: Jobs) -> float:
        hours = HARDWARE["cpu"].units * job.rank_hours + (tables if job.name == "evaluate" else 0.0)
        return 3600 * hours + UPDATE * updates.get(job.name, 0) + STARTS.get(job.stage, START) * job.count

    total = ALONE
    for _, stage in groupby(jobs, lambda job: job.stage):
        works = [(job, core_seconds(job)) for job in stage]
        longest = max(work / job.count / min(cores, job.ranks * job.threads) for job, work in works)
        total += max(sum(work for _, work in works) / cores, longest)
    text = sum(size or 0.0 for size in _text(run).values())
    return total + 3600 * sum(RATES[name].hours(text) for name in ("anonymize", "split", "tokenize")) / cores


def _text(run: Run) -> dict[str, float | None]:
    """Bytes of text that a run reads of each domain; None where neither the config nor a local file says so."""
    found: dict[str, float | None] = {}
    for plan in plan_domains(run):
        source = run.domains[plan.domain].source
        size = None if plan.passing is None else WORD_BYTES / TEXT_BYTES * plan.passing
        if source.kind == "files":
            files = filter(os.path.isfile, source.names)
            plain = (".txt", ".json", ".jsonl", ".csv", ".tar")
            there = sum(os.path.getsize(file) * (1 if file.endswith(plain) else PACKED) for file in files)
            # Nobody knows how much of a source that several domains share each of them has.
            there /= len(run.shared.get(run.domains[plan.domain].shared or "", ())) or 1
            size = there if size is None else min(size, there)
        found[plan.domain] = size
    return found


def here_line(run: Run, ranks: int | None = None) -> str:
    """The time and the disk that a completed config takes on the cores of this machine, in one line."""
    cores = len(os.sched_getaffinity(0))
    text, plans = _text(run), {plan.domain: plan for plan in plan_domains(run)}
    # Documents, what splits keep of them, and tokens.
    a_word = 2 * TEXT_BYTES + 2 * TOKENS_PER_WORD
    own = sum((text[name] or 0.0) / WORD_BYTES * a_word for name, plan in plans.items() if plan.kept is None)
    unknown = sum(size is None for size in text.values())
    # A training removes its checkpoints when it ends, and a run on few cores trains few models at a time.
    saved = max(plan.checkpoints * plan.checkpoint for plan in plan_training(run, ranks, HARDWARE["cpu"]))
    disk = f"{short(round(kept_bytes(run, 'cpu', ranks) + own) + saved + REPORT_BYTES)}B of disk"
    more = f", and what the text of {unknown} domain{'s' * (unknown > 1)} adds" if unknown else ""
    return f"{run.name} needs {_about(seconds_here(run, cores, ranks))} on {cores} cores and {disk}{more}"


def _about(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 1.5 * size:
            return f"about {seconds / size:.0f} {unit}"
    return f"about {max(10, round(seconds, -1)):.0f} seconds"
