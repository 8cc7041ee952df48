"""The anonymizer published with the paper, a peer: its seven patterns in its order, with its dummy tokens.

demix-data, scripts/anonymize_file.py: each pattern replaces in what the one before it left, one line of the file at a
time. Not linear in the text; `demix.data.anonymize` says what is wrong with them.
"""

import re

_LOCAL = r"[a-z0-9!#$%&'*+/=?^_`{|}~-]"
_LABEL = r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
_DOMAIN = rf"(?:{_LABEL}\.)+{_LABEL}"

# By category: what the published code finds, for Python's `re` and one line, and what it puts there.
PATTERNS = {
    "EMAIL": (rf"{_LOCAL}+(?:\.{_LOCAL}+)*@{_DOMAIN}", "<|EMAIL|>"),
    "DART": (r"[0-9]{10}-[0-9A-Fa-f]{53}", "<|DART|>"),
    "FB_USERID": (r"@\[[0-9]+:[0-9]+:(?=[^\]])(?:[^:\]]*\.*)*\]", "<|FBUSERID|>"),
    "PHONE_NUMBER": (
        r"(?<![\d-])(?:\+\d{1,3}[-.\s*]?)?(?:\(?\d{3}\)?[-/.\s*]?)?\d{3}[-.\s*]?\d{4}(?![\d-])",
        "<|PHONE_NUMBER|>",
    ),
    "CREDIT_CARD_NUMBER": (
        r"4\d{12}(?:\d{3})?|(?:5[1-5]\d\d|222[1-9]|22[3-9]\d|2[3-6]\d\d|27[01]\d|2720)\d{12}|3[47]\d{13}|5019\d{12}"
        r"|3(?:0[0-5]|[68]\d)\d{11}|6(?:011|5\d\d)\d{12}|(?:2131|1800|35\d{3})\d{11}",
        "<CREDIT_CARD_NUMBER>",
    ),
    "SSN": (r"(?!000|666|9)\d{3}-(?!00)\d{2}-(?!0000)\d{4}", "<|SSN|>"),
    "USER": (r"@[a-zA-Z0-9_.-]{1,30}", "@USER"),
}


def anonymize(text: str) -> tuple[str, dict[str, int]]:
    """`text` as the published code leaves it; nothing is counted."""
    return "\n".join(map(_line, text.split("\n"))), {}


def _line(line: str) -> str:
    for pattern, replacement in PATTERNS.values():
        line = re.sub(pattern, replacement, line)
    return line
