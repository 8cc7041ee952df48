"""Input files, output files and resources of the workflow's rules, derived from the config without Snakemake."""

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from demix.config.adaptation import AdaptationSection
from demix.config.evaluation import ScoredTokens
from demix.config.models import DENSE_EXPERT, RowSettings
from demix.config.training import Execution, TrainingRecipe, taken
from demix.files import fingerprint, write_json
from demix.run.contexts import POSITION_BINS, context_tables
from demix.run.harness import harness_routings
from demix.run.kept import config_fingerprint
from demix.run.models import Model
from demix.run.run import Run
from demix.run.systems import chosen_on_dev, evaluated, ngram_tokens, routed
from demix.settings import names_of, written

# The bytes of the longest argument that Linux passes to a program, less the NUL at its end.
LONGEST_ARGUMENT = 128 * 1024 - 1


@dataclass(frozen=True)
class RunRules:
    """The files and options of the rules of one run."""

    run: Run

    @property
    def folder(self) -> str:
        """The folder of the run, as rules name it."""
        return str(self.run.folder)

    @property
    def apart(self) -> bool:
        """Whether one job fetches a part of a domain's text and another one anonymizes it, as a cluster may need.

        Elsewhere one job does both. A run that moves to a cluster goes on in the way it began, so that nothing is
        fetched and trained again.
        """
        logs = self.run.folder / "logs"
        return (logs / "anonymize").exists() or (self.run.submitted and not (logs / "read").exists())

    def as_json(self, *parts: Mapping[str, Any], **more: Any) -> str:
        """The part of the config that a stage uses, as one argument. A change to it reruns that stage alone."""
        merged = {key: value for part in (*parts, more) for key, value in part.items()}
        return self.argument(json.dumps(merged, sort_keys=True))

    def given(self, settings: Mapping[str, Any]) -> str:
        """Settings as one argument without the empty ones. A stage treats an absent setting like an empty one."""
        return self.as_json({key: value for key, value in settings.items() if value not in (None, "", [], {})})

    def argument(self, text: str) -> str:
        """JSON as one argument: itself, or @ and the path of a file that holds it, where it is too long for one.

        The name of the file is a digest of the JSON, so that the argument changes if and only if a setting does.
        """
        if len(text.encode()) <= LONGEST_ARGUMENT:
            return text
        path = self.run.folder / "settings" / f"{fingerprint(text)}.json"
        if not path.exists():
            write_json(path, json.loads(text), sort_keys=False)
        return f"@{path}"

    def parts(self, domains: Iterable[str], *kinds: str) -> list[str]:
        """The files of the anonymized parts of domains, in order. The config sets the parts of each domain."""
        return [
            f"{self.folder}/documents/{domain}/{part:04d}.{kind}"
            for domain in domains
            for kind in kinds
            for part in range(self.run.texts[domain].source.parts)
        ]

    def counted(self, source: str) -> list[str]:
        """The counts of all parts of a source that domains share."""
        parts = range(self.run.config.sources[source].source.parts)
        return [f"{self.folder}/sources/{source}/{part:04d}.json" for part in parts]

    def sharing(self, name: str, **more: Any) -> str:
        """The domains of a source that several share, each with its value, as JSON."""
        return self.as_json(more, domains={domain: self.run.domains[domain].value for domain in self.run.shared[name]})

    def division(self, source: str) -> dict[str, Any]:
        """How a source that domains share is divided, whichever domains there are."""
        shared = self.run.config.sources[source]
        # Pieces are cut when a domain's text is anonymized.
        return {"source": written(shared.source) | {"piece_words": None}, "by": shared.by}

    def fetched_by(self, rule: str, wildcards: Mapping[str, str]) -> tuple[str, ...]:
        """The domains whose text a job reads from its source; none for a job of another rule."""
        if rule in ("read", "download"):
            return (wildcards["domain"],)
        return self.run.shared[wildcards["source"]] if rule == "divide" else ()

    def tokens(self, domains: Iterable[str], *splits: str) -> list[str]:
        """The token files of the splits of domains."""
        return [f"{self.folder}/tokens/{domain}/{split}.arrow" for domain in domains for split in splits]

    def experts(self, model: str, names: Iterable[str]) -> list[str]:
        """The files that scoring reads for the experts `names` of a model."""
        return self._model_files(f"models/{model}", names)

    def trained_files(self, part: Model) -> list[str]:
        """The files of the model directory that a training makes."""
        return self._model_files(part.folder, part.experts)

    def _model_files(self, folder: str, names: Iterable[str]) -> list[str]:
        files = [f"experts/{name}.{kind}" for name in names for kind in ("safetensors", "json")]
        return [f"{self.folder}/{folder}/{file}" for file in ["model.json", "shared.safetensors", *files]]

    def scores(
        self, model: str, domains: Iterable[str], names: Iterable[str], splits: Iterable[str] = ("dev", "test")
    ) -> list[str]:
        """The score tables by which the workflow knows those of the experts `names` on `domains`.

        tokens.parquet has a digest of the columns that were scored with it, and stands for them, so that files grow
        with domains and not with pairs of a domain and an expert. The column of an expert that was added is named.
        """
        names, splits = dict.fromkeys(name if name in self.run.novel else "tokens" for name in names), list(splits)
        places = [f"{self.folder}/scores/{model}/{domain}.{split}" for domain in domains for split in splits]
        return [f"{place}/{name}.parquet" for place in places for name in names]

    def routing(
        self, clustering: str, context: str, domains: Iterable[str], splits: Iterable[str] = ("dev", "test")
    ) -> list[str]:
        """The routing tables of a clustering on `domains`."""
        splits = list(splits)
        folder = f"{self.folder}/routing/{clustering}/{context}"
        return [f"{folder}/{domain}.{split}.parquet" for domain in domains for split in splits]

    def evaluated_scores(self, domain: str) -> list[str]:
        """The score tables that the evaluation of a domain reads."""
        return [
            file
            for table in evaluated(self.run, domain)
            for file in self.scores(table.folder, [domain], [*table.columns, "tokens"], table.splits)
        ]

    def context_scores(self, domain: str) -> list[str]:
        """The score tables that the evaluation of a domain by position reads."""
        found = dict[str, None]()
        for table in context_tables(self.run, domain):
            tables = [(table.folder, "test"), *([(table.prior, "dev")] if table.prior else [])]
            for folder, split in tables:
                found |= dict.fromkeys(self.scores(folder, [domain], [*table.columns, "tokens"], [split]))
        return list(found)

    def context_settings(self, domain: str) -> str:
        """The settings of the evaluation of a domain by position, as JSON."""
        mixing = written(self.run.config.evaluation)
        return self.as_json(
            {key: mixing[key] for key in ("decay", "dev_blocks")},
            kind=self.run.kind_of(domain),
            tables=[asdict(table) for table in context_tables(self.run, domain)],
            width=max(1, self.run.context // POSITION_BINS),
            seed=self.run.seed,
        )

    def ngram_settings(self, order: int) -> str:
        """The settings of the job that scores n-grams, as JSON."""
        tokens = max(1, ngram_tokens(self.run) // len(self.run.training))
        scored = taken(ScoredTokens, self.run.config.evaluation)
        return self.as_json(scored, order=order, train_tokens=tokens, length=self.run.context)

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
        """The shards of domains or clusters that training reads: dev too, where it is evaluated and `dev` allows."""
        splits = ("train", "dev") if dev and model.settings.dev_blocks else ("train",)
        return [file for split in splits for file in self.learned_tokens(model, split)]

    def learned_tokens(self, model: Model, split: str) -> list[str]:
        """The shards of a split of the domains or clusters that a model learns from, in order."""
        if model.data:
            return self.shards(model.data, model.domains, split)
        return self.tokens(model.domains, split)

    def task_documents(self, task: str) -> list[str]:
        """The splits that the examples of a task are made of; none for examples of a source."""
        if not self.run.config.tasks[task].made:
            return []
        return [
            f"{self.folder}/corpus/{domain}/{split}.parquet"
            for split in ("test", "dev")
            for domain in self.run.training
        ]

    def task_inputs(self, task: str) -> list[str]:
        """The files that the examples of a task are read from, or made of. A changed file is read again."""
        given = self.run.config.tasks[task]
        sources = given.sources | ({"test": given.tested} if given.tested else {})
        return [*self.task_documents(task), *(file for source in sources.values() for file in source.files)]

    def harness_mixing(self, model: str) -> list[str]:
        """What mixes the experts of a model that does tasks of the harness: parameters chosen on dev, and clusters."""
        asked, clustering = self.run.config.lm_eval, harness_routings(self.run).get(model)
        tempered = asked and "tempered" in asked.weights and model in chosen_on_dev(self.run)
        chosen = [f"{self.folder}/models/{model}/mixing.json"] if tempered else []
        return chosen + ([f"{self.folder}/clusters/{clustering}/clusterer.json"] if clustering else [])

    def shards(self, clustering: str, clusters: Iterable[str], split: str) -> list[str]:
        """The token files of a split of the clusters of a clustering."""
        return [f"{self.folder}/clusters/{clustering}/shards/{cluster}/{split}.arrow" for cluster in clusters]

    def training_settings(self, model: Model, **changes: Any) -> str:
        """The settings that define the training of a model, as JSON.

        Settings that change only time and memory are left out, because a change of the JSON reruns the training.
        """
        more = {"seed": model.seed, "threads": self.run.config.threads, "architecture": model.base.section}
        return self.as_json(taken(TrainingRecipe, model.settings), **(more | changes))

    def chosen_rate(self, model: Model) -> list[str]:
        """The file with the learning rate that a sweep chose for a model and all its seeds; empty without one."""
        return [f"{self.folder}/sweep/{model.rates_from}.json"] if model.settings.sweep else []

    def seed_files(self, parent: str, step: int | str) -> list[str]:
        """The files of the state that the model `parent` had after `step` updates; none for 0 updates."""
        names = ("manifest.json", "shared.safetensors", f"expert-{DENSE_EXPERT}.safetensors")
        folder = f"step-{step:08d}" if isinstance(step, int) else f"step-{step}"
        return [f"{self.folder}/seeds/{parent}/{folder}/{name}" for name in names] if step else []

    def seed_of(self, model: Model) -> list[str]:
        """The files of the state that `model` begins with; none for a model that is trained from scratch."""
        if model.mixes:
            return self.begun_files(f"{self.folder}/models/{model.mixes}")
        if folder := model.base.initial:
            return self.begun_files(folder.rstrip("/"))
        return self.seed_files(model.parent, model.seed_step)

    def begun_files(self, folder: str) -> list[str]:
        """The files of the dense model in a folder that training begins with."""
        experts = [f"experts/{DENSE_EXPERT}.{kind}" for kind in ("json", "safetensors")]
        return [f"{folder}/{file}" for file in ("model.json", "shared.safetensors", *experts)]

    def train_options(self, model: Model) -> str:
        """The options of a training that are a resource: those of `run_options`, and which states are kept."""
        kept = ",".join(str(step) for parent, step in self.run.seeds if parent == model.name)
        options = f"{self.run_options('train', model.settings)} {self.live}"
        return f"{options} --keep {kept}" if kept else options

    @property
    def live(self) -> str:
        """The option of a training and of an adaptation that says where metrics go while it runs."""
        named = {"run": self.run.name, "config": config_fingerprint(self.run.config)}
        where = {"uri": self.run.config.tracking.uri, "experiment": self.run.experiment}
        return f"--live {shlex.quote(json.dumps(where | named))}"

    def beginning(self, model: Model) -> str:
        """The options of a training that say with which learning rate and which state it begins."""
        given = [f" --learning-rate-from {path}" for path in self.chosen_rate(model)]
        given += [f" --branch {shlex.quote(str(Path(path).parent))}" for path in self.seed_of(model)[:1]]
        return "".join([*given, *([" --schedule restart"] if model.restarts and model.seed_step else [])])

    def cores(self, settings: RowSettings | AdaptationSection) -> int:
        """The cores that a training takes on this machine: those of all ranks, or one if the job only waits."""
        return 1 if self.run.submitted else self.run.config.threads * settings.ranks

    def site(self, stage: str) -> dict[str, str | int]:
        """The resources that a job of a stage requests from the cluster. Without a cluster they have no effect."""
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

    def on_login(self, stage: str) -> bool:
        """Whether the jobs of a stage run where snakemake does, for compute nodes without internet."""
        return stage == "download" and self.run.config.cluster.downloads == "login"

    def run_options(self, stage: str, settings: RowSettings | AdaptationSection) -> str:
        """The options of a command that say how a section of the config trains.

        These options are a resource of the rule and not params: Snakemake reruns a job whose params changed, but
        settings of time and memory must rerun nothing.
        """
        cluster = shlex.quote(self.argument(json.dumps(written(self.run.config.cluster.of(stage)))))
        how = shlex.quote(json.dumps({key: getattr(settings, key) for key in names_of(Execution)}))
        return f"--ranks {settings.ranks} --how {how} --cluster {cluster}"
