"""Rows of `models` whose names clash with those of what the workflow makes of other rows."""

import re
from collections.abc import Iterator

from demix.errors import DemixError
from demix.run.models import job_place, rule_of
from demix.run.run import Run
from demix.run.scoring import scoring_jobs


def refuse_clashes(run: Run) -> None:
    """Raise DemixError where two rules of the workflow of a run would have the same name.

    Rules are named like the models that they make, with `_` for what separates a row from a seed, a domain or weights.
    """
    makers: dict[str, str] = {}
    for rule, made in _rules(run):
        if makers.setdefault(rule, made) == made:
            continue
        # The row that has the name itself, and not the one that something else is made of.
        found = sorted((re.split("[-/@]", one)[0], one) for one in (makers[rule], made))
        rows = [one for one in found if one[0] in run.config.models]
        row, own = max(rows, key=lambda one: (one[0] == one[1], len(one[0])))
        other = next(one for _, one in found if one != own)
        cause = f"is a name that the workflow also has for {other} (rule {rule})"
        raise DemixError(f"config key models.{row}", cause, "rename the row")


def _rules(run: Run) -> Iterator[tuple[str, str]]:
    """The rules of the workflow that are named like models, each with what the rule makes."""
    yield "score_ngrams", "n-grams"
    for model in run.trained:
        yield f"join_{model.rule}", model.name
        yield from ((rule_of(job), job_place(job)) for job in model.jobs)
    yield from ((merged.rule, merged.place) for merged in (*run.merged, *run.routed_merges))
    # On one machine, several of these rules are one.
    yield from ((job.rule, job.parts[0].folder) for job in scoring_jobs(run, apart=True))
