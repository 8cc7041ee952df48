"""Telephone numbers by the rules of numbering, from the metadata of the `phonenumbers` package.

The package (Google's libphonenumber) holds, by country, which digits form a number, the trunk prefix that is dialled
before it at home, and the groups in which it is written.
"""

from functools import cache
from typing import Any

import phonenumbers
import regex
from phonenumbers import PhoneMetadata

# Countries whose numbers are known as written at home: after a trunk prefix, or with an area code in parentheses.
COUNTRIES = (
    "AR", "AT", "AU", "BE", "BR", "CH", "CN", "CZ", "DE", "DK", "ES", "FI", "FR", "GB", "GR", "HU", "IE", "IL", "IN",
    "IT", "JP", "KR", "MX", "NL", "NO", "NZ", "PL", "PT", "RU", "SE", "TR", "UA", "US", "ZA",
)  # fmt: skip
_PIECE = regex.compile(r"\\[1-9]|[0-9()]|[^0-9()\\]++")
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
    return _forms(bare).fullmatch(f"{digits} {groups}") is not None


@cache
def _forms(bare: bool) -> regex.Pattern[str]:
    forms: dict[str, None] = {}
    for country in COUNTRIES:
        metadata: Any = PhoneMetadata.metadata_for_region(country)
        for form in metadata.number_format:
            if pattern := _form(form, metadata.general_desc.national_number_pattern, bare):
                forms[pattern] = None
    return regex.compile("|".join(forms))


def _form(form: Any, national: str, bare: bool) -> str | None:
    """A pattern for one way to write numbers: all digits, a space and the groups; None where nothing tells a phone."""
    rule = form.national_prefix_formatting_rule or r"\1"
    prefix = "".join(filter(str.isdigit, rule.replace(r"\1", "")))
    leading = form.leading_digits_pattern[-1] if form.leading_digits_pattern else ""
    if not bare and not prefix and "(" not in rule and not leading.startswith("0"):
        return None
    groups = _GROUP.findall(form.pattern)
    # Parentheses around an area code after a trunk prefix are a matter of taste.
    taste = "?" if prefix else ""
    written = ""
    for piece in _PIECE.findall(form.format.replace(r"\1", rule, 1)):
        if piece[0] == "\\":
            if int(piece[1]) > len(groups):
                return None
            written += groups[int(piece[1]) - 1]
        elif piece in "()":
            written += f"\\{piece}{taste}"
        else:
            written += piece if piece.isdigit() else " "
    return f"{prefix}(?={leading})(?:{national}) {written}"
