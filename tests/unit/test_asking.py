"""`demix sql` at the command line: runs, formats, errors in one line, and the prompt."""

import csv
import dataclasses
import io
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from rich.console import Console

from demix.files import read_parquet, write_json_lines, write_parquet
from demix.query.ask import Answers, named_runs
from demix.query.output import MOST_ROWS, show
from demix.query.views import VIEWS
from demix.run.run import Run
from support.cli import demix, said
from support.errors import refused

ODD = (
    "select 'a|b' as text, 'x\ny' as line, 'nan'::double as n, sum(i) as s, null::int as missing from range(3) as r(i)"
)


@pytest.fixture(scope="module")
def run(frozen: Run) -> Path:
    return frozen.folder


def printed(*arguments: object) -> str:
    done = demix("sql", *arguments)
    assert done.exit_code == 0, (arguments, done.exception)
    return done.output


def test_formats(run: Path, tmp_path: Path) -> None:
    assert list(csv.reader(io.StringIO(printed(run, ODD, "--format", "csv")))) == [
        ["text", "line", "n", "s", "missing"],
        ["a|b", "x\ny", "nan", "3", ""],
    ]
    assert json.loads(printed(run, ODD, "--format", "json")) == [
        {"text": "a|b", "line": "x\ny", "n": None, "s": 3, "missing": None}
    ]
    assert printed(run, ODD, "--format", "markdown").splitlines() == [
        "| text | line | n | s | missing |",
        "| --- | --- | ---: | ---: | ---: |",
        r"| a\|b | x\ny | nan | 3 | NULL |",
    ]
    assert json.loads(printed(run, "select 1 as a where false", "--format", "json")) == []
    assert json.loads(printed(run, "select 1 as a, 2 as a", "--format", "json")) == [{"a": 1, "a_1": 2}]
    for name in ("out.csv", "out.json", "out.md", "out.parquet"):
        assert printed(run, "select 1 as a, 'b' as b", "--output", tmp_path / name) == ""
    assert (tmp_path / "out.csv").read_text() == "a,b\n1,b\n"
    assert json.loads((tmp_path / "out.json").read_text()) == [{"a": 1, "b": "b"}]
    assert (tmp_path / "out.md").read_text().endswith("| 1 | b |\n")
    assert read_parquet(tmp_path / "out.parquet").to_pylist() == [{"a": 1, "b": "b"}]
    assert demix("sql", run, "select 1 as a", "--format", "parquet").stdout_bytes.startswith(b"PAR1")


def test_a_terminal_gets_the_first_rows(run: Path) -> None:
    def shown(query: str, **how: object) -> str:
        stream = io.StringIO()
        with Answers(named_runs([run])) as answers, answers.ask(query) as reader:
            show(reader, Console(file=stream, **how))
        return stream.getvalue()

    query = "select i as number from range(1000) as r(i)"
    assert shown(query, force_terminal=True, width=80, color_system=None).count("│") == 2 * MOST_ROWS
    assert "999" in shown(query, width=80)
    # A row of thirty columns stands below itself.
    assert "  perplexity_low   " in shown("select * from results limit 1", width=80)
    assert shown("select repeat('x', 1000) as x", width=300).count("x") < 120


@pytest.fixture
def runs(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders results/a, results/b and old/a of runs in the working folder."""
    for name in ("results/a", "results/b", "old/a"):
        (tmp_path / name).mkdir(parents=True)
        for file in ("config.json", "results.parquet", "priors.parquet", "metrics/dense.jsonl"):
            (tmp_path / name / file).parent.mkdir(exist_ok=True)
            shutil.copy(run / file, tmp_path / name / file)
    monkeypatch.chdir(tmp_path)


def answer(*arguments: object) -> list[dict]:
    return json.loads(printed(*arguments, "--format", "json"))


@pytest.mark.usefixtures("runs")
def test_runs_are_told_apart() -> None:
    def named(*folders: str) -> list[str]:
        found = answer(*folders, "select run, count(*) as n from results group by run order by run")
        assert len({row["n"] for row in found}) == 1
        return [row["run"] for row in found]

    assert named("results/a", "results/b") == ["a", "b"]
    assert named("results/a", "old/a") == ["old/a", "results/a"]
    assert named("old/a/") == ["a"]
    # A column that one run lacks is NULL there.
    write_parquet(read_parquet("old/a/results.parquet").drop_columns("bytes"), Path("old/a/results.parquet"))
    for folders in (("old/a", "results/b"), ("results/b", "old/a")):
        assert answer(*folders, "select count(bytes) as n from results where run = 'a'") == [{"n": 0}]
    # Without a name it is the only run there is.
    assert said(["sql", "select 1"]).startswith("demix: error: RUN: ")
    shutil.rmtree("results/b")
    assert named() == ["a"]


@pytest.mark.usefixtures("runs")
def test_a_run_under_way_can_be_asked_what_there_is() -> None:
    shutil.rmtree("results/b")
    Path("results/a/results.parquet").unlink()
    assert said(["sql", "select * from results"]).startswith("demix: error: results/a/results.parquet: ")
    assert answer("select count(*) as n from metrics")[0]["n"] > 0
    with Answers(named_runs([])) as answers:
        assert {name for name, _, told in answers.described() if told.startswith("results/a")} >= {"results", "scores"}
    metrics = Path("results/a/metrics/dense.jsonl")
    for rows in ([{"step": 1, "loss": 1.0}], [{"step": "one", "tokens": 1, "loss": 1.0}]):
        write_json_lines(metrics, rows)
        assert said(["sql", "select * from metrics"]).startswith(f"demix: error: {metrics}: ")
    with Answers(named_runs([])) as answers:
        # What one query met is no answer to the next.
        for query, subject in (("from metrics", metrics), ("select error('x') from priors", "query")):
            with refused(subject), answers.ask(query) as reader:
                reader.read_all()
    shutil.rmtree("results/a/metrics")
    assert said(["sql", "select * from metrics"]).startswith("demix: error: results/a: ")


@pytest.mark.parametrize(
    ("arguments", "subject"),
    [
        (["{run}", "{run}", "select 1"], "{run}"),
        (["{run}x", "select 1"], "{run}x/config.json"),
        (["{run}x"], "{run}x/config.json"),
        (["{run}/models", "select 1"], "{run}/models/config.json"),
        (["{run}", ""], "query"),
        (["{run}", " "], "query"),
        (["{run}", "select 1; select 2"], "query"),
        (["{run}", "drop view results"], "query"),
        (["{run}", "select * from result"], "query"),
        (["{run}", "select foo from results"], "query"),
        (["{run}", "select * form results"], "query, at results"),
        (["{run}", "select model::int from results"], "query, at ::int"),
        (["{run}", "select $1"], "query"),
        (["{run}", "select 1", "--format", "xml"], "--format xml"),
        (["{run}", "select 1", "--output", "{run}/x.csv"], "{run}/x.csv"),
        (["{run}", "select 1", "--output", "/dev/null/x.csv"], "/dev/null/x.csv"),
    ],
)
def test_errors_are_one_line(run: Path, arguments: list[str], subject: str) -> None:
    told = said(["sql", *(word.format(run=run) for word in arguments)])
    assert told.startswith(f"demix: error: {subject.format(run=run)}: "), told
    assert "\n" not in told


def test_codes_in_a_text_do_not_control_a_terminal(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for terminal in (True, False):
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal)
        for form in ("table", "csv", "markdown", "json"):
            assert said(["sql", str(run), "select 'red' || chr(27) || '[31m' as text", "--format", form]) is None
            told = capsys.readouterr().out
            assert "red" in told
            assert (chr(27) + "[31m" in told) == (not terminal and form in ("csv", "markdown")), (terminal, form)


def test_an_answer_that_breaks_off_leaves_no_file(run: Path, tmp_path: Path) -> None:
    query = "select case when i = 99999 then error('late') else i end as i from range(100000) as r(i)"
    for name in ("out.csv", "out.parquet"):
        assert said(["sql", str(run), query, "--output", str(tmp_path / name)]).startswith("demix: error: query: ")
    assert not [*tmp_path.iterdir()]


def test_ctrl_c_ends_a_query(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    read: list[int] = []

    def reading(parts: object, columns: object) -> Iterator[pa.Table]:
        for number in range(5000):
            if number == 100:
                os.kill(os.getpid(), signal.SIGINT)
            # It takes most of a minute, so that only the signal can end it soon.
            time.sleep(0.01 if number > 100 else 0)
            read.append(number)
            yield pa.table({"key": ["a"] * 1000, "value": ["b"] * 1000})

    monkeypatch.setitem(VIEWS, "settings", dataclasses.replace(VIEWS["settings"], read=reading))
    assert said(["sql", str(run), "select count(*) from settings"]) == "130"
    assert 100 < len(read) < 5000
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)


def test_the_query_comes_from_a_pipe(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("select 41 + 1 as answer;\n"))
    assert said(["sql", str(run), "--format", "csv"]) is None
    assert capsys.readouterr().out == "answer\n42\n"


def test_tables_are_listed(run: Path) -> None:
    told = printed(run, "--tables").split()
    assert {*VIEWS} <= {*told}
