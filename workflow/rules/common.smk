import atexit
import json
import os
import re
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from shlex import quote

from demix.config.adaptation import AdaptationRecipe
from demix.config.evaluation import MixingRecipe, ScoredTokens, ScoringRecipe
from demix.config.keys import located, read_keys
from demix.config.models import DENSE_EXPERT
from demix.config.training import taken
from demix.errors import DemixError
from demix.files import exclusive
from demix.launch.arguments import SHELL_FUNCTION
from demix.launch.checksums import read_once
from demix.launch.producers import end_at_loops, find_by_name
from demix.launch.times import keep_shared_times
from demix.report import report_files, report_items
from demix.run import systems
from demix.run.check import completed_run
from demix.run.compared import balanced_pairs, compared
from demix.run.contexts import asked_contexts
from demix.run.harness import harness_files, harness_routings, harness_settings, harness_tasks, harnessed
from demix.run.kept import kept, refuse_other_domains, refuse_other_format
from demix.run.merged import MERGED
from demix.run.models import adapted, left_out, trained_without
from demix.run.rules import RunRules
from demix.run.scoring import scoring_jobs
from demix.settings import written
from snakemake.common import NOTHING_TO_BE_DONE_MSG

find_by_name()
end_at_loops()
keep_shared_times()
read_once()

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
MODELS = {model.name: model for model in THIS.planned}
# The parents of seed phases, by folder.
SEEDS = {parent: model for (parent, _), model in THIS.seeds.items()}
# The snakemake that works on the run holds the lock until it ends.
HELD, LOCK = ExitStack(), Path(RUN) / ".lock"
TRAINING, NOVEL, DOMAINS = list(THIS.training), list(THIS.novel), THIS.domains
# What is scored and nothing else, and all that text is read of.
SUITES, TEXTS = list(THIS.suites), THIS.texts
SPLITS = ["train", "dev", "test"]
# Training jobs are then submitted from here by a process that waits for them and takes no core.
SUBMITTED = THIS.submitted
setup = ["set -e", *CONFIG.cluster.setup, "set -euo pipefail", SHELL_FUNCTION]
lines = [line.replace("{", "{{").replace("}", "}}") for line in setup]
# A job ends with the snakemake that started the job's shell (`demix.launch.parents`).
shell.prefix("; ".join(["export DEMIX_SNAKEMAKE=$PPID", *lines, ""]))
# The models trained without a domain.
WITHOUT = THIS.without


wildcard_constraints:
    domain="[a-z0-9_]+",
    training="|".join(TRAINING),
    novel="|".join(NOVEL) or "none",
    suite="|".join(SUITES) or "none",
    part="[0-9]+",
    expert="[a-z0-9_]+",
    model="[a-z0-9_-]+",
    split="train|dev|test",


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


def verbatim(value):
    """A parameter as it is. In a plain text Snakemake takes each {name}, which a text of the config may hold, for a wildcard."""
    return lambda wildcards: value


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


def anonymizing(wildcards):
    return {True: "--enabled", False: "--no-enabled", "released": "--rules released"}[TEXTS[wildcards.domain].anonymize]


def of_domain(wildcards):
    """The local files of a domain's source, and the pass over a shared source, which leaves the text of the domain."""
    domain = TEXTS[wildcards.domain]
    if domain.shared:
        files = CONFIG.sources[domain.shared].source.files_of(int(wildcards.part))
        return [*files, f"{RUN}/sources/{domain.shared}/{wildcards.part}.json"]
    # All files are inputs of each part, as of the runs that are there, but of a folder, which may have thousands.
    folders = any(map(os.path.isdir, domain.source.paths))
    return domain.source.files_of(int(wildcards.part)) if folders else domain.source.files


def once(files):
    return list(dict.fromkeys(files))


def scoring_settings(job):
    """The settings of a job that scores texts under models."""
    return lambda wildcards: RULES.as_json(
        taken(ScoringRecipe, CONFIG.evaluation),
        threads=CONFIG.threads,
        models=[part.settings(dict(wildcards.items())) for part in job.parts],
    )
