"""The settings of the workflow's stages: the part of the config that a stage uses, as one argument of its command."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from demix.config.adaptation import AdaptationRecipe
from demix.config.domains import UNCUT, SplitRecipe
from demix.config.evaluation import CACHE, MixingRecipe, ScoredTokens, ScoringRecipe
from demix.config.training import OptimizerRecipe, TrainingRecipe, selected
from demix.files import fingerprint, write_json
from demix.run.evaluated import POSITION_BINS, columns_of, comparisons, context_tables, evaluated
from demix.run.harness import harnessed
from demix.run.models import Model, trained_without
from demix.run.run import Run, kept
from demix.run.scoring import ScoringJob, scoring_jobs
from demix.run.systems import ClassifiedModel, Member, classified, merged_whole
from demix.settings import Settings, written

# The maximum length of one argument in Linux, in bytes, without the NUL at its end.
LONGEST_ARGUMENT = 128 * 1024 - 1


def _plain(value: Any) -> dict[str, Any]:
    """The JSON form of a config section or of a derived object."""
    return written(value) if isinstance(value, Settings) else asdict(value)


@dataclass(frozen=True)
class StageSettings:
    """The settings of the stages of one run, as JSON."""

    run: Run

    @cached_property
    def models(self) -> dict[str, Model]:
        """The models of the run by name."""
        return {model.name: model for model in self.run.planned}

    @cached_property
    def scoring(self) -> dict[str, ScoringJob]:
        """The jobs that score, by name."""
        return {job.name: job for job in scoring_jobs(self.run)}

    @property
    def folder(self) -> str:
        """The folder of the run, as rules name it."""
        return str(self.run.folder)

    def as_json(self, *parts: Mapping[str, Any], **more: Any) -> str:
        """The part of the config that a stage uses, as one argument. A change to it reruns only that stage."""
        merged = {key: value for part in (*parts, more) for key, value in part.items()}
        return self.argument(json.dumps(merged, sort_keys=True, default=_plain))

    def argument(self, text: str) -> str:
        """JSON as one argument: the text itself, or, if it is too long, @ and the path of a file that holds it.

        The name of the file is a digest of the JSON, so the argument changes if and only if a setting changes.
        """
        if len(text.encode()) <= LONGEST_ARGUMENT:
            return text
        path = self.run.folder / "settings" / f"{fingerprint(text)}.json"
        if not path.exists():
            write_json(path, json.loads(text), sort_keys=False)
        return f"@{path}"

    def division_settings(self, source: str) -> str:
        """The settings of a pass over a source that domains share, as JSON quoted for a shell."""
        domains = {domain: self.run.domains[domain].value for domain in self.run.shared[source]}
        return shlex.quote(self.as_json(self.division(source), domains=domains))

    @property
    def kept(self) -> str:
        """The config that the run records, as JSON."""
        return self.argument(json.dumps(kept(self.run.config)))

    def division(self, source: str) -> dict[str, Any]:
        """How a source that domains share is divided, independently of which domains there are."""
        shared = self.run.config.sources[source]
        # Chunks are cut later, when a domain's text is anonymized.
        return {"source": written(shared.source) | UNCUT, "by": shared.by}

    def scoring_settings(self, name: str) -> str:
        """The settings of a job that scores, as JSON."""
        scored = selected(ScoringRecipe, self.run.config.evaluation)
        return self.as_json(scored, models=self.scoring[name].parts, threads=self.run.config.threads)

    def context_settings(self, domain: str) -> str:
        """The settings of the evaluation of a domain by position in the context, as JSON."""
        mixing = written(self.run.config.evaluation)
        return self.as_json(
            {key: mixing[key] for key in ("decay", "dev_blocks")},
            kind=self.run.kind_of(domain),
            tables=context_tables(self.run, domain),
            width=max(1, self.run.context // POSITION_BINS),
            seed=self.run.seed,
        )

    def ngram_settings(self, order: str) -> str:
        """The settings of the job that scores n-grams, as JSON."""
        number, _, counts_all = order.partition("_")
        # As many tokens as the model dense is trained on.
        tokens = None if counts_all else max(1, self.run.rows["dense"].settings.tokens // len(self.run.training))
        scored = selected(ScoredTokens, self.run.config.evaluation)
        return self.as_json(scored, order=int(number), train_tokens=tokens, length=self.run.context)

    def combination_settings(self, name: str) -> str:
        """The settings of the job that writes the tables of a system that mixes columns of models, as JSON."""
        system = self.run.config.evaluation.mixed[name]
        rules = {one: "" if weights is None else str(weights) for one, weights in system.columns.items()}
        members = [
            Member() if one == CACHE else Member(one, columns_of(self.run, one), rules.get(one, ""))
            for one in (*system.columns, *system.pairs)
        ]
        of_run = {"training": self.run.training, "length": self.run.context}
        return self.as_json(of_run, members=members, paired=bool(system.pairs), reset=system.reset)

    def source_settings(self, domain: str, whole: bool = False) -> str:
        """The settings of a domain's source, as JSON; `whole` leaves documents uncut."""
        return self.as_json(written(self.run.texts[domain].source), UNCUT if whole else {})

    def split_settings(self, domain: str) -> str:
        """The settings of splitting a domain's documents, as JSON. A domain of a suite has only a test split."""
        split = selected(SplitRecipe, self.run.texts[domain])
        more = {"test_only": True} if domain in self.run.suites else {}
        return self.as_json(split, more, training=domain in self.run.training, seed=self.run.seed)

    def routing_settings(self, context: str) -> str:
        """The settings of routing contexts to clusters, as JSON."""
        scored = selected(ScoredTokens, self.run.config.evaluation)
        return self.as_json(scored, length=self.run.context, context=context)

    def evaluation_settings(self, domain: str) -> str:
        """The settings of the evaluation of a domain, as JSON."""
        run = self.run
        return self.as_json(
            selected(MixingRecipe, run.config.evaluation),
            kind=run.kind_of(domain),
            tables=evaluated(run, domain),
            pairs=comparisons(run, domain) if domain in run.domains else [],
            seed=run.seed,
        )

    def audit_settings(self, removed: str) -> str:
        """The settings of the audit of a removed domain, as JSON."""
        run = self.run
        return self.as_json(
            merged=list(merged_whole(run)),
            model=run.whole.name,
            training=run.training,
            without=self.models[trained_without(removed)].experts,
            threads=run.config.threads,
        )

    def example_settings(self, task: str) -> str:
        """The settings of the examples of a task, as JSON."""
        return self.as_json(written(self.run.config.tasks[task]), length=self.run.context, seed=self.run.seed)

    def fewshot_settings(self, task: str) -> str:
        """The settings of scoring a task's prompts, as JSON."""
        config = self.run.config
        return self.as_json(written(config.tasks[task]), precision=config.evaluation.precision, threads=config.threads)

    @property
    def classify_settings(self) -> str:
        """The settings of the classification, as JSON. If a run has only harness tasks, its list of tasks is empty."""
        evaluation = self.run.config.evaluation
        asked = classified(self.run)
        return self.as_json(
            tasks=self.run.config.tasks or ({} if harnessed(self.run) else None),
            models=[ClassifiedModel(one.row, one.name, one.seed, one.kind.has_experts, one.routing) for one in asked],
            weights=evaluation.weights,
            temperature=written(evaluation)["temperature"],
            top_k=evaluation.top_k,
            seed=self.run.seed,
        )

    def training_settings(self, model: Model, **changes: Any) -> str:
        """The settings that define the training of a model, as JSON.

        They do not include settings of only time and memory, because a change of the JSON reruns the training.
        """
        more = {"seed": model.seed, "threads": self.run.config.threads, "architecture": model.architecture.described}
        return self.as_json(selected(TrainingRecipe, model.settings), **(more | changes))

    def trial_settings(self, model: Model, rate: float) -> str:
        """The settings of a trial.

        A trial differs from the training in tokens and rate, and is not evaluated on dev.
        """
        tokens = written(model.settings)["sweep"]["tokens"]
        return self.training_settings(model, tokens=tokens, learning_rate=rate, dev_blocks=0)

    def adaptation_settings(self, parent: Model) -> str:
        """The settings of the adaptation of a model to a novel domain, as JSON."""
        section = self.run.config.adaptation
        trained = {} if parent.kind.has_experts else {"trained": section.dense_trained}
        return self.as_json(
            selected(OptimizerRecipe, parent.settings),
            selected(AdaptationRecipe, section),
            learning_rate_factor=self.run.learning_rate_factor(parent),
            seed=self.run.seed,
            threads=self.run.config.threads,
            **trained,
        )
