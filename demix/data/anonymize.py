"""Personal data replaced by the dummy tokens of the paper's Table 8.

What each category means here, and where it differs from the code published with the paper
(demix-data, scripts/anonymize_file.py):

- EMAIL: an address in any case and script, whose last label has only letters. The dot that ends a sentence and emphasis
around the address stay. Not `git@host:`, which is nobody's address. - DART: as published, ten digits, a dash and 53
hexadecimal digits, but not inside a longer word. - FB_USERID: as published, a mention in Facebook's markup,
`@[100001:2048:A Name]`; also the address of a profile (`facebook.com/profile.php?id=…`, `facebook.com/a.name`,
`facebook.com/groups/…/user/…`), but not of its own pages. - CREDIT_CARD_NUMBER: 12 to 19 digits, plain or in an
issuer's groups with one kind of separator, with an issuer's prefix and length and a valid Luhn digit; after a word such
as "card" any prefix. - SSN: three, two and four digits separated by dashes, area and group as issued since 2011; after
"SSN" or "social security" also plain or separated by spaces. - PHONE_NUMBER: North American numbers with an area code
and separators; numbers with a country code, or after the digits that are dialled to leave a country; numbers as 64
countries write them with a trunk prefix or an area code in parentheses (`demix.data.numbers`); extensions. Other groups
of 7 to 15 digits only directly next to words such as "phone:", "call me on" or "is my number" (`demix.data.cues`),
because years, pages, identifiers and times look alike. - USER: a whole `@handle` without a trailing dot; not a
decorator, a documentation tag, a package scope, a key of JSON-LD or a command of a batch file.

A text is searched until nothing is found, at most four times. Patterns read each character a bounded number of times,
so the time is linear in the text. Anonymizing a text again changes nothing.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from demix.data import mentions, numbers
from demix.data.cues import CATEGORIES, Span
from demix.files import write_json
from demix.files.batches import counted, read_batches, write_batches

# Counts in the key-value metadata of the raw file.
_WHEN_READ = ("invalid_bytes", "surrogates", "not_utf8")
SCHEMA = pa.schema([("id", pa.string()), ("text", pa.large_string()), ("n_words", pa.int64()), ("origin", pa.string())])

_ROUNDS = 4
# If spans overlap, the category that comes first here is used.
_PRIORITY = ("FB_USERID", "DART", "EMAIL", "CREDIT_CARD_NUMBER", "SSN", "PHONE_NUMBER", "USER")


def normalise(text: str) -> tuple[str, dict[str, int]]:
    """`text` as all later stages see it, and how often each rule applied.

    "nul": NUL characters are removed; "line_ends": "\\r\\n" becomes "\\n". Nothing else is touched: no Unicode
    normalisation, no trimming.
    """
    counts = {"nul": text.count("\0")}
    text = text.replace("\0", "")
    counts["line_ends"] = text.count("\r\n")
    return text.replace("\r\n", "\n"), counts


def anonymize(text: str) -> tuple[str, dict[str, int]]:
    """`text` with personal data replaced by dummy tokens such as `<EMAIL>`, and the number replaced by category.

    Applying it again changes nothing.
    """
    counts = dict.fromkeys(CATEGORIES, 0)
    # The rest of a match that lost to an overlapping one may match again, and so may text next to a match.
    for _ in range(_ROUNDS):
        parts, last = [], 0
        for start, end, category in _spans(text):
            parts += [text[last:start], f"<{category}>"]
            counts[category] += 1
            last = end
        if not parts:
            break
        text = "".join([*parts, text[last:]])
    return text, counts


def _spans(text: str) -> list[Span]:
    """Non-overlapping spans of personal data in order."""
    kept: list[Span] = []
    for span in sorted([*mentions.find(text), *numbers.find(text)], key=itemgetter(0)):
        if not kept or span[0] >= kept[-1][1]:
            kept.append(span)
        elif _PRIORITY.index(span[2]) < _PRIORITY.index(kept[-1][2]):
            kept[-1] = span
    return kept


def anonymize_documents(
    input: Path,
    output: Path,
    counts: Path,
    enabled: bool = True,
    document_words: int | None = None,
    piece_words: int | None = None,
) -> None:
    """Normalise and, unless `enabled` is false, anonymize the raw documents in `input`.

    Documents of more than `document_words` words are then cut into documents of this length, and documents of more than
    `piece_words` words into chunks of this length. Writes Parquet with `id` (hexadecimal sha256 of the final text),
    `text`, `n_words` (words separated by white space) and `origin` (the id of the document from which a chunk was cut,
    else its own), and the JSON `counts`: documents, words written, rules applied, documents rejected ("empty": without
    a word, "not_utf8": not text, skipped when they were read), and replacements by category.
    """
    normalised: Counter[str] = Counter(nul=0, line_ends=0)
    replacements: Counter[str] = Counter(dict.fromkeys(CATEGORIES, 0))
    totals = Counter(documents=0, words=0, empty=0)

    def clean(text: str) -> str:
        text, found = normalise(text)
        normalised.update(found)
        text, found = anonymize(text) if enabled else (text, {})
        replacements.update(found)
        return text

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in counted(read_batches(input, ["text"]), f"{input.parent.name}: documents", [input]):
            rows = []
            for cleaned in map(clean, batch.column("text").to_pylist()):
                for document in [cleaned] if document_words is None else cut(cleaned, document_words):
                    origin = _sha256(document)
                    for piece in [document] if piece_words is None else cut(document, piece_words):
                        words = len(piece.split())
                        totals.update(documents=1, words=words, empty=not words)
                        if words:
                            rows.append((_sha256(piece), piece, words, origin))
            if rows:
                typed = zip(zip(*rows, strict=True), SCHEMA.types, strict=True)
                yield pa.record_batch([pa.array(column, type_) for column, type_ in typed], schema=SCHEMA)

    write_batches(output, SCHEMA, batches())
    read = {name: int((pq.read_metadata(input).metadata or {}).get(name.encode(), 0)) for name in _WHEN_READ}
    normalised.update({name: read[name] for name in ("invalid_bytes", "surrogates")})
    said = {"documents": totals["documents"] + read["not_utf8"], "words": totals["words"], "normalised": normalised}
    rejected = {"empty": totals["empty"], "not_utf8": read["not_utf8"]}
    write_json(counts, said | {"rejected": rejected, "replacements": replacements})


def cut(text: str, words: int) -> list[str]:
    """The chunks of a text, which is cut before every `words`-th word. Joined, they are the text again."""
    return re.findall(rf"\s*(?:\S+\s*){{1,{words}}}", text) or [text]


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
