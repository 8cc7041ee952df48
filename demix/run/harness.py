"""Tasks of the lm-evaluation-harness in a run: which models are evaluated, and the inputs of their jobs."""

import os
from collections.abc import Iterable, Mapping
from glob import escape, glob
from itertools import product
from pathlib import Path
from typing import Any

from demix.config.addresses import refuse_unnamable
from demix.config.evaluation import HarnessTasks
from demix.config.mixing import Weights, parsed_weights
from demix.config.training import selected
from demix.errors import DemixError, nearest
from demix.run.models import Model
from demix.run.run import Run


def harnessed(run: Run) -> tuple[Model, ...]:
    """The models of the run's own seed that are evaluated on the tasks of `lm_eval`; none without this section.

    Raises DemixError for a model that cannot be evaluated, and for a cluster rule of a model without clusters.
    """
    asked, key = run.config.lm_eval, "config key lm_eval"
    if not asked:
        return ()
    able = {model.name: model for model in run.own if model.continues}
    for name in asked.models:
        if name not in able:
            raise DemixError(
                f"{key}.models", f"{name} is not an entry that supports tasks", nearest(name, able, "remove it")
            )
    found = tuple(able[name] for name in asked.models or able)
    check_clustered(f"{key}.weights", _rules(run), found)
    return found


def check_clustered(key: str, rules: Mapping[str, Weights], models: Iterable[Model]) -> None:
    """Raise DemixError if a rule of the config `key` needs distances to clusters and a model has no clusters."""
    for weights, model in product((name for name, parsed in rules.items() if parsed.rules.routed), models):
        if model.kind.has_experts and not (model.routing or model.removed or model.masked):
            cause, cure = f"{weights} needs a clustering of {model.name}", "add by_domain: {method: metadata}"
            raise DemixError(key, cause, f"{cure} to clusterings")


def harness_routings(run: Run) -> dict[str, str]:
    """By model: the clustering whose distances a rule of `lm_eval.weights` uses to mix the model's experts."""
    if not any(parsed.rules.routed for parsed in _rules(run).values()):
        return {}
    return {model.name: model.routing for model in harnessed(run) if model.routing}


def harness_files(run: Run) -> list[str]:
    """The files in `lm_eval.include_path`, without Python's compiled files. If one changes, the tasks rerun.

    Raises DemixError if the folder contains the run's folder, or if a rule cannot hold a file's name.
    """
    folder = run.config.lm_eval.include_path if run.config.lm_eval else None
    if folder is None:
        return []
    if run.folder.resolve().is_relative_to(Path(folder).resolve()):
        cause, cure = "holds the run's own files", "give the tasks a folder of their own"
        raise DemixError(f"config key lm_eval.include_path: {folder}", cause, cure)
    files = [path for path in glob(f"{escape(folder)}/**/*", recursive=True) if os.path.isfile(path)]
    return sorted(refuse_unnamable(file) for file in files if "__pycache__" not in Path(file).parts)


def harness_tasks(run: Run) -> dict[str, Any]:
    """The settings of the section that define the tasks."""
    return selected(HarnessTasks, run.config.lm_eval) if run.config.lm_eval else {}


def harness_settings(run: Run, model: Model) -> dict[str, Any]:
    """The settings of a model's job.

    Names of cluster rules include their temperature, because the model's folder does not record it.
    """
    heat, weights = run.config.evaluation.temperature, list[str]()
    for name, parsed in _rules(run).items():
        weights.append(f"{name}({heat})" if parsed.rules.routed and parsed.open else name)
    experts = list(model.experts) if model.kind.has_experts else []
    about = {"model": model.row, "seed": model.seed, "experts": experts, "weights": weights}
    return harness_tasks(run) | about | {"threads": run.config.threads}


def _rules(run: Run) -> dict[str, Weights]:
    """The rules of `lm_eval.weights` by name, without `average`, which uses only the prior."""
    named = run.config.lm_eval.weights if run.config.lm_eval else ()
    return {name: Weights("average") if name == "average" else parsed_weights(name) for name in named}
