"""`demix sql`: answers about a run, from its files alone and without a change of anything."""

import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from demix.data.tokenizer import Tokenizer
from demix.files.batches import read_batches
from demix.query import views
from demix.query.views import VIEWS
from demix.run.main_systems import main_systems
from demix.run.run import Run
from support.cli import demix, said
from support.contents import contents
from support.frozen import rows_of

PAGE = (Path(__file__).parents[2] / "docs" / "questions.md").read_text()
EXAMPLES = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)


def rows(run: Run, query: str) -> list[dict]:
    done = demix("sql", run.folder, query, "--format", "json")
    assert done.exit_code == 0, (query, done.exception)
    return json.loads(done.output)


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


TABLES = {name: f"{name}.parquet" for name in ("results", "suites", "differences", "priors", "posteriors", "audit")}
TABLES |= {"tasks": "tasks.parquet", "contexts": "evaluations/*.contexts.parquet", "loads": "loads/*.parquet"}


@pytest.mark.parametrize("view", TABLES)
def test_tables_of_parquet_files_are_those_files(frozen: Run, view: str) -> None:
    whole = pd.concat(pd.read_parquet(path) for path in frozen.folder.glob(TABLES[view]))
    numbers = whole.select_dtypes("number").columns
    sums = ", ".join(f'sum("{name}") as "{name}"' for name in numbers)
    found = rows(frozen, f"select count(*) as n, {sums} from {view}")
    expected = whole[numbers].sum(min_count=1)
    assert found == [pytest.approx({"n": len(whole), **expected.astype(object).where(expected.notna(), None)})]


@pytest.mark.parametrize("at_once", [64, views.TOKENS])
def test_scores_are_those_of_the_files_with_their_texts_and_documents(
    frozen: Run, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(views, "TOKENS", at_once)
    monkeypatch.setattr(views, "read_batches", partial(read_batches, rows=at_once // 32))
    where = "where model = 'demix' and seed = 1 and domain = 'fantasy' and split = 'test' and expert = 'licenses'"
    found = pd.DataFrame(rows(frozen, f"select * from scores {where} order by position"))
    tokens = rows_of(frozen, "scores/demix/fantasy.test/tokens")
    logprobs = rows_of(frozen, "scores/demix/fantasy.test/licenses")["log_probability"]
    np.testing.assert_array_equal(found["logprob"].astype(np.float32), logprobs)
    for name, column in (("token_id", "token"), ("block", "block"), ("document", "document"), ("origin", "origin")):
        np.testing.assert_array_equal(found[name], tokens[column])
    positions = np.arange(len(tokens))
    np.testing.assert_array_equal(found["position"], positions)
    np.testing.assert_array_equal(found["block_position"], positions % frozen.context)
    encoder = Tokenizer.load(frozen.folder / "tokenizer.json")
    assert [*found["token"]] == [encoder.decode([number]) for number in tokens["token"]]
    texts = rows(frozen, "select document, text from documents where domain = 'fantasy' and split = 'test'")
    whole = {row["document"]: re.sub("[^ -~]", "", row["text"]) for row in texts}
    # A character of several bytes may be several tokens, which alone are no text.
    for document, scored in found.groupby("document")["token"].sum().items():
        assert whole[document].startswith(re.sub("[^ -~]", "", scored).removeprefix("<|endoftext|>"))


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


def test_losses_are_sums_of_scores(frozen: Run) -> None:
    (found,) = rows(
        frozen,
        "select count(*) as n, max(abs(nll - summed)) as off from losses join (select run, model, seed, domain, split, "
        "expert, document, -sum(logprob) as summed from scores group by all) "
        "using (run, model, seed, domain, split, expert, document)",
    )
    assert found["n"] == len(rows(frozen, "select 1 from losses where model in ('demix', 'dense') and seed = 1")) > 100
    assert found["off"] < 1e-5


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


def test_only_the_files_that_a_query_needs_are_opened(frozen_copy: Run) -> None:
    """All others are damaged, so that to open one is an error."""
    run = frozen_copy.folder
    kept = {"scores/demix/fantasy.test/tokens.parquet", "scores/demix/fantasy.test/licenses.parquet"}
    kept |= {"config.json", "evaluations/fantasy.losses.parquet", "corpus/fantasy/test.parquet"}
    # These say what columns there are.
    kept |= {path.name for path in run.glob("*.parquet")} | {"evaluations/fantasy.contexts.parquet"}
    kept |= {f"harness/contamination/{name}.parquet" for name in frozen_copy.training}
    for path in run.rglob("*"):
        if path.is_file() and str(path.relative_to(run)) not in kept:
            path.write_bytes(path.read_bytes()[:-20])
    alone = "model = 'demix' and seed = 1 and domain = 'fantasy' and split = 'test' and expert in ('licenses', 'none')"
    assert rows(frozen_copy, f"select avg(logprob) as mean from scores where {alone}")[0]["mean"] < 0
    join = "from scores s join documents using (run, domain, split, document) join losses l "
    join += "using (run, model, seed, domain, split, expert, document)"
    assert rows(frozen_copy, f"select distinct left(text, 9) as a {join} where {alone}")
    for query, broken in (
        ("select count(*) from scores where model = 'demix' and domain = 'fantasy' and split = 'test'", "fantasy.test"),
        (f"select max(token) from scores where {alone}", "tokenizer.json"),
        ("select max(leakage) from corpus where domain = 'licenses'", "corpus/licenses/card.json"),
        ("select * from overlap", "overlap.parquet"),
        ("select * from benchmarks where rule = 'train'", "benchmarks/train/"),
        ("select text from documents", ".parquet"),
        ("select * from metrics", ".jsonl"),
        ("select nll from contexts where domain = 'scripture'", "scripture.contexts.parquet"),
    ):
        told = said(["sql", str(run), query])
        assert told is not None, query
        assert told.startswith(f"demix: error: {run}/")
        assert broken in told.split(": ")[2]


FORBIDDEN = (
    "copy results to 'out.csv'",
    "copy (select 1 as a) to '{run}/out.parquet'",
    "export database 'out'",
    "attach 'out.db'",
    "install httpfs",
    "create table t as select 1",
    "create view results as select 1",
    "insert into results select * from results",
    "delete from results",
    "drop view results",
    "set enable_external_access = true",
    "reset lock_configuration",
    "pragma version",
    "begin transaction",
    "explain analyze copy results to 'out.csv'",
    "prepare p as select 1",
    "select 1; drop view results",
    "with t as (copy results to '/dev/stdout') select * from t",
    "with t as (insert into results select * from results returning *) select * from t",
    "pivot results on model using avg(perplexity)",
    "select * from '{run}/results.parquet'",
    "select * from read_csv('in.csv')",
    "select * from read_text('/etc/passwd')",
    "select * from read_json('{run}/config.json')",
    "select * from parquet_metadata('{run}/results.parquet')",
    "select * from glob('*')",
    "select * from read_csv('https://example.com/x.csv')",
    "select * from query('copy results to ''out.csv''')",
    "select getenv('HOME')",
    "select * from json_execute_serialized_sql('[]')",
    "select * from duckdb_secrets()",
    "select * from local_variable",
    "select * from run",
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
