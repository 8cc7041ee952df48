"""Words beside a number that tell what it is, in the languages of the countries whose numbers are known.

Each pattern that ends where a number starts is read backwards (`(?r)`), so that it fails at the first character that
no cue ends in. None is longer than 60 characters.
"""

import re

import regex

_DEVICE = (
    "(?:tele|smart)?phones?|mobiles?|cell(?:phone)?|telefax|fax|tel|telephones?|whatsapp|viber|sms|hotline|helpline"
    "|landline|reception|voicemail|pager|switchboard|handy|telefono|teléfono|telefone|téléphone|telefon|telefonnummer|telefoon"
    "|puhelin|puh|tlf|tfno|tél|móvil|celular|gsm|portable|телефон|тел|моб|τηλ|τηλέφωνο|電話|电话|手机|전화"
)
_WHOSE = "my|his|her|its|your|our|their"
_PLACE = "home|work|office|desk|direct|contact|emergency|business|daytime|evening|personal|private|customer service"
_BETWEEN = r"""(?:[ \u00a0]?[.:#=|\u2013\u2014]{1,2}|[ ]-(?=[ ]))?[*_]{0,2}\s{0,4}[*_"'\[]{0,2}\+?\(?\+?"""

# After these any groups of digits are a telephone number.
PHONE = regex.compile(
    rf"(?r)\b(?:(?:(?:{_DEVICE})(?: ?(?:numbers?|no\.?|nr\.?|num\.?|line|#))?"
    r"(?:,? (?:is|at|on|was|under|below|above|follows)){0,2}(?: now)?"
    r"|(?:call|dial)(?: \w{1,12}){0,2}|(?:ring|phone|text|fax|reach|message|contact|buzz)(?: \w{1,12}){1,3} (?:on|at)"
    r"|(?:a|me|us) (?:call|ring|bell|buzz|shout|text|message|line) (?:on|at)"
    rf"|(?:{_WHOSE}) (?:(?:new|old|other|{_PLACE}) ){{0,2}}number(?:'s| is| was)|ph)"
    rf"{_BETWEEN})",
    regex.IGNORECASE,
)
# After these only those in more than one group or with a leading 0.
MAYBE = regex.compile(
    rf"(?r)\b(?:(?:{_PLACE}|direct line|line|mob|cel|contacts?)(?: (?:numbers?|no\.?|is))?[.:#]"
    r"|(?:get|got|speak|spoke|talk|reach(?:ed|able)?|available|dial(?:l?ed)?|called|rang|phoned|texted|faxed|calls?|texts?"
    r"|messages?|bookings?|enquir(?:y|ies)|inquir(?:y|ies)|reservations?|appointments?|call(?:ing)?|dial(?:l?ing)?"
    r"|ring(?:ing)?|texting|phoning)(?: \w{1,12}){0,4} (?:on|at|via|to|from)"
    r"|(?:dial(?:l?ed|l?ing)?|rang|ring|phoned|texted|calling|ringing|texting)(?: \w{1,12})?"
    rf"|number(?:'s| is|:)|[tfmp](?=:)){_BETWEEN}",
    regex.IGNORECASE,
)
# And before these, which stand after it.
AFTER = regex.compile(
    rf"[)\]\"'*_]{{0,2}}(?:[ \u00a0]?[(\[](?:{_DEVICE}|mob|cel|home|work|office|direct|[tfmhw])\b"
    rf"|,? (?:is|was|will be|'s|being) (?:{_WHOSE}|the)(?: \w{{1,12}}){{0,2}} (?:numbers?|{_DEVICE}|line)\b(?! of)"
    r"|,? (?:is|was) (?:where|how|the best way) (?:\w{1,12} ){1,4}(?:reach|call|ring|phone|text)"
    r"|,? (?:to (?:reach|speak|talk|call|book)|(?:will|should|always) (?:reach|get) (?:me|us|him|her|them)"
    r"|(?:reaches|gets) (?:me|us|him|her|them))\b)",
    regex.IGNORECASE,
)
# And a number in the groups of its country, wherever one of these stands on its line near it.
NEAR = re.compile(
    rf"\b(?:{_DEVICE}|voice ?mail|help ?desk|front desk|call(?:ed|ing|s)?|dial(?:l?ed|l?ing|s)?|phon(?:ed|ing)|texted"
    r"|rang|ring|text|reach|contact|kontakt|llám\w*|llama\w*|appel\w*|anruf\w*|ruf\w*|chiam\w*|handynummer|rufnummer"
    r"|hit me up|her number|the number you)\b",
    re.IGNORECASE,
)
EXTENSION = regex.compile(
    r"[)]?(?:[ \u00a0,]{0,2}(?:x|ext(?:ension|n)?\.?|anexo|poste|durchwahl|dw\.?|доб\.?|wewn\.?)"
    r"[ \u00a0.:#]{0,2}|;ext=|[ ]#)[0-9]{1,6}(?![\w])(?![.][0-9])",
    regex.IGNORECASE,
)
SSN = regex.compile(
    r"(?r)(?:\bssns?|social security)(?: ?(?:number|no\.?|#))?(?:'s| is| was)?[\s:#=]{0,3}", regex.IGNORECASE
)
CARD = regex.compile(
    r"\b(?:cards?|visa|mastercard|maestro|amex|american express|discover|diners|cc|pan)\b", regex.IGNORECASE
)

# A quick look before PHONE and MAYBE: the last words of cues that no free word ends, and verbs that one may follow.
_OTHER = (
    "number|numbers|number's|no|nr|num|line|is|at|on|was|under|below|above|follows|now|via|to|from|ph|mob|cel|contact"
    "|contacts|t|f|m|p"
)
_LAST = frozenset(
    f"{_DEVICE}|{_PLACE}|{_OTHER}".replace("customer service", "service")
    .replace("(?:tele|smart)?phones?", "telephone|smartphone|smartphones|phone|phones")
    .replace("mobiles?", "mobile|mobiles")
    .replace("telephones?", "telephone|telephones")
    .replace("cell(?:phone)?", "cell|cellphone")
    .split("|")
)
_VERB = re.compile("call|dial|r[ia]ng|phon|text")
_LAST_WORD = regex.compile(r"(?r)[\w']{1,20}+")
_PUNCTUATION = " \u00a0\t\n.:#=|-\u2013\u2014*_\"'[+("


def may_end(before: str) -> bool:
    """Whether a cue may end `before`: false only where neither PHONE nor MAYBE matches there."""
    lower = before.lower().rstrip(_PUNCTUATION)
    if _VERB.search(lower):
        return True
    word = _LAST_WORD.match(lower, 0, len(lower))
    return word is not None and word.group().lstrip("'") in _LAST
