"""The jobs of a run on a cluster, before anything is submitted: where each runs, and what it asks for."""

from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from demix.config.check import MODELS, adaptations, further_seeds, site_of, trained_models
from demix.files import write_text
from demix.launch.job import Cluster, TrainingJob
from demix.launch.slurm import sbatch_text
from demix.plan.cost import TrainingPlan, plan_training
from demix.plan.flops import HARDWARE
from demix.settings import settings_from


@dataclass(frozen=True)
class Jobs:
    """`count` jobs of one kind, `hours` an estimate for all of them, where there is one."""

    stage: str
    name: str
    count: int
    site: Cluster
    ranks: int = 1
    threads: int = 1
    hours: float | None = None

    @property
    def nodes(self) -> int:
        return self.site.nodes(self.ranks) if self.stage in ("train", "adapt") else 1

    @property
    def gpus(self) -> int:
        """Of one job."""
        return self.site.gpus * self.ranks if self.stage in ("train", "adapt", "score") else 0


def plan_jobs(config: dict, hardware: str) -> list[Jobs]:
    """The jobs of a completed config in the order of the workflow, with hours of training on `hardware`."""
    domains = config["domains"]["training"] | config["domains"]["novel"]
    training, novel = len(config["domains"]["training"]), len(config["domains"]["novel"])
    parts = sum(domain["source"]["parts"] for domain in domains.values())
    sites = {
        stage: settings_from(Cluster, site_of(config, stage), "cluster")
        for stage in ("download", "anonymize", "corpus", "train", "adapt", "score", "evaluate")
    }

    def trained(stage: str, plan: TrainingPlan) -> Jobs:
        count = 1 if "rates" not in plan.name else int(plan.name.split()[-2])
        return Jobs(stage, plan.name, count, sites[stage], plan.ranks, config["threads"], plan.hours)

    plans = plan_training(config, None, HARDWARE[hardware])
    adapted = set(adaptations(config))
    # The four models of each seed on every domain, each retrained model on one.
    models = len(MODELS) * (1 + len(further_seeds(config)))
    scores = models * len(domains) + len(config["removal"]["retrain_without"])
    return [
        Jobs("download", "download", parts, sites["download"]),
        Jobs("anonymize", "anonymize", parts, sites["anonymize"]),
        Jobs("corpus", "owners, tokenizer, shared", 2 + bool(novel), sites["corpus"]),
        Jobs("corpus", "split, tokenize", 2 * len(domains), sites["corpus"]),
        *(trained("train", plan) for plan in plans if plan.name not in adapted),
        Jobs("score", "score", scores, sites["score"], 1, config["threads"]),
        *(trained("adapt", plan) for plan in plans if plan.name in adapted),
        Jobs("score", "score what was adapted", 2 * novel, sites["score"], 1, config["threads"]),
        Jobs("evaluate", "evaluate", training + novel, sites["evaluate"]),
    ]


def jobs_table(config: dict, hardware: str) -> Table:
    """The jobs of a completed config as a table."""
    jobs = plan_jobs(config, hardware)
    submits = config["cluster"]["launch"] == "slurm"
    table = Table(
        title=f"Jobs of {config['run']}",
        caption="each with what the section cluster gives it; joining, report and tracking run where snakemake does"
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


def write_sbatch_files(config: dict, hardware: str) -> list[Path]:
    """Write what sbatch would be given for each training, below results/<run>/sbatch/; nothing is submitted."""
    run = Path("results") / config["run"]
    known = {*trained_models(config), *adaptations(config)}
    written = []
    for job in plan_jobs(config, hardware):
        if job.name in known:
            kind = "adapt" if job.stage == "adapt" else "train"
            checkpoints = run / "checkpoints" / job.name
            work = TrainingJob((kind, job.name), "", {}, job.ranks, job.threads, checkpoints, 0)
            path = run / "sbatch" / f"{job.name}.sh"
            write_text(path, sbatch_text(work, job.site))
            written.append(path)
    return written
