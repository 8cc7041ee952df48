"""What a run needs before its first job: the network for downloads and, on SLURM, its commands and partitions."""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable

from demix.config.addresses import STORES, local
from demix.config.domains import SourceSection
from demix.data.shared import NOTES
from demix.data.sources import Source, pinned
from demix.errors import DemixError, nearest
from demix.launch.job import Cluster
from demix.run.run import Run
from demix.settings import settings_from, written

# What the executor plug-in, submitit and demix call of SLURM; one package has them all.
CLIENTS = ("sbatch", "srun", "sinfo", "squeue", "sacct", "scontrol", "scancel")
# A node that is free within so many seconds is asked for an address; a longer queue is not waited for.
SECONDS_IN_QUEUE = 30
# By this status the process that asks for an address says that it got nothing; its last line has the address and why.
REFUSED = 3
NO_INTERNET = "where compute nodes have no internet, set cluster.downloads: login"
ASKS = """
import os, sys
from demix.data.fetch import refusal
hub = {!r}
why = "" if hub and os.environ.get("HF_HUB_OFFLINE") else refusal(sys.argv[1], any_answer=hub)
print(sys.argv[1], why, sep="\\t")
sys.exit({} * bool(why))
"""
# As huggingface_hub reads it where the download runs: lines of `cluster.setup` may export it.
HUB = '"${HF_ENDPOINT:-https://huggingface.co}"'


def check_site(run: Run, domains: Iterable[str]) -> str | None:
    """Check that SLURM is here, has the partitions that a run asks for, and that one address of `domains` answers.

    `domains` are those whose text the run downloads. The address is asked for where downloads run, after the lines of
    `cluster.setup`: here, or by `srun` on a compute node. Returns what could not be checked and why, or None. Raises
    DemixError.
    """
    if absent := [name for name in CLIENTS if shutil.which(name) is None]:
        cause = f"SLURM's {'command is' if len(absent) == 1 else 'commands are'} not installed here"
        raise DemixError(", ".join(absent), cause, "log in to the cluster, or leave out --profile")
    known = _partitions()
    cluster = run.config.cluster
    for key, site in {"cluster": cluster, **{f"cluster.stages.{k}": v for k, v in cluster.stages.items()}}.items():
        for partition in filter(None, (site.partition or "").split(",")):
            if partition not in known:
                cause = f"is {partition!r}, which this cluster does not have"
                raise DemixError(
                    f"config key {key}.partition", cause, nearest(partition, known, "name one that sinfo lists")
                )
    return _asked(run, domains, cluster.of("download"))


def check_here(run: Run, domains: Iterable[str]) -> str | None:
    """Check that one address of `domains` answers this machine, as `check_site` does.

    A domain is left out whose text may be taken from another run, which needs no network.
    """
    fetched = (domain for domain in domains if not _may_be_taken(run, domain))
    return _asked(run, fetched, run.config.cluster.of("download").replace(downloads="login"))


def _may_be_taken(run: Run, domain: str) -> bool:
    """Whether the config pins the text of a domain, and another run has noted that it made text of this domain.

    A source that domains share is read all the same.
    """
    if run.texts[domain].shared:
        return False
    source = settings_from(Source, written(run.texts[domain].source))
    noted = run.folder.parent.glob(f"*/{NOTES}/documents.{domain}.*")
    return pinned(source, 0) is not None and any(note.parents[1] != run.folder for note in noted)


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
        raise DemixError("sinfo", f"gives no answer ({said})", "rerun when SLURM's controller is back") from None
    # A line of more than one word is a site's or a federation's.
    return sorted({line.strip() for line in done.stdout.splitlines() if len(line.split()) == 1})


def _address(source: SourceSection) -> str | None:
    """One address of a source as a word of the shell; None for files of this machine."""
    if source.kind in ("url", "store"):
        return shlex.quote(source.paths[0])
    return HUB if source.kind == "hub" and not local(source.paths) else None


def _asked(run: Run, domains: Iterable[str], site: Cluster) -> str | None:
    """Ask for the first address of `domains`, if there is one, where downloads of `site` run.

    Returns why nobody could ask, or None.
    """
    address = next(filter(None, (_address(run.texts[domain].source) for domain in domains)), None)
    if address is None:
        return None
    ask = shlex.join([sys.executable, "-c", ASKS.format(address == HUB, REFUSED)])
    command = ["bash", "-c", "; ".join([*site.setup, f"{ask} {address}"])]
    on_nodes = site.downloads == "compute"
    if on_nodes:
        options = [
            f"--{key}={value}" for key in ("partition", "account", "qos", "constraint") if (value := getattr(site, key))
        ] + site.options
        limits = [f"--immediate={SECONDS_IN_QUEUE}", "--time=5", "--ntasks=1", f"--mem={site.memory_mb}M"]
        command = ["srun", "--quiet", "--job-name=demix-address", *limits, *options, *command]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_IN_QUEUE + 120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no address was asked for: {error}"
    url, _, why = (done.stdout.splitlines() or [""])[-1].partition("\t")
    if done.returncode == REFUSED and why:
        cause = f"does not answer {'a compute node' if on_nodes else 'here'} ({why})"
        cure = NO_INTERNET if on_nodes else "fix the network"
        cure += ", or name a proxy in cluster.setup (export HTTPS_PROXY=…)"
        if url.partition("://")[0] in STORES:
            cause, _, cure = why.partition("; ")
            cure += f"; {NO_INTERNET}" if on_nodes and cause.startswith("cannot") else ""
        raise DemixError(url, cause, cure)
    if done.returncode:
        return f"no address was asked for: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}"
    return None
