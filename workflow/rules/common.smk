import json
import shlex
from contextlib import ExitStack
from dataclasses import asdict
from glob import glob
from pathlib import Path

from demix.config.check import complete, site_of
from demix.config.run import refuse_other_format
from demix.config.sections import (
    AdaptationRecipe,
    Execution,
    MixingRecipe,
    ScoringRecipe,
    TrainingRecipe,
    taken,
)
from demix.config.evaluated import compared, bases, evaluated
from demix.config.systems import adaptations, adapted, adapted_model, planned, removal_model, scoring_jobs, trained
from demix.errors import DemixError
from demix.files import exclusive
from demix.report import REPORT_FILES, SHOWS
from demix.settings import names_of

try:
    # A base is named relative to the config file.
    complete(config, Path(workflow.configfiles[-1]).parent if workflow.configfiles else Path())
    MODELS = {model.name: model for model in planned(config)}
    refuse_other_format(Path(f"results/{config['run']}"))
except DemixError as error:
    raise WorkflowError(str(error)) from None

RUN = f"results/{config['run']}"
# Held by the snakemake that works on the run, until it ends.
HELD, LOCK = ExitStack(), Path(RUN) / ".lock"
TRAINING, NOVEL = list(config["domains"]["training"]), list(config["domains"]["novel"])
DOMAINS = config["domains"]["training"] | config["domains"]["novel"]
SPLITS = ["train", "dev", "test"]
# Training jobs are submitted from here, where somebody waits for them; that costs no core.
SUBMITTED = config["cluster"]["launch"] == "slurm"
lines = [line.replace("{", "{{").replace("}", "}}") for line in config["cluster"]["setup"]]
# Jobs end when the snakemake that started their shell does (`demix.launch.parents`).
shell.prefix("; ".join(["export DEMIX_SNAKEMAKE=$PPID", "set -e", *lines, "set -euo pipefail; "]))
# The models trained without a domain.
WITHOUT = [model for model in trained(config) if model.removed]


wildcard_constraints:
    domain="[a-z0-9_]+",
    novel="|".join(NOVEL) or "none",
    part="[0-9]+",
    expert="[a-z0-9_]+",
    model="[a-z0-9_-]+",
    split="train|dev|test",


def as_json(*parts, **more):
    """The part of the config that a stage uses, as one JSON argument: a change to it reruns that stage alone."""
    merged = {key: value for part in (*parts, more) for key, value in part.items()}
    return json.dumps(merged, sort_keys=True)


def given(settings):
    """Settings as JSON without those that are empty, which is what a stage takes for them anyway."""
    return as_json({key: value for key, value in settings.items() if value not in (None, "", [], {})})


def below_run(place):
    """A folder of the run as a parameter, with its wildcards filled in."""
    return lambda wildcards: f"{RUN}/{place}".rstrip("/").format(**wildcards)


def source_files(source):
    """The local files of a source, so that a changed file is read again. What is missing, `demix download` tells."""
    if source["kind"] != "files":
        return []
    paths = [source["path"]] if isinstance(source["path"], str) else source["path"]
    return sorted({file for path in paths for file in glob(path, recursive=True)})


def parts(domains, *kinds):
    """The anonymized parts of domains, in order; how many there are is in the config."""
    names = {domain: range(DOMAINS[domain]["source"]["parts"]) for domain in domains}
    return [
        f"{RUN}/documents/{domain}/{part:04d}.{kind}" for domain in domains for kind in kinds for part in names[domain]
    ]


def tokens(domains, *splits):
    return [f"{RUN}/tokens/{domain}/{split}.arrow" for domain in domains for split in splits]


def experts(model, names):
    """The files of a model that scoring its experts `names` reads."""
    files = [f"experts/{name}.{kind}" for name in names for kind in ("safetensors", "json")]
    return [f"{RUN}/models/{model}/{file}" for file in ["model.json", "shared.safetensors", *files]]


def scores(model, domains, names, splits=("dev", "test")):
    """The score tables of experts `names` on `domains`."""
    places = [f"{RUN}/scores/{model}/{domain}.{split}" for domain in domains for split in splits]
    return [f"{place}/{name}.parquet" for place in places for name in names]


def training_settings(model, **changes):
    """What the training of a model is, as JSON: all but how it is computed and kept."""
    kept = taken(TrainingRecipe, model.settings)
    more = {"seed": model.seed, "threads": config["threads"], "architecture": config["architecture"]}
    return as_json(kept, **(more | changes))


def swept_rates(model):
    """The learning rates that are tried for a model, as files are named by them."""
    return [repr(float(rate)) for rate in (model.settings["sweep"] or {"learning_rates": []})["learning_rates"]]


def chosen_rate(model):
    """The record of a model's learning rate, where a sweep chooses it: one for all seeds."""
    return [f"{RUN}/sweep/{model.base}.json"] if swept_rates(model) else []


def cores(settings):
    """How many cores the job of a training takes here: those of its ranks, or next to none where it only waits."""
    return 1 if SUBMITTED else config["threads"] * settings["ranks"]


def site(stage):
    """What a job of a stage asks of the cluster; without one it means nothing."""
    settings = site_of(config, stage)
    names = {"slurm_partition": "partition", "slurm_account": "account", "qos": "qos", "constraint": "constraint"}
    asked = {resource: settings[key] for resource, key in names.items()} | {
        "mem_mb": settings["memory_mb"],
        "runtime": settings["minutes"],
        "gpu": settings["gpus"] if stage == "score" else 0,
    }
    return {resource: value for resource, value in asked.items() if value}


def run_options(stage, settings, removed=""):
    """How a section of the config trains, as options: no part of what it trains, so that a change reruns nothing.

    They go as a resource, since params are compared with those of the last run. The replacement of a removed domain
    has the ranks of that one.
    """
    cluster = shlex.quote(json.dumps(site_of(config, stage)))
    how = ",".join(f"{key}={json.dumps(settings[key])}" for key in names_of(Execution))
    instead = {removed: config["removal"]["replacement"]}
    numbers = [f"{instead.get(domain, domain)}={number}" for domain, number in settings.get("replicas", {}).items()]
    replicas = f" --replicas {','.join(numbers)}" if numbers else ""
    return f"--ranks {settings['ranks']} --how {how}{replicas} --cluster {cluster}"


def train_inputs(model):
    """The tokens that training reads: dev too where checkpoints are evaluated on it."""
    return tokens(model.domains, "train") + (tokens(model.domains, "dev") if model.settings["dev_blocks"] else [])


def evaluated_scores(domain):
    """The score tables that the evaluations of a domain read."""
    return [
        file
        for table in evaluated(config, domain)
        for file in scores(table.folder, [domain], [*table.columns, "tokens"], SPLITS[1:] if table.sets else ["test"])
    ]


def captioned(name):
    """A report file, with its caption and what it shows in `snakemake --report`."""
    kind, _, file = name.rpartition("/")
    stem, _, suffix = file.rpartition(".")
    path = f"{RUN}/report/{name}"
    # Two for each, which the page shows as a switch; the first in the alphabet is on.
    formats = {"svg": "SVG", "tex": "LaTeX", "html": "Interactive" if kind == "figures" else "HTML"}
    if suffix not in formats:
        return path
    labels = {"shows": SHOWS[stem], "as": formats[suffix]}
    return report(path, caption=f"../report/{stem}.rst", category=kind.capitalize() or "Claims", labels=labels)
