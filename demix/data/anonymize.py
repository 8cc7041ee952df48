"""Personal data replaced by the dummy tokens of the paper's Table 8, in text and in metadata.

What each category means here, and where it differs from the code published with the paper
(demix-data, scripts/anonymize_file.py):

- EMAIL: an address in any case and script, its last label holding letters only; the dot that ends a sentence stays.
- DART: as published, ten digits, a dash and 53 hexadecimal digits, but not inside a longer word.
- FB_USERID: as published, a mention in Facebook's markup, `@[100001:2048:A Name]`; also the address of a profile
  (`facebook.com/profile.php?id=…`, `facebook.com/a.name`), but not of Facebook's own pages.
- CREDIT_CARD_NUMBER: 13 to 19 digits, plain or in groups parted by one kind of separator, with an issuer's prefix and
  length and a valid Luhn digit.
- SSN: three, two and four digits parted by dashes, area and group as issued since 2011; after "SSN" or "social
  security" also parted by spaces or plain.
- PHONE_NUMBER: North American numbers with an area code and separators; numbers with a country code; separated numbers
  with a trunk 0 or an area code in parentheses. Other groups of 7 to 15 digits only just after words such as "phone:",
  "fax" or "call me on", since years, pages, identifiers and times look the same.
- USER: `@handle`, the whole of it but no trailing dot; not a decorator, a documentation tag or a package scope.

Every pattern takes time linear in the text.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import regex

from demix.data import released
from demix.data.sources import SURROGATE
from demix.data.text import buffers, count_words, splice
from demix.errors import DemixError
from demix.files import write_json
from demix.files.batches import counted, read_batches, write_batches

# What the raw file's key-value metadata counts.
_WHEN_READ = ("invalid_bytes", "surrogates", "not_utf8")
CATEGORIES = ("EMAIL", "DART", "FB_USERID", "PHONE_NUMBER", "CREDIT_CARD_NUMBER", "SSN", "USER")
SCHEMA = pa.schema(
    [("id", pa.string()), ("text", pa.large_string()), ("n_words", pa.int64()), ("metadata", pa.large_string())]
)

Span = tuple[int, int, str]

# Joiners come at most two at a time, so that a failed scan ends where the next one may begin.
_EMAIL = regex.compile(
    r"(?<!\w)(?<!\w[.%+'-])(?<!\w[.%+'-]{2})"
    r"\w++(?:[.%+'-]{1,2}+\w++)*+[.%+'-]{0,2}+"
    r"@(?:\w++(?:-++\w++)*+\.)+(?:[^\W\d_]{2,24}|xn--\w++)(?!-?\w)"
)
_DART = regex.compile(r"(?<![0-9A-Za-z])[0-9]{10}-[0-9A-Fa-f]{53}(?![0-9A-Za-z])")
_FACEBOOK_MENTION = regex.compile(r"@\[[0-9]{1,20}:[0-9]{1,20}:(?:[^\]\\\n]|\\.){1,256}+\]")
_FACEBOOK_ADDRESS = regex.compile(
    r"(?<![\w.-])(?:https?://)?(?:[a-z-]{1,16}\.)?(?:facebook|fb)\.com/"
    r"(?:profile\.php\?(?:[\w=-]{1,64}&){0,8}id=[0-9]++|people/[^/\s]{1,128}/[0-9]++"
    r"|(?!(?:about|ads|apps|business|careers|dialog|docs|developers?|events?|games|gaming|groups?|hashtag|help|home|legal"
    r"|login|marketplace|media|messages|notes?|pages?|people|permalink|photos?|plugins|policies|policy|privacy|public|reel"
    r"|search|settings|sharer?|stories|story|terms|videos?|watch)(?![\w])|\w++\.php)[a-z0-9](?:\.?[a-z0-9]){4,49}+(?!\w))",
    regex.IGNORECASE,
)

# Text with fewer than seven digits this close together holds none of the numbers below.
_RUN = regex.compile(r"[0-9](?:[ \t\u00a0().\-/\u2010-\u2015]{0,3}+[0-9]){6,}+")
# A dummy token bounds as the text did that it replaced: else each replacement could uncover one more, without end.
_NO_TOKEN = rf"(?<!(?:{'|'.join(CATEGORIES)})>)"
_FREE = rf"(?<![\w+])(?<![\w)][.\-/\u2010-\u2015]){_NO_TOKEN}"
_END = r"(?![\w])(?![.\-/\u2010-\u2015][0-9])"
_CARD = regex.compile(
    _FREE
    + r"(?:[0-9]{13,19}+|[0-9]{4}([ -])[0-9]{4}\1[0-9]{4}\1[0-9]{1,4}+(?:\1[0-9]{1,3}+)?"
    + r"|[0-9]{4}([ -])[0-9]{6}\2[0-9]{4,5}+)"
    + _END
)
_ISSUER = regex.compile(
    r"4[0-9]{12}(?:[0-9]{3}){0,2}|(?:5[1-5]|2[2-7])[0-9]{14}|3[47][0-9]{13}|3(?:0[0-5]|[689][0-9])[0-9]{11}"
    r"|35[0-9]{14}|(?:2131|1800)[0-9]{11}|6[0-9]{15,18}|5[06-9][0-9]{11,17}"
)
_SSN = regex.compile(_FREE + r"(?!000|666|9)[0-9]{3}-(?!00)[0-9]{2}-(?!0000)[0-9]{4}" + _END)
_SSN_CUE = regex.compile(r"(?:\bssns?|social security)(?: ?(?:number|no\.?|#))?(?: is)?[\s:#=]{0,3}$", regex.IGNORECASE)
_SSN_LOOSE = regex.compile(r"(?!000|666|9)[0-9]{3}([ -]?)(?!00)[0-9]{2}\1(?!0000)[0-9]{4}" + _END)

# A number in a row of numbers (a table, a list of pages) is no phone.
_ALONE = r"(?<![0-9][ \u00a0])(?<![0-9],)"
_ROW = regex.compile(r"[ \u00a0,][0-9]")
_NOT_IN_A_ROW = f"(?!{_ROW.pattern})"
_ZIP = r"[0-9]{5}-[0-9]{4}(?![0-9])"
_PHONE = regex.compile(
    rf"""
    {_FREE}(?:
      (?:\+?1[ .\-]?)?\([2-9][0-9]{{2}}\)[ ]?[2-9][0-9]{{2}}[ .\-][0-9]{{4}}
    | (?:\+?1[.\-/ ])?[2-9][0-9]{{2}}(?:/[2-9][0-9]{{2}}-|([.\-\u2010-\u2015])[2-9][0-9]{{2}}\1)[0-9]{{4}}
    | {_ALONE}(?:1[ ])?[2-9][0-9]{{2}}[ ][2-9][0-9]{{2}}[ \-][0-9]{{4}}{_NOT_IN_A_ROW}
    | {_ALONE}\((?:0[0-9]{{1,4}}|(?!19|20)[1-9][0-9]{{1,2}})\)[ ]?[0-9]{{3,4}}[ \-][0-9]{{3,4}}{_NOT_IN_A_ROW}
    | 0[1-9](?:\.[0-9]{{2}}){{4}}
    | {_ALONE}(?=(?:[ \-/]?[0-9]){{9,11}}{_END}{_NOT_IN_A_ROW})(?!{_ZIP})
      0[1-9][0-9]{{0,3}}[ \-/](?:[0-9]{{2,9}}[ \-])*[0-9]{{2,9}}{_NOT_IN_A_ROW}
    )(?:[ ]?(?:x|ext\.?)[ ]?[0-9]{{1,5}})?{_END}
    """,
    regex.VERBOSE,
)
_PLUS = regex.compile(r"(?<![\w)+~])(?<!\w-)\+\(?$")
_DOUBLE_ZERO = regex.compile(_FREE + _ALONE + r"00[1-9][0-9]{0,2}[ \-/]")
_PHONE_CUE = regex.compile(
    r"\b(?:(?:(?:tele)?phone|mobile|cell|fax|tel|telefax|whatsapp|hotline)"
    r"(?: ?(?:number|no\.?|nr\.?|#))?(?: (?:is|at|on))?"
    r"|(?:call|dial)(?: \w{1,12}){0,2}|(?:ring|phone|text|fax|reach)(?: \w{1,12}){1,2} (?:on|at)"
    r"|(?:my|his|her|your) number is|ph|[TFM](?=:))"
    r"[.:#]{0,2}\s{0,4}[+(]?$",
    regex.IGNORECASE,
)
_GROUP = regex.compile(r"[0-9]++")
_DATE = regex.compile(
    r"(?:1[5-9]|20)[0-9]{2}[.\-/ ][01]?[0-9][.\-/ ][0-3]?[0-9](?![0-9])|[0-3]?[0-9][./][01]?[0-9][./](?:19|20)[0-9]{2}"
)

# Words after an @ that documentation tools, style sheets, cron and programming languages give a meaning of their own.
_KEYWORDS = (
    "abstractmethod|annually|argv|author|brief|cached_property|charset|classmethod|code|contextmanager|copyright|daily"
    "|dataclass|deprecated|export(?:_ok)?|file|font-face|hourly|import|inc|include|inheritdoc|interface|isa|keyframes|link"
    "|media|method|midnight|mixin|monthly|namespace|node|overload|override|params?|private|property|protected|public"
    "|reboot|returns?|see|since|staticmethod|supports|template|throws|todo|typedef|version|weekly|wraps|yearly"
)
_USER = regex.compile(
    rf"(?<![\w@\\`&$%*=+]|\w[.'-]){_NO_TOKEN}@"
    r"(?=\w{2})(?=_{0,2}[^\W\d_]|[0-9]++[^\W\d]{4})"
    rf"(?!(?:{_KEYWORDS})\b|[0-9a-f]{{40}}\b)"
    r"\w++(?:[.-]++\w++)*+(?<!\.(?:com|edu|gov|io|net|org))(?![({\\`=@]|/\w)",
    regex.IGNORECASE,
)
_LINE_END = regex.compile(r"[^\S\n]*+(?:#[^\n]*+)?\n[^\S\n]*+")
_DEFINITION = regex.compile(
    rf"@[\w.]++\(|@(?:{_KEYWORDS})\b|(?:async|class|def|export|final|fun|function|private|protected|public|static|void)\b"
)


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
    # A replacement may uncover another match beside it, one or two at most: the boundaries below are symmetrical.
    while spans := _spans(text):
        parts, last = [], 0
        for start, end, category in spans:
            parts += [text[last:start], f"<{category}>"]
            counts[category] += 1
            last = end
        text = "".join([*parts, text[last:]])
    return text, counts


def _spans(text: str) -> list[Span]:
    """Non-overlapping spans of personal data in order; of two that overlap the one found first here stays."""
    taken: list[Span] = []
    at = "@" in text
    if at:
        taken += [(*match.span(), "FB_USERID") for match in _FACEBOOK_MENTION.finditer(text)]
    if "facebook.com/" in (lower := text.lower()) or "fb.com/" in lower:
        taken += [(*match.span(), "FB_USERID") for match in _FACEBOOK_ADDRESS.finditer(text)]
    if at:
        taken += [(*match.span(), "EMAIL") for match in _EMAIL.finditer(text)]
    for run in _RUN.finditer(text):
        taken += _numbers(text, *run.span())
    if at:
        taken += _users(text)
    if len(taken) < 2:
        return taken
    kept: list[Span] = []
    order = sorted(range(len(taken)), key=lambda i: (taken[i][0], i))
    for span in (taken[i] for i in order):
        if kept and span[0] < kept[-1][1]:
            if _PRIORITY[span[2]] < _PRIORITY[kept[-1][2]]:
                kept[-1] = span
        else:
            kept.append(span)
    return kept


_PRIORITY = {
    name: rank
    for rank, name in enumerate(("FB_USERID", "DART", "EMAIL", "CREDIT_CARD_NUMBER", "SSN", "PHONE_NUMBER", "USER"))
}


def _numbers(text: str, start: int, end: int) -> Iterator[Span]:
    """The spans in one run of digits and separators, best category first."""
    # Room for what follows a number in its pattern: a boundary, an extension, the end of a DART identifier.
    stop, begin = end + 64, max(start - 2, 0)
    for match in _DART.finditer(text, begin, stop):
        if start <= match.start() < end:
            yield (*match.span(), "DART")
    for match in _CARD.finditer(text, start, stop):
        if match.start() < end and _is_card(match.group()):
            yield (*match.span(), "CREDIT_CARD_NUMBER")
    for match in _SSN.finditer(text, start, stop):
        if match.start() < end:
            yield (*match.span(), "SSN")
    before = text[max(start - 48, 0) : start]
    if _SSN_CUE.search(before) and (loose := _SSN_LOOSE.match(text, start, stop)):
        yield (*loose.span(), "SSN")
    for match in _PHONE.finditer(text, begin, stop):
        if match.start() < end and match.end() > start:
            yield (*match.span(), "PHONE_NUMBER")
    if text[start] != "0" and (plus := _PLUS.search(before)) and (last := _groups(text, start, end, 8, 15)):
        yield (start - len(plus.group()), last, "PHONE_NUMBER")
    if _DOUBLE_ZERO.match(text, start) and (last := _groups(text, start, end, 10, 16)):
        # Dumps of memory have groups of one length.
        lengths = {len(group) for group in _GROUP.findall(text, start, last)}
        if len(lengths) > 1 and not _ROW.match(text, last):
            yield (start, last, "PHONE_NUMBER")
    cue = None if _DATE.match(text, start) else _PHONE_CUE.search(before)
    if cue and (last := _groups(text, start, end, 7, 15)):
        yield (start - (cue.group()[-1] in "+("), last, "PHONE_NUMBER")


def _groups(text: str, start: int, end: int, low: int, high: int) -> int | None:
    """Where the leading whole groups of digits end that hold `low` to `high` digits in all."""
    digits, last = 0, None
    for match in _GROUP.finditer(text, start, end):
        digits += len(match.group())
        if digits > high:
            break
        if digits >= low:
            last = match.end()
    return last if last and not text[last : last + 1].isalnum() else None


def _is_card(text: str) -> bool:
    digits = text.replace(" ", "").replace("-", "")
    if not _ISSUER.fullmatch(digits):
        return False
    total = 0
    for place, digit in enumerate(map(int, reversed(digits))):
        total += digit if place % 2 == 0 else (2 * digit - 9 if digit > 4 else 2 * digit)
    return total % 10 == 0


def _users(text: str) -> Iterator[Span]:
    """The spans of handles. At the start of a line, a name above a definition or above a decorator is a decorator."""
    decorator = -1
    for match in reversed(list(_USER.finditer(text))):
        start, end = match.span()
        line = text[max(text.rfind("\n", 0, start) + 1, start - 80) : start].strip()
        follow = _LINE_END.match(text, end) if line == "" else None
        if follow and (follow.end() == decorator or _DEFINITION.match(text, follow.end())):
            decorator = start
            continue
        # A comment's leader or Python's prompt before it: a documentation tag or an example.
        if line not in ("*", "/**", "///", ">>>"):
            yield (start, end, "USER")


def anonymize_texts(texts: pa.Array) -> tuple[pa.Array, dict[str, int]]:
    """A column of texts as `anonymize` leaves each, and the sum of its counts; only lines that may matter are read.

    Every span holds an @, seven digits close together or the end of a Facebook host, all of which bytes show.
    """
    data, edges = buffers(texts)
    counts = dict.fromkeys(CATEGORIES, 0)
    places = _places(data)
    raw, replaced = data.tobytes() if len(places) else b"", []
    for text, start, end in _stretches(raw, edges, places):
        before = raw[start:end].decode()
        after, found = anonymize(before)
        if after != before:
            replaced.append((text, start, end, after.encode()))
            for category, number in found.items():
                counts[category] += number
    return splice(texts, replaced), counts


def _places(data: np.ndarray) -> np.ndarray:
    """The bytes, in order, at which a line may hold personal data."""
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
    return np.sort(np.concatenate([at, runs, slash]))


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


def anonymize_documents(input: Path, output: Path, counts: Path, *, enabled: bool = True, rules: str = "ours") -> None:
    """Normalise and, unless `enabled` is false, anonymize the raw documents in `input`.

    `rules` are "ours" or "released" (`demix.data.released`). Writes Parquet with `id` (hexadecimal sha256 of the
    final text), `text`, `n_words` (words parted by white space) and `metadata`, and the JSON `counts`: documents read,
    words written, rules applied, documents rejected ("empty": without a word, "not_utf8": no text, left out when they
    were read), replacements by category. Source ids,
    which may hold personal data, go no further.
    """
    if rules not in ("ours", "released"):
        raise DemixError(f"rules {rules!r}", "are not known", "use ours or released")
    normalised: Counter[str] = Counter(invalid_bytes=0, surrogates=0, nul=0, line_ends=0)
    replacements: Counter[str] = Counter(dict.fromkeys(CATEGORIES, 0))
    totals = Counter(documents=0, words=0, empty=0)
    one = anonymize if rules == "ours" else released.anonymize

    def clean(text: str) -> str:
        text, found = normalise(text)
        normalised.update(found)
        if enabled:
            text, found = one(text)
            replacements.update(found)
        return text

    def batches() -> Iterator[pa.RecordBatch]:
        read = read_batches(input, ["text", "metadata"])
        for batch in counted(read, f"{input.parent.name}: documents", [input]):
            texts = _normalise_texts(batch.column("text"), normalised)
            if enabled and rules == "ours":
                texts, found = anonymize_texts(texts)
                replacements.update(found)
            elif enabled:
                pairs = [one(text) for text in texts.to_pylist()]
                texts = pa.array([text for text, _ in pairs], pa.large_string())
                for _, found in pairs:
                    replacements.update(found)
            words = count_words(texts)
            kept = np.flatnonzero(words)
            totals.update(documents=len(words), words=int(words.sum()), empty=len(words) - len(kept))
            metadata = batch.column("metadata")
            if len(kept) < len(words):
                texts, metadata, words = texts.take(kept), metadata.take(kept), words[kept]
            if pc.any(pc.not_equal(metadata, "{}")).as_py():
                metadata = pa.array([_clean_metadata(value, clean) for value in metadata.to_pylist()], metadata.type)
            if len(kept):
                yield pa.record_batch([_ids(texts), texts, pa.array(words), metadata], schema=SCHEMA)

    write_batches(output, SCHEMA, batches())
    read = {name: int((pq.read_metadata(input).metadata or {}).get(name.encode(), 0)) for name in _WHEN_READ}
    normalised.update({name: read[name] for name in ("invalid_bytes", "surrogates")})
    write_json(
        counts,
        {
            "documents": totals["documents"] + read["not_utf8"],
            "words": totals["words"],
            "normalised": dict(normalised),
            "rejected": {"empty": totals["empty"], "not_utf8": read["not_utf8"]},
            "replacements": dict(replacements),
        },
    )


def _normalise_texts(texts: pa.Array, counts: Counter[str]) -> pa.Array:
    """A column as `normalise` leaves each text; Arrow's strings hold no surrogates."""
    data, _ = buffers(texts)
    if not (data == 0).any() and b"\r\n" not in data.tobytes():
        return texts
    pairs = [normalise(text) for text in texts.to_pylist()]
    for _, found in pairs:
        counts.update(found)
    return pa.array([text for text, _ in pairs], pa.large_string())


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
