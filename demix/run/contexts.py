"""Blocks of other lengths than those of training: which models are scored on them, and evaluated by position."""

from dataclasses import dataclass

from demix.errors import DemixError
from demix.run.models import Model, folder_at
from demix.run.run import Run
from demix.run.systems import systems_of

# In how many bins of positions a block of the length of training is cut; bins of longer blocks are as wide.
POSITION_BINS = 8


@dataclass(frozen=True)
class ContextTable:
    """The score table of one row of `models` on a domain in blocks of `context` tokens, and how it is mixed.

    `folder` is its folder below scores/. With the method `cached` the prior comes from the dev split in blocks of the
    length of training, whose table is in `prior`. Other methods have one column.
    """

    model: str
    folder: str
    context: int
    columns: tuple[str, ...]
    experts: str
    method: str
    weights: str = ""
    prior: str = ""


def asked_contexts(run: Run) -> tuple[int, ...]:
    """The lengths of blocks in `evaluation.contexts`, ascending."""
    return tuple(sorted(run.config.evaluation.contexts or ()))


def contexts_of(run: Run, model: Model) -> tuple[int, ...]:
    """The asked lengths of blocks on which a model is evaluated; its learned positions end at the length of training.

    Models of further seeds, or without a domain, are not evaluated, and neither are those that learned masked tokens.
    """
    if model.name != model.row or model.removed or model.adapted_to or model.masked:
        return ()
    ends = model.architecture.position == "learned"
    return tuple(context for context in asked_contexts(run) if not ends or context <= model.architecture.context)


def other_contexts(run: Run, model: Model) -> tuple[int, ...]:
    """The lengths of `contexts_of` that are not that of training: those that need score tables of their own."""
    return tuple(context for context in contexts_of(run, model) if context != model.architecture.context)


def context_tables(run: Run, domain: str) -> tuple[ContextTable, ...]:
    """The score tables of `domain` in blocks of the asked lengths, by row of `models`.

    A row is mixed as in the paper's tables: a training domain has its own token, and experts the cached prior with
    weights by `history`. A novel domain has no token.
    """
    found = []
    for model in run.trained:
        if model.kind.domain_tokens and domain not in model.domains:
            continue
        system = systems_of(model.row, model.kind, model.label)[-1]
        columns = (domain,) if model.kind.domain_tokens else model.columns
        other = other_contexts(run, model)
        for context in contexts_of(run, model):
            folder = folder_at(model.name, context if context in other else 0)
            prior = model.name if model.kind.has_experts else ""
            found.append(
                ContextTable(
                    model.row, folder, context, columns, system.experts, system.method, system.weights, prior
                )
            )  # fmt: skip
    return tuple(found)


def check_contexts(run: Run) -> None:
    """Raise DemixError for a length of blocks on which no model can be evaluated."""
    for context in asked_contexts(run):
        if not any(context in contexts_of(run, model) for model in run.trained):
            cause = f"{context} is beyond the {run.context} positions that the models learn"
            raise DemixError("config key evaluation.contexts", cause, "leave it out, or add a row of position alibi")
