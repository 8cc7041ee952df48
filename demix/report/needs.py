"""The requirements of tables, figures and claims: a run that lacks a requirement does not have the element."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from demix.run.rows import Row
from demix.run.run import Run


@dataclass(frozen=True)
class Need:
    """Something that a run may lack: its name, and the check whether a run has it."""

    name: str
    met: Callable[[Run], bool]


def _causal(run: Run) -> dict[str, Row]:
    return {name: row for name, row in run.rows.items() if not row.masked}


NOVEL = Need("novel domains", lambda run: bool(run.novel))
SECOND_TRAINING = Need("second training domain", lambda run: len(run.training) > 1)
WITHOUT_DOMAIN = Need("model trained without a domain", lambda run: bool(run.config.removal.retrain_without))
DENSE_UNBALANCED = Need("model dense_unbalanced", lambda run: "dense_unbalanced" in _causal(run))
DOMAIN_TOKEN = Need("model domain_token", lambda run: "domain_token" in _causal(run))
CLUSTERS = Need("model that learns from clusters", lambda run: any(row.settings.data for row in _causal(run).values()))
TASKS = Need("task", lambda run: bool(run.config.tasks))
HARNESS = Need("task of the harness", lambda run: bool(run.config.lm_eval))
SUITES = Need("suite", lambda run: bool(run.suites))
ANY_TASK = Need("task or suite", lambda run: any(need.met(run) for need in (TASKS, HARNESS, SUITES)))
# The report names these if a run lacks them; most runs are not meant to have the others.
STATED = (NOVEL, SECOND_TRAINING, WITHOUT_DOMAIN, DENSE_UNBALANCED, DOMAIN_TOKEN)


def missing(needs: Iterable[Need], run: Run) -> Need | None:
    """The first of `needs` that `run` lacks."""
    return next((need for need in needs if not need.met(run)), None)
