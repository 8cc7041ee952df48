import datetime

import pytest

from demix.data.selection import as_text, matches, select

PAPER = {
    "title": "T",
    "a.b": "dotted",
    "full_text": [{"name": "One", "paragraphs": ["p", None, "q"]}, None, {"name": None, "paragraphs": ["r"]}],
    "nested": {"deep": {"text": "d"}, "none": None},
    "grid": [["a"], ["b", "c"]],
}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("title", "T"),
        ("a.b", "dotted"),
        ("nested.deep.text", "d"),
        ("nested.none", None),
        ("full_text[].paragraphs[]", ["p", "q", "r"]),
        ("full_text[].name", ["One"]),
        ("grid[][]", ["a", "b", "c"]),
    ],
)
def test_paths(path, value):
    assert select(PAPER, path) == value


@pytest.mark.parametrize("path", ["body", "nested.shallow", "title.text", "title[]", "full_text[].text", "nested[]"])
def test_paths_that_lead_nowhere(path):
    with pytest.raises(LookupError):
        select(PAPER, path)


def test_texts():
    assert as_text(["a", ["b", "c"], None]) == "a\nb\nc\n"
    assert as_text(None) == ""
    with pytest.raises(TypeError, match="dict"):
        as_text([{}])


ROW = {
    "language": "en",
    "stars": 4,
    "score": "3.5",
    "day": datetime.date(2019, 5, 1),
    "ok": True,
    "none": None,
    "at": {"x": 1},
}


@pytest.mark.parametrize(
    ("where", "kept"),
    [
        ({}, True),
        ({"language": "en"}, True),
        ({"language": "de"}, False),
        ({"language": ["de", "en"], "stars": 4}, True),
        ({"language": ["de", "en"], "stars": 5}, False),
        ({"stars": {"min": 4}}, True),
        ({"stars": {"min": 4.5}}, False),
        ({"stars": {"max": 3}}, False),
        ({"stars": {"max": 4}}, True),
        ({"stars": "4"}, True),
        ({"score": {"min": 3, "max": 4}}, True),
        ({"score": {"min": 10}}, False),
        ({"language": {"min": 1}}, False),
        ({"day": {"min": "2019-01-01", "max": "2019-12-31"}}, True),
        ({"day": {"max": "2019-04-30"}}, False),
        ({"ok": True}, True),
        ({"none": "x"}, False),
        ({"missing": "x"}, False),
        ({"at.x": 1}, True),
    ],
)
def test_filters(where, kept):
    assert matches(ROW, where) is kept
