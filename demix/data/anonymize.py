"""Personal data replaced by the dummy tokens of the paper's Table 8, in text and in metadata.

What each category means here, and where it differs from the code published with the paper
(demix-data, scripts/anonymize_file.py):

- EMAIL: an address in any case and script, its last label holding letters only; the dot that ends a sentence stays, and
  so does emphasis around it. A local part in quotes too. Not `git@host:`, which is nobody's.
- DART: as published, ten digits, a dash and 53 hexadecimal digits, but not inside a longer word.
- FB_USERID: as published, a mention in Facebook's markup, `@[100001:2048:A Name]`; also the address of a profile
  (`facebook.com/profile.php?id=…`, `facebook.com/a.name`, `facebook.com/groups/…/user/…`), but not of its own pages.
- CREDIT_CARD_NUMBER: 12 to 19 digits, plain or in an issuer's groups parted by one kind of separator, with an issuer's
  prefix and length and a valid Luhn digit; after a word such as "card" any prefix. Not a part of an IBAN.
- SSN: three, two and four digits parted by dashes, area and group as issued since 2011; after "SSN" or "social
  security" also parted by spaces or plain.
- PHONE_NUMBER: North American numbers with an area code and separators; numbers with a country code, or after the
  digits that are dialled to leave a country; numbers as 64 countries write them with a trunk prefix or an area code in
  parentheses (`demix.data.dialling`); extensions. Other groups of 7 to 15 digits only just beside words such as
  "phone:", "call me on" or "is my number" (`demix.data.cues`), since years, pages, identifiers and times look the same.
- USER: `@handle`, the whole of it but no trailing dot; not a decorator, a documentation tag, a package scope, a key of
  JSON-LD or a command of a batch file.

Text is read once, or where matches touch one another up to four times, by patterns that read each character a bounded
number of times: time is linear in the text. A second pass changes nothing.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import regex

from demix.data import mentions, numbers
from demix.data.dummies import CATEGORIES, Span
from demix.data.text import SURROGATE, buffers, count_words, cut, splice
from demix.files import write_json
from demix.files.batches import counted, read_batches, write_batches

# What the raw file's key-value metadata counts.
_WHEN_READ = ("invalid_bytes", "surrogates", "not_utf8")
_TYPES = {"id": pa.string(), "text": pa.large_string(), "n_words": pa.int64(), "origin": pa.string()}
SCHEMA = pa.schema(_TYPES | {"metadata": pa.large_string()})

_ROUNDS = 4
_BEFORE = regex.compile(r"(?r)(?:[\w)+]|[0-9][ \t\u00a0\u2007\u2009\u202f()./\-\u2010-\u2015]{1,3}+)")
_AFTER = regex.compile(
    r"[\w(+]|[./\-\u2010-\u2015]\w|(?<=[0-9])[,\s]?[0-9+]|[ \t\u00a0\u2007\u2009\u202f()./\-\u2010-\u2015]{1,3}+[0-9+]"
)
# Seven digits that separators part, in UTF-8.
_DIGITS_NEAR = re.compile(rb"[0-9](?:[ \t()./\x80-\xff-]{0,9}[0-9]){6}")
# Of spans that overlap, the first of these is right.
_PRIORITY = ("FB_USERID", "DART", "EMAIL", "CREDIT_CARD_NUMBER", "SSN", "PHONE_NUMBER", "USER")


def normalise(text: str) -> tuple[str, dict[str, int]]:
    """`text` as all later stages see it, and how often each rule applied.

    "surrogates": lone surrogates become U+FFFD; "nul": NUL characters are removed; "line_ends": "\\r\\n" becomes
    "\\n". Nothing else is touched: no Unicode normalisation, no trimming.
    """
    text, surrogates = SURROGATE.subn("\ufffd", text)
    counts = {"surrogates": surrogates, "nul": text.count("\0")}
    text = text.replace("\0", "")
    counts["line_ends"] = text.count("\r\n")
    return text.replace("\r\n", "\n"), counts


def anonymize(text: str) -> tuple[str, dict[str, int]]:
    """`text` with personal data replaced by dummy tokens such as `<EMAIL>`, and the number replaced by category.

    Applying it again changes nothing.
    """
    counts = dict.fromkeys(CATEGORIES, 0)
    # What is left of a match that lost to another may match anew, and so may what a match ran into.
    for _ in range(_ROUNDS):
        spans, lost = _spans(text)
        parts, last = [], 0
        for start, end, category in spans:
            parts += [text[last:start], f"<{category}>"]
            counts[category] += 1
            last = end
            lost = lost or _touches(text, start, end)
        if not parts:
            break
        text = "".join([*parts, text[last:]])
        if not lost:
            break
    return text, counts


def _touches(text: str, start: int, end: int) -> bool:
    """Whether another match may have run into the one at [start, end), so that its replacement uncovers that one."""
    if _BEFORE.match(text, max(start - 4, 0), start) or _AFTER.match(text, end):
        return True
    # A run of digits goes on into an address or a handle.
    return text[start].isdigit() and "@" in text[start:end]


def _spans(text: str) -> tuple[list[Span], bool]:
    """Non-overlapping spans of personal data in order, and whether some were left out for others."""
    taken = [*mentions.find(text), *numbers.find(text)]
    if len(taken) < 2:
        return taken, False
    kept: list[Span] = []
    for span in sorted(taken, key=itemgetter(0)):
        if kept and span[0] < kept[-1][1]:
            if _PRIORITY.index(span[2]) < _PRIORITY.index(kept[-1][2]):
                kept[-1] = span
        else:
            kept.append(span)
    return kept, len(kept) < len(taken)


def anonymize_texts(texts: pa.Array) -> tuple[pa.Array, dict[str, int]]:
    """A column of texts as `anonymize` leaves each, and the sum of its counts; only lines that may matter are read.

    Every span holds an @, seven digits close together or the end of a Facebook host, all of which bytes show.
    """
    data, edges = buffers(texts)
    counts = dict.fromkeys(CATEGORIES, 0)
    places = _places(data, edges)
    raw, replaced = data.tobytes() if len(places) else b"", []
    for text, start, end in _stretches(raw, edges, places):
        before = raw[start:end].decode()
        after, found = anonymize(before)
        if after != before:
            replaced.append((text, start, end, after.encode()))
            for category, number in found.items():
                counts[category] += number
    return splice(texts, replaced), counts


def _places(data: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The bytes, in order, at which a line may hold personal data; where there are many, the first of each line."""
    at = np.flatnonzero(data == ord("@"))
    digits = np.flatnonzero((data - np.uint8(ord("0"))) < 10)
    # Up to three separators of up to three bytes may part two digits.
    near = np.concatenate([[0], np.cumsum(np.diff(digits) > 10)])
    runs = digits[:-6][near[6:] == near[:-6]] if len(digits) > 6 else digits[:0]
    slash = np.flatnonzero(data == ord("/"))
    slash = slash[slash >= 5]
    # ".com/" after the last letter of facebook or fb, in any case (the Kelvin sign is a k).
    for back, letters in ((1, b"mM"), (2, b"oO"), (3, b"cC"), (4, b"."), (5, b"kKbB\xaa")):
        slash = slash[np.isin(data[slash - back], np.frombuffer(letters, np.uint8))]
    if len(at) + len(runs) + len(slash) < len(data) // 1000:
        view = data.data
        runs = np.array([place for place in runs.tolist() if _DIGITS_NEAR.match(view, place)], at.dtype)
        return np.sort(np.concatenate([at, runs, slash]))
    found = np.sort(np.concatenate([at, runs, slash]))
    line = np.searchsorted(np.flatnonzero(data == ord("\n")), found)
    text = np.searchsorted(edges, found, side="right")
    new = np.ones(len(found), bool)
    new[1:] = (np.diff(line) > 0) | (np.diff(text) > 0)
    return found[new]


def _stretches(raw: bytes, edges: np.ndarray, places: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Stretches (text, first byte, one after the last) outside of which `anonymize` neither reads nor writes.

    Lines with a place, the line after (is it a definition below a decorator?) and the 64 characters before (do they
    announce a number?); lines that follow one another go together, as a decorator may stand on another.
    """
    owner = np.searchsorted(edges, places, side="right") - 1
    last: tuple[int, int, int] | None = None
    core = -1
    for text, place in zip(owner.tolist(), places.tolist(), strict=True):
        if last and text == last[0] and place < core:
            continue
        low, high = int(edges[text]), int(edges[text + 1])
        begin = max(raw.rfind(b"\n", low, place) + 1, low)
        core = raw.find(b"\n", place, high) + 1 or high
        start = max(begin - 256, low)
        while start > low and raw[start] & 0xC0 == 0x80:
            start += 1
        end = raw.find(b"\n", core, high) + 1 or high
        if last and text == last[0] and start <= last[2]:
            start = last[1]
        elif last:
            yield last
        last = (text, start, end)
    if last:
        yield last


def anonymize_documents(
    input: Path, output: Path, counts: Path, *, enabled: bool = True, piece_words: int | None = None
) -> None:
    """Normalise and, unless `enabled` is false, anonymize the raw documents in `input`.

    Documents of more than `piece_words` words are then cut into pieces of this length, which are documents from here
    on. Writes Parquet with `id` (hexadecimal sha256 of the final text), `text`, `n_words` (words parted by white
    space), `origin` (the id of the whole document, its own where it was not cut) and `metadata`, and the
    JSON `counts`: documents, words written, rules applied, documents rejected ("empty": without a word, "not_utf8": no
    text, left out when they were read), replacements by category. Source ids, which may hold personal data, go no
    further.
    """
    normalised: Counter[str] = Counter(invalid_bytes=0, surrogates=0, nul=0, line_ends=0)
    replacements: Counter[str] = Counter(dict.fromkeys(CATEGORIES, 0))
    totals = Counter(documents=0, words=0, empty=0)

    def clean(text: str) -> str:
        text, found = normalise(text)
        normalised.update(found)
        text, found = anonymize(text) if enabled else (text, {})
        replacements.update(found)
        return text

    def batches() -> Iterator[pa.RecordBatch]:
        read = read_batches(input, ["text", "metadata"])
        for batch in counted(read, f"{input.parent.name}: documents", [input]):
            texts, found = _normalise_texts(batch.column("text"))
            normalised.update(found)
            texts, found = anonymize_texts(texts) if enabled else (texts, {})
            replacements.update(found)
            ids = origins = _ids(texts)
            metadata = batch.column("metadata")
            if piece_words is not None:
                texts, whole = cut(texts, piece_words)
                ids, origins, metadata = _ids(texts), origins.take(whole), metadata.take(whole)
            words = count_words(texts)
            kept = np.flatnonzero(words)
            totals.update(documents=len(words), words=int(words.sum()), empty=len(words) - len(kept))
            columns = [ids, texts, pa.array(words), origins, metadata]
            if len(kept) < len(words):
                columns = [column.take(kept) for column in columns]
            if pc.any(pc.not_equal(columns[-1], "{}")).as_py():
                said = [_clean_metadata(value, clean) for value in columns[-1].to_pylist()]
                columns[-1] = pa.array(said, metadata.type)
            if len(kept):
                yield pa.record_batch(columns, schema=SCHEMA)

    write_batches(output, SCHEMA, batches())
    read = {name: int((pq.read_metadata(input).metadata or {}).get(name.encode(), 0)) for name in _WHEN_READ}
    normalised.update({name: read[name] for name in ("invalid_bytes", "surrogates")})
    said = {"documents": totals["documents"] + read["not_utf8"], "words": totals["words"], "normalised": normalised}
    rejected = {"empty": totals["empty"], "not_utf8": read["not_utf8"]}
    write_json(counts, said | {"rejected": rejected, "replacements": replacements})


def _normalise_texts(texts: pa.Array) -> tuple[pa.Array, Mapping[str, int]]:
    """A column as `normalise` leaves each text, and the sum of its counts; Arrow's strings hold no surrogates."""
    data, _ = buffers(texts)
    if not (data == 0).any() and b"\r\n" not in data.tobytes():
        return texts, {}
    counts: Counter[str] = Counter()
    changed = []
    for text in texts.to_pylist():
        text, found = normalise(text)
        changed.append(text)
        counts.update(found)
    return pa.array(changed, pa.large_string()), counts


def _ids(texts: pa.Array) -> pa.Array:
    data, edges = buffers(texts)
    view = data.data
    return pa.array([hashlib.sha256(view[start:end]).hexdigest() for start, end in pairwise(edges.tolist())])


def _clean_metadata(metadata: str, clean: Any) -> str:
    if metadata == "{}":
        return metadata
    return json.dumps(_walk(json.loads(metadata), clean), sort_keys=True, ensure_ascii=False)


def _walk(value: Any, clean: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {clean(key): _walk(item, clean) for key, item in value.items()}
    if isinstance(value, list):
        return [_walk(item, clean) for item in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        # A card's number may have become 4111111111111111.0.
        digits = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
        text = clean(digits)
        return value if text == digits else text
    return value
