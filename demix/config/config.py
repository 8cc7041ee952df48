"""A whole config: all sections, read from a YAML file and its bases, and completed with all defaults."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from demix.config.adaptation import PASSES, AdaptationSection, RemovalSection
from demix.config.addresses import COMMIT, LOG_IN_ELSEWHERE, local, refuse_secrets
from demix.config.architecture import DECODERS, PRESETS, Decoder
from demix.config.domains import (
    DomainName,
    DomainSection,
    DomainsSection,
    SharedSource,
    SourceSection,
    check_domains,
    check_source,
    check_sources,
    with_source,
)
from demix.config.evaluation import EvaluationSection, HarnessSection
from demix.config.keys import read_keys
from demix.config.models import PAPER, Clustering, Models
from demix.config.names import NAME, NAMED, EntryName
from demix.config.tasks import Task, check_tasks
from demix.config.tokenizer import TokenizerSection, completed_tokenizer
from demix.config.training import Threads, TrainingSection, with_presets
from demix.errors import DemixError
from demix.files.json_files import SEAL
from demix.launch.job import Cluster, Site
from demix.settings import DistinctItems, Seed, Settings, Switch, Text, absent, partial, settings_from, written

# The keys of a run's config.json that are not keys of a config.
NOT_CONFIG = ("format", SEAL)
SUBJECT = "config key "

# `demix.config.architecture.architecture_from` fills in the sizes of a preset.
ArchitectureSection = partial(
    "ArchitectureSection",
    Decoder,
    preset=Annotated[
        Literal[(*PRESETS, *DECODERS)],
        Field(
            description="gpt3-small to gpt3-xl: the paper's models (125M, 350M, 760M, 1.3B). Other presets have no "
            "sizes, so give layers, width, heads and context, too. llama, olmo2, qwen3, opt, pythia, roberta: options "
            "of these architectures. modern: Qwen 3's options with Llama 2's rope and an untied head; used by the "
            "sample. compact: modern with bigram and value embeddings. paper: GPT-2's options, as in the paper's "
            "models."
        ),
    ],
)


class TrackingSection(Settings):
    """Where results are recorded."""

    uri: Text = Field(
        default="sqlite:///results/mlflow.db",
        description="MLflow tracking store: a SQLite or PostgreSQL URI, or the address of a server.",
    )


StageSite = partial("StageSite", Site)


class ClusterSection(Cluster):
    """All settings of the compute cluster. They do not change results, and changing them reruns nothing."""

    stages: dict[Literal["download", "anonymize", "corpus", "train", "adapt", "score", "evaluate"], StageSite] = Field(  # type: ignore[valid-type]
        default_factory=dict,
        description="Values of partition, account, qos, constraint, sbatch, minutes, memory_mb, gpus and gpu_type for "
        "single stages, such as `{train: {minutes: 2880}}`. The stages are download, anonymize, corpus (the rules "
        "deduplicate, split, tokenizer and tokenize), train (trials of a sweep, too), adapt, score and evaluate.",
    )

    def of(self, stage: str) -> Cluster:
        """The cluster settings for the jobs of one stage."""
        whole: dict[str, Any] = written(self)
        stages = whole.pop("stages")
        return settings_from(Cluster, whole | stages.get(stage, {}), "config key cluster")


class Config(Settings):
    """Every key of a demix config, with its meaning, unit and default."""

    base: Text | None = Field(
        default_factory=absent,
        description="Path of another config file, relative to this one. The two are merged, nested keys included; if "
        "both set a key, this file's value is used.",
    )
    run: Text = Field(
        pattern=NAME,
        json_schema_extra={"patternErrorMessage": NAMED},
        description="Name of the run. All its files are below results/<run>/.",
    )
    seed: Seed = Field(default=1, description="Random seed of splits, initialisation and data order.")
    seeds: DistinctItems[Seed] = Field(
        default=(),
        description="Further random seeds. The models are trained again with each; `seed` may be among them. A further "
        "seed changes initialisation and data order, but not splits and tokenizer. Tables show the spread over seeds. "
        "Adaptation and removal use only `seed`.",
    )
    threads: Threads = Field(default=1)
    allow_branches: Switch = Field(
        default=False,
        description="Accept hub sources whose revision is not a commit. If a branch or tag moves, the text of the run "
        "changes. `demix config --pin CONFIG` prints the commits.",
    )
    sources: dict[DomainName, SharedSource] = Field(
        default_factory=dict,
        description="Corpora that several domains share, by name. A domain selects documents by `from` and `value`.",
    )
    domains: DomainsSection = Field(
        description="The text domains by name, in the order in which tables and figures show them."
    )
    tokenizer: TokenizerSection = Field(default_factory=TokenizerSection, description="How text becomes tokens.")
    architecture: ArchitectureSection = Field(  # type: ignore[valid-type]
        description="Sizes and options of the models: a preset, the four sizes (layers, width, heads and context), or "
        "both. Keys that are given replace the preset's values. Without a preset, the first of an option's listed "
        "values is its default; gated and value_embeddings are false, rope_theta is 10000 and rope_share 1."
    )
    training: TrainingSection = Field(
        description="Training settings of all models. An entry of `models` overrides them for one model."
    )
    models: Models = Field(
        default_factory=dict,
        description="The models by name. An entry overrides values of `training` for one model. By default there are "
        "four: demix (whose entry also applies to models that are retrained without a domain), dense (balanced: every "
        "step has equally many tokens of each domain), dense_unbalanced (the paper's Dense: data in proportion to the "
        "domains' sizes) and domain_token (dense and balanced, with a domain token before each sequence). An entry of "
        "another name adds a model of the entry's `kind`. Set an entry to null to leave it out (not possible for "
        "demix and dense).",
    )
    clusterings: dict[EntryName, Clustering] = Field(
        default_factory=dict,
        description="Ways to divide the training domains' documents into clusters, by name (c-BTM).",
    )
    evaluation: EvaluationSection = Field(
        default_factory=EvaluationSection, description="What is scored and how experts are mixed."
    )
    tasks: dict[EntryName, Task] = Field(
        default_factory=dict,
        description="Classification tasks by name: texts with labels, on which the accuracy of mixtures is measured. "
        "Default: none.",
    )
    lm_eval: HarnessSection | None = Field(
        default_factory=absent,
        description="Tasks of EleutherAI's lm-evaluation-harness on which models are evaluated. Default: none.",
    )
    adaptation: AdaptationSection = Field(
        default_factory=AdaptationSection, description="DEMix-DAPT and Dense-DAPT on each novel domain."
    )
    removal: RemovalSection = Field(
        default_factory=RemovalSection, description="Removal of domains from a trained model."
    )
    tracking: TrackingSection = Field(default_factory=TrackingSection, description="Where results are recorded.")
    cluster: ClusterSection = Field(
        default_factory=ClusterSection,
        description="All settings of the compute cluster. They do not change results; changing them reruns nothing.",
    )

    @classmethod
    def complete(cls, values: Mapping[str, Any], folder: Path = Path()) -> Self:
        """The config of a file in `folder` with the keys `values`: merged with its base, checked, completed.

        Raises DemixError that names the first wrong key and its allowed values. For an unknown key, the error also
        names the nearest known one.
        """
        # The config.json of a run is also accepted as a config.
        whole = with_base({key: value for key, value in values.items() if key not in NOT_CONFIG}, folder)
        # `novel:` with nothing below it is null in YAML.
        if isinstance(whole.get("domains"), dict) and whole["domains"].get("novel", {}) is None:
            whole["domains"] = whole["domains"] | {"novel": {}}
        given = settings_from(cls, whole, SUBJECT)
        domains, adaptation = given.domains.kinds, given.adaptation
        for kind, named in domains.items():
            domains[kind] = {
                name: with_source(f"{SUBJECT}domains.{kind}.{name}", one, given.sources) for name, one in named.items()
            }
        if not domains["training"]:
            raise DemixError("config key domains.training", "leaves out every domain", "keep or add a domain")
        if adaptation.tokens is None:
            share = max(1, given.training.tokens // len(domains["training"]))
            passes = adaptation.passes if "passes" in adaptation.model_fields_set else PASSES
            adaptation = adaptation.replace(passes=passes, tokens=share)
        config = given.replace(
            domains=given.domains.replace(**domains),
            adaptation=adaptation,
            tokenizer=completed_tokenizer(given.tokenizer),
            # Tables show the models that every run has first, then further ones.
            models={name: given.models.get(name, {}) for name in PAPER} | given.models,
        )
        config._check()
        return config

    @property
    def values(self) -> dict[str, Any]:
        """Every key as in a file, completed with all defaults."""
        return written(self)

    @property
    def further_seeds(self) -> tuple[int, ...]:
        """The further random seeds with which the models are trained again."""
        return tuple(seed for seed in self.seeds if seed != self.seed)

    def _check(self) -> None:
        """Check the rules that involve several keys of a user's config."""
        check_domains(self.domains)
        check_sources(self.sources, self.domains)
        self._check_suites()
        for key, source in self._read.items():
            check_source(f"config key {key}", source)
        for key, source in self.moving.items() if not self.allow_branches else ():
            cause = f"is {source.revision}, which is not a commit, so its text can change"
            cure = "set the commit that `demix config --pin CONFIG` prints, or allow_branches: true"
            raise DemixError(f"config key {key}.revision", cause, cure)
        check_tasks(self.tasks)
        refuse_secrets("config key tracking.uri", self.tracking.uri, LOG_IN_ELSEWHERE)

    def _check_suites(self) -> None:
        """Raise DemixError if a source of a suite has the name of another domain, or keys of training text."""
        names = set(self.domains.all)
        for suite, sources in (self.evaluation.suites or {}).items():
            for name, domain in sources.items():
                key = f"config key evaluation.suites.{suite}.{name}"
                if f"{suite}_{name}" in names:
                    raise DemixError(key, f"is called {suite}_{name}, like another domain", "rename the source")
                names.add(f"{suite}_{name}")
                if domain.shared or not domain.source:
                    raise DemixError(f"{key}.source", "is missing", "add it; a suite cannot use the key `from`")
                if domain.near_duplicates is not None or domain.words.train is not None:
                    raise DemixError(key, "has keys of training text", "leave out words.train and near_duplicates")

    @property
    def suites(self) -> dict[str, DomainSection]:
        """The sources of all suites as domains, by the names of their files: <suite>_<source>."""
        suites = self.evaluation.suites or {}
        return {f"{suite}_{name}": domain for suite, sources in suites.items() for name, domain in sources.items()}

    @property
    def of_text(self) -> dict[str, SourceSection]:
        """The sources of all text by their config keys; a shared source is listed once."""
        sections = {f"domains.{kind}": found for kind, found in self.domains.kinds.items()}
        sections |= {f"evaluation.suites.{suite}": found for suite, found in (self.evaluation.suites or {}).items()}
        texts = {f"{key}.{name}": domain for key, found in sections.items() for name, domain in found.items()}
        return {f"sources.{name}.source": shared.source for name, shared in self.sources.items()} | {
            f"{key}.source": domain.source for key, domain in texts.items() if domain.shared is None
        }

    @property
    def _read(self) -> dict[str, SourceSection]:
        """The sources of all text and of tasks by their config keys."""
        return self.of_text | {
            f"tasks.{name}.{split}": source
            for name, task in self.tasks.items()
            for split, source in task.sources.items()
        }

    @property
    def moving(self) -> dict[str, SourceSection]:
        """The sources whose revisions are branches or tags, by their config keys."""
        return {
            key: source
            for key, source in self._read.items()
            if source.kind == "hub" and not COMMIT.fullmatch(source.revision or "") and not local(source.paths)
        }

    def refuse_missing_files(self, file: Path) -> None:
        """Raise DemixError that names each local source path of this config (read from `file`) that does not exist."""
        lines, missing, instructions = read_keys(file)[1], list[str](), dict[str, None]()
        for key, source in self.of_text.items():
            for path, files in source.listed.items():
                if not files:
                    place = next((f"line {lines[one]}" for one in (f"{key}.path", key) if one in lines), "its base")
                    missing.append(f"{path} ({key.split('.')[-2]}, {place})")
                    instructions[source.instructions] = None
        if missing:
            cure = " ".join(filter(None, instructions)) or "fix the paths, which are relative to the working directory"
            raise DemixError(file, f"names files that are missing: {', '.join(missing)}", cure)


def with_base(config: dict[str, Any], folder: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """`config` merged with the file that its key `base` names, nested keys included.

    The path of the base is relative to `folder`. If both set a key, the value in `config` is used. A base may have a
    base of its own, relative to the folder of its own file. The values of a training preset are filled into the file
    that names the preset.
    """
    base, own = config.get("base"), with_presets({key: value for key, value in config.items() if key != "base"})
    if base is None:
        return own
    if not isinstance(base, str) or "\0" in base:
        raise DemixError("config key base", f"is {base!r}", "give the path of a config file, relative to this one")
    path = (folder / base).resolve()
    if path in above:
        raise DemixError("config key base", f"{base} is based on itself", "remove one key `base`")
    if not path.is_file():
        raise DemixError("config key base", f"{path} does not exist", "give a path relative to the file that names it")
    below = with_base(read_keys(path)[0], path.parent, (*above, path))
    return _merged(below, own)


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    both = {
        key: _merged(below[key], value) if isinstance(value, dict) and isinstance(below.get(key), dict) else value
        for key, value in above.items()
    }
    return below | both
