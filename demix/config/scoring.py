"""The rules of the workflow that score texts under the planned models."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from demix.config.contexts import folder_at, other_contexts
from demix.config.merged import MERGED, merged_models
from demix.config.rows import DENSE_EXPERT, novel_domains, training_domains
from demix.config.systems import adapted, adapted_model, dense_adapted_row, trained


@dataclass(frozen=True)
class ScoringJob:
    """A rule of the workflow that scores texts under a model, in `jobs` jobs.

    Names may hold the wildcards {training} and {novel}. The rule reads the files of `experts` and makes one score table
    for each of `columns`. With `shared` the rule also makes the table of the tokens; otherwise that table already
    exists for the domains of `after`. With `added` the rule scores what an adaptation made. With `own` each domain has
    one column, its own domain token. `expert_scope` is that of the model's kind: with `model` nothing of one column's
    work is another's. `context` is the length of the blocks, 0 for that of training.
    """

    rule: str
    log: str
    model: str
    experts: tuple[str, ...]
    columns: tuple[str, ...]
    domains: tuple[str, ...]
    splits: tuple[str, ...]
    jobs: int
    priority: int = 0
    shared: bool = True
    after: tuple[str, ...] = ()
    added: bool = False
    own: bool = False
    expert_scope: str = "none"
    context: int = 0

    @property
    def folder(self) -> str:
        """The folder of the score tables below scores/."""
        return folder_at(self.model, self.context)

    def columns_on(self, domain: str) -> tuple[str, ...]:
        """The columns of the score tables of a domain."""
        return (domain,) if self.own else self.columns


def _at(context: int, job: ScoringJob) -> ScoringJob:
    """The job that scores the same test splits as `job` in blocks of `context` tokens."""
    log = f"{folder_at(job.model, context)}/{job.log.removeprefix(f'{job.model}/')}"
    return replace(job, rule=f"{job.rule}_at_{context}", log=log, splits=("test",), priority=0, context=context)


def scoring_jobs(config: Mapping[str, Any]) -> tuple[ScoringJob, ...]:
    """All rules that score, in the order of the workflow.

    On one machine a job scores all training domains under a model, whose weights and libraries it loads once: nothing
    scores one of these domains again without the others, since a change of one changes the models. On a cluster each
    domain is a job of its own, and so is each novel domain everywhere.
    An adapted expert is scored on all earlier domains in one job, not in one job for each pair. Another job scores this
    expert and all earlier novel experts on the new domain. A novel domain that is appended therefore changes no
    existing job.
    """
    training, novel = training_domains(config), novel_domains(config)
    receiver = adapted_model(config)
    each = (config.get("cluster") or {}).get("launch") == "slurm"
    jobs = []
    for model in trained(config):
        priority = 0 if model.removed else 80 if model == receiver else 10
        job = ScoringJob(
            f"score_{model.rule}", model.name, model.name, model.experts, model.columns, (model.removed,), model.splits,
            1, priority, expert_scope=model.kind.expert_scope,
        )  # fmt: skip
        if model.removed:
            jobs.append(job)
            continue
        own = model.kind.domain_tokens
        known = replace(job, rule=f"score_known_{model.rule}", own=own, splits=("test",) if own else model.splits)
        known = (
            replace(known, log=f"{model.name}/{{training}}", domains=("{training}",), jobs=len(training))
            if each
            else replace(known, log=f"{model.name}/training", domains=training)
        )
        unknown = replace(job, log=f"{model.name}/{{novel}}", domains=("{novel}",), jobs=len(novel))
        jobs += [known, unknown]
        for context in other_contexts(config, model):
            # A novel domain has no token of its own.
            jobs += [_at(context, one) for one in ((known,) if own else (known, unknown))]
    for number, name in enumerate(novel):
        before, so_far = (*training, *novel[:number]), novel[: number + 1]
        into = ScoringJob(
            "", "", receiver.name, (), (), (), receiver.splits, 1, priority=60, shared=False, added=True,
            expert_scope=receiver.kind.expert_scope,
        )  # fmt: skip
        jobs += [
            replace(
                into, rule=f"score_adapted_{name}", log=f"adapted/{name}", experts=(name,), columns=(name,),
                domains=before, after=before,
            ),
            replace(
                into, rule=f"score_adapted_on_{name}", log=f"adapted/on-{name}", experts=so_far, columns=so_far,
                domains=(name,), after=(name,),
            ),
        ]  # fmt: skip
    if novel:
        made, dense = adapted(dense_adapted_row(config), "{novel}"), (DENSE_EXPERT,)
        jobs.append(
            ScoringJob(
                "score_adapted_dense", made, made, dense, dense, (*training, "{novel}"), ("test",), len(novel),
                added=True,
            )
        )  # fmt: skip
    for merged in merged_models(config):
        place, kind = merged.place, ScoringJob("", "", "", MERGED, MERGED, (*training, *novel), ("test",), 1)
        if not merged.by_domain:
            jobs.append(replace(kind, rule=f"score_{merged.rule}", log=place, model=place))
        else:
            jobs += [
                replace(
                    kind, rule=f"score_{name}_{merged.rule}", log=place.format(domain=f"{{{name}}}"),
                    model=place.format(domain=f"{{{name}}}"), domains=(f"{{{name}}}",), jobs=len(domains),
                )
                for name, domains in (("training", training), ("novel", novel)) if domains
            ]  # fmt: skip
    return tuple(jobs)
