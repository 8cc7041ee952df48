"""Examples of tasks that are not taken, and labels that no example has."""

import json
from pathlib import Path

import pytest

from demix.config.config import Config
from demix.errors import DemixError
from support.configs import small
from support.tasks import read_task, write_lines


def test_examples_that_are_not_taken_are_counted_and_end_the_job(
    tokens: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"text": f"text {n}", "label": ("law", "code")[n % 2]} for n in range(198)]
    lines = [json.dumps(row).encode() for row in rows] + [json.dumps(rows[0]).encode()]
    (tmp_path / "x.jsonl").write_bytes(b"\n".join([*lines, b'{"text": " ", "label": "law"}']))
    assert len(read_task(tokens, tmp_path, path=str(tmp_path / "x.jsonl"), examples=None)) == 198
    assert "left out 0 not UTF-8, 1 without text, 1 there before" in caplog.text
    latin = '{"text": "éééééééééé %d", "label": "code"}'
    (tmp_path / "x.jsonl").write_bytes(b"\n".join([*lines, *((latin % n).encode("latin-1") for n in range(50))]))
    with pytest.raises(
        DemixError, match=r"tasks\.topics: leaves out 51 of 249 examples \(50 not UTF-8.*1 there before\)"
    ):
        read_task(tokens, tmp_path, path=str(tmp_path / "x.jsonl"))
    assert len(read_task(tokens, tmp_path, path=str(tmp_path / "x.jsonl"), examples=None, left_out=0.21)) == 198


@pytest.mark.parametrize(
    ("choices", "label", "answer"),
    [
        (["1", "2", "3"], "2", 1),
        ([0, 1, 2], 1, 1),
        ([7, 8, 9], 1, 1),
        (["a", "b"], 1, 1),
        ([True, False], True, 0),
        ([7, 8, 9], 9, 2),
        (["a", "b"], "b", 1),
    ],
)
def test_a_label_is_looked_for_among_the_choices_first(
    tokens: Path, tmp_path: Path, choices: list, label: object, answer: int
) -> None:
    rows = [{"text": f"q {n}", "options": choices, "label": label} for n in range(10)]
    found = read_task(tokens, tmp_path, path=write_lines(tmp_path / "x.jsonl", rows), choices="options")
    assert {one.answer for one in found} == {answer}


@pytest.mark.parametrize(
    ("choices", "label", "said"),
    [
        ([1, 2, 3, 4], 2, "has the label 2, which is one of its choices .* and the number of another"),
        (["a", "b"], True, "has the label 'true', which is none of 'a', 'b'"),
        (["a", None], "a", "has the label None in options, which is no text"),
        (["a", {"b": 1}], "a", "in options, which is no text"),
        (["a", "b"], 2, "has the label '2', which is none of"),
        ([str(n) for n in range(1001)], "1", "has more than 1000 labels"),
    ],
)
def test_choices_that_say_no_right_one_are_refused(
    tokens: Path, tmp_path: Path, choices: list, label: object, said: str
) -> None:
    rows = [{"text": f"q {n}", "options": choices, "label": label} for n in range(10)]
    with pytest.raises(DemixError, match=rf"x\.jsonl#\d+.* {said}"):
        read_task(tokens, tmp_path, path=write_lines(tmp_path / "x.jsonl", rows), choices="options")


def test_labels_that_are_one_or_without_number_are_refused(tokens: Path, tmp_path: Path) -> None:
    rows = [{"text": f"text {n}", "label": "law"} for n in range(30)]
    path = write_lines(tmp_path / "x.jsonl", rows)
    with pytest.raises(DemixError, match="has the one label 'law'"):
        read_task(tokens, tmp_path, path=path, labels={"law": "law", "code": "code"})
    path = write_lines(tmp_path / "y.jsonl", [{"text": f"text {n}", "label": f"id {n}"} for n in range(1001)])
    with pytest.raises(DemixError, match="has more than 1000 labels"):
        read_task(tokens, tmp_path, path=path)
    for labels, said in (({"law": "law"}, "has one label alone"), ({str(n): "x" for n in range(100_000)}, "more than")):
        with pytest.raises(DemixError, match=rf"config key tasks\.topics\.labels: has {said}|{said}"):
            Config.complete(small(tasks={"topics": {"path": "x.jsonl", "labels": labels}}))
