"""Texts with personal data to measure the anonymizer on, made without a look at its words and patterns.

Telephones are the `phonenumbers` package's examples, payment cards come from ranges of issuers. In a
template ⟦…⟧ marks what is to be replaced.
"""

import random
import re
import tomllib
from collections.abc import Collection, Iterator
from itertools import pairwise
from pathlib import Path

from demix.data.numbers import COUNTRIES
from support.numbering import written

_TEMPLATES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
# By issuer: prefixes, lengths, groupings.
CARDS: dict[str, tuple[list[str], list[int], list[str]]] = _TEMPLATES["cards"]


def _templates(name: str) -> list[str]:
    text: str = _TEMPLATES[name]
    return text.split("\n")


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
    home, abroad = (
        {country: [number for how, number in written(country) if how in ways] for country in known}
        for ways in (("cue",), ("international", "dialled"))
    )

    def phones(kind: str, templates: list[str], countries: list[str]) -> Iterator[tuple[str, str, str]]:
        for template in templates:
            for country in countries if template else ():
                if country not in known:
                    continue
                fill = {name: draw.choice(home[country]) for name in ("n", "n2")}
                fill |= {name: draw.choice(abroad[country]) for name in ("i", "i2")}
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
