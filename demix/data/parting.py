"""Which fields of a user's records part them into domains, and how much text each value of a field has."""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from demix.config.domains import Scalar
from demix.data.readers import Reading, read_rows
from demix.data.sources import Omitted, Source, records
from demix.settings import settings_from

# The records from which fields are guessed: so many of each file, of so many files.
OF_A_FILE, OF_FILES = 100, 10
# A field with more values, with longer ones, or with fewer records for each is not thought to tell domains.
MOST_GUESSED, LONGEST_GUESSED, FEWEST_RECORDS = 50, 60, 5


class Distinct(dict[bytes, int]):
    """The words of each document by the SHA-256 of its text, and the number of documents that repeat another one."""

    repeated = 0

    def add(self, text: str, words: int) -> None:
        """Add a document, which counts as repeated if its text is there."""
        self.repeated += (key := hashlib.sha256(text.encode()).digest()) in self
        self[key] = words


def parting_fields(files: Sequence[str], layout: Mapping[str, str]) -> dict[str, int]:
    """The fields that seem to tell the domain of a record, each with its number of values in some first records.

    Their values are few and short texts that stand in nearly all records. `layout` has the keys `text` and `json` of
    the source, where they differ from their defaults. Fields with more values come first.
    """
    found, number = defaultdict[str, Counter[str]](Counter), 0
    # First records of the files at even distances.
    for file in files[:: -(-len(files) // OF_FILES)]:
        reading = Reading((), values=layout.get("json") == "values")
        for row in islice(read_rows(Path(file), reading), OF_A_FILE):
            number += 1
            for path, value in _texts(row.fields, ""):
                found[path][value] += 1
    found.pop(layout.get("text", "text"), None)
    fields = {
        path: len(values)
        for path, values in found.items()
        if 2 <= len(values) <= min(MOST_GUESSED, number // FEWEST_RECORDS)
        and values.total() >= 0.9 * number
        and max(map(len, values)) <= LONGEST_GUESSED
    }
    return dict(sorted(fields.items(), key=lambda one: -one[1]))


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Path and value of each field of text, by paths as `demix.data.selection.select` takes them; no lists."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _texts(inner, f"{path}.{name}" if path else name)


def by_value(
    files: Sequence[str], source: Mapping[str, Any], by: str, most: int
) -> tuple[dict[Scalar, Distinct], int, bool]:
    """The distinct documents of each value of the field `by`.

    Of all files about `most` words are read, of each the same number. Also returns the number of documents without
    a text or a number there, and whether a file has more than was read. Values that a condition takes for the same are
    one, the first.
    """
    documents, same = defaultdict[Scalar, Distinct](Distinct), dict[Scalar, Scalar]()
    without, more, omitted = 0, False, Omitted()
    for file in files:
        keys = {**source, "path": file, "metadata": [by], "words": -(-most // len(files))}
        words = 0
        for _, text, metadata in records(settings_from(Source, keys), file, Path(), omitted):
            value = json.loads(metadata)[by]
            words += (many := len(text.split()))
            if not isinstance(value, (str, int, float)) or not str(value).strip():
                without += 1
            elif many:
                value = same.setdefault(value, same.setdefault(str(value), value))
                documents[value].add(text, many)
        more |= words >= keys["words"]
    return documents, without, more
