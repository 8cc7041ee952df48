"""The jobs of the workflow that score texts with the planned models."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from demix.config.models import DENSE_EXPERT
from demix.run.evaluated import other_contexts, suite_models
from demix.run.models import MERGED, adapted, folder_at
from demix.run.run import Run
from demix.run.systems import merged_whole, other_top_k


@dataclass(frozen=True)
class ScoringPart:
    """The texts that a job scores with one model.

    The job writes one score table for each of `experts`; without experts, each domain is scored with its own token.
    With `shared` the job also writes the table of the tokens of these columns; otherwise that table already exists.
    `reads` are the experts whose files are read. `expert_scope` is as in the model's kind: with `model`, columns share
    no work. `context` is the context length, and `top_k` the number of experts per token and layer; 0 means as in
    training. No token uses the expert `without` of a merged model (`demix.model.experts.load_without`).
    """

    model: str
    experts: tuple[str, ...]
    domains: tuple[str, ...]
    splits: tuple[str, ...]
    reads: tuple[str, ...] = ()
    shared: bool = True
    expert_scope: str = "none"
    context: int = 0
    top_k: int = 0
    without: str = ""

    @property
    def folder(self) -> str:
        """The folder of the score tables below scores/."""
        return folder_at(self.model, self.context, self.top_k, self.without)


@dataclass(frozen=True)
class ScoringJob:
    """A job that scores texts with the models of `parts`; scores/<name>.json has the digests of its tables."""

    name: str
    parts: tuple[ScoringPart, ...]
    priority: int = 0


def scoring_jobs(run: Run) -> tuple[ScoringJob, ...]:
    """All jobs that score, in the order of the workflow.

    On a cluster there is one job per model and domain, and one job for an adapted expert on all earlier domains. On one
    machine there are three groups: the model to which experts of novel domains are added (adaptation waits for its
    scores), all other models together, and everything that was adapted to a novel domain. The first two groups have one
    job for all training domains and one per novel domain, the third has one per novel domain. Such a job loads
    libraries once and reads each text once. Appending a novel domain does not change existing jobs.
    """
    joined: dict[str, list[ScoringJob]] = {}
    for together, job in (*_of_trained(run), *_of_adapted(run), *_of_merged(run)):
        joined.setdefault(job.name if run.submitted else together, []).append(job)
    jobs = []
    for name, some in joined.items():
        # One job has a single part for all domains of a model.
        parts: dict[ScoringPart, tuple[str, ...]] = {}
        for part in (part for job in some for part in job.parts):
            alike = replace(part, domains=())
            parts[alike] = parts.get(alike, ()) + part.domains
        whole = tuple(replace(alike, domains=domains) for alike, domains in parts.items())
        jobs.append(ScoringJob(name, whole, max(job.priority for job in some)))
    return tuple(jobs)


# The name of the combined job on one machine, and the separate job that a cluster uses instead.
_Jobs = Iterator[tuple[str, ScoringJob]]


def _of_trained(run: Run) -> _Jobs:
    for model in run.trained:
        own, first = model.kind.domain_tokens, model == run.receiver
        part = ScoringPart(model.name, model.columns, (), model.splits, expert_scope=model.kind.expert_scope)
        if model.removed:
            removed = replace(part, domains=(model.removed,))
            yield "others-training", ScoringJob(f"{model.name}/{model.removed}", (removed,), 15)
            continue
        for domains in (run.training, run.novel):
            known = domains is run.training
            # A novel domain has no token of its own.
            own_here = own and known
            # Longer jobs of other models start before shorter ones.
            priority = 80 if first else 15 if known else 10
            here = replace(part, experts=(), splits=("test",)) if own_here else part
            yield from _each(run, here, domains, model.name if first else "others", priority)
            again = replace(here, splits=("test",))
            if known or not own:
                for context in other_contexts(run, model):
                    yield from _each(run, replace(again, context=context), domains)
            for top_k in other_top_k(run).get(model.name, ()):
                yield from _each(run, replace(again, top_k=top_k), domains)
        # Only the evaluation of the suites waits for the suites' scores.
        for suite in run.suites if model in suite_models(run) else ():
            here = replace(part, domains=(suite,), splits=("test",))
            yield f"suites-{suite}", ScoringJob(f"{model.name}/{suite}", (here,))


def _each(run: Run, part: ScoringPart, domains: Iterable[str], together: str = "others", priority: int = 0) -> _Jobs:
    """The jobs that score `domains` with the model of `part`."""
    separator = "-" if together == "others" else "/"
    for domain in domains:
        texts = "training" if domain in run.training else domain
        job = ScoringJob(f"{part.folder}/{domain}", (replace(part, domains=(domain,)),), priority)
        yield f"{together}{separator}{texts}", job


def _of_adapted(run: Run) -> _Jobs:
    training, novel, receiver, row = run.training, run.novel, run.receiver, run.config.adaptation.dense
    dense = (DENSE_EXPERT,)
    for number, name in enumerate(novel):
        before, so_far = (*training, *novel[:number]), novel[: number + 1]
        scope = receiver.kind.expert_scope
        into = ScoringPart(receiver.name, (name,), before, receiver.splits, (name,), shared=False, expert_scope=scope)
        on = replace(into, experts=so_far, reads=so_far, domains=(name,))
        made = ScoringPart(adapted(row, name), dense, (*training, name), ("test",))
        for job, part in ((f"{receiver.name}/adapted-{name}", into), (f"{receiver.name}/adapted-on-{name}", on)):
            yield f"adapted-{name}", ScoringJob(job, (part,), 60)
        yield f"adapted-{name}", ScoringJob(made.model, (made,), 0 if run.submitted else 60)


def _of_merged(run: Run) -> _Jobs:
    domains = (*run.training, *run.novel)
    for merged in run.merged:
        # The average by a prior waits for the scores of its experts.
        together = "averages" if merged.by_domain else "others"
        for domain, top_k in product(domains, (0, *other_top_k(run).get(merged.place, ()))):
            part = ScoringPart(merged.of(domain), MERGED, (), ("test",), top_k=top_k)
            yield from _each(run, part, [domain], together)
    for folder, domain in product(merged_whole(run), run.training):
        left = ScoringPart(folder, MERGED, (), ("test",), without=domain)
        yield from _each(run, left, [domain])
