"""Loading a run: reading its config, and checking it with everything that is derived from it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from demix.config.config import Config
from demix.config.evaluation import CACHE
from demix.config.keys import located, read_keys
from demix.config.mixing import parsed_weights
from demix.config.training import Execution, TrainingRecipe
from demix.errors import DemixError, nearest
from demix.progress import so_many
from demix.run import placement
from demix.run.evaluated import check_contexts, columns_of
from demix.run.harness import check_clustered, harness_files, harnessed
from demix.run.models import Merged, Model
from demix.run.run import Run, refuse_other_domains, refuse_other_format
from demix.run.systems import MAX_NGRAM_TOKENS, ngram_folders
from demix.settings import names_of, written


def load_run(path: str | Path, **instead: Any) -> Run:
    """The checked run of the config in the YAML file `path`. Keys in `instead` replace the file's."""
    path = Path(path)
    content, lines = read_keys(path)
    try:
        return completed_run(content | instead, path.parent)
    except DemixError as error:
        raise located(error, {path: lines}) from None


def completed_run(values: Mapping[str, Any], folder: Path = Path()) -> Run:
    """The checked run of a config with the keys `values`. Raises DemixError for keys that exclude each other.

    A path in `base` is relative to `folder`.
    """
    config = Config.complete(values, folder)
    run = Run(config, Path("results") / config.run)
    _check_clusters(run)
    # Models are trained without these domains, so removals are checked before models are derived.
    _check_removed_domains(run)
    # The architecture is checked before the entries that change its options.
    _ = run.architecture, run.adaptations
    for model in run.own:
        _check_model(run, model)
    _check_jobs(run)
    _check_merged_removal(run)
    _check_weights(run)
    check_contexts(run)
    _ = harnessed(run), harness_files(run)
    _check_ngrams(run)
    _check_systems(run)
    return run


def run_of_files(values: Mapping[str, Any], files: Sequence[Path]) -> Run:
    """The checked run of a config whose keys Snakemake has merged from `files`.

    Raises DemixError, with the line, for a wrong key, and for a key that occurs twice in a file (Snakemake would use
    the last one without a message). Also raises DemixError for a folder that holds another run.
    """
    places = {}
    try:
        for path in files:
            places[path] = read_keys(path)[1]
        # The path in `base` is relative to the config file.
        run = completed_run(values, files[-1].parent if files else Path())
        refuse_other_format(run.folder)
        refuse_other_domains(run.folder, run.config)
    except DemixError as error:
        raise located(error, places) from None
    return run


def _check_clusters(run: Run) -> None:
    """Raise DemixError for a domain that has the name of a cluster."""
    for name, clustering in run.config.clusterings.items():
        both = {*run.domains} & {*run.clusters(name)}
        if clustering.method != "metadata" and both:
            cause = f"has a cluster {min(both)}, which is also the name of a domain"
            raise DemixError(f"config key clusterings.{name}", cause, "rename the domain")


def _check_model(run: Run, model: Model) -> None:
    """Raise DemixError for an entry whose ranks do not fit its experts, or whose tokens are fewer than one step."""
    settings, given = model.settings, written(run.config.models[model.name])

    def key(name: str) -> str:
        return f"config key {f'models.{model.name}' if name in given else 'training'}.{name}"

    try:
        if model.in_parts:
            placement.place_experts(model.parts[0].domains, settings.sequences, settings.ranks)
        else:
            placement.place(model.kind, model.domains, settings.sequences, settings.ranks)
    except DemixError as error:
        raise error.but(key(error.subject)) from None
    if settings.tokens < model.step_tokens:
        cause = f"is {settings.tokens}, less than the {model.step_tokens} tokens of one step of {model.name}"
        cure = f"raise it, or lower the tokens of a step: {len(model.domains)} domains × {settings.sequences} "
        cure += f"sequences × {run.context} tokens of context"
        raise DemixError(key("tokens"), cause, cure)
    if model.parent and not model.mixes:
        _check_branch(run, model)
    if model.sweeps and (model.in_parts or model.mixes or model.base.initial):
        cause = "cannot be used: no trial matches a model that is trained in several parts or starts from a model"
        raise DemixError(f"config key models.{model.name}.sweep", cause, "set sweep: null and a learning_rate")
    if settings.sweep and settings.sweep.tokens < model.step_tokens:
        cause = f"is {settings.sweep.tokens}, less than the {model.step_tokens} tokens of one step of {model.name}"
        raise DemixError("config key training.sweep.tokens", cause, "raise it")


def _check_branch(run: Run, model: Model) -> None:
    """Raise DemixError if a warm-started entry changes its parent's schedule or data, unless it restarts.

    An entry that restarts must have tokens left for an update of its own.
    """
    key, given, parents = (
        f"config key models.{model.name}",
        written(run.config.models[model.name]),
        run.rows[model.parent],
    )
    seen, tokens = model.seed_step * model.parent_step_tokens, model.settings.tokens
    if model.restarts and model.updates <= model.first_step:
        cause = f"is {tokens}, which leaves no update after the {seen} tokens of the warm start"
        raise DemixError(f"{key}.tokens", cause, "raise it, or lower seed_tokens")
    of_parent = written(parents.settings)
    own = [name for name in (*names_of(TrainingRecipe), "sweep") if name not in (*names_of(Execution), "dev_blocks")]
    for name in own if not model.restarts else ():
        if name in given and given[name] != of_parent.get(name):
            cause = f"is {given[name]}, but its parent {model.parent} has {of_parent.get(name)}"
            raise DemixError(
                f"{key}.{name}", cause, "remove it, or the entry's preset: parent and branch have the same"
            )
    if model.settings.seed_tokens < model.parent_step_tokens:
        cause = f"is {model.settings.seed_tokens}, less than the {model.parent_step_tokens} tokens of one step"
        raise DemixError(f"{key}.seed_tokens", cause, "raise it, or remove parent")


def _check_jobs(run: Run) -> None:
    """Raise DemixError for invalid ranks or an invalid model of adaptations, and a grace period longer than a job."""
    adaptation = run.config.adaptation
    if run.novel and run.receiver.kind.anchored:
        cause = f"is {run.receiver.name} of kind anchored, to which no experts of novel domains can be added"
        raise DemixError("config key adaptation.model", cause, "name an entry of kind demix or branched")
    try:
        placement.place_experts(["novel"], adaptation.sequences, adaptation.ranks)
    except DemixError as error:
        raise error.but(f"config key adaptation.{error.subject}") from None
    for stage in ("train", "adapt"):
        cluster = run.config.cluster.of(stage)
        if cluster.grace_seconds >= 60 * cluster.minutes:
            cause = f"is {cluster.grace_seconds}, which leaves none of the {cluster.minutes} minutes of {stage}"
            raise DemixError("config key cluster.grace_seconds", cause, "lower it, or raise cluster.minutes")


def _check_removed_domains(run: Run) -> None:
    """Raise DemixError if a removed domain is not a training domain, or its replacement is not a novel domain."""
    removal, key = run.config.removal, "config key removal"
    for name in removal.retrain_without:
        if name not in run.training:
            cause = f"{name} is not a training domain"
            raise DemixError(f"{key}.retrain_without", cause, nearest(name, run.training, ""))
    if removal.retrain_without and removal.replacement not in run.novel:
        cause = f"is {removal.replacement or 'null'}, which is not a novel domain"
        cure = nearest(removal.replacement or "", run.novel, "add a novel domain first")
        raise DemixError(f"{key}.replacement", cause, cure)


def _check_merged_removal(run: Run) -> None:
    """Raise DemixError if an entry of `removal.merged` is not a merged model of domains, or has too few experts."""
    for name in run.config.removal.merged:
        row, key = run.rows.get(name), f"config key removal.merged: {name}"
        made = row and ((row.mixes and row.settings.parent) or (row.kind.anchored and name))
        parent = next((one for one in run.own if one.name == made), None)
        if not row or not parent or parent.data:
            cure = "name an entry of kind anchored, or one that trains merged experts, whose experts are of domains"
            raise DemixError(key, "is not an entry with a merged model of domains", cure)
        chosen = (row.architecture.routed if row.mixes else None) or parent.architecture.merged_routed(2).routed
        if chosen and len(Merged(parent, "routed").choices) - 1 < max(2, chosen.top_k):
            raise DemixError(key, "has too few experts to leave one out", "remove it, or add a training domain")


def _check_weights(run: Run) -> None:
    """Raise DemixError if the rule that tables need is missing, or if a cluster rule has no clusters in a model."""
    named = run.config.evaluation.weights
    if "history" not in named:
        cause = "lacks the mixing rule history, which the report's tables need"
        raise DemixError("config key evaluation.weights", cause, "add history to the list")
    check_clustered("config key evaluation.weights", {str(one): parsed_weights(one) for one in named}, run.planned)


def _check_ngrams(run: Run) -> None:
    """Raise DemixError for n-grams of more tokens than fit in memory, and for an entry with their name."""
    orders, tokens = run.config.evaluation.ngrams or (), run.rows["dense"].settings.tokens
    if any(isinstance(order, int) for order in orders) and tokens > MAX_NGRAM_TOKENS:
        cause = f"would count {tokens:,} tokens, but at most {MAX_NGRAM_TOKENS:,} fit in memory"
        raise DemixError("config key evaluation.ngrams", cause, "remove evaluation.ngrams")
    for order in orders:
        for folder in ngram_folders(order):
            if folder in run.rows:
                cause = f"is the name of the n-grams of order {order}"
                raise DemixError(f"config key models.{folder}", cause, "rename the entry")


def _check_systems(run: Run) -> None:
    """Raise DemixError for a system of unknown models, without a needed rule, or with the name of a model."""
    for name, system in run.config.evaluation.mixed.items():
        key = f"config key evaluation.systems.{name}"
        if name in run.rows or columns_of(run, name):
            raise DemixError(key, "is the name of a model", "rename the system")
        for model in system.models:
            if not (columns := columns_of(run, model)):
                known = [*run.rows, *(one for n in run.config.evaluation.ngrams or () for one in ngram_folders(n))]
                cause = f"mixes {model}, which is not a causal model of this run"
                raise DemixError(key, cause, f"use some of {', '.join(known)}, {CACHE}")
            if model in system.columns and (len(columns) > 1) == (system.columns[model] is None):
                cause = f"mixes {model}, which has {so_many(len(columns), 'expert')}"
                raise DemixError(key, cause, "give a rule (tempered) to models with experts, and null to others")
        if system.pairs and {columns_of(run, model) for model in system.pairs} != {run.training}:
            raise DemixError(key, "has pairs of models without an expert for each domain", "name two with such experts")
        if system.columns.get(CACHE) is not None:
            raise DemixError(key, "gives a mixing rule to the model cache, which has no experts", "write cache: null")
        rules = [system.weights] if system.pairs else [one for one in system.columns.values() if one]
        chosen = ({"tempered"} & {*run.config.evaluation.weights}) | ({"switching"} & {*system.columns.values()})
        for weights, parsed in ((one, parsed_weights(one)) for one in rules if one not in chosen):
            if parsed.rules.routed or parsed.open:
                cause = f"mixes experts by {weights}, whose distances or parameters are missing here"
                raise DemixError(
                    key, cause, "use history, switching or tempered(0.2,0.98), or add tempered to evaluation.weights"
                )
