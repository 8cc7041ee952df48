"""The dummy tokens of the paper's Table 8, and the words by which patterns know what a number or a name is."""

import tomllib
from pathlib import Path

CATEGORIES = ("EMAIL", "DART", "FB_USERID", "PHONE_NUMBER", "CREDIT_CARD_NUMBER", "SSN", "USER")

# Half-open range of characters and the category there.
Span = tuple[int, int, str]

# A dummy token bounds as the text did that it replaced: else each replacement could uncover one more, without end.
TOKEN = f"<(?:{'|'.join(CATEGORIES)})>"
NUMBER_TOKEN = "<(?:PHONE_NUMBER|CREDIT_CARD_NUMBER|SSN|DART)>"

_WORDS = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))


def any_of(name: str) -> str:
    """The words of a list in words.toml, as alternatives of a regular expression."""
    return "|".join(_WORDS[name])
