"""Telephone numbers by the rules of numbering, from the metadata of the `phonenumbers` package.

The package (Google's libphonenumber) holds, by country, which digits form a number, the trunk prefix that is dialled
before it at home, and the groups in which it is written.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import phonenumbers
import regex
from phonenumbers import PhoneMetadata

# Countries whose numbers are known as written at home: after a trunk prefix, or with an area code in parentheses.
_NAMES = """
AE AR AT AU BD BE BG BR CA CH CL CN CO CZ DE DK EE EG ES FI FR GB GR HK HR HU ID IE IL IN IS IT JP KE KR LT LU LV MA MX
MY NG NL NO NZ PE PH PK PL PT RO RS RU SA SE SG SI SK TH TR UA US VN ZA
"""
COUNTRIES = tuple(_NAMES.split())
_PIECE = regex.compile(r"\\[1-9]|[0-9()]|[^0-9()\\]++")
_PLACE = regex.compile(r"\\[1-9]")
_DIGITS = regex.compile(r"[0-9]++")
_GROUP = regex.compile(r"\(([^()]*)\)")
_SEPARATORS = regex.compile(r"[^0-9()]++")


def is_international(digits: str) -> bool:
    """Whether `digits`, a country code and what follows it, are a number that may be in use."""
    try:
        return phonenumbers.is_valid_number(phonenumbers.parse("+" + digits))
    except phonenumbers.NumberParseException:
        return False


def is_written_at_home(text: str, bare: bool = False) -> bool:
    """Whether the whole of `text` is a number with its trunk prefix or area code, in the groups of its country.

    With `bare` also numbers that have neither, whose groups alone tell little. Any separators may part the groups.
    Text of more than 24 characters is no number.
    """
    if len(text) > 24:
        return False
    digits = "".join(filter(str.isdigit, text))
    groups = _SEPARATORS.sub(" ", text.replace("(", " (").replace(")", ") ")).strip()
    size = (len(digits), len(_DIGITS.findall(text)))
    return any(
        _compiled(form.written).fullmatch(groups) and _compiled(form.leading).match(digits, form.prefix)
        for form in _forms(bare).get(size, ())
    )


_compiled = cache(regex.compile)


@dataclass(frozen=True)
class _Form:
    """A way to write numbers: its groups, the digits they start with after `prefix` digits of a trunk prefix."""

    written: str
    leading: str
    prefix: int


@cache
def _forms(bare: bool) -> dict[tuple[int, int], list[_Form]]:
    """Ways to write numbers, by the numbers of digits and of groups."""
    forms: dict[tuple[int, int], list[_Form]] = {}
    for country in COUNTRIES:
        metadata: Any = PhoneMetadata.metadata_for_region(country)
        lengths = metadata.general_desc.possible_length
        for way in metadata.number_format:
            rule = way.national_prefix_formatting_rule or r"\1"
            prefix = "".join(_DIGITS.findall(rule.replace(r"\1", "")))
            leading = way.leading_digits_pattern[-1] if way.leading_digits_pattern else ""
            # Nothing tells these from other numbers.
            if not bare and not prefix and "(" not in rule and not leading.startswith("0"):
                continue
            shown = way.format.replace(r"\1", rule, 1)
            written = _written(shown, _GROUP.findall(way.pattern), bool(prefix))
            parts = len(_DIGITS.findall(_PLACE.sub("9", shown)))
            # At home a mobile number may have other digits than abroad: 15 in Argentina.
            other = bool(_DIGITS.search(_PLACE.sub("", way.format)))
            form = _Form(written, "" if other else leading, len(prefix))
            for length in range(min(lengths), max(lengths) + 2) if other else lengths:
                forms.setdefault((length + len(prefix), parts), []).append(form)
    return forms


def _written(shown: str, groups: list[str], taste: bool) -> str:
    """A pattern for `shown`, such as `0\\1 \\2`; parentheses after a trunk prefix are a matter of taste."""
    written = ""
    for piece in _PIECE.findall(shown):
        if piece[0] == "\\":
            written += groups[int(piece[1]) - 1]
        elif piece in "()":
            written += f"\\{piece}{'?' if taste else ''}"
        else:
            written += piece if piece.isdigit() else " "
    return written
