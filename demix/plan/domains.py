"""The cost of a config's domains in the data stage, before anything is downloaded."""

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq
from rich.table import Table

from demix.config.addresses import local
from demix.config.domains import DomainSection, SourceSection
from demix.plan.cells import short
from demix.run.rules import RunRules
from demix.run.run import Run

# Bytes per word of the sample's English in zstd Parquet, raw or anonymized. The disk keeps two copies: documents and
# splits. GPT-2's tokenizer makes 1.3 to 1.5 tokens per word.
TEXT_BYTES = 2.6
TOKENS_PER_WORD = 1.5


@dataclass(frozen=True)
class DomainPlan:
    """The cost of one domain. `words`, `kept` and `passing` are None if no setting bounds them before the text is read.

    `documents`: the approximate number in the source. `words`: the sum of the budgets of the three splits. `jobs`: the
    jobs of the data stage, which read and anonymize each part, in one job or two, split, and tokenize. `kept`: bytes of
    documents, corpus and tokens. `passing`: most bytes of raw text, which is removed after anonymization; the
    downloaded files of a url source are not counted.
    """

    domain: str
    documents: int | None
    words: int | None
    jobs: int
    kept: int | None
    passing: int | None


def plan_domain(name: str, domain: DomainSection, token_bytes: int, apart: bool = False) -> DomainPlan:
    """The plan of one domain of a config. Only local Parquet footers are read.

    `token_bytes` is 2 or 4. With `apart` each part takes two jobs (`demix.run.rules.RunRules.apart`).
    """
    source, budgets = domain.source, domain.words
    words = None if budgets.train is None else budgets.train + budgets.dev + budgets.test
    read = source.words or words
    kept = None
    if words is not None and read is not None:
        kept = round(read * TEXT_BYTES + words * (TEXT_BYTES + TOKENS_PER_WORD * token_bytes))
    passing = None if read is None else round(read * TEXT_BYTES)
    documents = domain.documents or _count(source)
    return DomainPlan(name, documents, words, (1 + apart) * source.parts + 2, kept, passing)


def _count(source: SourceSection) -> int | None:
    """The number of rows of local Parquet files; None for a source that must be read to be counted."""
    paths = source.names
    if source.kind != "files" or source.where or not paths or not all(path.endswith(".parquet") for path in paths):
        return None
    try:
        return sum(int(pq.read_metadata(path).num_rows) for path in paths)
    except (pa.ArrowException, OSError):
        return None


def plan_domains(run: Run) -> list[DomainPlan]:
    """The plans of the training domains and then the novel ones of a completed config."""
    token_bytes, apart = 4 if run.types > 65536 else 2, RunRules(run).apart
    return [plan_domain(name, domain, token_bytes, apart) for name, domain in run.domains.items()]


def plan_table(run: Run) -> Table:
    """The plans of all domains of a completed config as a table, with totals."""
    table = Table(
        title=f"Data stage of {run.name}",
        caption=f"disk: estimates at {TEXT_BYTES} bytes of compressed text and {TOKENS_PER_WORD} tokens a word; "
        "access: as the config says (nothing was asked)",
        show_footer=True,
    )
    plans = plan_domains(run)
    # The tokenizer and the deduplication across domains are jobs of no single domain, as passes over a shared source.
    passes = sum(run.config.sources[name].source.parts + 1 for name in run.shared)
    total = DomainPlan(
        "total",
        _sum([plan.documents for plan in plans]),
        _sum([plan.words for plan in plans]),
        sum(plan.jobs for plan in plans) + 2 + passes,
        _sum([plan.kept for plan in plans]),
        _sum([plan.passing for plan in plans]),
    )
    footers = _shown(total, [plan for plan in plans if None in (plan.documents, plan.words, plan.kept)])
    numbers = ("documents", "words", "jobs", "disk kept", "raw, passing")
    heads = ("", "domain", "source", "anonymized", *numbers, "access", "licence")
    for head, footer in zip(heads, ("", "total", "", "", *footers, "", ""), strict=True):
        table.add_column(head, footer, justify="right" if head in numbers else "left", no_wrap=head != "licence")
    by_name = {plan.domain: plan for plan in plans}
    for kind, domains in run.config.domains.kinds.items():
        table.add_section()
        for number, (name, domain) in enumerate(domains.items()):
            where = f"{domain.shared or domain.source.kind} ×{domain.source.parts}"
            anonymized = "yes" if domain.anonymize else "no"
            table.add_row(
                "" if number else kind, name, where, anonymized, *_shown(by_name[name]), _access(domain), domain.licence
            )
    return table


def _access(domain: DomainSection) -> str:
    """How the text of a domain is to be had, as its config says, or its files show."""
    source = domain.source
    there = local(source.paths) if source.kind == "hub" else bool(source.files)
    return "here" if there else "by hand" if source.kind == "files" else domain.access


def _sum(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _shown(plan: DomainPlan, partly: Sequence[DomainPlan] = ()) -> tuple[str, str, str, str, str]:
    """The numbers of a plan as text; a + after a sum marks that one of `partly` has an unknown number."""

    def more(key: str) -> str:
        return "+" if any(getattr(part, key) is None for part in partly) else ""

    documents = "?" if plan.documents is None else short(plan.documents) + more("documents")
    words = "all" if plan.words is None else short(plan.words) + more("words")
    kept, passing = ("?" if size is None else f"{short(size)}B{more('kept')}" for size in (plan.kept, plan.passing))
    return documents, words, str(plan.jobs), kept, passing
