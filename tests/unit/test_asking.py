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

from demix.errors import DemixError
from demix.files import read_parquet, write_json_lines
from demix.query.ask import Answers, named_runs
from demix.query.output import MOST_ROWS, show
from demix.query.views import VIEWS
from support.cli import demix, said
from support.synthetic_run import build_run

ODD = (
    "select 'a|b' as text, 'x\ny' as line, 'nan'::double as n, sum(i) as s, null::int as missing from range(3) as r(i)"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is not to be written to."""
    return build_run(tmp_path_factory.mktemp("asking") / "mine").path


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
    assert json.loads(printed(run, "select 1 as a, 2 as a, 3 as a", "--format", "json")) == [
        {"a": 1, "a_1": 2, "a_2": 3}
    ]
    for name in ("out.csv", "out.json", "out.md", "out.parquet"):
        assert printed(run, "select 1 as a, 'b' as b", "--output", tmp_path / name) == ""
    assert (tmp_path / "out.csv").read_text() == "a,b\n1,b\n"
    assert json.loads((tmp_path / "out.json").read_text()) == [{"a": 1, "b": "b"}]
    assert (tmp_path / "out.md").read_text().endswith("| 1 | b |\n")
    assert read_parquet(tmp_path / "out.parquet").to_pylist() == [{"a": 1, "b": "b"}]
    assert demix("sql", run, "select 1 as a", "--format", "parquet").stdout_bytes.startswith(b"PAR1")


def test_a_terminal_gets_the_first_rows_and_is_told_so(run: Path) -> None:
    def shown(query: str, **how: object) -> str:
        stream = io.StringIO()
        with Answers(named_runs([run])) as answers, answers.ask(query) as reader:
            show(reader, Console(file=stream, **how))
        return stream.getvalue()

    query = "select i as number from range(1000) as r(i)"
    cut = shown(query, force_terminal=True, width=80, color_system=None)
    assert f"The first {MOST_ROWS} rows." in cut
    assert cut.count("│") == 2 * MOST_ROWS
    whole = shown(query, width=80)
    assert "1,000 rows" in whole
    assert "999" in whole
    assert "The first" not in shown(f"{query} limit {MOST_ROWS}", force_terminal=True, width=80)
    # A row of thirty columns stands below itself.
    assert "  perplexity_low   " in shown("select * from results limit 1", width=80)
    assert shown("select repeat('x', 1000) as x", width=300).count("x") < 120


def test_runs_are_told_apart(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = "select run, count(*) as n from results group by run order by run"
    for name in ("results/a", "results/b", "old/a"):
        shutil.copytree(run, tmp_path / name)
    monkeypatch.chdir(tmp_path)

    def runs(*folders: str) -> list[str]:
        found = json.loads(printed(*folders, counting, "--format", "json"))
        assert len({row["n"] for row in found}) == 1
        return [row["run"] for row in found]

    assert runs("results/a", "results/b") == ["a", "b"]
    assert runs("results/a", "old/a") == ["old/a", "results/a"]
    assert runs("old/a/") == ["a"]
    # A column that one run lacks is NULL there.
    columns = [name for name in read_parquet("old/a/results.parquet").column_names if name != "bytes"]
    shutil.copy(tmp_path / "old/a/results.parquet", tmp_path / "kept")
    printed("old/a", f"select {', '.join(columns)} from results", "--output", tmp_path / "fewer.parquet")
    (tmp_path / "fewer.parquet").rename(tmp_path / "old/a/results.parquet")
    for folders in (("old/a", "results/b"), ("results/b", "old/a")):
        (row,) = json.loads(
            printed(*folders, "select count(bytes) as n from results where run = 'a'", "--format", "json")
        )
        assert row == {"n": 0}
    assert runs("old/a", "results/b") == ["a", "b"]
    told = said(["sql", counting])
    assert (
        told
        == "demix: error: RUN: is not named, and there are results/a, results/b; name a run's folder, results/<run>"
    )
    shutil.rmtree("results/b")
    assert runs() == ["a"]
    # A run under way can be asked what there is.
    (tmp_path / "results/a/results.parquet").unlink()
    assert said(["sql", "select * from results"]).startswith("demix: error: results/a/results.parquet: is missing")
    assert json.loads(printed("select count(*) as n from metrics", "--format", "json"))[0]["n"] > 0
    shutil.rmtree("results/a/metrics")
    assert said(["sql", "select * from metrics"]).startswith("demix: error: results/a: has no metrics yet")
    write_json_lines(tmp_path / "results/a/metrics/demix.jsonl", [{"step": 1, "loss": 1.0}])
    assert "metrics/demix.jsonl: " in said(["sql", "select * from metrics"])
    with Answers(named_runs([])) as answers:
        # What one query met is no answer to the next.
        for query, told in (("from metrics", "demix.jsonl"), ("select error('x') from priors", "query: x")):
            with pytest.raises(DemixError, match=told), answers.ask(query) as reader:
                reader.read_all()
    write_json_lines(tmp_path / "results/a/metrics/demix.jsonl", [{"step": "one", "tokens": 1, "loss": 1.0}])
    assert "demix.jsonl: holds what no stage writes" in said(["sql", "select * from metrics"])


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["{run}", "{run}", "select 1"], "{run}: is named twice; name each run once"),
        (["{run}x", "select 1"], "{run}x/config.json: is missing, so its folder is none of a run; "),
        (["{run}x"], "{run}x/config.json: is missing, so its folder is none of a run; "),
        (["{run}/models", "select 1"], "{run}/models/config.json: is missing, so its folder is none of a run; "),
        (["{run}", ""], "query: is empty; "),
        (["{run}", " "], "query: is empty; ask a question such as select * from results"),
        (["{run}", "select 1; select 2"], "query: is 2 statements; ask one SELECT at a time"),
        (["{run}", "drop view results"], "query: is no SELECT but DROP; ask one SELECT: it can change nothing"),
        (["{run}", "select * from result"], 'query: Table with name result does not exist; Did you mean "results"?'),
        (["{run}", "select * from zzz"], "query: Table with name zzz does not exist; The tables are results, "),
        (["{run}", "select foo from results"], 'query: Referenced column "foo" not found in FROM clause; Candidate'),
        (["{run}", "select * form results"], 'query, at results: syntax error at or near "results"; mend the query'),
        (["{run}", "select model::int from results"], "query, at ::int: Could not convert string 'd"),
        (["{run}", "select * from read_csv('x')"], 'query: Cannot access file "x"'),
        (["{run}", "select $1"], "query: "),
        (
            ["{run}", "select 1", "--format", "xml"],
            "--format xml: is not known; use table, csv, json, markdown, parquet",
        ),
        (["{run}", "select 1", "--output", "{run}/x.csv"], "{run}/x.csv: lies in the run mine; name a file outside"),
        (["{run}", "select 1", "--output", "/dev/null/x.csv"], "/dev/null/x.csv: cannot be written ("),
    ],
)
def test_errors_are_one_line(run: Path, arguments: list[str], line: str) -> None:
    told = said(["sql", *(word.format(run=run) for word in arguments)])
    assert told is not None
    assert told.startswith(f"demix: error: {line.format(run=run)}"), told
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
        assert said(["sql", str(run), query, "--output", str(tmp_path / name)]).startswith("demix: error: query: late")
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
    assert (told.out, told.err) == ("", "demix: interrupted\n")


def test_the_query_comes_from_a_pipe(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("select 41 + 1 as answer;\n"))
    assert said(["sql", str(run), "--format", "csv"]) is None
    assert capsys.readouterr().out == "answer\n42\n"


def test_tables_are_listed(run: Path) -> None:
    told = " ".join(printed(run, "--tables").split())
    assert "posteriors" in told
    assert "perplexity_low" in told
    with Answers(named_runs([run])) as answers:
        faults = {name: columns for name, _, columns in answers.described() if " has no " in columns}
    assert faults["scores"] == f"{run}: has no scores yet; run the workflow to its end"
    assert "results" not in faults
    assert " scores " in told
