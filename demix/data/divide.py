"""A corpus of several domains, read once: a field says which domain a document belongs to."""

import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from demix.config.domains import DomainName, Scalar, check_values, domain_name
from demix.data import sources
from demix.data.anonymize import anonymize, normalise
from demix.data.readers import Row
from demix.data.selection import as_list, matches, select_or_none
from demix.data.sources import Omitted, Source
from demix.errors import DemixError, nearest
from demix.files import read_json, write_json
from demix.files.batches import rows_writer
from demix.progress import followed
from demix.settings import Items, Settings, Text

# Of a field with more values, or with longer ones, the further values are counted together: they may name people.
MAX_VALUES, MAX_VALUE_LENGTH, OTHERS = 1000, 100, "other values"


class Sharing(Settings):
    """The domains of a corpus, each with the value of a field, or several."""

    domains: dict[DomainName, Scalar | Items[Scalar]]


class Division(Sharing):
    """How domains part a corpus: the field `by` of the documents of `domains[name]` has this value."""

    source: Source
    by: Text


def divide(name: str, division: Division, raw: Path, output: Path, part: int = 0) -> None:
    """Write part `part` of the raw text of each domain in one pass over the source, for `demix.data.sources.download`.

    `download` to `raw/<domain>/<part>.parquet` uses the file, which has the bytes that it would write of the source
    with the condition `{by: value}` among those of `where`. `words` counts for each domain by itself. The JSON `output`
    has the documents that were read, those that `where` leaves out ("filtered"), those without the field, those of each
    value ("values", anonymized where it is of no domain), and whether the source was read to its end ("whole"). Raises
    DemixError naming the file or key at fault.
    """
    source, by = division.source, division.by
    sources.check_part(source, name, part)
    try:
        domain_name(name)
    except ValueError as error:
        raise DemixError(name, *error.args) from None
    given = {domain: as_list(values) for domain, values in division.domains.items()}
    check_values(given, {})
    # A condition accepts a value that is equal or the same text: to each, the domain that has it and how it names it.
    named = {one: (domain, str(one)) for domain, values in given.items() for one in values}
    as_text = {one: found for found in named.values() for one in found[1:]}
    owned = Counter({text: 0 for _, text in named.values()})
    found, others, full, omitted = Counter(documents=0, filtered=0, without=0), Counter[str](), set[str](), Omitted()
    fetched = raw / f".{name}.{part:04d}.fetched"
    with ExitStack() as stack:
        take = {
            domain: stack.enter_context(_divided(source, domain, raw / domain / f"{part:04d}.parquet", {by: value}))
            for domain, value in division.domains.items()
        }
        # A reader gives the fields that are asked for.
        asked = source.replace(where=source.where | {by: ("",)})
        rows = sources.KINDS[source.kind](asked, name, part, fetched, omitted.files)
        for row in followed(rows, f"{name}: documents"):
            found["documents"] += 1
            sources.check_depth(row)
            if source.where and not matches(row.fields, source.where):
                found["filtered"] += 1
                continue
            value = select_or_none(row.fields, by)
            text = str(value)
            equal = named.get(value) if isinstance(value, (str, int, float)) else None
            owners = {} if value is None else dict(filter(None, (equal, as_text.get(text))))
            for domain, one in owners.items():
                owned[one] += 1
                if take[domain](row):
                    full.add(domain)
            if value is None:
                found["without"] += 1
            elif not owners:
                few = len(text) <= MAX_VALUE_LENGTH and (text in others or len(others) < MAX_VALUES)
                others[text if few else OTHERS] += 1
            if len(full) == len(take):
                break
    omitted.warn(name)
    for text, number in others.items():
        owned[_anonymized(text)] += number
    write_json(output, {"source": name, "by": by, "whole": len(full) < len(take), **found, "values": owned})
    # Kept until here: a job that fails and is run again need not fetch again what it has.
    shutil.rmtree(fetched, ignore_errors=True)


@contextmanager
def _divided(source: Source, domain: str, output: Path, more: dict[str, Any]) -> Iterator[Callable[[Row], bool]]:
    """Yield a function that writes a document of a domain, and returns whether the domain has its share of words."""
    sources.make_private(output.parent)
    left = sources.divided(output, source, int(output.stem), source.where | more)
    omitted, share, words = Omitted(), sources.share_of(source), 0
    with rows_writer(left, sources.SCHEMA, private=True, footer=omitted.footer) as write:

        def take(row: Row) -> bool:
            nonlocal words
            for document in sources.valid([sources.document_of(row, source)], omitted) if words < share else ():
                write(document)
                words += len(document[1].split()) if share < math.inf else 0
            return words >= share

        yield take
    omitted.warn(domain)
    if words < share < math.inf:
        sources.warn_short(domain, words, share)


def _anonymized(value: str) -> str:
    return anonymize(normalise(value)[0])[0]


def write_source_card(counts: Sequence[Path], sharing: Sharing, output: Path) -> None:
    """Write the card of a source that several domains share, from the counts of all its parts: its documents by domain.

    Raises DemixError for a field that no document has, and for a value that none has.
    """
    parts = [read_json(path) for path in counts]
    name, by, whole = parts[0]["source"], parts[0]["by"], all(part["whole"] for part in parts)
    total, values = Counter[str](), Counter[str]()
    for part in parts:
        total.update({key: part[key] for key in ("documents", "filtered", "without")})
        values.update(part["values"])
    if total["without"] and total["without"] == total["documents"] - total["filtered"]:
        raise DemixError(
            f"config key sources.{name}.by",
            f"is {by!r}, a field that no document has",
            "name one of its documents' fields",
        )
    by_domain = {}
    for domain, given in sharing.domains.items():
        found = {value: values.pop(str(value), None) for value in as_list(given)}
        # A domain that was added since the pass has its documents among those of none.
        by_domain[domain] = sum(
            values.pop(_anonymized(str(value)), 0) if number is None else number for value, number in found.items()
        )
        for value in (value for value, number in found.items() if number == 0):
            # A domain that has its words is read no further.
            if whole or not by_domain[domain]:
                cause = f"is {value!r}, and no document of {name} has it in {by}"
                raise DemixError(f"{domain}.value", cause, nearest(value, values, f"correct it, or sources.{name}.by"))
    said = {"source": name, "by": by, **total, "domains": by_domain, "untaken": dict((+values).most_common())}
    write_json(output, said, sort_keys=False)


def untaken(cards: Iterable[Path]) -> list[str]:
    """One line for each source of these cards that has documents of no domain."""
    lines = []
    for path in cards:
        card = read_json(path)
        if number := sum(card["untaken"].values()) + card["without"]:
            of_all = f"{number:,} of {card['documents']:,} documents are of no domain"
            lines.append(f"{card['source']}: {of_all}; {path} counts them by {card['by']}")
    return lines
