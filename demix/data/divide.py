"""A corpus of several domains, read once: a field says which domain a document belongs to."""

import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from demix.config.domains import DomainName, Scalar, check_values, domain_name
from demix.data import sources
from demix.data.readers import Row, as_list, matches, select_or_none
from demix.data.sources import Omitted, Source
from demix.errors import DemixError
from demix.files import write_json
from demix.files.batches import rows_writer
from demix.progress import followed
from demix.settings import Items, Settings, Text


class Division(Settings):
    """How a corpus is divided: documents of a domain `name` have a value of `domains[name]` in the field `by`."""

    source: Source
    by: Text
    domains: dict[DomainName, Scalar | Items[Scalar]]


def divide(name: str, division: Division, raw: Path, output: Path, part: int = 0) -> None:
    """Write part `part` of the raw text of each domain in one pass over the source, for `demix.data.sources.download`.

    `download` to `raw/<domain>/<part>.parquet` uses the file. It has the same bytes as a download of the source with
    the additional condition `{by: value}` in `where`. `words` applies to each domain separately. The JSON `output` has
    the numbers of documents read, excluded by `where` ("filtered"), without the field, of no domain ("others") and of
    each value of a domain ("values"), and whether the source was read to its end ("whole"). Raises DemixError naming
    the file or key at fault, also if a source of one part has no document with the field.
    """
    source, by = division.source, division.by
    sources.check_part(source, name, part)
    try:
        domain_name(name)
    except ValueError as error:
        raise DemixError(name, *error.args) from None
    given = {domain: as_list(values) for domain, values in division.domains.items()}
    check_values(given, {})
    # A condition accepts an equal value, or a value with the same text. For each: its domain, and its form there.
    named = {one: (domain, str(one)) for domain, values in given.items() for one in values}
    as_text = {one: found for found in named.values() for one in found[1:]}
    owned = Counter({text: 0 for _, text in named.values()})
    found, full, omitted = Counter(documents=0, filtered=0, without=0, others=0), set[str](), Omitted()
    fetched = raw / f".{name}.{part:04d}.fetched"
    with ExitStack() as stack:
        take = {
            domain: stack.enter_context(_divided(source, domain, raw / domain / f"{part:04d}.parquet", {by: value}))
            for domain, value in division.domains.items()
        }
        # A reader returns only the requested fields.
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
                found["others"] += 1
            if len(full) == len(take):
                break
    omitted.warn(name)
    if source.parts == 1 and found["without"] and found["without"] == found["documents"] - found["filtered"]:
        cause, cure = f"is {by!r}, a field that no document has", "name a field of the source's documents"
        raise DemixError(f"config key sources.{name}.by", cause, cure)
    write_json(output, {"source": name, "by": by, "whole": len(full) < len(take), **found, "values": owned})
    # Fetched files are kept until here, so that a failed job need not download them again.
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
                write(document[1:2])
                words += len(document[1].split()) if share < math.inf else 0
            return words >= share

        yield take
    omitted.warn(domain)
    if words < share < math.inf:
        sources.warn_short(domain, words, share)
