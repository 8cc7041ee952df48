"""Example numbers of every country that the anonymizer knows, in all the ways to write them, inside prose."""

import tomllib
from collections.abc import Iterator
from pathlib import Path

import phonenumbers
from phonenumbers import PhoneNumberFormat, PhoneNumberType

from demix.data.numbers import COUNTRIES

_TEMPLATES = tomllib.loads(Path(__file__).with_name("unseen.toml").read_text(encoding="utf-8"))
KINDS = (PhoneNumberType.FIXED_LINE, PhoneNumberType.MOBILE, PhoneNumberType.TOLL_FREE)
SEPARATORS = (" ", "-", ".", "\u00a0", "\u2011", "\u2013", "\u202f")
# What stands before and after a number that has no form of its own.
BEFORE, AFTER = (tuple(_TEMPLATES[name]) for name in ("near_before", "near_after"))
FRAMES = ("It was {} that rang.", "Write or use {}; both work.", "- {}\n- nothing else", "Ana Pit, {}")
EXTENSIONS = (" ext. 45", "x45", " extension 4521", " x 7", ", ext 12", " ext.331")


def written(country: str) -> Iterator[tuple[str, str]]:
    """(how, number): each way to write each example number of a country that tells that it is a telephone's."""
    for kind in KINDS:
        number = phonenumbers.example_number_for_type(country, kind)
        if number is None:
            continue
        abroad, home, plain = (
            phonenumbers.format_number(number, form)
            for form in (PhoneNumberFormat.INTERNATIONAL, PhoneNumberFormat.NATIONAL, PhoneNumberFormat.E164)
        )
        code = f"+{number.country_code}"
        rest = abroad.removeprefix(code).strip()
        yield "international", plain
        for separator in SEPARATORS:
            yield "international", code + separator + rest.replace(" ", separator).replace("-", separator)
        yield "international", f"({code}) {rest}"
        yield "dialled", f"00{number.country_code} {rest}"
        yield "dialled", f"(00{number.country_code}) {rest}"
        yield "dialled", f"011 {number.country_code} {rest}"
        if home[0] == "0" and not home.startswith("00") and country != "IT":
            yield "international", f"{code} (0){rest}"
        # Toll-free and Italian mobile numbers have no trunk prefix; Norway's, Poland's and others' numbers never do.
        if (home[0] == "0" or "(" in home) and " 15-" not in home:
            yield "home", home
            for separator in SEPARATORS[1:]:
                if "(" not in home and separator != ".":
                    yield "home", home.replace(" ", separator).replace("-", separator)
        for extension in EXTENSIONS:
            yield "extension", abroad + extension
        yield "cue", home


def sentences(country: str) -> Iterator[tuple[str, str, str]]:
    """(how, text, number): a country's numbers in prose, bare ones with a cue beside them."""
    for place, (how, number) in enumerate(written(country)):
        if how == "cue":
            for before in BEFORE:
                yield "cue before", f"Hello. {before}{number}, as agreed.", number
            for after in AFTER:
                yield "cue after", f"As agreed, {number}{after}. Bye.", number
        else:
            yield how, FRAMES[place % 4].format(number), number


def every_country() -> Iterator[tuple[str, str, str, str]]:
    """(country, how, text, number) for all of them."""
    for country in COUNTRIES:
        for how, text, number in sentences(country):
            yield country, how, text, number
