"""Words next to a number that say what it is, in the languages of the countries whose numbers are known.

Each pattern that ends where a number starts is read backwards (`(?r)`), so that it fails at the first character that
no cue ends in. All are bounded.
"""

import tomllib
from pathlib import Path

import regex

CATEGORIES = ("EMAIL", "DART", "FB_USERID", "PHONE_NUMBER", "CREDIT_CARD_NUMBER", "SSN", "USER")

# Half-open range of characters and the category there.
Span = tuple[int, int, str]

# A dummy token is a boundary, like the text that it replaced. Otherwise each replacement could lead to another one.
TOKEN = f"<(?:{'|'.join(CATEGORIES)})>"
NUMBER_TOKEN = "<(?:PHONE_NUMBER|CREDIT_CARD_NUMBER|SSN|DART)>"

_WORDS = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))


def any_of(name: str) -> str:
    """The words of a list in words.toml, as alternatives of a regular expression."""
    return "|".join(_WORDS[name])


_DEVICE, _UNPARTED, _WHOSE, _PLACE, _INVITE = map(any_of, ("devices", "unparted", "whose", "places", "invitations"))
_NUMBER = (
    r"(?:[ ._-]?(?:numbers?|nos?|nr|num|line|nummer|número|numéro|numero|номер(?:у|а)?|číslo|kom)\.?|[ ]?[#№]"
    r"| (?:enquiries|inquiries|support|sales|orders|bookings))"
)
_TAG = r"(?:</?[a-z][^<>\n]{0,40}>\s{0,2})"
# Text that is allowed between a word and a number: closing marks, a tag's rest, a sign, tags, space, opening marks.
_BETWEEN = (
    r"""(?:\(s\)|[ ]?\([^()0-9\n]{1,20}\))?(?:;[a-z;=,-]{1,24}(?=:))?[:.]?"""
    r"""["'*_`\])}]{0,3}(?: \w{1,12}="[^"<>\n]{0,20}"){0,2}"""
    rf"""{_TAG}{{0,2}}"""
    r"""(?:(?<=["']),(?= ?["'])|[ \u00a0\t]?(?:[.:#=|>\u2013\u2014\uff1a]{1,2}|\.{3,24}:?)|[ ]-(?=[ ]))?"""
    rf"""[*_]{{0,2}}\s{{0,4}}{_TAG}{{0,3}}[*_"'`\[({{]{{0,2}}\+?\(?\+?"""
)
_SO = r"(?:,? (?:is|are|at|on|to|from|was|under|unter|below|above|follows)){0,2}(?: now)?"

# A dummy token is no cue.
_NO_TOKEN = r"(?-i:(?!PHONE_NUMBER>))"
# The start of a word, also by a capital letter within a name such as `homePhone`.
_STARTS = rf"(?:(?<![^\W_])|(?<=[a-z])(?-i:(?=[A-Z]))){_NO_TOKEN}"

# After these words, any groups of digits are a telephone number.
PHONE = regex.compile(
    rf"(?r)(?:{_STARTS}(?:(?:{_DEVICE})\.?{_NUMBER}?{_SO}"
    r"|(?:call|dial)(?: \w{1,12}){0,2}|(?:ring|phone|text|fax|reach|message|contact|buzz)(?: \w{1,12}){1,3} (?:on|at)"
    r"|(?:a|me|us) (?:call|ring|bell|buzz|shout|text|message|line) (?:on|at)"
    rf"|(?:{_WHOSE}) (?:(?:new|old|other|{_PLACE}) ){{0,2}}number(?:'s| is| was)|ph(?=[.:#\s])"
    rf"|(?:{_INVITE}){_NUMBER}?)|(?:{_UNPARTED}){_NUMBER}?){_BETWEEN}",
    regex.IGNORECASE,
)
# After these words, only digits in more than one group or with a leading 0.
MAYBE = regex.compile(
    rf"(?r)(?<![^\W_])(?:(?:{_PLACE}|direct line|line|mob|cel|hp|kom|contacts?)(?: (?:numbers?|no\.?|is))?[.:#]"
    r"|(?:get|got|speak|spoke|talk|reach(?:ed|able)?|available|dial(?:l?ed)?|called|rang|phoned|texted|faxed|calls?"
    r"|texts?|messages?|bookings?|enquir(?:y|ies)|inquir(?:y|ies)|reservations?|appointments?|call(?:ing)?"
    r"|dial(?:l?ing)?|ring(?:ing)?|texting|phoning)(?: \w{1,12}){0,4} (?:on|at|via|to|from)"
    r"|(?:dial(?:l?ed|l?ing)?|rang|ring|phoned|texted|calling|callers?|ringing|texting|txt|mob|rsvp|bookings?"
    r"|enquir(?:y|ies)|inquir(?:y|ies)|reservations?|appointments?|signal|telegram|after hours)(?: \w{1,12})?"
    rf"|number(?:'s| is|:)|[tfmp](?=:)){_BETWEEN}",
    regex.IGNORECASE,
)
# Any groups of digits before these words.
AFTER = regex.compile(
    rf"[)\]\"'*_]{{0,2}}(?:[ \u00a0]?[(\[](?:(?:{_PLACE}) )?(?:{_DEVICE}|mob|cel|home|work|office|direct|[tfmhw])\b"
    rf"|,? (?:is|was|will be|'s|being) (?:{_WHOSE}|the)(?: \w{{1,12}}){{0,2}} (?:numbers?|{_DEVICE}|line)\b(?! of)"
    r"|,? (?:is|was) (?:where|how|the best way) (?:\w{1,12} ){1,4}(?:reach|call|ring|phone|text)"
    r"|,? (?:to (?:reach|speak|talk|call|book)|(?:will|should|always) (?:reach|get) (?:me|us|him|her|them)"
    r"|(?:reaches|gets) (?:me|us|him|her|them))\b)",
    regex.IGNORECASE,
)
# Before these words, only digits in more than one group or with a leading 0.
AFTER_MAYBE = regex.compile(
    r"[)\]\"'*_]{0,2}(?:[ ]?[,(\u2013\u2014-][ ]?(?:please |pls )?(?:call|phone|ring|text|txt|dial|whatsapp|ask for)\b"
    rf"|(?:[ ]?[\u2013\u2014,-]|[ ]<-{{1,2}})?[ ](?:(?:{_WHOSE}) )?(?:{_DEVICE})\b(?=[ ]?(?:[.,;)\]|\n]|$)))",
    regex.IGNORECASE,
)
# A number in the groups of its country, if one of these words is near it on the same line.
NEAR = regex.compile(
    rf"(?<![^\W_]){_NO_TOKEN}(?!portable|handy|fon\b)(?:{_DEVICE}|voice ?mail|help ?desk|front desk|call(?:ed|ing|s|er"
    r"|ers)?|dial(?:l?ed|l?ing|s)?|phon(?:ed|ing)|texted|rang|ring|text|txt|reach|contact|kontakt|llamar?|llamad[ao]s?"
    rf"|llám\w*|appels?|anrufe|ruf|ph|rsvp|bookings?|reservations?|enquir(?:y|ies)"
    rf"|hit me up|her number|the number you|{_INVITE})(?![^\W_])|{_UNPARTED}",
    regex.IGNORECASE,
)
EXTENSION = regex.compile(
    r"[ \u00a0]\((?:x|ext(?:ension|n)?\.?|durchwahl|dw\.?|доб\.?|wewn\.?)[ .:]{0,2}[0-9]{1,6}\)"
    r"|[)]?(?:[ \u00a0,]{0,2}(?:x|ext(?:ension|n)?\.?|anexo|poste|durchwahl|dw\.?|доб\.?|wewn\.?)"
    r"[ \u00a0.:#]{0,2}|;ext=|[ ]#)[0-9]{1,6}(?![\w])(?![.][0-9])",
    regex.IGNORECASE,
)
SSN = regex.compile(
    r"(?r)(?:\b(?:ssns?(?:/\w{3,4})?|ss#|soc(?:ial|\.)?[ -]sec(?:urity|\.)?))(?:[ -]?(?:number|no\.?|#))?"
    r"""(?:'s| is| was)?["']?[\s:#=]{0,3}["']?""",
    regex.IGNORECASE,
)
CARD = regex.compile(
    r"\b(?:cards?|visa|mastercard|maestro|amex|american express|discover|diners|cc|pan)\b", regex.IGNORECASE
)
