"""Tasks of the lm-evaluation-harness in a run: which models do them, and what a job of each reads."""

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
    """The models that do the tasks of `lm_eval`, of the run's own seed; none without this section.

    Raises DemixError for one that is not such a model, and for weights by clusters of a model without any.
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
    """Raise DemixError for rules of the config `key` that read distances to clusters, which a model does not have."""
    for weights, model in product((name for name, parsed in rules.items() if parsed.rules.routed), models):
        if model.kind.has_experts and not (model.routing or model.removed or model.masked):
            cause, cure = f"{weights} has no clustering for {model.name}", "add by_domain: {method: metadata}"
            raise DemixError(key, cause, f"{cure} to clusterings")


def harness_routings(run: Run) -> dict[str, str]:
    """The clustering by whose distances a rule of `lm_eval.weights` mixes the experts of a model, by model."""
    if not any(parsed.rules.routed for parsed in _rules(run).values()):
        return {}
    return {model.name: model.routing for model in harnessed(run) if model.routing}


def harness_files(run: Run) -> list[str]:
    """The files in `lm_eval.include_path`, but those that Python keeps of code. If one changes, the tasks run again.

    Raises DemixError for a folder around the run's, and for a name that no rule can hold.
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
    """The settings of the section that say what is asked."""
    return selected(HarnessTasks, run.config.lm_eval) if run.config.lm_eval else {}


def harness_settings(run: Run, model: Model) -> dict[str, Any]:
    """The settings of the job of a model.

    Rules by distance have their temperature in their names: the model's folder does not say it.
    """
    heat, weights = run.config.evaluation.temperature, list[str]()
    for name, parsed in _rules(run).items():
        weights.append(f"{name}({heat})" if parsed.rules.routed and parsed.open else name)
    experts = list(model.experts) if model.kind.has_experts else []
    about = {"model": model.row, "seed": model.seed, "experts": experts, "weights": weights}
    return harness_tasks(run) | about | {"threads": run.config.threads}


def _rules(run: Run) -> dict[str, Weights]:
    """The rules of `lm_eval.weights` by name; `average` has none, and is only the prior."""
    named = run.config.lm_eval.weights if run.config.lm_eval else ()
    return {name: Weights("average") if name == "average" else parsed_weights(name) for name in named}
