"""Personal data replaced by the dummy tokens of the paper's Table 8.

What each category means here, and where it differs from the code published with the paper
(demix-data, scripts/anonymize_file.py):

- EMAIL: an address in any case and script, its last label holding letters only; the dot that ends a sentence stays, and
  so does emphasis around it. Not `git@host:`, which is nobody's.
- DART: as published, ten digits, a dash and 53 hexadecimal digits, but not inside a longer word.
- FB_USERID: as published, a mention in Facebook's markup, `@[100001:2048:A Name]`; also the address of a profile
  (`facebook.com/profile.php?id=…`, `facebook.com/a.name`, `facebook.com/groups/…/user/…`), but not of its own pages.
- CREDIT_CARD_NUMBER: 12 to 19 digits, plain or in an issuer's groups parted by one kind of separator, with an issuer's
  prefix and length and a valid Luhn digit; after a word such as "card" any prefix.
- SSN: three, two and four digits parted by dashes, area and group as issued since 2011; after "SSN" or "social
  security" also parted by spaces or plain.
- PHONE_NUMBER: North American numbers with an area code and separators; numbers with a country code, or after the
  digits that are dialled to leave a country; numbers as 64 countries write them with a trunk prefix or an area code in
  parentheses (`demix.data.numbers`); extensions. Other groups of 7 to 15 digits only right next to words such as
  "phone:", "call me on" or "is my number" (`demix.data.cues`), since years, pages, identifiers and times look the same.
- USER: `@handle`, the whole of it but no trailing dot; not a decorator, a documentation tag, a package scope, a key of
  JSON-LD or a command of a batch file.

Text is read until nothing is found, up to four times, by patterns that read each character a bounded number of times:
time is linear in the text. Anonymizing it again changes nothing.
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

# What the raw file's key-value metadata counts.
_WHEN_READ = ("invalid_bytes", "surrogates", "not_utf8")
SCHEMA = pa.schema([("id", pa.string()), ("text", pa.large_string()), ("n_words", pa.int64()), ("origin", pa.string())])

_ROUNDS = 4
# Of spans that overlap, the first of these is right.
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
    # What is left of a match that lost to another may match again, and so may what a match ran into.
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
    `piece_words` words into pieces of this length. Writes Parquet with `id` (hexadecimal sha256 of the final text),
    `text`, `n_words` (words parted by white space) and `origin` (the id of the document that a piece was cut from, else
    its own), and the JSON `counts`: documents, words written, rules applied, documents rejected ("empty": without a
    word, "not_utf8": no text, left out when they were read), replacements by category.
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
    """The pieces of a text, which is cut before every `words`-th word; joined they give the text again."""
    return re.findall(rf"\s*(?:\S+\s*){{1,{words}}}", text) or [text]


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
