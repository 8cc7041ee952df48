"""Tables as they are printed: which cells are bold, and names that would be markup."""

import re
from pathlib import Path

import pandas as pd
import pytest

from demix.report import write_report
from demix.report.card import model_card
from demix.report.cells import lowest
from demix.report.render import Table, cell, write_table
from support.synthetic_run import NOVEL, TRAINING, build_run


def test_what_is_equal_as_printed_is_bold_alike() -> None:
    frame = pd.DataFrame({"a": [1.004, 2.0], "b": [1.001, 2.006], "c": [1.01, 2.004]})
    assert lowest(frame, axis=1).to_numpy().tolist() == [[True, True, False], [True, False, True]]


def test_what_rounds_to_zero_has_no_sign() -> None:
    values = (0.001, -0.001, -0.01, 1.5)
    assert [cell(value, "{:+.2f}") for value in values] == ["0.00", "0.00", "−0.01", "+1.50"]


@pytest.mark.parametrize("training", [TRAINING, TRAINING[:1]], ids=("several", "one"))
def test_one_novel_domain_is_one_domain(tmp_path: Path, training: tuple[str, ...]) -> None:
    run = build_run(tmp_path, training=training, retrained=(), novel=NOVEL[:1])
    output = tmp_path / "report"
    write_report(run.run, output)
    pages = "".join(path.read_text() for kind in ("html", "md", "tex") for path in output.rglob(f"*.{kind}"))
    pages += "".join(model_card(run.run, model) for model in ("demix", "dense"))
    assert "1 novel domain," in pages
    assert "1 expert joined later" in pages
    assert not re.findall(r".{,40}(?<![0-9,.])\b1 (?:\w+ )?(?:domains|experts|documents|pairs)\b.{,20}", pages)


def test_names_are_escaped(tmp_path: Path) -> None:
    name = "<b>a&b_|c"
    write_table(Table("names", "Names", name, pd.DataFrame({name: [1.0], "text": [name]}, index=[name])), tmp_path)
    html, markdown, latex = ((tmp_path / f"names.{kind}").read_text() for kind in ("html", "md", "tex"))
    assert "&lt;b&gt;a&amp;b_|c" in html
    assert name not in html
    assert r"a\&b\_" in latex
    assert r"\|c" in markdown
    assert "<b>" not in markdown
