"""The rules of the workflow that score texts under the planned models."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from demix.config.models import DENSE_EXPERT
from demix.run.contexts import other_contexts
from demix.run.merged import MERGED
from demix.run.models import adapted, folder_at
from demix.run.run import Run
from demix.run.systems import merged_whole, other_top_k, suite_models


@dataclass(frozen=True)
class ScoringPart:
    """The texts that a rule scores under one model.

    Names may hold the wildcards {training} and {novel}. The rule reads the files of `experts` and makes one score table
    for each of `columns`. With `shared` the rule also makes the table of the tokens, which tells of these columns;
    otherwise that table already exists for the domains of `after`. With `own` each domain has one column, its own
    domain token. `expert_scope` is that of the model's kind: with `model` nothing of one column's work is another's.
    `context` is the length of the blocks, and `top_k` the number of experts that a token chooses in a layer, 0 for
    those of training. `without` is an expert that no token chooses.
    """

    model: str
    experts: tuple[str, ...]
    columns: tuple[str, ...]
    domains: tuple[str, ...]
    splits: tuple[str, ...]
    shared: bool = True
    after: tuple[str, ...] = ()
    own: bool = False
    expert_scope: str = "none"
    context: int = 0
    top_k: int = 0
    without: str = ""

    @property
    def folder(self) -> str:
        """The folder of the score tables below scores/."""
        return folder_at(self.model, self.context, self.top_k, self.without)

    def columns_on(self, domain: str) -> tuple[str, ...]:
        """The columns of the score tables of a domain."""
        return (domain,) if self.own else self.columns

    def settings(self, wildcards: Mapping[str, str]) -> dict[str, Any]:
        """What `demix score` is told of the part in a job of several models, with the values of wildcards by name."""
        columns, splits = () if self.own else self.columns, self.splits
        domains = [domain.format(**wildcards) for domain in self.domains]
        named = {"model": self.model.format(**wildcards), "experts": columns, "domains": domains, "splits": splits}
        changed = {"context": self.context, "top_k": self.top_k, "without": self.without}
        return named | {key: value for key, value in changed.items() if value}


@dataclass(frozen=True)
class ScoringJob:
    """A rule of the workflow that scores texts under the models of `parts`, in `jobs` jobs.

    With `added` the rule scores what an adaptation made. On one machine, rules with the same name in `joins` are one
    rule of that name.
    """

    rule: str
    log: str
    parts: tuple[ScoringPart, ...]
    jobs: int = 1
    priority: int = 0
    added: bool = False
    joins: str = ""


def scoring_jobs(run: Run, *, apart: bool = False) -> tuple[ScoringJob, ...]:
    """All rules that score, in the order of the workflow; `apart` asks for those of a cluster on any machine.

    On a cluster each model and domain is a job of its own, and an adapted expert on all earlier domains. On one machine
    the model that receives the experts of novel domains, for whose scores adaptation waits, has a job for all training
    domains and one for each novel domain; so have all other models together; and so has all that was adapted to a
    novel domain. Such a job loads libraries once and reads each text once. A novel domain that is appended changes no
    existing job.
    """
    submitted = apart or run.submitted
    found = [*_of_trained(run, submitted), *_of_adapted(run, submitted), *_of_merged(run, submitted)]
    chosen = other_top_k(run)
    found += [
        _again(job, f"top_{k}", top_k=k)
        for job in found
        for k in chosen.get(job.parts[0].model, ())
        if not job.parts[0].context
    ]
    found += _of_suites(run)
    part = ScoringPart("", MERGED, MERGED, (), ("test",))
    for folder in merged_whole(run):
        left = tuple(replace(part, model=folder, domains=(one,), without=one) for one in run.training)
        rule = f"score_{folder.replace('-', '_')}_left_out"
        found.append(ScoringJob(rule, f"{folder}/left-out", left, joins="score_known_others"))
    # A run without novel domains has no jobs for them.
    singles = [job for job in found if job.jobs]
    if submitted:
        return tuple(singles)
    joined: dict[str, list[ScoringJob]] = {}
    for job in singles:
        joined.setdefault(job.joins or job.rule, []).append(job)
    return tuple(jobs[0] if len(jobs) == 1 else _together(jobs) for jobs in joined.values())


def _together(jobs: list[ScoringJob]) -> ScoringJob:
    """One rule in place of several with the same wildcard."""
    rule, place = jobs[0].joins, jobs[0].joins.removeprefix("score_")
    log = {"known_others": "others/training", "others": "others/{novel}", "suites": "suites/{suite}"}.get(
        place, place.replace("_", "/", 1)
    )
    parts = tuple(part for job in jobs for part in job.parts)
    return replace(jobs[0], rule=rule, log=log, parts=parts, priority=max(job.priority for job in jobs))


def _of_trained(run: Run, submitted: bool) -> list[ScoringJob]:
    training, novel, receiver = run.training, run.novel, run.receiver
    jobs: list[ScoringJob] = []
    for model in run.trained:
        own, first = model.kind.domain_tokens, model == receiver
        # The longest jobs of other models start before their shorter ones.
        priorities = (80, 80) if first else (15, 10)
        part = ScoringPart(
            model.name, model.experts, model.columns, (model.removed,), model.splits,
            expert_scope=model.kind.expert_scope,
        )  # fmt: skip
        if model.removed:
            jobs.append(ScoringJob(f"score_{model.rule}", model.name, (part,), joins="score_known_others"))
            continue
        known = replace(
            part,
            own=own,
            splits=("test",) if own else model.splits,
            domains=("{training}",) if submitted else training,
        )
        place, count = ("{training}", len(training)) if submitted else ("training", 1)
        both = [
            ScoringJob(
                f"score_known_{model.rule}", f"{model.name}/{place}", (known,), count, priorities[0],
                joins="" if first else "score_known_others",
            ),
            ScoringJob(
                f"score_{model.rule}", f"{model.name}/{{novel}}", (replace(part, domains=("{novel}",)),), len(novel),
                priorities[1], joins="" if first else "score_others",
            ),
        ]  # fmt: skip
        jobs += both
        for context in other_contexts(run, model):
            # A novel domain has no token of its own.
            jobs += [_again(job, f"at_{context}", context=context) for job in (both[:1] if own else both)]
    return jobs


def _again(job: ScoringJob, name: str, **changes: Any) -> ScoringJob:
    """The job that scores the same test splits as `job` with `changes` of its part. No adaptation waits for it."""
    (part,), joins = job.parts, "score_known_others" if job.rule.startswith("score_known_") else "score_others"
    again = replace(part, splits=("test",), **changes)
    log = f"{again.folder}/{job.log.removeprefix(f'{part.model}/')}"
    return replace(job, rule=f"{job.rule}_{name}", log=log, parts=(again,), priority=0, joins=joins)


def _of_adapted(run: Run, submitted: bool) -> list[ScoringJob]:
    training, novel, receiver, row = run.training, run.novel, run.receiver, run.config.adaptation.dense
    jobs: list[ScoringJob] = []
    dense = (DENSE_EXPERT,)
    for number, name in enumerate(novel):
        before, so_far = (*training, *novel[:number]), novel[: number + 1]
        into = ScoringPart(
            receiver.name, (name,), (name,), before, receiver.splits, shared=False, after=before,
            expert_scope=receiver.kind.expert_scope,
        )  # fmt: skip
        on = replace(into, experts=so_far, columns=so_far, domains=(name,), after=(name,))
        kind = ScoringJob("", "", (), priority=60, added=True, joins=f"score_adapted_{name}")
        jobs += [
            replace(kind, rule=f"score_adapted_{name}", log=f"adapted/{name}", parts=(into,)),
            replace(kind, rule=f"score_adapted_on_{name}", log=f"adapted/on-{name}", parts=(on,)),
        ]
        if not submitted:
            made = ScoringPart(adapted(row, name), dense, dense, (*training, name), ("test",))
            jobs.append(replace(kind, rule=f"score_adapted_dense_{name}", log=made.model, parts=(made,)))
    if novel and submitted:
        made = ScoringPart(adapted(row, "{novel}"), dense, dense, (*training, "{novel}"), ("test",))
        jobs.append(ScoringJob("score_adapted_dense", made.model, (made,), len(novel), added=True))
    return jobs


def _of_suites(run: Run) -> list[ScoringJob]:
    """The jobs of the suites. They come last, and nothing but their own evaluation waits for them."""
    jobs = []
    for model in suite_models(run):
        part = ScoringPart(
            model.name, model.experts, model.columns, ("{suite}",), ("test",), expert_scope=model.kind.expert_scope
        )
        log = f"{model.name}/{{suite}}"
        jobs.append(ScoringJob(f"score_suites_{model.rule}", log, (part,), len(run.suites), joins="score_suites"))
    return jobs


def _of_merged(run: Run, submitted: bool) -> list[ScoringJob]:
    training, novel = run.training, run.novel
    jobs: list[ScoringJob] = []
    for merged in run.merged:
        rule, part = merged.rule, ScoringPart(merged.place, MERGED, MERGED, (*training, *novel), ("test",))
        kinds = [(name, len(domains)) for name, domains in (("training", training), ("novel", novel)) if domains]
        if merged.by_domain:
            # Each of these models is made for one domain, and removed once it is scored there.
            for name, count in kinds:
                of = f"{{{name}}}"
                made = replace(part, model=merged.of(of), domains=(of,))
                jobs.append(ScoringJob(f"score_{name}_{rule}", made.model, (made,), count))
        elif submitted:
            jobs.append(ScoringJob(f"score_{rule}", merged.place, (part,)))
        else:
            known, new = (replace(part, domains=domains) for domains in (training, ("{novel}",)))
            name = merged.place
            jobs += [
                ScoringJob(f"score_known_{rule}", f"{name}/training", (known,), joins="score_known_others"),
                ScoringJob(f"score_{rule}", f"{name}/{{novel}}", (new,), len(novel), joins="score_others"),
            ]
    return jobs
