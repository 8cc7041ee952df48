import atexit
import json
import re
import sys
from contextlib import ExitStack
from pathlib import Path
from shlex import quote

from demix.config.evaluation import ScoredTokens
from demix.config.keys import located, read_keys
from demix.errors import DemixError
from demix.files import exclusive
from demix.launch.arguments import SHELL_FUNCTION
from demix.launch.checksums import read_once
from demix.launch.loops import end_at_loops
from demix.launch.times import keep_shared_times
from demix.report import report_files, report_items
from demix.run.check import completed_run
from demix.run.harness import harness_files, harness_routings, harness_settings, harness_tasks
from demix.run.kept import kept, refuse_other_domains, refuse_other_format
from demix.run.rules import RunRules
from demix.run.systems import chosen_on_dev
from demix.settings import written
from snakemake.common import NOTHING_TO_BE_DONE_MSG

end_at_loops()
read_once()
keep_shared_times()

FILES = {}
try:
    # Snakemake has merged the files, and silently took the last of keys that stand twice in one.
    for path in map(Path, workflow.configfiles):
        FILES[path] = read_keys(path)[1]
    # The path in `base` is relative to the config file.
    THIS = completed_run(config, Path(workflow.configfiles[-1]).parent if workflow.configfiles else Path())
    refuse_other_format(THIS.folder)
    if not THIS.config.overwrite:
        refuse_other_domains(THIS.folder, THIS.config)
except DemixError as error:
    raise WorkflowError(str(located(error, FILES))) from None

CONFIG, RULES = THIS.config, RunRules(THIS)
RUN = RULES.folder
# The snakemake that works on the run holds the lock until it ends.
HELD, LOCK = ExitStack(), Path(RUN) / ".lock"
TRAINING, NOVEL, DOMAINS = list(THIS.training), list(THIS.novel), list(THIS.domains)
SPLITS = ["train", "dev", "test"]
setup = ["set -e", *CONFIG.cluster.setup, "set -euo pipefail", SHELL_FUNCTION]
lines = [line.replace("{", "{{").replace("}", "}}") for line in setup]
# A job ends with the snakemake that started the job's shell (`demix.launch.parents`).
shell.prefix("; ".join(["export DEMIX_SNAKEMAKE=$PPID", *lines, ""]))


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


def tell_results():
    """Print what `demix summary` prints or, where targets were named, where the files are."""
    from demix.commands.people import summary

    try:
        if any(target.name == "all" for target in workflow.dag.targetrules):
            summary(Path(RUN))
        else:
            print(f"The files are in {RUN}")
    except DemixError as error:
        # A run that has ended well stays one.
        print(f"demix summary {RUN}: {error}", file=sys.stderr)


def tell_of_nothing_to_do(record):
    """Snakemake calls no handler of a run that had nothing to do: its message is one."""
    if record.msg == NOTHING_TO_BE_DONE_MSG and workflow.is_main_process and not workflow.dryrun:
        atexit.register(tell_results)
    return True


logger.addFilter(tell_of_nothing_to_do)


def below_run(place):
    """A folder of the run as a parameter, with its wildcards filled in."""
    return lambda wildcards: f"{RUN}/{place}".rstrip("/").format(**wildcards)


def captioned(item):
    """The files of an item of the report, with its caption and what it shows in `snakemake --report`."""
    caption = Path.cwd() / ".snakemake" / "captions" / f"{item.name}.rst"

    def category(wildcards):
        # Snakemake takes a caption from a file alone. It asks for this when a report is made, before it reads the file.
        caption.parent.mkdir(parents=True, exist_ok=True)
        caption.write_text(item.caption, encoding="utf-8")
        return item.category

    for suffix, shown in item.formats:
        path, labels = f"{RUN}/report/{item.files[suffix]}", {"shows": item.heading, "as": shown}
        yield report(path, caption=str(caption), category=category, labels=labels) if shown else path
