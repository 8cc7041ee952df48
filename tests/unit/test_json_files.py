"""JSON and JSON lines: what an editor may do to them, and what it may not."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from demix.files import check_sealed, digest, read_json, read_json_lines, write_json, write_json_lines
from support.errors import refused

VALUE = {"steps": 12, "loss": 1.0, "tiny": 1e-05, "on": True, "none": None, "name": "ü\ud800"}
VALUE |= {"nested": {"b": [1], "a": {}}}
ROWS = [{"step": 2, "loss": 2.5}, {"step": 1, "loss": math.nan}, {"step": 3, "loss": 2.0}]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_json(tmp_path / "a.json", VALUE)
    return tmp_path / "a.json"


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    write_json_lines(tmp_path / "a.jsonl", ROWS)
    return tmp_path / "a.jsonl"


def plain(path: Path) -> dict[str, Any]:
    """The object in a file with its seal, by Python's own parser."""
    return json.loads(path.read_text())


def test_the_seal_is_the_last_key_over_the_canonical_rest(path: Path) -> None:
    *keys, last = plain(path)
    assert (keys, last) == (sorted(VALUE), "seal")
    # Written out, so that files of today are read tomorrow.
    write_json(path, {"b": [1, 2.0, None], "a": "é"})
    assert plain(path)["seal"] == "14bd98c300a59a6305cbe874c98fc0185f1a736ac101a3d7ead06c6a4547a0ba"
    assert path.read_bytes().endswith(b'"\n}\n')


def test_readers_do_not_hand_the_seal_on(path: Path) -> None:
    assert read_json(path) == VALUE
    write_json(path, read_json(path) | {"steps": 13})
    assert read_json(path) == VALUE | {"steps": 13}


def reformatted(path: Path) -> dict[str, bytes]:
    """The file in forms that hold the same value."""
    value, text = plain(path), path.read_text()
    return {
        "no white space": json.dumps(value, separators=(",", ":")).encode(),
        "other indentation": json.dumps(value, indent="\t").encode(),
        "keys the other way round": json.dumps(dict(reversed(value.items())), indent=1).encode(),
        "UTF-8 for escapes": text.replace("\\u00fc", "ü").encode(),
        "CRLF": text.replace("\n", "\r\n").encode(),
        "blanks around": f" \n\t{text} \n\n".encode(),
        "another spelling of a number": text.replace("1e-05", "0.0000100").encode(),
    }


def test_a_reformatted_file_is_read(path: Path) -> None:
    before = path.read_bytes()
    for how, content in reformatted(path).items():
        assert content != before, how
        path.write_bytes(content)
        assert read_json(path) == VALUE, how


CHANGES = {
    "an integer for a float": ('"loss": 1.0', '"loss": 1'),
    "a float for an integer": ('"steps": 12', '"steps": 12.0'),
    "a number for true": ('"on": true', '"on": 1'),
    "a key less": ('  "steps": 12,\n', ""),
    "a key twice, with its value": ('"steps": 12', '"steps": 12, "steps": 12'),
    "a key twice, the right value last": ('"steps": 12', '"steps": 99, "steps": 12'),
    "a key twice, deep inside": ('"a": {}', '"a": {}, "a": {}'),
    "another order of a list": ("[\n      1\n    ]", "[1, 1]"),
    "no seal": ('"seal"', '"sea"'),
    "NaN": ('"loss": 1.0', '"loss": NaN'),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_value_is_refused(path: Path, change: str) -> None:
    text = path.read_text()
    assert CHANGES[change][0] in text
    path.write_text(text.replace(*CHANGES[change]))
    for read in (read_json, check_sealed):
        with refused("a.json"):
            read(path)


@pytest.mark.parametrize("content", ["", "[1]", "1", "null", "{}", '{"a": 1}\n', '\t{"a": 1}' + " \t" * 64, "[" * 9999])
def test_what_is_no_sealed_object_is_refused(path: Path, content: str) -> None:
    path.write_text(content)
    with refused("a.json"):
        read_json(path)


def test_what_cannot_be_sealed_is_not_written(tmp_path: Path) -> None:
    for value in ({"a": math.nan}, {"a": {"b": -math.inf}}, {"seal": 1}):
        with pytest.raises(ValueError, match=r"compliant|seal"):
            write_json(tmp_path / "a.json", value)
    assert not list(tmp_path.iterdir())


def test_keys_and_lists_of_other_types_are_sealed_as_they_are_read(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"a": {10: (1, 2), 9: 0}})
    assert read_json(tmp_path / "a.json") == {"a": {"10": [1, 2], "9": 0}}


def test_json_lines_end_in_their_number_and_seal(lines: Path) -> None:
    *rows, end = map(json.loads, lines.read_text().splitlines())
    assert repr(rows) == repr(ROWS)
    assert end == {"rows": 3, "seal": digest(ROWS)}
    assert repr(read_json_lines(lines)) == repr(ROWS)
    write_json_lines(lines, [])
    assert read_json_lines(lines) == []


def test_reformatted_json_lines_are_read(lines: Path) -> None:
    rows = list(map(json.loads, lines.read_text().splitlines()))
    text = "\r\n\r\n ".join(json.dumps(dict(reversed(row.items())), separators=(" ,", " : ")) for row in rows)
    lines.write_text(text)
    assert repr([dict(sorted(row.items())) for row in read_json_lines(lines)]) == repr(
        [dict(sorted(row.items())) for row in ROWS]
    )


def test_a_file_of_more_bytes_than_are_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    size = path.stat().st_size
    assert read_json(path, most_bytes=size) == {"a": 1}
    for most in (size - 1, 1):
        with refused("a.json"):
            read_json(path, most_bytes=most)


def edited(rows: list[str]) -> dict[str, list[str]]:
    """Other files of the same rows."""
    first, second, third, end = rows
    return {
        "a row twice": [first, first, second, third, end],
        "rows changed places": [second, first, third, end],
        "a changed value": [first.replace("2.5", "2.6"), second, third, end],
        "another number of rows": [first, second, third, end.replace("3", "4", 1)],
        "the end is missing": [first, second, third],
        "nothing": [],
        "the last row cut": [first, second, third[:-4], end],
        "a row that is a list": [first, second, "[]", end],
        "a key twice": [first.replace("{", '{"step": 1, '), second, third, end],
    }


@pytest.mark.parametrize("change", edited(["", "", "", ""]))
def test_edited_json_lines_are_refused(lines: Path, change: str) -> None:
    rows = edited(lines.read_text().splitlines())[change]
    lines.write_text("".join(f"{row}\n" for row in rows))
    for read in (read_json_lines, check_sealed):
        with refused("a.jsonl"):
            read(lines)
