"""What a config asks for, domain by domain, before anything runs or is fetched."""

import glob
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq
from rich.table import Table

from demix.data.sources import Source
from demix.files import settings_from

# Bytes a word: zstd Parquet of the sample's English takes 2.6, raw or anonymized, which is kept twice, as documents and
# as splits. GPT-2 makes 1.3 to 1.5 tokens of a word.
TEXT_BYTES = 2.6
TOKENS_PER_WORD = 1.5


@dataclass(frozen=True)
class DomainPlan:
    """What one domain takes. `words` and the bytes are None where nothing bounds them before the text is read.

    `documents`: about how many the source holds. `words`: the budgets of the three splits. `jobs`: those of the data
    stage, which read and anonymize each part, split, tokenize. `kept`: bytes of documents, corpus and tokens.
    `passing`: bytes of raw text at its largest, removed once anonymized; the files of a url source come on top.
    """

    domain: str
    documents: int | None
    words: int | None
    jobs: int
    kept: int | None
    passing: int | None


def plan_domain(name: str, domain: dict, token_bytes: int) -> DomainPlan:
    """The plan of one domain of a completed config; `token_bytes` is 2 or 4. Only local Parquet footers are read."""
    source = settings_from(Source, domain["source"])
    budgets = domain["words"]
    words = None if budgets["train"] is None else budgets["train"] + budgets["dev"] + budgets["test"]
    read = source.words or words
    kept = None
    if words is not None and read is not None:
        kept = round(read * TEXT_BYTES + words * (TEXT_BYTES + TOKENS_PER_WORD * token_bytes))
    passing = None if read is None else round(read * TEXT_BYTES)
    documents = domain["documents"] or _count(source)
    return DomainPlan(name, documents, words, 2 * source.parts + 2, kept, passing)


def _count(source: Source) -> int | None:
    """The rows of local Parquet files; None for all that would have to be read to be counted."""
    paths = [path for pattern in source.locations for path in glob.glob(pattern, recursive=True)]
    if source.kind != "files" or source.where or not paths or not all(path.endswith(".parquet") for path in paths):
        return None
    try:
        return sum(pq.read_metadata(path).num_rows for path in paths)
    except (pa.ArrowException, OSError):
        return None


def plan_table(config: dict) -> Table:
    """The plans of all domains of a completed config as a table, with totals."""
    wide = config["tokenizer"]["kind"] == "bpe" and config["tokenizer"]["vocab_size"] > 65536
    table = Table(
        title=f"Data stage of {config['run']}",
        caption=f"disk: estimates at {TEXT_BYTES} bytes of compressed text and {TOKENS_PER_WORD} tokens a word",
        show_footer=True,
    )
    plans: list[DomainPlan] = []
    rows = []
    for kind in ("training", "novel"):
        for name, domain in config["domains"][kind].items():
            plan = plan_domain(name, domain, 4 if wide else 2)
            plans.append(plan)
            where = f"{domain['source']['kind']} ×{domain['source']['parts']}"
            rows.append((kind, name, where, "yes" if domain["anonymize"] else "no", *_shown(plan), domain["licence"]))
    # The tokenizer, and who keeps a text that several domains hold, are jobs of no domain.
    total = DomainPlan(
        "total",
        _sum([plan.documents for plan in plans]),
        _sum([plan.words for plan in plans]),
        sum(plan.jobs for plan in plans) + 2,
        _sum([plan.kept for plan in plans]),
        _sum([plan.passing for plan in plans]),
    )
    footers = _shown(total, [plan for plan in plans if None in (plan.documents, plan.words, plan.kept)])
    heads = ("", "domain", "source", "anonymized", "documents", "words", "jobs", "disk kept", "raw, passing", "licence")
    for head, footer in zip(heads, ("", "total", "", "", *footers, ""), strict=True):
        number = head in heads[4:9]
        table.add_column(head, footer, justify="right" if number else "left", no_wrap=head != "licence")
    previous = ""
    for row in rows:
        if previous and row[0] != previous:
            table.add_section()
        table.add_row(row[0] if row[0] != previous else "", *row[1:])
        previous = row[0]
    return table


def _sum(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _shown(plan: DomainPlan, partly: Sequence[DomainPlan] = ()) -> tuple[str, str, str, str, str]:
    """The numbers of a plan; a + after a sum says that some of `partly` do not know theirs."""

    def more(key: str) -> str:
        return "+" if any(getattr(part, key) is None for part in partly) else ""

    documents = "?" if plan.documents is None else _short(plan.documents) + more("documents")
    words = "all" if plan.words is None else _short(plan.words) + more("words")
    kept, passing = ("?" if size is None else f"{_short(size)}B{more('kept')}" for size in (plan.kept, plan.passing))
    return documents, words, str(plan.jobs), kept, passing


def _short(number: int) -> str:
    """1234567 as 1.2M; thousands to trillions."""
    value, letters = float(number), iter(("", "k", "M", "G", "T"))
    letter = next(letters)
    while value >= 999.5 and letter != "T":
        value, letter = value / 1000, next(letters)
    return f"{value:.0f}{letter}" if value >= 99.5 or not letter else f"{value:.1f}{letter}"
