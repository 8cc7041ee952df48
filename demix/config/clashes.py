"""Rows of `models` whose names clash with those of what the workflow makes of other rows."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from demix.config.merged import merged_models
from demix.config.scoring import scoring_jobs
from demix.config.systems import job_place, rule_of, trained
from demix.errors import DemixError


def refuse_clashes(config: Mapping[str, Any]) -> None:
    """Raise DemixError where two rules of the workflow of a completed config would have the same name.

    Rules are named like the models that they make, with `_` for what separates a row from a seed, a domain or weights.
    """
    makers: dict[str, str] = {}
    for rule, made in _rules(config):
        if makers.setdefault(rule, made) == made:
            continue
        # The row that has the name itself, and not the one that something else is made of.
        found = sorted((re.split("[-/@]", one)[0], one) for one in (makers[rule], made))
        rows = [one for one in found if one[0] in config["models"]]
        row, own = max(rows, key=lambda one: (one[0] == one[1], len(one[0])))
        other = next(one for _, one in found if one != own)
        cause = f"is a name that the workflow also has for {other} (rule {rule})"
        raise DemixError(f"config key models.{row}", cause, "rename the row")


def _rules(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The rules of the workflow that are named like models, each with the model."""
    for model in trained(config):
        yield f"join_{model.rule}", model.name
        yield from ((rule_of(job), job_place(job)) for job in model.jobs)
    yield from ((merged.rule, merged.place) for merged in merged_models(config))
    # On one machine, several of these rules are one.
    apart = {**config, "cluster": {**config["cluster"], "launch": "slurm"}}
    yield from ((job.rule, job.parts[0].folder) for job in scoring_jobs(apart))
