"""Numbers that identify somebody: cards, social security numbers, telephones, DART identifiers.

Every number is searched in one run of digits and separators, with bounded patterns that read at most 64 characters on
both sides of it, so the time is linear in the text. The metadata of the package `phonenumbers` (Google's
libphonenumber) give, by country, the digits that form a telephone number, the trunk prefix for domestic calls, and the
groups in which numbers are written.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import phonenumbers
import regex
from phonenumbers import PhoneMetadata, PhoneNumberFormat

from demix.data import cues
from demix.data.cues import NUMBER_TOKEN, TOKEN, Span

# Countries whose numbers are known as written at home: after a trunk prefix, or with an area code in parentheses.
_NAMES = """
AE AR AT AU BD BE BG BR CA CH CL CN CO CZ DE DK EE EG ES FI FR GB GR HK HR HU ID IE IL IN IS IT JP KE KR LT LU LV MA MX
MY NG NL NO NZ PE PH PK PL PT RO RS RU SA SE SG SI SK TH TR UA US VN ZA
"""
COUNTRIES = tuple(_NAMES.split())

_BLANK = r" \u00a0\u2007\u2009\u202f"
_DASH = r"\-\u2010-\u2015"
_BETWEEN = rf"{_BLANK}\t()./{_DASH}"
# Text without seven digits this close together contains none of the numbers below. On plain character sets the
# standard library is twice as fast as `regex`.
_RUN = re.compile(rf"[0-9](?=[0-9{_BETWEEN}]{{6}})(?:[{_BETWEEN}]{{0,3}}+[0-9]){{6,}}+")
# Underscores are emphasis, except inside a name.
_FREE = rf"(?<![^\W_]|\+|\w_)(?<![\w)][./{_DASH}])(?<![0-9]:)(?<!{TOKEN}[./{_DASH}]?)"
_END = rf"(?![^\W_]|_\w)(?![./{_DASH}]?+(?:(?<=[./{_DASH}])[0-9]|{TOKEN}))"

_DART = regex.compile(r"(?<![0-9A-Za-z])[0-9]{10}-[0-9A-Fa-f]{53}(?![0-9A-Za-z])")
# A number in a row of numbers (a table, a list of pages) is not a phone.
_LONE = rf"(?<!(?:[0-9]|{NUMBER_TOKEN})(?:[ \u00a0]|,))"
_ROW = regex.compile(rf"[ \u00a0,](?:[0-9]|{NUMBER_TOKEN})")
_NOT_IN_A_ROW = f"(?!{_ROW.pattern})"
_CARD = regex.compile(
    rf"{_FREE}(?:[0-9]{{12,19}}+"
    rf"|[0-9]{{4}}([{_BLANK}{_DASH}])[0-9]{{4}}\1[0-9]{{4}}\1[0-9]{{1,4}}+(?:\1[0-9]{{1,3}}+)?"
    rf"|[0-9]{{4}}([{_BLANK}{_DASH}])[0-9]{{6}}\2[0-9]{{4,5}}+"
    rf"|{_LONE}(?:[0-9]{{4}}([{_BLANK}{_DASH}])[0-9]{{4}}\3[0-9]{{4,5}}+|[0-9]{{6}}[{_BLANK}{_DASH}][0-9]{{6,13}}+)"
    rf"{_NOT_IN_A_ROW}){_END}"
)
# Prefixes and lengths of issuers (ISO/IEC 7812): Visa, Mastercard, Mir, American Express, Diners, JCB, Discover,
# UnionPay, RuPay, Troy, and Maestro from 13 digits.
_ISSUER = regex.compile(
    r"4[0-9]{12}(?:[0-9]{3}){0,2}|(?:5[1-5]|2[2-7])[0-9]{14}|3[47][0-9]{13}|3(?:0[0-5]|[689][0-9])[0-9]{11}"
    r"|3095[0-9]{10}|35[0-9]{14}|(?:2131|1800)[0-9]{11}|6[0-9]{15,18}|5[06-9][0-9]{11,17}|(?:8[12]|9792)[0-9]{12,14}(?<=^.{16})"
    # With twelve digits, one number in fifty would match by chance, so only Maestro's own ranges are used.
    r"|(?:5018|5020|5038|5[67][0-9]{2}|5893|6304|6390|67[0-9]{2})[0-9]{8}"
)
# If the digits are in groups, more of Maestro's prefixes are allowed.
_MAESTRO = regex.compile(r"(?:6304|6390|67[0-9]{2})[0-9]{9,11}")
_ANY_ISSUER = regex.compile(r"[2-6][0-9]{11,18}|0604[0-9]{8,15}")

_SSN = regex.compile(rf"{_FREE}(?!000|666|9)[0-9]{{3}}([{_DASH}])(?!00)[0-9]{{2}}\1(?!0000)[0-9]{{4}}{_END}")
_SSN_LOOSE = regex.compile(rf"(?!000|666|9)[0-9]{{3}}([{_BLANK}.{_DASH}]?)(?!00)[0-9]{{2}}\1(?!0000)[0-9]{{4}}{_END}")

# With an area code, between separators of one kind.
_AMERICAN = regex.compile(rf"(?:1[{_BLANK}.{_DASH}])?[2-9][0-9]{{2}}([{_BLANK}.{_DASH}])[2-9][0-9]{{2}}\1[0-9]{{4}}")
_PLUS = regex.compile(rf"(?r)(?<![^\W_]|[)+~]|\w_)(?<!\w-)(?<!{TOKEN}-?)(?:\(\+|\+\(?)")
_ABROAD = regex.compile(rf"{_FREE}{_LONE}(?:00|011|0011|010)(?:[{_BLANK}{_DASH}()]{{0,2}}[1-9])")
_JOINED = regex.compile(rf"[{_DASH}]\w")
# Between two numbers of a run: a slash between spaces, or a parenthesis that does not close.
_GAP = re.compile(r"(?<=[0-9)]) / (?=[0-9(])| \((?=[^()]*\Z)")
_HOME = regex.compile(rf"{_FREE}{_LONE}\(?(?=[0-9])")
# If a number in a run was replaced, the rest of the run is still judged as a part of that run.
_CUT_BEFORE = regex.compile(rf"(?r){NUMBER_TOKEN}[{_BETWEEN}]{{0,3}}+")
_CUT_AFTER = regex.compile(rf"[{_BETWEEN}]{{0,3}}+{NUMBER_TOKEN}")
_GROUP = re.compile(r"[0-9]++")
_DECIMAL = regex.compile(r"[0-9]{1,3}\.[0-9]++")
_YEARS = regex.compile(r"(?:1[5-9]|20)[0-9]{2}\D{1,3}(?:1[5-9]|20)[0-9]{2}(?![0-9])")
_HOST = regex.compile(r"[0-9]{1,3}(?:\.[0-9]{1,3}){3}(?![0-9])")
# Two more hexadecimal digits mean that these are bytes of a dump.
_DUMP = regex.compile(r"[ ]{1,2}[0-9A-Fa-f]{2}(?![\w])")
_DATE = regex.compile(
    r"(?:1[5-9]|20)[0-9]{2}[.\-/ ][01]?[0-9][.\-/ ][0-3]?[0-9](?![0-9])|[0-3]?[0-9][./][01]?[0-9][./](?:19|20)[0-9]{2}"
)


def find(text: str) -> Iterator[Span]:
    """The spans of numbers in `text`; some overlap."""
    for run in _RUN.finditer(text):
        start = run.start()
        for gap in _GAP.finditer(text, *run.span()):
            yield from _in_run(text, start, gap.start())
            start = gap.end()
        yield from _in_run(text, start, run.end())


def _in_run(text: str, start: int, end: int) -> Iterator[Span]:
    """The spans in one run of digits and separators, best category first."""
    groups = [match.span() for match in _GROUP.finditer(text, start, end)]
    for first, last in groups:
        yield from _identifiers(text, first, last)
    low = max(start - 64, 0)
    if _CUT_BEFORE.match(text, low, start):
        return
    if cues.SSN.match(text, low, start) and (loose := _SSN_LOOSE.match(text, start)):
        yield (*loose.span(), "SSN")
    if found := _phone(text, start, end, groups):
        yield (found[0], _extended(text, found[1]), "PHONE_NUMBER")


def _identifiers(text: str, first: int, last: int) -> Iterator[Span]:
    """The numbers other than telephone numbers that begin with the group of digits at [first, last)."""
    length = last - first
    if length == 10 and text.startswith("-", last) and (match := _DART.match(text, first)):
        yield (*match.span(), "DART")
    if length >= 4 and (match := _CARD.match(text, first)) and _is_card(text, *match.span()):
        yield (*match.span(), "CREDIT_CARD_NUMBER")
    if length == 3 and (match := _SSN.match(text, first)):
        yield (*match.span(), "SSN")


def _phone(text: str, start: int, end: int, groups: list[tuple[int, int]]) -> tuple[int, int] | None:
    """The telephone number with which a run of digits starts, by its beginning, its country code or a cue."""
    ways = (_after_a_plus, _from_abroad, _from_home)
    if found := next(filter(None, (way(text, start, end, groups) for way in ways)), None):
        return found
    last = _whole(text, groups, 7, 15)
    if last is None:
        return None
    parted, opened = text[start] == "0" or last > groups[0][1], _opens_with(text, start, last)
    begin = start - (opened or text[start - 1 : start] == "+")
    if _is_announced(text, start, last, parted):
        return None if _DATE.match(text, start) else (begin, last)
    if last != end:
        return None
    if _is_explained(text, start, end, parted):
        return (begin, end)
    return (start - opened, end) if parted and len(groups) < 7 and _near_a_word(text, start, end) else None


def _after_a_plus(text: str, start: int, end: int, groups: list[tuple[int, int]]) -> tuple[int, int] | None:
    """A number with a country code after a plus."""
    if text[start - 1 : start] not in ("+", "(") or text[start] == "0":
        return None
    if (plus := _PLUS.match(text, max(start - 64, 0), start)) is None:
        return None
    # A trunk prefix in parentheses is not one of the fifteen digits of E.164.
    last = _whole(text, groups, 8, 15 + ("(0" in text[start : start + 6]))
    if last is None or (_DECIMAL.fullmatch(text, start, last) and not is_international(_digits(text, start, last))):
        return None
    return (start - len(plus.group()) + (plus.group() == "(+" and ")" not in text[start:last]), last)


def _is_announced(text: str, start: int, last: int, parted: bool) -> bool:
    """Whether words before a number announce a telephone number. Some words do so only if its groups are `parted`."""
    low = max(start - 64, 0)
    if cues.PHONE.match(text, low, start):
        return True
    if not parted or _DECIMAL.fullmatch(text, start, last) or _any_at(text, start, _YEARS, _HOST):
        return False
    return cues.MAYBE.match(text, low, start) is not None


def _is_explained(text: str, start: int, end: int, parted: bool) -> bool:
    """Whether words after a number say that it is a telephone number. Some count only if its groups are `parted`."""
    found = cues.AFTER.match(text, end) or (parted and cues.AFTER_MAYBE.match(text, end))
    if not found or _CUT_AFTER.match(text, end):
        return False
    return not _any_at(text, start, _DATE, _YEARS)


def _any_at(text: str, at: int, *patterns: regex.Pattern[str]) -> bool:
    """Whether one of `patterns` begins at a place."""
    return any(pattern.match(text, at) for pattern in patterns)


def _opens_with(text: str, start: int, end: int) -> bool:
    """Whether a parenthesis opens just before a number, and closes in it."""
    return text[start - 1 : start] == "(" and ")" in text[start:end]


def _near_a_word(text: str, start: int, end: int) -> bool:
    """Whether a number in the groups of some country has a word about telephones near it on its line."""
    shown = text[start:end]
    # Seven digits may be a local number, but also anything else.
    if len(shown) < 9 or not _HOME.match(text, start) or _any_at(text, end, _ROW, _DUMP, _CUT_AFTER):
        return False
    before, after = text[max(start - 48, 0) : start].rsplit("\n", 1)[-1], text[end : end + 40].split("\n", 1)[0]
    if not (cues.NEAR.search(before) or cues.NEAR.search(after)):
        return False
    return is_written_at_home("(" + shown if ")" in shown else shown, bare=True)


def _from_abroad(text: str, start: int, end: int, groups: list[tuple[int, int]]) -> tuple[int, int] | None:
    """A number in use after the digits dialled to leave a country: 00, 011, 0011 or 010."""
    prefix = _ABROAD.match(text, start) if text[start] == "0" else None
    last = _whole(text, groups, 10, 19) if prefix else None
    if prefix is None or last is None:
        return None
    if not is_international(_digits(text, prefix.end() - 1, last)):
        return None
    return (start - _opens_with(text, start, last), last)


def _from_home(text: str, start: int, end: int, groups: list[tuple[int, int]]) -> tuple[int, int] | None:
    """A number in the groups of a country, if the run holds nothing else."""
    opened = _opens_with(text, start, end)
    trunk = text[start] in "08" and not text.startswith("0", start + 1)
    american = _AMERICAN.fullmatch(text, start, end)
    if not (opened or trunk or american) or not 1 < len(groups) < 7:
        return None
    first = start - opened
    if _whole(text, groups, 8, 14) != end or not _HOME.match(text, first):
        return None
    if _any_at(text, end, _ROW, _CUT_AFTER, _JOINED):
        return None
    return (first, end) if american or is_written_at_home(text[first:end]) else None


def _extended(text: str, last: int) -> int:
    extension = cues.EXTENSION.match(text, last)
    return extension.end() if extension else last


def _digits(text: str, start: int, end: int) -> str:
    return "".join(_GROUP.findall(text, start, end))


def _whole(text: str, groups: list[tuple[int, int]], low: int, high: int) -> int | None:
    """The end of the leading whole groups of digits that have `low` to `high` digits in all."""
    digits, last = 0, None
    for first, end in groups:
        digits += end - first
        if digits > high:
            break
        if digits >= low:
            last = end
    if last and text[last : last + 1].isalnum() and not cues.EXTENSION.match(text, last):
        return None
    return last


def _is_card(text: str, start: int, end: int) -> bool:
    digits = _digits(text, start, end)
    # Luhn's sum.
    doubled = (int(digit) * (1 + place % 2) for place, digit in enumerate(reversed(digits)))
    if sum(number - 9 * (number > 9) for number in doubled) % 10:
        return False
    if _ISSUER.fullmatch(digits) or (end - start > len(digits) and _MAESTRO.fullmatch(digits)):
        return True
    return bool(_ANY_ISSUER.fullmatch(digits) and cues.CARD.search(text, max(start - 40, 0), start))


def is_international(digits: str) -> bool:
    """Whether `digits`, a country code and what follows it, are a number that may be in use."""
    return _valid("+" + digits, None) is not None


@lru_cache(1 << 14)
def is_written_at_home(text: str, bare: bool = False) -> bool:
    """Whether the whole of `text` is a number with its trunk prefix or area code, in the groups of its country.

    With `bare`, also numbers that have neither; their groups are weak evidence. Groups may have any separators. A text
    of more than 24 characters is not a number.
    """
    plain = re.sub("[^0-9()]+", " ", text)
    groups = _groups(plain) if len(text) <= 24 else []
    for country in COUNTRIES:
        if not _is_likely("".join(groups), country) or not (number := _valid(plain, country)):
            continue
        home = phonenumbers.format_number(number, PhoneNumberFormat.NATIONAL)
        significant = phonenumbers.national_significant_number(number)
        prefixed = significant[0] == "0" or "".join(_groups(home)) != significant
        if _groups(home) == groups and (bare or prefixed or ("(" in home and "(" in text)):
            return True
        abroad = phonenumbers.format_number(number, PhoneNumberFormat.INTERNATIONAL)
        if bare and _groups(abroad)[1:] == groups:
            return True
    return False


def _is_likely(digits: str, country: str) -> bool:
    """Whether digits may be a number of a country: a fast check before the library's, which needs 30 times as long."""
    metadata: Any = PhoneMetadata.metadata_for_region(country)
    short = digits.removeprefix(metadata.national_prefix or "")
    pattern = re.compile(metadata.general_desc.national_number_pattern)
    # In some countries numbers have other digits at home.
    return bool(metadata.national_prefix_transform_rule or pattern.fullmatch(digits) or pattern.fullmatch(short))


def _valid(text: str, country: str | None) -> phonenumbers.PhoneNumber | None:
    """The number in use that a text is in a country, if it is one."""
    try:
        number = phonenumbers.parse(text, country)
    except phonenumbers.NumberParseException:
        return None
    return number if phonenumbers.is_valid_number(number) else None


def _groups(text: str) -> list[str]:
    return re.findall("[0-9]+", text)
