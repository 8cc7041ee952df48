"""Telephone numbers by the rules of numbering, from the metadata of the `phonenumbers` package.

The package (Google's libphonenumber) holds, by country, which digits form a number, the trunk prefix that is dialled
before it at home, and the groups in which it is written.
"""

import re
from functools import lru_cache
from typing import Any

import phonenumbers
from phonenumbers import PhoneMetadata, PhoneNumberFormat

# Countries whose numbers are known as written at home: after a trunk prefix, or with an area code in parentheses.
_NAMES = """
AE AR AT AU BD BE BG BR CA CH CL CN CO CZ DE DK EE EG ES FI FR GB GR HK HR HU ID IE IL IN IS IT JP KE KR LT LU LV MA MX
MY NG NL NO NZ PE PH PK PL PT RO RS RU SA SE SG SI SK TH TR UA US VN ZA
"""
COUNTRIES = tuple(_NAMES.split())


def is_international(digits: str) -> bool:
    """Whether `digits`, a country code and what follows it, are a number that may be in use."""
    return _valid("+" + digits, None) is not None


@lru_cache(1 << 14)
def is_written_at_home(text: str, bare: bool = False) -> bool:
    """Whether the whole of `text` is a number with its trunk prefix or area code, in the groups of its country.

    With `bare` also numbers that have neither, whose groups say little. Any separators may part the groups.
    Text of more than 24 characters is not a number.
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
    """Whether digits may be a number of a country, a quick look before the library's, which needs 30 times as long."""
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
