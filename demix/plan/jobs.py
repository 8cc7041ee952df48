"""The jobs of a run on a cluster, before anything is submitted: the place and the resources of each."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from demix.config.architecture import architecture_from
from demix.config.check import site_of
from demix.config.evaluated import chosen_on_dev
from demix.config.scoring import scoring_jobs
from demix.config.systems import adaptations, seeds, trained
from demix.files import write_text
from demix.launch.job import Cluster, TrainingJob
from demix.launch.slurm import sbatch_text
from demix.plan.cost import TrainingPlan, plan_training
from demix.plan.flops import HARDWARE
from demix.settings import settings_from


@dataclass(frozen=True)
class Jobs:
    """Jobs of one kind: the number of jobs of each rule of the workflow, by the rule's name.

    `hours` is an estimate for all the jobs, or None. `site` is None for rules that run where snakemake does.
    """

    stage: str
    name: str
    rules: dict[str, int]
    site: Cluster | None
    ranks: int = 1
    threads: int = 1
    hours: float | None = None

    @property
    def count(self) -> int:
        """The number of jobs of all rules."""
        return sum(self.rules.values())

    @property
    def nodes(self) -> int:
        """Nodes of one job."""
        return self.site.nodes(self.ranks) if self.site and self.stage in ("train", "adapt") else 1

    @property
    def gpus(self) -> int:
        """GPUs of one job."""
        return self.site.gpus * self.ranks if self.site and self.stage in ("train", "adapt", "score") else 0


def plan_jobs(config: dict[str, Any], hardware: str) -> list[Jobs]:
    """All jobs of a completed config in the order of the workflow, with hours of training on `hardware`.

    The rules are those that `snakemake -n` lists, `all` aside.
    """
    domains = config["domains"]["training"] | config["domains"]["novel"]
    novel, number = len(config["domains"]["novel"]), len(domains)
    parts = sum(domain["source"]["parts"] for domain in domains.values())
    sites = {
        stage: settings_from(Cluster, site_of(config, stage), "cluster")
        for stage in ("download", "anonymize", "corpus", "train", "adapt", "score", "evaluate")
    }
    plans, adapting = plan_training(config, None, HARDWARE[hardware]), {one.rule for one in adaptations(config)}
    models, threads = trained(config), config["threads"]
    removed = [model.removed for model in models if model.removed]
    swept = [model for model in models if model.sweeps]
    kept = seeds(config, architecture_from(config["architecture"]).context)

    def of_training(stage: str, plan: TrainingPlan) -> Jobs:
        return Jobs(stage, plan.name, {plan.rule: plan.jobs}, sites[stage], plan.ranks, threads, plan.hours)

    def of_scoring(name: str, *, added: bool) -> Jobs:
        rules = {job.rule: job.jobs for job in scoring_jobs(config) if job.added == added}
        return Jobs("score", name, rules, sites["score"], 1, threads)

    chosen = len(chosen_on_dev(config))
    once = {"results": 1, "run_config": 1, "report": 1, "card": 1, "track": 1}
    jobs = [
        Jobs("download", "download", {"download": parts}, sites["download"]),
        Jobs("anonymize", "anonymize", {"anonymize": parts}, sites["anonymize"]),
        Jobs(
            "corpus",
            "deduplicate, tokenizer, overlap",
            {"deduplicate": 1, "novel_duplicates": int(novel > 0), "tokenizer": 1, "overlap": 1},
            sites["corpus"],
        ),
        Jobs("corpus", "split, tokenize", {"split": number, "tokenize": number}, sites["corpus"]),
        *(of_training("train", plan) for plan in plans if plan.rule not in adapting),
        Jobs("train", "keep seeds", {"seed": len(kept)}, sites["train"], 1, threads),
        of_scoring("score", added=False),
        *(of_training("adapt", plan) for plan in plans if plan.rule in adapting),
        of_scoring("score what was adapted", added=True),
        Jobs("evaluate", "evaluate", {"choose_mixing": chosen, "evaluate": number}, sites["evaluate"]),
        Jobs("score", "audit", {f"audit_{name}": 1 for name in removed}, sites["score"], 1, threads),
        Jobs("", "join, report, track", once | {"audit": int(bool(removed)), "choose_rate": len(swept)}, None),
    ]
    return [job for job in jobs if job.count]


def jobs_table(config: dict[str, Any], hardware: str) -> Table:
    """The jobs of a completed config as a table."""
    jobs = plan_jobs(config, hardware)
    submits = config["cluster"]["launch"] == "slurm"
    table = Table(
        title=f"Jobs of {config['run']}",
        caption="each with what the section cluster gives it"
        + ("" if submits else "; launch is local: with profiles/slurm training is submitted as jobs of these nodes"),
        show_footer=True,
    )
    heads = ("stage", "jobs", "nodes\na job", "ranks\na job", "GPUs\na job", "cores\na job", "memory\na node")
    for head in heads:
        footer = {"stage": "total", "jobs": f"{sum(job.count for job in jobs):,}"}.get(head, "")
        table.add_column(head, footer, justify="left" if head == "stage" else "right")
    hours = sum(job.hours * max(1, job.gpus) for job in jobs if job.hours)
    table.add_column("limit", justify="right")
    table.add_column(f"hours\n({hardware})", f"{hours:,.1f}\nGPU-hours", justify="right")
    table.add_column("where")
    for job in jobs:
        if job.site is None:
            table.add_row(job.name, f"{job.count:,}", *[""] * 7, "where snakemake runs")
            continue
        login = job.stage == "download" and job.site.downloads == "login"
        table.add_row(
            job.name,
            f"{job.count:,}",
            str(job.nodes),
            str(job.ranks),
            str(job.gpus),
            str(job.ranks * job.threads),
            f"{job.site.memory_mb * job.ranks // job.nodes / 1000:,.1f} GB",
            f"{job.site.minutes / 60:,.1f} h",
            "" if job.hours is None else f"{job.hours:,.2g}" if job.hours < 10 else f"{job.hours:,.0f}",
            "login node" if login else job.site.partition or "default partition",
        )
    return table


def write_sbatch_files(config: dict[str, Any], hardware: str) -> list[Path]:
    """Write the sbatch script of each training below results/<run>/sbatch/, without submitting any."""
    run = Path("results") / config["run"]
    known = {one.name for one in trained(config)} | {one.name for one in adaptations(config)}
    written = []
    for job in plan_jobs(config, hardware):
        if job.name in known and job.site is not None:
            checkpoints = run / "checkpoints" / job.name
            work = TrainingJob((job.stage, job.name), "", {}, job.ranks, job.threads, checkpoints, 0)
            path = run / "sbatch" / f"{job.name}.sh"
            write_text(path, sbatch_text(work, job.site))
            written.append(path)
    return written
