"""Input files, output files and resources of the workflow's rules, derived from the config without Snakemake."""

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

from demix.config.models import EntrySettings
from demix.config.training import Execution
from demix.launch.snakemake import SHELL_FUNCTION
from demix.run.evaluated import asked_contexts, chosen_on_dev, context_tables, evaluated, routed
from demix.run.harness import harness_routings, harnessed
from demix.run.models import Model, trained_without
from demix.run.run import config_fingerprint
from demix.run.stage_settings import StageSettings
from demix.run.systems import (
    classified,
    classified_by,
    clustered,
    merged_whole,
    ngram_folders,
)
from demix.settings import names_of, written

# The rules of each stage of the config's section `cluster`. All other rules last seconds and run where snakemake runs.
STAGES = {
    "download": ("divide", "download", "read", "examples", "harness_documents"),
    "anonymize": ("anonymize",),
    "corpus": (
        *("deduplicate", "split", "hold_out", "tokenizer", "tokenize", "tokenize_suite", "overlap"),
        *("fit_clusters", "assign", "cluster_shards", "join", "contamination"),
    ),
    "train": ("sweep", "seed", "train", "train_expert"),
    "adapt": ("adapt", "adapt_dense"),
    "score": ("score", "fewshot", "harness", "audit_domain"),
    "evaluate": (
        *("score_ngrams", "combine", "average", "merge_routed", "route", "choose_mixing", "evaluate", "contexts"),
        "classify",
    ),
}
STAGE_OF = {rule: stage for stage, rules in STAGES.items() for rule in rules}


@dataclass(frozen=True)
class RunRules(StageSettings):
    """The files and options of the rules of one run."""

    @property
    def shell_prefix(self) -> str:
        """The shell code before each job's command: the lines of `cluster.setup`, and what demix commands need.

        A job ends when the snakemake process that started its shell ends (`demix.launch.snakemake`).
        """
        setup = ["set -e", *self.run.config.cluster.setup, "set -euo pipefail", SHELL_FUNCTION]
        lines = [line.replace("{", "{{").replace("}", "}}") for line in setup]
        return "; ".join(["export DEMIX_SNAKEMAKE=$PPID", *lines, ""])

    def parts(self, domains: Iterable[str], *kinds: str) -> list[str]:
        """The files of the anonymized parts of domains, in order. The config sets the number of parts."""
        return [
            f"{self.folder}/documents/{domain}/{part:04d}.{kind}"
            for domain in domains
            for kind in kinds
            for part in range(self.run.texts[domain].source.parts)
        ]

    def fetched_by(self, rule: str, wildcards: Mapping[str, str]) -> tuple[str, ...]:
        """The domains whose text a job reads from its source; none for a job of another rule."""
        if rule in ("read", "download"):
            return (wildcards["domain"],)
        return self.run.shared[wildcards["source"]] if rule == "divide" else ()

    def tokens(self, domains: Iterable[str], *splits: str) -> list[str]:
        """The token files of the splits of domains."""
        return [f"{self.folder}/tokens/{domain}/{split}.arrow" for domain in domains for split in splits]

    def model(self, name: str, experts: Iterable[str] = ()) -> list[str]:
        """The manifests of a model, and of the experts in `experts` that adaptations added.

        Manifests hold the digests of files. The workflow tracks a model only by its manifests, so that rules need not
        name experts.
        """
        added = [one for one in experts if name == self.run.receiver.name and one in self.run.novel]
        return [f"{self.folder}/models/{name}/{file}" for file in ("model.json", *(f"experts/{n}.json" for n in added))]

    @cached_property
    def _scored_by(self) -> dict[tuple[str, str, str], str]:
        """The job that writes the tables of a folder and a domain, and the jobs that write columns of added experts."""
        orders = self.run.config.evaluation.ngrams or ()
        found = {
            (folder, domain, ""): ngram_folders(order)[0]
            for order in orders
            for folder in ngram_folders(order)
            for domain in self.run.domains
        }
        systems = self.run.config.evaluation.mixed
        found |= {(name, domain, ""): f"systems/{name}" for name in systems for domain in self.run.domains}
        for job in self.scoring.values():
            for part in job.parts:
                added = () if part.shared else part.experts
                for domain in part.domains:
                    found |= {(part.folder, domain, column): job.name for column in added or ("",)}
        return found

    def scores(self, model: str, domains: Iterable[str], names: Iterable[str] = ()) -> list[str]:
        """The manifests of the score tables of a model on `domains`, under the experts `names` if these were added.

        A manifest has the digests of all tables of one job. The number of input files therefore grows with the number
        of jobs, not with the number of pairs of domain and expert.
        """
        keys = [(model, domain, name) for domain in domains for name in ("", *names)]
        found = dict.fromkeys(self._scored_by[key] for key in keys if not key[2] or key in self._scored_by)
        return [f"{self.folder}/scores/{name}.json" for name in found]

    def combined_inputs(self, name: str) -> list[str]:
        """The score tables that a system mixes, and the mixing rules chosen for its members with experts."""
        system = self.run.config.evaluation.mixed[name]
        tables = dict.fromkeys(chain(*(self.scores(one, self.run.domains) for one in system.models)))
        rules = [one for one, weights in system.columns.items() if weights == "tempered"]
        return [*tables, *(f"{self.folder}/models/{one}/mixing.json" for one in rules)]

    def scoring_inputs(self, name: str) -> dict[str, list[str]]:
        """The inputs of a scoring job: models, tokens, and the tables to which it adds columns."""
        parts = self.scoring[name].parts
        models = [file for part in parts for file in self.model(part.model, part.reads)]
        old = [file for part in parts if not part.shared for file in self.scores(part.model, part.domains)]
        return {
            "model": list(dict.fromkeys(models)),
            "tokens": list(dict.fromkeys(chain(*(self.tokens(one.domains, *one.splits) for one in parts)))),
            "old": list(dict.fromkeys(old)),
        }

    def prior_options(self, model: str, domain: str) -> str:
        """The options of an average by the prior of `domain`; without a domain there are none, so weights are equal."""
        evaluation, scores = self.run.config.evaluation, f"{self.folder}/scores/{model}"
        prior = f"--scores {scores} --decay {evaluation.decay} --blocks {evaluation.dev_blocks} --domain {domain}"
        return prior if domain else ""

    def routing(self, clustering: str, context: str, domains: Iterable[str]) -> list[str]:
        """The routing tables of a clustering on `domains`."""
        folder = f"{self.folder}/routing/{clustering}/{context}"
        return [f"{folder}/{domain}.{split}.parquet" for domain in domains for split in ("dev", "test")]

    def evaluated_scores(self, domain: str) -> list[str]:
        """The score tables that the evaluation of a domain reads."""
        tables = evaluated(self.run, domain)
        return list(dict.fromkeys(chain(*(self.scores(one.folder, [domain], one.columns) for one in tables))))

    def joined(self, table: str) -> list[str]:
        """The files of single domains that are joined into a table of the run."""
        removed = [model.removed for model in self.run.without]
        domains = {"suites": self.run.suites, "audit": removed}.get(table, self.run.domains)
        kind = "" if table in ("results", "suites") else f".{table}"
        return [f"{self.folder}/evaluations/{domain}{kind}.parquet" for domain in domains]

    def context_scores(self, domain: str) -> list[str]:
        """The score tables that the evaluation of a domain by position in the context reads."""
        tables = context_tables(self.run, domain)
        folders = dict.fromkeys(folder for table in tables for folder in (table.folder, table.prior) if folder)
        return list(dict.fromkeys(chain(*(self.scores(folder, [domain]) for folder in folders))))

    def evaluated_routing(self, domain: str) -> list[str]:
        """The routing tables that the evaluation of a domain reads, and the clusterers that made them."""
        sets = [some for table in evaluated(self.run, domain) for some in table.sets]
        names = dict.fromkeys(some.routing for some in sets if some.routing)
        if not routed(self.run):
            return []
        contexts = self.run.config.evaluation.routing_context
        tables = [self.routing(name, context, [domain]) for name in names for context in contexts]
        return [*chain.from_iterable(tables), *(f"{self.folder}/clusters/{name}/clusterer.json" for name in names)]

    def train_inputs(self, model: Model, dev: bool = True) -> list[str]:
        """The shards of domains or clusters that training reads; dev only if it evaluates and `dev` is set."""
        folder = f"clusters/{model.data}/shards" if model.data else "tokens"
        splits = model.read_splits if dev else ("train",)
        return [f"{self.folder}/{folder}/{name}/{split}.arrow" for split in splits for name in model.domains]

    def train_files(self, model: Model, dev: bool = True) -> list[str]:
        """The files by which the workflow tracks `train_inputs`; for shards of clusters these are manifests."""
        if not model.data:
            return self.train_inputs(model, dev)
        splits = model.read_splits if dev else ("train",)
        return [f"{self.folder}/clusters/{model.data}/shards/{split}.json" for split in splits]

    def anonymizing(self, domain: str) -> str:
        """The command option that says how a domain's text is anonymized."""
        return "--enabled" if self.run.texts[domain].anonymize else "--no-enabled"

    def pieces(self, domain: str) -> str:
        """The command options that say how the documents of a domain are cut."""
        source = self.run.texts[domain].source
        lengths = {"--document-words": source.document_words, "--piece-words": source.piece_words}
        return " ".join(f"{option} {words}" for option, words in lengths.items() if words)

    def read_files(self, domain: str, part: int) -> list[str]:
        """The local files of a domain's source; for a shared source, the output of the pass that divided it."""
        text = self.run.texts[domain]
        if text.shared:
            files = self.run.config.sources[text.shared].source.share(part)
            return [*files, f"{self.folder}/sources/{text.shared}/{part:04d}.json"]
        return text.source.share(part)

    def audited(self, removed: str) -> list[str]:
        """The models in the audit of a removed domain: the whole one, the one without the domain, and merged models."""
        merged = chain(*map(self.model, merged_whole(self.run)))
        return [*self.model(self.run.whole.name), *self.model(trained_without(removed)), *merged]

    @property
    def classified(self) -> dict[str, list[str]]:
        """The inputs of classification: examples, scores, clusterers, mixing rules and the harness's results."""
        run, tasks, asked = self.run, list(self.run.config.tasks), classified(self.run)
        return {
            "examples": [f"{self.folder}/examples/{task}.parquet" for task in tasks],
            "scores": [f"{self.folder}/tasks/{model.name}/{task}.parquet" for model in asked for task in tasks],
            "clusterers": [f"{self.folder}/clusters/{name}/clusterer.json" for name in classified_by(run)],
            "mixing": [
                f"{self.folder}/models/{one.name}/mixing.json" for one in asked if one.name in chosen_on_dev(run)
            ],
            "harness": [f"{self.folder}/harness/models/{model.name}.parquet" for model in harnessed(run)],
        }

    @property
    def task_weights(self) -> list[str]:
        """The table of the weights that mixing methods give to clusters; none without clusters."""
        return [f"{self.folder}/task_weights.parquet"] if self.run.config.tasks and clustered(self.run) else []

    @property
    def tracked(self) -> list[str]:
        """The inputs of both tracking and report: results, tasks, metrics, models."""
        run = self.run
        tables = ["results", *["suites"] * bool(run.suites)]
        named = [*(one.name for one in run.trained), *(one.name for one in run.adaptations)]
        metrics = [f"{self.folder}/metrics/{name}.jsonl" for name in named]
        manifests = [*chain(*map(self.model, self.models)), *self.model(run.receiver.name, run.novel)[1:]]
        tasks = [f"{self.folder}/tasks.parquet", *self.task_weights] if run.config.tasks or harnessed(run) else []
        return [*(f"{self.folder}/{name}.parquet" for name in tables), *tasks, *metrics, *manifests]

    @property
    def reported(self) -> list[str]:
        """The files that the report reads."""
        run, training = self.run, self.run.training
        files = ["priors.parquet", "differences.parquet", "posteriors.parquet", "corpus/overlap.parquet"]
        files += [f"corpus/{domain}/card.json" for domain in run.domains]
        files += ["audit.parquet"] * bool(run.without)
        files += [f"scores/{ngram_folders(order)[0]}.json" for order in run.config.evaluation.ngrams or ()]
        files += [f"harness/contamination/{domain}.parquet" for domain in training if harnessed(run)]
        for name in run.learned_clusterings:
            assigned = [f"{domain}.{split}" for domain in training for split in ("train", "test")]
            files += [
                f"clusters/{name}/clusterer.json",
                *(f"clusters/{name}/assigned/{one}.parquet" for one in assigned),
            ]
        files += [f"evaluations/{domain}.losses.parquet" for domain in training if run.learned_clusterings]
        files += [f"evaluations/{domain}.contexts.parquet" for domain in run.domains if asked_contexts(run)]
        return [*self.tracked, *(f"{self.folder}/{file}" for file in files)]

    def task_inputs(self, task: str) -> list[str]:
        """The files from which the examples of a task are read. A changed file is read again."""
        return [file for source in self.run.config.tasks[task].sources.values() for file in source.names]

    def harness_mixing(self, model: str) -> list[str]:
        """The files for mixing the experts of a model on harness tasks: parameters chosen on dev, and clusterers."""
        asked, clustering = self.run.config.lm_eval, harness_routings(self.run).get(model)
        tempered = asked and "tempered" in asked.weights and model in chosen_on_dev(self.run)
        chosen = [f"{self.folder}/models/{model}/mixing.json"] if tempered else []
        return chosen + ([f"{self.folder}/clusters/{clustering}/clusterer.json"] if clustering else [])

    def chosen_rate(self, model: Model) -> list[str]:
        """The file with the learning rate that a sweep chose for a model and all its seeds; empty without a sweep."""
        return [f"{self.folder}/sweep/{model.rates_from}.json"] if model.settings.sweep else []

    def seed_of(self, model: Model) -> list[str]:
        """The manifest of the state from which `model` starts; none for a model that is trained from scratch."""
        if model.mixes:
            return self.model(model.mixes)
        if folder := model.base.initial:
            return [f"{folder.rstrip('/')}/model.json"]
        step = f"{self.folder}/seeds/{model.parent}/step-{model.seed_step:08d}"
        return [f"{step}/manifest.json"] if model.seed_step else []

    def part_files(self, model: Model, above: str, name: str = "") -> list[str]:
        """One file per training of a model whose experts are whole models, in branches/ or in metrics/."""
        return [f"{self.folder}/{above}/{part.place}" + (f"/{name}" if name else ".jsonl") for part in model.parts]

    def priority(self, model: Model) -> int:
        """The priority of a training. Models for which other rules wait start first."""
        return 20 if model.removed else 100 if model.kind.has_experts else 50

    def trials(self, model: Model) -> list[str]:
        """The metrics of the trials of a model's sweep of learning rates."""
        return [f"{self.folder}/metrics/sweep/{model.name}/{rate}.jsonl" for rate in model.swept_rates]

    def train_options(self, model: Model) -> str:
        """The training options that are a resource of the rule: those of `run_options`, and which states are kept."""
        kept = ",".join(str(step) for parent, step in self.run.seeds if parent == model.name)
        options = f"{self.run_options('train', model.settings)} {self.live}"
        return f"{options} --keep {kept}" if kept else options

    @property
    def live(self) -> str:
        """The option of trainings and adaptations that says where metrics are sent while they run."""
        named = {"run": self.run.name, "config": config_fingerprint(self.run.config)}
        where = {"uri": self.run.config.tracking.uri, "experiment": self.run.experiment}
        return f"--live {shlex.quote(json.dumps(where | named))}"

    def beginning(self, model: Model) -> str:
        """The training options that give the learning rate and the state from which the training starts."""
        given = [f" --learning-rate-from {path}" for path in self.chosen_rate(model)]
        given += [f" --branch {shlex.quote(str(Path(path).parent))}" for path in self.seed_of(model)[:1]]
        return "".join([*given, *([" --restart"] if model.restarts and model.seed_step else [])])

    def cores(self, settings: EntrySettings) -> int:
        """The cores that a training needs on this machine: all ranks' cores, or one to wait for a job."""
        return 1 if self.run.submitted else self.run.config.threads * settings.ranks

    def log(self, rule: str, wildcards: Iterable[str]) -> str:
        """The path of a rule's log, with its wildcards."""
        names = ".".join(f"{{{name}}}" for name in sorted(wildcards))
        return f"{self.folder}/logs/{rule}{'/' if names else ''}{names}.log"

    def is_local(self, rule: str) -> bool:
        """Whether jobs of a rule run on the machine of snakemake.

        These include downloads for compute nodes without internet, and processes that wait for a training's SLURM job.
        """
        stage = STAGE_OF.get(rule)
        on_login = stage == "download" and self.run.config.cluster.downloads == "login"
        return stage is None or on_login or (stage in ("train", "adapt") and self.run.submitted)

    def site(self, rule: str) -> dict[str, str | int]:
        """The resources that a job of a rule requests from the cluster. Without a cluster they have no effect."""
        stage = STAGE_OF.get(rule)
        if stage is None:
            return {}
        site = self.run.config.cluster.of(stage)
        names = {"slurm_partition": "partition", "slurm_account": "account", "qos": "qos", "constraint": "constraint"}
        asked = {resource: getattr(site, key) for resource, key in names.items()} | {
            "mem_mb": site.memory_mb,
            "runtime": site.minutes,
            "slurm_extra": shlex.join(site.options),
        }
        if stage == "score" and site.gpus:
            asked |= {"gpu": site.gpus, "gpu_model": site.gpu_type}
        return {resource: value for resource, value in asked.items() if value}

    def run_options(self, stage: str, settings: EntrySettings) -> str:
        """The command options for settings of only time and memory in a section of the config.

        They are a resource of the rule, not params: Snakemake reruns a job if its params change, but a change of these
        settings must rerun nothing.
        """
        cluster = shlex.quote(self.argument(json.dumps(written(self.run.config.cluster.of(stage)))))
        how = shlex.quote(json.dumps({key: getattr(settings, key) for key in names_of(Execution)}))
        return f"--ranks {settings.ranks} --how {how} --cluster {cluster}"
