"""Checks before the first job of a run: the network for downloads and, on SLURM, its commands and partitions."""

import shutil
import subprocess
from collections.abc import Iterable
from typing import Literal

from demix.data.fetch import check_network
from demix.data.shared import NOTES
from demix.data.sources import Source, pinned
from demix.errors import DemixError, nearest
from demix.run.run import Run
from demix.settings import settings_from, written

# The commands of SLURM that the executor plug-in, submitit and demix call; one package has them all.
CLIENTS = ("sbatch", "srun", "sinfo", "squeue", "sacct", "scontrol", "scancel")


def check_ready(run: Run, executor: Literal["local", "slurm"], domains: Iterable[str]) -> None:
    """Raise DemixError if jobs of a run cannot start; `domains` are the domains whose text is downloaded."""
    if executor == "slurm":
        check_site(run)
    if executor == "local" or run.config.cluster.downloads == "login":
        check_downloads(run, domains)


def check_site(run: Run) -> None:
    """Raise DemixError if SLURM is not installed, or lacks a partition that a run requests."""
    if absent := [name for name in CLIENTS if shutil.which(name) is None]:
        cause = f"SLURM's {'command is' if len(absent) == 1 else 'commands are'} not installed here"
        raise DemixError(", ".join(absent), cause, "log in to the cluster, or omit --profile")
    known = _partitions()
    cluster = run.config.cluster
    for key, site in {"cluster": cluster, **{f"cluster.stages.{k}": v for k, v in cluster.stages.items()}}.items():
        for partition in filter(None, (site.partition or "").split(",")):
            if partition not in known:
                cause = f"is {partition!r}, which this cluster does not have"
                raise DemixError(
                    f"config key {key}.partition", cause, nearest(partition, known, "name one that sinfo lists")
                )


def check_downloads(run: Run, domains: Iterable[str]) -> None:
    """Raise DemixError if this machine downloads text and gets no response from the first address of `domains`.

    Domains whose text may come from another run, without a network, are skipped. Lines of `cluster.setup` may change
    the network of jobs, so with such lines nothing is checked.
    """
    if not run.config.cluster.setup:
        check_network(source for domain in domains if (source := _fetched(run, domain)))


def _fetched(run: Run, domain: str) -> Source | None:
    """The source of a domain; none if the config pins its text and another run has recorded that it has this text.

    A source that domains share is read in any case.
    """
    source = settings_from(Source, written(run.texts[domain].source))
    noted = run.folder.parent.glob(f"*/{NOTES}/documents.{domain}.*")
    found = not run.texts[domain].shared and pinned(source, 0) is not None
    return None if found and any(note.parents[1] != run.folder for note in noted) else source


def _partitions() -> list[str]:
    try:
        done = subprocess.run(
            ["sinfo", "--all", "--noheader", "--format", "%R"],
            capture_output=True,
            errors="replace",
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = str((getattr(error, "stderr", None) or "").strip() or error).splitlines()[-1]
        raise DemixError("sinfo", f"does not answer ({said})", "rerun when SLURM's controller answers again") from None
    # A line of more than one word comes from a site or a federation.
    return sorted({line.strip() for line in done.stdout.splitlines() if len(line.split()) == 1})
