import json
import shlex
from contextlib import ExitStack
from glob import glob
from pathlib import Path

from demix.config.check import HOW, adaptations, complete, further_seeds, kind_of, site_of, trained_models
from demix.config.run import refuse_other_format
from demix.errors import DemixError
from demix.files import exclusive
from demix.report import REPORT_FILES, SHOWS

try:
    complete(config)
    refuse_other_format(Path(f"results/{config['run']}"))
except DemixError as error:
    raise WorkflowError(str(error)) from None

RUN = f"results/{config['run']}"
# Held by the snakemake that works on the run, until it ends.
HELD, LOCK = ExitStack(), Path(RUN) / ".lock"
TRAINING, NOVEL = list(config["domains"]["training"]), list(config["domains"]["novel"])
DOMAINS = config["domains"]["training"] | config["domains"]["novel"]
SPLITS = ["train", "dev", "test"]
# Their models are called <model>-seed<seed>.
SEEDS = further_seeds(config)
# Training jobs are submitted from here, where somebody waits for them; that costs no core.
SUBMITTED = config["cluster"]["launch"] == "slurm"
lines = [line.replace("{", "{{").replace("}", "}}") for line in config["cluster"]["setup"]]
# Jobs end when the snakemake that started their shell does (`demix.launch.parents`).
shell.prefix("; ".join(["export DEMIX_SNAKEMAKE=$PPID", "set -e", *lines, "set -euo pipefail; "]))
# The domains of each model trained without one of them: the replacement stands in its place.
WITHOUT = {
    removed: [config["removal"]["replacement"] if domain == removed else domain for domain in TRAINING]
    for removed in config["removal"]["retrain_without"]
}


wildcard_constraints:
    domain="[a-z0-9_]+",
    part="[0-9]+",
    removed="[a-z0-9_]+",
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


def training_of(model):
    """The section `training` with the values of one model."""
    return config["training"] | config["models"][kind_of(model)]


def training_settings(model, **changes):
    seed = model.partition("-seed")[2]
    changes |= {"seed": int(seed)} if seed else {}
    kept = {key: value for key, value in training_of(model).items() if key not in ("ranks", "replicas", "sweep", *HOW)}
    more = {key: config[key] for key in ("seed", "threads", "architecture")}
    return as_json(kept, **(more | changes))


def swept_rates(model):
    """The learning rates that are tried for a model, as files are named by them; all seeds take the one chosen."""
    return [repr(float(rate)) for rate in (training_of(model)["sweep"] or {"learning_rates": []})["learning_rates"]]


def chosen_rate(model):
    """The record of a model's learning rate, where a sweep chooses it."""
    return [f"{RUN}/sweep/{kind_of(model)}.json"] if swept_rates(model) else []


def rate_option(model):
    return "".join(f" --learning-rate-from {path}" for path in chosen_rate(model))


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


def run_options(stage, settings, removed=None):
    """How a section of the config trains, as options: no part of what it trains, so that a change reruns nothing.

    They go as a resource, since params are compared with those of the last run. The replacement of a removed domain
    has the ranks of that one.
    """
    cluster = shlex.quote(json.dumps(site_of(config, stage)))
    how = ",".join(f"{key}={json.dumps(settings[key])}" for key in HOW)
    instead = {removed: config["removal"]["replacement"]}
    numbers = [f"{instead.get(domain, domain)}={number}" for domain, number in settings.get("replicas", {}).items()]
    replicas = f" --replicas {','.join(numbers)}" if numbers else ""
    return f"--ranks {settings['ranks']} --how {how}{replicas} --cluster {cluster}"


def train_inputs(model, domains):
    """The tokens that training reads: dev too where checkpoints are evaluated on it."""
    dev = training_of(model)["dev_blocks"]
    return tokens(domains, "train") + (tokens(domains, "dev") if dev else [])


def evaluated(wildcards):
    """The score tables that the evaluations of a domain read."""
    domain = [wildcards.domain]
    kind = "training" if wildcards.domain in TRAINING else "novel"
    adapted = [f"dense-dapt-{novel}" for novel in NOVEL if kind == "training" or novel == wildcards.domain]
    files = scores("demix", domain, [*TRAINING, *NOVEL, "tokens"])
    files += scores("domain_token", domain, [*TRAINING, "tokens"])
    for model in ["dense", "dense_unbalanced", *adapted]:
        files += scores(model, domain, ["dense", "tokens"], ["test"])
    for seed in SEEDS:
        files += scores(f"demix-seed{seed}", domain, [*TRAINING, "tokens"])
        files += scores(f"domain_token-seed{seed}", domain, [*TRAINING, "tokens"])
        for model in ("dense", "dense_unbalanced"):
            files += scores(f"{model}-seed{seed}", domain, ["dense", "tokens"], ["test"])
    if wildcards.domain in WITHOUT:
        files += scores(f"without-{wildcards.domain}", domain, [*WITHOUT[wildcards.domain], "tokens"])
    return files


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
