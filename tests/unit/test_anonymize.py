"""What the anonymizer replaces and leaves alone: by cases, by labelled and made texts, by rule, and in any text."""

import hashlib
import json
import re
import time
import tomllib
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from demix.data.anonymize import CATEGORIES, anonymize, anonymize_documents, cut, normalise
from demix.data.leakage import words_of
from demix.data.numbers import COUNTRIES, is_written_at_home
from demix.data.sources import SCHEMA
from demix.files import read_json
from support.numbering import AFTER, BEFORE, EXTENSIONS, every_country, sentences, written
from support.unseen import card, unseen

HERE = Path(__file__).parent
SHARED = HERE.parents[2] / "shared" / "pii" / "labelled.jsonl"
LABELLED = (SHARED if SHARED.exists() else HERE / "data" / "pii_excerpt.jsonl").read_text(encoding="utf-8")
EXAM = [json.loads(line) for line in LABELLED.split("\n")[:-1]]
CASES = tomllib.loads((HERE / "data" / "anonymize.toml").read_text(encoding="utf-8"))
TOKEN = regex.compile("<(" + "|".join(CATEGORIES) + ")>")
NONE = dict.fromkeys(CATEGORIES, 0)


def test_personal_data_is_replaced_and_what_looks_alike_is_left_alone():
    wanted = dict(CASES["replaced"] + CASES["near_words"]) | {text: text for text in CASES["kept"] + CASES["nobodys"]}
    found = {text: anonymize(text) for text in wanted}
    assert {text: changed for text, (changed, _) in found.items()} == wanted
    for text, (changed, counts) in found.items():
        assert sum(counts.values()) == len(TOKEN.findall(changed)) - len(TOKEN.findall(text))


def spans(text: str) -> set[tuple[int, int, str]]:
    """Where the original's pieces were replaced, found from the anonymized text alone."""
    pieces = TOKEN.split(anonymize(text)[0])
    pattern = regex.escape(pieces[0]) + "".join(f"(.+?){regex.escape(piece)}" for piece in pieces[2::2])
    found = regex.fullmatch(pattern, text, regex.DOTALL)
    return {(*found.span(number + 1), category) for number, category in enumerate(pieces[1::2])}


def test_recall_and_precision_on_labelled_texts():
    right, missed, false = Counter[str](), Counter[str](), Counter[str]()
    for case in EXAM:
        wanted = {(span["start"], span["end"], span["category"]) for span in case["spans"]}
        found = spans(case["text"])
        right.update(span[2] for span in wanted & found)
        missed.update(span[2] for span in wanted - found)
        false.update(span[2] for span in found - wanted)
    for category, floor in {"EMAIL": 0.95, "PHONE_NUMBER": 0.9, "CREDIT_CARD_NUMBER": 0.9, "SSN": 0.95}.items():
        assert right[category] / (right[category] + missed[category]) >= floor, category
        assert right[category] / (right[category] + false[category]) >= 0.95, category
    assert false["USER"] + false["DART"] + false["FB_USERID"] == 0


def test_recall_on_texts_of_many_kinds():
    cases, found = Counter[str](), Counter[str]()
    for kind, text, wanted in islice(unseen(known=("DE", "ES", "GB", "RU", "US")), 0, None, 3):
        cases[kind] += 1
        found[kind] += anonymize(text)[0] == wanted
    assert cases.total() > 500
    assert {kind: found[kind] / cases[kind] for kind in cases if found[kind] < 0.9 * cases[kind]} == {}


@pytest.mark.parametrize("country", COUNTRIES)
def test_numbers_of_each_country_in_every_way_they_are_written(country):
    cases = list(sentences(country))
    found = [anonymize(text)[0] == text.replace(number, "<PHONE_NUMBER>") for _, text, number in cases]
    assert sum(found) / len(cases) >= 0.95, [case for case, right in zip(cases, found, strict=True) if not right]


NUMBERS = list(every_country())
TOLD = [number for country in COUNTRIES for how, number in written(country) if how not in ("cue", "extension")]
WORDS = st.text("abcdefghijklmnopqrstuvwxyzé ,;", max_size=30)


def test_nearly_every_number_is_known_by_its_form():
    """Without a word beside it; dates and bytes look like the few others."""
    others = [number for number in TOLD if anonymize(f"x {number} y")[0] != "x <PHONE_NUMBER> y"]
    assert len(others) < 0.005 * len(TOLD), others
    for text in ("020 7946 0958", "8 (301) 123-45-67", "(06 1) 234 5678", "(0212) 345 67 89", "(11) 96123-4567"):
        assert is_written_at_home(text), text
    for text in ("0000 1234 567", "020 79460 958", "2020 7946 0958", "(2003) 125-130", "0" * 5000):
        assert not is_written_at_home(text), text


@given(
    st.sampled_from(["4", "51", "2221", "6011", "3528"]),
    st.randoms(),
    st.sampled_from(["", " ", "-"]),
    st.integers(1, 9),
)
def test_cards_need_their_check_digit(prefix, draw, separator, wrong):
    good = card(prefix, 16, draw)
    bad = good[:-1] + str((int(good[-1]) + wrong) % 10)
    for number, expected in ((good, 1), (bad, 0)):
        shown = separator.join(number[start : start + 4] for start in range(0, 16, 4))
        assert anonymize(f"a {shown}, b")[1]["CREDIT_CARD_NUMBER"] == expected


@given(st.integers(2, 998), st.integers(0, 9_999_999))
def test_phones_with_a_country_code(country, number):
    assert anonymize(f"ring +{country} {number:07d}, please")[0] == "ring <PHONE_NUMBER>, please"


ADDRESS = r"[A-Za-z0-9]+([._%+-][A-Za-z0-9]+){0,2}@[a-z0-9]+(-[a-z0-9]+)?(\.[a-z]+)?\.[a-zA-Z]{2,6}"


@given(st.from_regex(ADDRESS, fullmatch=True))
def test_addresses_go_whole(address):
    assert anonymize(f"from {address}. Then")[0] == "from <EMAIL>. Then"


@given(st.text("abcdefghijklmnopqrstuvwxyz ,.;:!?'\"\n\t<>[]()-–é漢", max_size=300))
def test_text_without_digits_and_at_signs_is_untouched(text):
    assert anonymize(text)[0] == text


@pytest.mark.parametrize("sentence", CASES["near"])
def test_a_bare_number_near_a_word_about_telephones(sentence):
    for number in ("512 345 678", "91 234 56 78", "612 34 56 78", "32 12 34 56"):
        assert anonymize(sentence.format(number))[0] == sentence.format("<PHONE_NUMBER>")
    # Not in the groups of any country, or bytes of a dump.
    for other in ("5 1 2 3 4 5 6 7 8", "12 34567 1", "85 10 00 00 ff call") if sentence in CASES["near"][:4] else ():
        assert anonymize(sentence.format(other))[0] == sentence.format(other)


SIGNS = ["phone ", "SSN ", "00", "@a", "def f", "@[", "\n\n    ", "call me on ", " \u212a.com/abcde", "1 2 3 4 5 6"]
CASE = st.sampled_from([text for text, _ in CASES["replaced"]] + CASES["kept"] + SIGNS + ["x " * 150, "é" * 200])
SIDE_BY_SIDE = st.sampled_from(TOLD + list(EXTENSIONS + BEFORE + AFTER)) | st.text("0123456789 -+()@./", max_size=9)
BETWEEN = st.sampled_from(["", " ", "-", "/", "\n", ", ", ") ("]) | WORDS.map("{}\n".format)
SENTENCES = st.lists(st.sampled_from([text for _, _, text, _ in NUMBERS]), min_size=1, max_size=4)
TEXTS = st.one_of(
    st.lists(CASE | st.sampled_from("@.-+()/, \n<>ax09") | st.text(max_size=4), max_size=12).map("".join),
    st.lists(SIDE_BY_SIDE).map("".join),
    st.builds(str.join, BETWEEN, SENTENCES),
)


def once(text: str) -> None:
    """Assert that a text stays what it becomes."""
    changed, counts = anonymize(text)
    assert anonymize(changed) == (changed, NONE)
    assert Counter(TOKEN.findall(changed)) - Counter(TOKEN.findall(text)) == Counter(counts) - Counter()


@settings(deadline=None, max_examples=400)
@given(TEXTS)
def test_any_text_is_anonymized_only_once(text):
    once(text)


def test_the_exam_is_anonymized_only_once():
    for text in [*CASES["running"], *(case["text"] for case in EXAM)]:
        once(text)


# What stands once before the repetition: a repetition may be harmless by itself.
ONCE = {"a.": "x@", "-": "@ab"}


def assert_linear(unit: str) -> None:
    def seconds(size: int) -> float:
        text = ONCE.get(unit, "") + (unit * (size // len(unit) + 1))[:size]
        start = time.process_time()
        anonymize(text)
        return time.process_time() - start

    # Sixteen times the text takes sixteen times as long, or 256 times where time is quadratic.
    small = max(min(seconds(2_000), seconds(2_000)), 0.002)
    assert seconds(32_000) < 60 * small or seconds(32_000) < 60 * small, unit


def test_time_is_linear_in_repetition():
    for unit in CASES["repeated"]:
        assert_linear(unit)


@given(st.text(st.characters() | st.sampled_from("\r\n\0")))
def test_normalised_text_stays(text):
    once, _ = normalise(text)
    assert normalise(once)[0] == once.replace("\r\n", "\n")
    assert "\0" not in once
    assert normalise("a\r\nb\0\r") == ("a\nb\r", {"nul": 1, "line_ends": 1})


@given(st.text(" \n\tab\u2003\u0085漢", max_size=60), st.integers(1, 5))
def test_pieces_lose_nothing(text, words):
    *full, last = cut(text, words)
    assert "".join([*full, last]) == text
    assert all(len(piece.split()) == words for piece in full)
    assert len(last.split()) <= words
    assert all(not piece[:1].isspace() for piece in [*full, last][1:])


@settings(deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8") | st.sampled_from(" \n\x1f\x85\u2003\u3000")), max_size=6))
def test_words_are_those_of_str_split(texts):
    data, lengths, number = words_of(pa.array(texts, pa.large_string()))
    words = [text.split() for text in texts]
    assert number.tolist() == [place for place, some in enumerate(words) for _ in some]
    assert lengths.tolist() == [len(word.encode()) for some in words for word in some]
    assert data.tobytes() == "".join(word for some in words for word in some).encode()


TEXTS = ["Write to ann@x.example\r\nnow.", " \n", "plain\0 text", "call (202) 555-0143 now, do"]


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def documents(folder: Path, texts: list[str], **options: Any) -> tuple[list[dict[str, Any]], Any]:
    """The documents that raw text becomes, and their counts."""
    schema = SCHEMA.with_metadata({"surrogates": "2"})
    pq.write_table(pa.table({"text": pa.array(texts, pa.large_string())}, schema=schema), folder / "raw.parquet")
    anonymize_documents(folder / "raw.parquet", folder / "out.parquet", folder / "counts.json", **options)
    return pq.read_table(folder / "out.parquet").to_pylist(), read_json(folder / "counts.json")


def test_documents(tmp_path):
    rows, counts = documents(tmp_path, TEXTS)
    assert [row["text"] for row in rows] == ["Write to <EMAIL>\nnow.", "plain text", "call <PHONE_NUMBER> now, do"]
    assert [row["n_words"] for row in rows] == [4, 2, 4]
    assert [row["origin"] for row in rows] == [row["id"] for row in rows] == [sha256(row["text"]) for row in rows]
    replaced = NONE | {"EMAIL": 1, "PHONE_NUMBER": 1}
    assert counts == {
        "documents": 4,
        "words": 10,
        "normalised": {"line_ends": 1, "nul": 1, "surrogates": 2, "invalid_bytes": 0},
        "rejected": {"empty": 1, "not_utf8": 0},
        "replacements": replaced,
    }
    assert b"ann" not in (tmp_path / "out.parquet").read_bytes()
    # They are cut once they are anonymized.
    rows, counts = documents(tmp_path, TEXTS, piece_words=2)
    whole = ["Write to <EMAIL>\nnow.", "plain text", "call <PHONE_NUMBER> now, do"]
    pieces = [("Write to ", 0), ("<EMAIL>\nnow.", 0), ("plain text", 1), ("call <PHONE_NUMBER> ", 2), ("now, do", 2)]
    assert [(row["text"], row["origin"]) for row in rows] == [(text, sha256(whole[of])) for text, of in pieces]
    assert [row["id"] for row in rows] == [sha256(text) for text, _ in pieces]
    assert (counts["documents"], counts["words"], counts["rejected"]["empty"]) == (6, 10, 1)
    # Documents of two words are cut into pieces of one.
    rows, _ = documents(tmp_path, TEXTS, document_words=2, piece_words=1)
    parts = [(piece, text) for text, _ in pieces for piece in re.findall(r"\S+\s*", text)]
    assert [(row["text"], row["origin"]) for row in rows] == [(piece, sha256(text)) for piece, text in parts]
    rows, counts = documents(tmp_path, TEXTS, enabled=False)
    assert (rows[0]["text"], counts["replacements"]) == ("Write to ann@x.example\nnow.", NONE)
