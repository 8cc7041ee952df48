import atexit
import re
import sys
from pathlib import Path

from demix.errors import DemixError
from demix.launch.snakemake import patch_snakemake
from demix.run.check import run_of_files
from demix.run.rules import RunRules
from demix.settings import written

patch_snakemake()

try:
    THIS = run_of_files(config, [Path(path) for path in workflow.configfiles])
except DemixError as error:
    raise WorkflowError(str(error)) from None

CONFIG, RULES, RUN = THIS.config, RunRules(THIS), str(THIS.folder)
TRAINING, NOVEL, DOMAINS = list(THIS.training), list(THIS.novel), list(THIS.domains)
SPLITS = ["train", "dev", "test"]
shell.prefix(RULES.shell_prefix)


def one_of(names):
    """The pattern of a wildcard that is one of `names`."""
    return "|".join(map(re.escape, names)) or "none"


wildcard_constraints:
    domain="[a-z0-9_]+",
    training=one_of(TRAINING),
    novel=one_of(NOVEL),
    part="[0-9]+",
    expert="[a-z0-9_]+",
    model="[a-z0-9_-]+",
    split="train|dev|test",
    clustering="[a-z0-9_]+",
    task="[a-z0-9_]+",


def below_run(place):
    """A folder of the run as a parameter, with its wildcards filled in."""
    return lambda wildcards: f"{RUN}/{place}".rstrip("/").format(**wildcards)


def print_summary():
    """Print what `demix summary` prints."""
    from demix.commands.people import summary

    try:
        summary(Path(RUN))
    except DemixError as error:
        # A run that has succeeded must not fail here.
        print(f"demix summary {RUN}: {error}", file=sys.stderr)


def captioned(item):
    """The files of a report element, with its caption and labels for `snakemake --report`."""
    caption = Path.cwd() / ".snakemake" / "captions" / f"{item.name}.rst"

    def category(wildcards):
        # Snakemake reads a caption only from a file. It calls this when a report is made, before it reads the file.
        caption.parent.mkdir(parents=True, exist_ok=True)
        caption.write_text(item.caption, encoding="utf-8")
        return item.category

    for suffix, shown in item.formats:
        path, labels = f"{RUN}/report/{item.files[suffix]}", {"shows": item.heading, "as": shown}
        yield report(path, caption=str(caption), category=category, labels=labels) if shown else path
