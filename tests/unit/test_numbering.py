"""What the anonymizer finds beyond the labelled texts: numbers of many countries, other words, hostile repetition."""

import time
from collections import Counter
from itertools import islice

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from demix.data import cues
from demix.data.anonymize import CATEGORIES, anonymize
from demix.data.dialling import COUNTRIES, is_written_at_home
from support.numbering import AFTER, BEFORE, EXTENSIONS, every_country, sentences, written
from support.unseen import unseen

NUMBERS = list(every_country())
TOLD = [number for country in COUNTRIES for how, number in written(country) if how not in ("cue", "extension")]
# The numbers that need no word beside them. Dates and bytes look like the few others.
ALONE = [number for number in TOLD if anonymize(f"x {number} y")[0] == "x <PHONE_NUMBER> y"]
WORDS = st.text("abcdefghijklmnopqrstuvwxyzé ,;", max_size=30)


@pytest.mark.parametrize("country", COUNTRIES)
def test_numbers_of_each_country_in_every_way_they_are_written(country):
    cases = list(sentences(country))
    found = [anonymize(text)[0] == text.replace(number, "<PHONE_NUMBER>") for _, text, number in cases]
    assert sum(found) / len(cases) >= 0.95, [case for case, right in zip(cases, found, strict=True) if not right]


def test_numbers_cards_and_addresses_beside_words_of_many_kinds_of_text():
    cases, found = Counter(), Counter()
    for case in islice(unseen(known=("DE", "ES", "GB", "RU", "US")), 0, None, 3):
        cases[case.kind] += 1
        found[case.kind] += anonymize(case.text)[0] == case.wanted
    assert cases.total() > 500
    assert {kind: found[kind] / cases[kind] for kind in cases if found[kind] < 0.9 * cases[kind]} == {}


def test_nearly_every_number_is_told_by_its_form():
    assert len(ALONE) > 0.995 * len(TOLD), {*TOLD} - {*ALONE}


@settings(deadline=None)
@given(st.sampled_from(ALONE), WORDS, WORDS)
def test_a_number_in_any_prose_goes_whole(number, before, after):
    text = f"{before}x {number} y{after}"
    assert anonymize(text) == (
        text.replace(number, "<PHONE_NUMBER>"),
        dict.fromkeys(CATEGORIES, 0) | {"PHONE_NUMBER": 1},
    )


RUNNING_INTO_ANOTHER = [
    "+97122345678" * 6,
    "<PHONE_NUMBER> 2015550123",
    "+41–21–234–56–78a@b.example",
    "+1234567 44 800 123 4567a@b.example",
    "011 61 412 345 678(07400–123456",
    "+353\u202f22\u202f12345-m.facebook.com/profile.php?id=100001234",
    "+541123456789(0032) 450 00 12 34",
    "see 1234567890-" + "0aF" * 17 + "12.J.Smith@example.com",
]
BETWEEN = st.sampled_from(["", " ", "-", "/", "\n", ", ", ") ("]) | WORDS.map("{}\n".format)
SENTENCES = st.lists(st.sampled_from([text for _, _, text, _ in NUMBERS]), min_size=1, max_size=4)
SIDE_BY_SIDE = st.lists(
    st.sampled_from(TOLD + list(EXTENSIONS + BEFORE + AFTER)) | st.text("0123456789 -+()@./", max_size=9)
)


def refuse_another_time(text: str) -> None:
    """An assertion that the anonymized text stays as it is, and that each match became one token."""
    once, counts = anonymize(text)
    assert anonymize(once) == (once, dict.fromkeys(CATEGORIES, 0))
    told, before = (Counter(regex.findall("<(" + "|".join(CATEGORIES) + ")>", some)) for some in (once, text))
    assert told - before == Counter(counts) - Counter()


@settings(deadline=None, max_examples=200)
@given(st.builds(str.join, BETWEEN, SENTENCES) | SIDE_BY_SIDE.map("".join))
def test_twice_is_once(text):
    refuse_another_time(text)


@pytest.mark.parametrize("text", RUNNING_INTO_ANOTHER)
def test_twice_is_once_where_one_runs_into_another(text):
    refuse_another_time(text)


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                *BEFORE,
                "no ",
                "call ",
                "it ",
                "to ",
                "x: ",
                "T:",
                "number's",
                "ph ",
                "help desk ",
                "voice mail ",
                "hit me up ",
            ]
        ),
        max_size=4,
    )
)
def test_the_quick_look_before_a_cue_misses_none(pieces):
    before = "".join(pieces)[-64:]
    for cue in (cues.PHONE, cues.MAYBE):
        assert cues.may_hold(before) or cue.match(before, 0, len(before)) is None
    assert cues.may_hold(before) or cues.NEAR.search(before) is None


NEAR = [
    "You can text {} any time.",
    "Emergency contact {}",
    "she gave me {} as her mobile",
    "Try {} instead, that's her landline.",
    "Our helpdesk ({}) is open",
    "<tel>{}</tel>",
    "llámame al {}",
]


@pytest.mark.parametrize("sentence", NEAR)
def test_a_bare_number_near_a_word_about_telephones(sentence):
    for number in ("512 345 678", "91 234 56 78", "612 34 56 78", "32 12 34 56"):
        assert anonymize(sentence.format(number))[0] == sentence.format("<PHONE_NUMBER>")
    # Not in the groups of any country, or bytes of a dump.
    for other in ("5 1 2 3 4 5 6 7 8", "12 34567 1", "85 10 00 00 ff call") if sentence in NEAR[:4] else ():
        assert anonymize(sentence.format(other))[0] == sentence.format(other)


def test_groups_of_a_country_are_known_and_others_are_not():
    for text in ("020 7946 0958", "8 (301) 123-45-67", "(06 1) 234 5678", "(0212) 345 67 89", "(11) 96123-4567"):
        assert is_written_at_home(text), text
    for text in ("0000 1234 567", "020 79460 958", "2020 7946 0958", "(2003) 125-130", "0" * 5000):
        assert not is_written_at_home(text), text


OTHER_WORDS = [
    ("see _jane.doe@example.org_ or __j@x.example__", "see _<EMAIL>_ or __<EMAIL>__"),
    ('to "jane doe"@example.org, "x y"', 'to <EMAIL>, "x y"'),
    ("**@janedoe** *@jane.d* _@jane_", "**<USER>** *<USER>* _<USER>_"),
    ("* @octocat made this\n  * @hub too", "* <USER> made this\n  * <USER> too"),
    ("@janedoe\nclass is cancelled", "<USER>\nclass is cancelled"),
    ("@janedoe\npublic holidays are near", "<USER>\npublic holidays are near"),
    ("@janedoe\nfun was had (a lot)", "<USER>\nfun was had (a lot)"),
    ("facebook.com/groups/cats.now/user/100001234/", "<FB_USERID>/"),
    ("(0044) 20 7946 0958", "<PHONE_NUMBER>"),
    ("00442079460958", "<PHONE_NUMBER>"),
    ("tel:+44-20-7946-0958;ext=12", "tel:<PHONE_NUMBER>"),
    ("+1.2015550123", "<PHONE_NUMBER>"),
    ("card 6762 3456 7896 and 676234567896", "card <CREDIT_CARD_NUMBER> and <CREDIT_CARD_NUMBER>"),
    ("Visa 4111\u00a01111\u00a01111\u00a01111", "Visa <CREDIT_CARD_NUMBER>"),
    ("4111\u20111111\u20111111\u20111111", "<CREDIT_CARD_NUMBER>"),
    ("Sent from my phone (91 234 56 78)", "Sent from my phone (<PHONE_NUMBER>)"),
    ("460\u201189\u20119847", "<SSN>"),
    ('{"ssn": "460 89 9847"}', '{"ssn": "<SSN>"}'),
    ('{"homePhone": "2015550123"}', '{"homePhone": "<PHONE_NUMBER>"}'),
    ("<td>Telephone</td><td>212 343 301</td>", "<td>Telephone</td><td><PHONE_NUMBER></td>"),
    ("<b>Tel</b>: 2015550123", "<b>Tel</b>: <PHONE_NUMBER>"),
    ('print("Phone:", "2015550123")', 'print("Phone:", "<PHONE_NUMBER>")'),
    ("TEL;TYPE=CELL:2015550123", "TEL;TYPE=CELL:<PHONE_NUMBER>"),
    ("☎ 212 343 301, 电话:212343301", "☎ <PHONE_NUMBER>, 电话:<PHONE_NUMBER>"),
    ("Helpline 212348631 (24 hours)", "Helpline <PHONE_NUMBER> (24 hours)"),
    ("tel 020 7946 0958 (ext. 7)", "tel <PHONE_NUMBER>"),
    ("Phone: 030 122359 / 01512 3454252", "Phone: <PHONE_NUMBER> / <PHONE_NUMBER>"),
    ("Tel. 212 343 301, 212 343 302 or 212 343 303", "Tel. <PHONE_NUMBER>, <PHONE_NUMBER> or <PHONE_NUMBER>"),
    ("(06 1) 234 5678 / 0041 78 123 46 36", "<PHONE_NUMBER> / <PHONE_NUMBER>"),
    ("02079460958 – Telephone", "<PHONE_NUMBER> – Telephone"),
    ("6763 1234 51004 and 30951234561007", "<CREDIT_CARD_NUMBER> and <CREDIT_CARD_NUMBER>"),
]
NO_DATA = [
    "git@github.com:owner/name.git",
    "ssh://git@example.org/name",
    '{"@type": "Person", "@id": 3}',
    "@echo off\ncd x",
    "\t@echo done",
    "+1.5000000000",
    "at +40.712776, -74.005974",
    "T: 1234567 steps",
    "c. 1900–1910",
    "F: 2003 2004",
    "DE89 3704 0044 0532 0130 00 and GB29 NWBK 6016 1331 9268 19",
    "FR14 2004 1010 0505 0001 3M02 606",
    "2: 85 10 00 00 ff ff call -1",
    "P-t-P:192.168.255.1  Mask",
    "FI21 4111 1111 1111 1111",
    "Boston, MA  02110-1301",
    "@cached\nclass Foo(Bar):",
    "@Inject\nprivate final Foo foo;",
    "@Test\nfun foo() {",
    "/**\n * @octocat x\n */",
    "* @param x",
    "08-12-34-56",
    "1234567 is the number of users",
    # A local number without an area code, far from the word.
    "Princess phone, 962-7873?",
    "Date: Tue Nov 17 12:10:01 2009 -0500",
    "WebText 13.8 14.6 14.3",
    "32CA\t<compat> 0031 0031 6708\n32CB\t<compat> 0031 0032 6708",
    "[*0328.0020.0004][.A48C.0020.0004]",
    "56DC 5661 5662 5663 5664 5665",
    "ISBN 0-312-10409-X (pbk.)",
    "octal number > 037777777777 non-portable",
    "of a)-5.616 F .31 (do not ph) 103.66 582",
    "{274177: 1, 67280421310721: 1}",
    "     *  @stable ICU 4.8\n     */",
    "    * @realms -> [list]\n    * @access_token",
    "| 2001 | 1234567 | 7654321 |",
    "x = [1000000, 2000000, 0123456]",
    "line 1234567",
    "rows 1 200 300 to 4 500 600",
]


@pytest.mark.parametrize(("text", "expected"), OTHER_WORDS)
def test_other_words_and_places(text, expected):
    assert anonymize(text)[0] == expected


@pytest.mark.parametrize("text", NO_DATA)
def test_nobodys_data_stays(text):
    assert anonymize(text)[0] == text


FAMILIES = [
    "@ab-",
    "+442079460958-",
    "a.",
    "a@a.",
    "x@a.b",
    "_",
    "_a@",
    '"',
    '"a',
    '@"',
    "@a_",
    "\n* @a",
    "**@ab",
    "(+",
    "(0",
    "0(",
    "1 ",
    "1.",
    "1-2/",
    "00",
    "001 ",
    "011 44 ",
    "4111 1111 ",
    "4111-",
    "(06 1) ",
    "8 (301) ",
    "DE89 ",
    "DE89 3704 ",
    "AB12-",
    "tel ",
    "call a ",
    "x1",
    "5551234 ext ",
    "5551234x",
    "is my number ",
    "+1.5 ",
    "fb.com/a.",
    "facebook.com/groups/",
    "@[1:1:a",
    "git@a.b:",
    "<USER>",
    "<SSN>-",
    "123-45-",
    "\u20111",
    "@a\nclass ",
    "@a\n",
    " \n",
    "public a ",
    "a",
    "1",
    "1-",
    "(",
    "[",
    "@[1:1:",
    "@",
    "a@",
    "a..",
    "@a.",
    "facebook.com/",
    "phone 5551234 ",
    "1-800-555-1234-",
    "(905) 674-3793",
    "0044 20 7946 0958 ",
    "205 555 1234 ",
    "4111 ",
    "\n@a",
    "@ab\n",
    "x@y.com",
    "@[1:1:\\]",
    "123-45-6789-",
    "+1",
    "a%+",
    "phone ",
]
# What stands once before the repetition: a repetition may be harmless by itself.
ONCE = {"a.": "x@", "-": "@ab"}


@pytest.mark.parametrize("unit", FAMILIES)
def test_time_is_linear_in_repetition(unit):
    def seconds(size):
        text = ONCE.get(unit, "") + (unit * (size // len(unit) + 1))[:size]
        times = []
        for _ in range(2):
            start = time.process_time()
            anonymize(text)
            times.append(time.process_time() - start)
        return min(times)

    # Sixteen times the text takes sixteen times as long, or 256 times where time is quadratic.
    assert seconds(64_000) < 60 * max(seconds(4_000), 0.002)
