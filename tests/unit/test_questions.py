"""`demix sql`: answers about a run, from its files alone and without a change of anything."""

import csv
import io
import json
import re
import shutil
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from demix.data.tokenizer import Tokenizer
from demix.files import read_parquet, write_json_lines, write_parquet
from demix.files.batches import read_batches
from demix.query import views
from demix.query.ask import Answers, named_runs
from demix.query.views import VIEWS
from demix.run.run import Run
from demix.run.systems import main_systems
from support.cli import said, succeeds
from support.contents import contents
from support.frozen import rows_of

PAGE = "".join(page.read_text() for page in (Path(__file__).parents[2] / "docs").rglob("sql*.md"))
EXAMPLES = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)


def rows(run: Run, query: str) -> list[dict]:
    return json.loads(succeeds("sql", run.folder, query, "--format", "json").output)


@pytest.mark.parametrize("query", EXAMPLES, ids=lambda query: query.split("\n")[0])
def test_examples_of_the_page_have_answers(frozen: Run, query: str) -> None:
    found = rows(frozen, query)
    assert found
    assert None not in found[0].values()


@pytest.mark.parametrize("view", VIEWS)
def test_every_table_has_rows_of_the_run_and_stands_on_the_page(frozen: Run, view: str) -> None:
    found = rows(frozen, f"select * from {view} limit 2")
    assert next(iter(found[0].items())) == ("run", "frozen")
    columns = rows(frozen, f"describe {view}")
    assert [column["column_name"] for column in columns] == list(found[0])
    told = re.search(rf"^\| `{view}` \| .* \| (.*) \|$", PAGE, re.MULTILINE)[1]
    if ".parquet" not in told:
        assert {*found[0]} - {"run"} == {*re.findall(r"\w+", re.sub(r"\(.*?\)", "", told))}


FILES = ("results", "suites", "differences", "priors", "posteriors", "audit", "tasks", "task_weights")
TABLES = {name: f"{name}.parquet" for name in FILES} | {"clusters": "clusters/*/assigned/*.parquet"}
TABLES |= {name: f"evaluations/*.{name}.parquet" for name in ("contexts", "losses")}


@pytest.mark.parametrize("view", TABLES)
def test_tables_of_parquet_files_are_those_files(frozen: Run, view: str) -> None:
    whole = pd.concat(pd.read_parquet(path) for path in frozen.folder.glob(TABLES[view]))
    numbers = whole.select_dtypes("number").columns
    sums = ", ".join(f'sum("{name}") as "{name}"' for name in numbers)
    found = rows(frozen, f"select count(*) as n, {sums} from {view}")
    expected = whole[numbers].astype("float64").sum(min_count=1)
    assert found == [pytest.approx({"n": len(whole), **expected.astype(object).where(expected.notna(), None)})]


def test_scores_are_those_of_the_files_with_their_texts_and_documents(
    frozen: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "read_batches", partial(read_batches, rows=2))
    where = "where model = 'demix' and seed = 1 and domain = 'fantasy' and split = 'test' and expert = 'licenses'"
    joined = "join tokens using (run, model, seed, domain, split, position) join vocabulary using (run, token)"
    found = pd.DataFrame(rows(frozen, f"select * from scores {joined} {where} order by position"))
    tokens = rows_of(frozen, "scores/demix/fantasy.test/tokens")
    logprobs = rows_of(frozen, "scores/demix/fantasy.test/licenses")["log_probability"]
    np.testing.assert_array_equal(found["log_probability"].astype(np.float32), logprobs)
    for name in ("token", "block", "document", "origin"):
        np.testing.assert_array_equal(found[name], tokens[name])
    np.testing.assert_array_equal(found["position"], np.arange(len(tokens)))
    encoder = Tokenizer.load(frozen.folder / "tokenizer.json")
    assert [*found["text"]] == [encoder.decode([number]) for number in tokens["token"]]
    texts = rows(frozen, "select document, text from documents where domain = 'fantasy' and split = 'test'")
    whole = {row["document"]: re.sub("[^ -~]", "", row["text"]) for row in texts}
    # A character of several bytes may be several tokens, which alone are no text.
    for document, scored in found.groupby("document")["text"].sum().items():
        assert whole[document].startswith(re.sub("[^ -~]", "", scored).removeprefix("<|endoftext|>"))


def test_domains_have_their_kinds(frozen: Run) -> None:
    found = {row["domain"]: row["kind"] for row in rows(frozen, "select distinct domain, kind from documents")}
    kinds = {"training": frozen.training, "novel": frozen.novel, "suite": frozen.suites}
    assert found == {domain: kind for kind, domains in kinds.items() for domain in domains}


def test_metrics_are_those_of_the_files(frozen: Run) -> None:
    """Those of a further seed and of an expert that was trained by itself among them."""
    for file, where in (
        ("demix", "model = 'demix' and seed = 1 and expert is null"),
        ("demix-seed2", "model = 'demix' and seed = 2"),
        ("btm/licenses", "model = 'btm' and seed = 1 and expert = 'licenses'"),
    ):
        lines = [json.loads(line) for line in (frozen.folder / f"metrics/{file}.jsonl").read_text().splitlines()]
        expected = {
            (line["step"], key): value
            for line in lines
            if "step" in line
            for key, value in line.items()
            if key not in ("step", "tokens") and not isinstance(value, str)
        }
        found = rows(frozen, f"select * from metrics where {where}")
        assert expected == {
            (row["step"], "/".join(filter(None, (row["metric"], row["domain"])))): row["value"] for row in found
        }
    assert not rows(frozen, "select 1 from metrics where model = 'demix-seed2'")


def test_main_has_the_systems_of_the_main_table(frozen: Run) -> None:
    """Without oracles, other seeds, numbers of experts and variants, which are rows of results."""
    results = rows_of(frozen)
    plain = results[
        (results["variant"] == "") & results["top_k"].isna() & (results["split"] == "test") & (results["seed"] == 1)
    ]
    expected = {}
    for row in plain[~plain["oracle"]].itertuples():
        for _, system in main_systems(frozen):
            if (row.model, row.experts, row.method, row.weights) == system.key:
                expected[system.label, row.domain] = row.perplexity
    found = rows(frozen, "select system, domain, perplexity from main")
    assert {(row["system"], row["domain"]): row["perplexity"] for row in found} == expected
    assert len(found) == len(expected)


FORBIDDEN = (
    "copy results to 'out.csv'",
    "copy (select 1 as a) to '{run}/out.parquet'",
    "attach 'out.db'",
    "install httpfs",
    "create table t as select 1",
    "insert into results select * from results",
    "set enable_external_access = true",
    "pragma version",
    "prepare p as select 1",
    "select 1; drop view results",
    "with t as (copy results to 'out.csv') select * from t",
    "with t as (insert into results select * from results returning *) select * from t",
    "pivot results on model using avg(perplexity)",
    "select * from 'in.csv'",
    "select * from read_csv('in.csv')",
    "select * from read_text('/etc/passwd')",
    "select * from read_json('{run}/config.json')",
    "select * from parquet_metadata('{run}/results.parquet')",
    "select * from glob('*')",
    "select * from query('copy results to ''out.csv''')",
    "select getenv('HOME')",
    "select * from json_execute_serialized_sql('[]')",
    "select * from enable_logging()",
    "select * from local_variable",
)


def test_a_query_neither_writes_nor_reads_elsewhere(
    frozen_copy: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "in.csv").write_text("a,b\n1,2\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    before = contents(tmp_path)
    for query in FORBIDDEN:
        told = said(["sql", str(frozen_copy.folder), query.format(run=frozen_copy.folder)])
        assert told is not None, query
        assert re.fullmatch("demix: error: query[^\n]*", told), told
        assert capfd.readouterr() == ("", ""), query
    assert contents(tmp_path) == before
    assert not [*(tmp_path / "home").iterdir()]


@pytest.fixture(scope="module")
def run(frozen: Run) -> Path:
    return frozen.folder


ODD = (
    "select 'a|b' as text, 'x\ny' as line, 'nan'::double as n, sum(i) as s, null::int as missing from range(3) as r(i)"
)


def printed(*arguments: object) -> str:
    return succeeds("sql", *arguments).output


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
    shutil.rmtree("results/a/metrics")
    assert said(["sql", "select * from metrics"]).startswith("demix: error: results/a: ")


@pytest.mark.parametrize(
    ("arguments", "subject"),
    [
        (["{run}", "{run}", "select 1"], "{run}"),
        (["{run}x", "select 1"], "{run}x/config.json"),
        (["{run}/models", "select 1"], "{run}/models/config.json"),
        (["{run}", ""], "query"),
        (["{run}", "select * from result"], "query"),
        (["{run}", "select foo from results"], "query"),
        (["{run}", "select * form results"], "query, at results"),
        (["{run}", "select model::int from results"], "query, at ::int"),
        (["{run}", "select $1"], "query"),
        (["{run}", "select 1", "--format", "xml"], "--format xml"),
        (["{run}", "select 1", "--format", "parquet"], "--format parquet"),
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


def test_the_query_comes_from_a_pipe(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("select 41 + 1 as answer;\n"))
    assert said(["sql", str(run), "--format", "csv"]) is None
    assert capsys.readouterr().out == "answer\n42\n"


def test_tables_are_listed(run: Path) -> None:
    told = printed(run, "--tables")
    assert [*VIEWS] == re.findall(r"^(\w+): ", told, re.MULTILINE)
    assert "perplexity_low" in told
