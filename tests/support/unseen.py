"""Texts with personal data to measure the anonymizer on, made without a look at its words and patterns.

Numbers come from the rules of numbering: the `phonenumbers` package's example numbers of 64 countries with other last
digits, and payment cards from ranges of issuers. In a template ⟦…⟧ marks what is to be replaced.
"""

import random
import re
import tomllib
from collections.abc import Collection, Iterator
from itertools import cycle, pairwise
from pathlib import Path

import phonenumbers
from phonenumbers import PhoneNumber, PhoneNumberFormat, PhoneNumberType

from demix.data.dialling import COUNTRIES

TYPES = (PhoneNumberType.FIXED_LINE, PhoneNumberType.MOBILE)

_TEMPLATES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
# By issuer: prefixes, lengths, groupings.
CARDS: dict[str, tuple[list[str], list[int], list[str]]] = _TEMPLATES["cards"]


def _templates(name: str) -> list[str]:
    text: str = _TEMPLATES[name]
    return text.split("\n")


def telephones(country: str, draw: random.Random) -> Iterator[PhoneNumber]:
    """Valid numbers of a country, its examples with other last digits, fixed and mobile in turn."""
    for kind in cycle(TYPES):
        example = phonenumbers.example_number_for_type(country, kind)
        digits = phonenumbers.national_significant_number(example)
        for _ in range(50):
            other = phonenumbers.parse(f"+{example.country_code}{digits[:-4]}{draw.randrange(10**4):04}")
            if phonenumbers.is_valid_number(other):
                example = other
                break
        yield example


def at_home(number: PhoneNumber, draw: random.Random) -> str:
    """A number as it is written in its own country."""
    national = phonenumbers.format_number(number, PhoneNumberFormat.NATIONAL)
    parted = re.sub(r"\D+", " ", national).strip()
    return draw.choice(
        [national] * 4
        + [parted, parted.replace(" ", "-"), parted.replace(" ", "."), re.sub(r"\D", "", national)]
        + [re.sub("[ -]", draw.choice("\u00a0\u2013\u2011"), national), national.replace(" ", "-", 1)]
    )


def abroad(number: PhoneNumber, draw: random.Random) -> str:
    """A number with its country code."""
    shown = phonenumbers.format_number(number, PhoneNumberFormat.INTERNATIONAL)
    code, rest = shown.split(" ", 1)
    trunk = phonenumbers.PhoneMetadata.metadata_for_region(
        phonenumbers.region_code_for_number(number) or "US"
    ).national_prefix
    ways = [shown, shown, phonenumbers.format_number(number, PhoneNumberFormat.E164), shown.replace("-", " ")]
    ways += [shown.replace(" ", sign) for sign in (".", "-", "\u00a0")]
    ways += [re.sub("[ -]", sign, shown) for sign in ("\u2013", "\u2011")]
    ways += [
        f"00{code[1:]} {rest}",
        f"00 {code[1:]} {rest}",
        f"(00{code[1:]}) {rest}",
        f"({code}) {rest}",
        f"{code}-{rest}",
    ]
    if trunk == "0":
        ways += [f"{code} (0){rest}", f"{code} (0) {rest}", f"{code}(0){rest}"]
    return draw.choice(ways)


def card(prefix: str, length: int, draw: random.Random) -> str:
    digits = prefix + "".join(str(draw.randrange(10)) for _ in range(length - len(prefix) - 1))
    total = sum(int(d) if place % 2 else sum(divmod(2 * int(d), 10)) for place, d in enumerate(reversed(digits)))
    return digits + str(-total % 10)


def _grouped(digits: str, draw: random.Random, groupings: list[str]) -> str:
    fitting = [g for g in groupings if sum(map(int, g.split())) == len(digits)]
    if not fitting or draw.random() < 0.3:
        return digits
    parts, sign = draw.choice(fitting).split(), draw.choice("  -\u00a0\u2011\u2013")
    edges = [sum(map(int, parts[:place])) for place in range(len(parts) + 1)]
    return sign.join(digits[low:high] for low, high in pairwise(edges))


def _cases(template: str, fill: dict[str, str], category: str) -> tuple[str, str]:
    """The text and what it becomes: letters n, i, c and s that stand alone, or first, in a mark are filled."""

    def value(match: re.Match[str]) -> str:
        inside = match[1]
        name = re.match(r"(n2?|i2?|c|s)(?=x\d|[^a-z]|$)", inside) if fill else None
        return fill[name[1]] + inside[name.end() :] if name else inside

    template = template.replace("¶", "\n").replace("→", "\t")
    return re.sub("⟦(.+?)⟧", value, template), re.sub("⟦(.+?)⟧", f"<{category}>", template)


def unseen(known: Collection[str], seed: int = 1) -> Iterator[tuple[str, str, str]]:
    """(kind, text, what it becomes): all cases, with the telephones of the `known` countries."""
    draw = random.Random(seed)
    streams = {country: telephones(country, draw) for country in known}

    def phones(kind: str, templates: list[str], countries: list[str]) -> Iterator[tuple[str, str, str]]:
        for template in templates:
            for country in countries if template else ():
                if country not in known:
                    continue
                first, second = next(streams[country]), next(streams[country])
                fill = {"n": at_home(first, draw), "n2": at_home(second, draw)}
                fill |= {"i": abroad(first, draw), "i2": abroad(second, draw)}
                yield kind, *_cases(template, fill, "PHONE_NUMBER")

    for kind in ("before", "after", "records", "plain", "extended"):
        yield from phones(kind, _templates(kind), COUNTRIES)
    for countries, templates in _TEMPLATES["languages"].items():
        for _ in range(3):
            yield from phones("other language", templates.split("\n"), countries.split())
    for template in _templates("card_texts"):
        for prefixes, lengths, groupings in CARDS.values():
            for _ in range(3):
                number = card(draw.choice(prefixes), draw.choice(lengths), draw)
                yield "card", *_cases(template, {"c": _grouped(number, draw, groupings)}, "CREDIT_CARD_NUMBER")
    for template in _templates("ssns"):
        for sign in "-- \u2013\u2011.":
            area = draw.choice([*range(1, 666), *range(667, 900)])
            number = f"{area:03}{sign}{draw.randrange(1, 100):02}{sign}{draw.randrange(1, 10000):04}"
            yield "SSN", *_cases(template, {"s": number}, "SSN")
    for category, name in (("EMAIL", "mails"), ("USER", "users"), ("FB_USERID", "facebook")):
        for template in _templates(name):
            yield category, *_cases(template, {}, category)
