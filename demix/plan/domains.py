"""The bytes of a config's text, before anything is downloaded."""

import os
from dataclasses import dataclass

from demix.config.domains import DomainSection
from demix.run.run import Run

# Bytes of a word of the sample and the space after it, in UTF-8; and of its English in zstd Parquet, raw or anonymized.
# The disk keeps two copies: documents and splits. GPT-2's tokenizer makes 1.3 to 1.5 tokens per word.
WORD_BYTES = 6.4
TEXT_BYTES = 2.6
TOKENS_PER_WORD = 1.5
# A local file of one of these endings is plain text; in another one, text has so many times its bytes.
PLAIN = (".txt", ".json", ".jsonl", ".csv", ".tar")
PACKED = 2.5


@dataclass(frozen=True)
class DomainPlan:
    """The cost of one domain; its numbers are None if neither the config nor a local file bounds them.

    `words`: the budgets of the three splits, or what local files hold. `read`: the words that are read for them.
    `kept`: bytes of documents, corpus and tokens. `passing`: most bytes of raw text, which is removed after
    anonymization; the downloaded files of a url source are not counted.
    """

    domain: str
    words: int | None
    read: int | None
    kept: int | None
    passing: int | None


def plan_domain(name: str, domain: DomainSection, token_bytes: int, sharing: int = 1) -> DomainPlan:
    """The plan of one domain of a config, with ids of `token_bytes`, which 2 or 4 are.

    So many domains have text of its source that nobody knows how much of it each of them has: an equal part here.
    """
    source, budgets = domain.source, domain.words
    words = None if budgets.train is None else budgets.train + budgets.dev + budgets.test
    read = source.words or words
    files = [file for file in source.names if os.path.isfile(file)] if source.kind == "files" else []
    if files:
        there = sum(os.path.getsize(file) * (1 if file.endswith(PLAIN) else PACKED) for file in files)
        found = round(there / WORD_BYTES / sharing)
        read = min(read or found, found)
        words = min(words or read, read)
    if words is None or read is None:
        return DomainPlan(name, words, read, None, None)
    passing = round(read * TEXT_BYTES)
    kept = round(read * TEXT_BYTES + words * (TEXT_BYTES + TOKENS_PER_WORD * token_bytes))
    return DomainPlan(name, words, read, kept, passing)


def plan_domains(run: Run) -> list[DomainPlan]:
    """The plans of the training domains and then the novel ones of a completed config."""
    sharing = {name: len(run.shared.get(domain.shared or "", ())) or 1 for name, domain in run.domains.items()}
    return [plan_domain(name, domain, _token_bytes(run), sharing[name]) for name, domain in run.domains.items()]


def cluster_bytes(run: Run) -> int:
    """The bytes of the token files of clusters.

    Each clustering has the tokens of all training domains once more, of the splits that models read of it.
    """
    found = {plan.domain: plan.words or 0 for plan in plan_domains(run) if plan.domain in run.training}
    words = 0
    for _, split in run.learned_splits:
        for name, known in found.items():
            words += min(getattr(run.domains[name].words, split) or known, known)
    return round(words * TOKENS_PER_WORD * _token_bytes(run))


def _token_bytes(run: Run) -> int:
    return 4 if run.types > 65536 else 2
