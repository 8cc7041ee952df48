"""`demix sql`: answers about a run, from its files alone and without a change of anything."""

import json
import math
import re
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from demix.data.tokenizer import Tokenizer
from demix.files import read_parquet, sha256_file, write_parquet
from demix.files.batches import read_batches
from demix.query import views
from demix.query.views import VIEWS
from demix.report.material import Material
from demix.report.ranking import ranking
from demix.run.run import Run
from support.asked_run import TOKENS, build_asked_run
from support.cli import demix, said
from support.once import once
from support.tokens import NOVEL, TRAINING

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "questions.md").read_text()
EXAMPLES = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def run(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is not to be written to."""
    return once(tmp_path_factory, "asked", lambda folder: build_asked_run(folder / "made-up", tokens)) / "made-up"


@pytest.fixture
def own(run: Path, tmp_path: Path) -> Path:
    """A copy of the run that may be damaged."""
    return shutil.copytree(run, tmp_path / "own")


def rows(run: Path, query: str, *more: str) -> list[dict]:
    done = demix("sql", run, *more, query, "--format", "json")
    assert done.exit_code == 0, (query, done.exception)
    return json.loads(done.output)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 10


@pytest.mark.parametrize("query", EXAMPLES, ids=lambda query: query.split("\n")[0])
def test_examples_of_the_page_have_answers(run: Path, query: str) -> None:
    found = rows(run, query)
    assert found
    assert None not in found[0].values()


@pytest.mark.parametrize("view", VIEWS)
def test_every_table_has_rows_of_the_run_and_stands_on_the_page(run: Path, view: str) -> None:
    found = rows(run, f"select * from {view} limit 2")
    assert next(iter(found[0].items())) == ("run", "made-up")
    columns = rows(run, f"describe {view}")
    assert [column["column_name"] for column in columns] == list(found[0])
    told = re.search(rf"^\| `{view}` \| .* \| (.*) \|$", PAGE, re.MULTILINE)[1]
    if ".parquet" not in told:
        assert {*found[0]} - {"run"} == {*re.findall(r"\w+", re.sub(r"\(.*?\)", "", told))}


@pytest.mark.parametrize("at_once", [64, views.TOKENS])
def test_scores_are_those_of_the_files_with_their_texts_and_documents(
    run: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(views, "TOKENS", at_once)
    monkeypatch.setattr(views, "read_batches", partial(read_batches, rows=at_once // 32))
    where = "where model = 'demix' and domain = 'fantasy' and split = 'test' and expert = 'licenses'"
    found = rows(run, f"select * from scores {where} order by position")
    folder = run / "scores" / "demix" / "fantasy.test"
    logprobs = read_parquet(folder / "licenses.parquet")["log_probability"].to_numpy()
    np.testing.assert_array_equal(np.array([row["logprob"] for row in found], np.float32), logprobs)
    tokens = read_parquet(folder / "tokens.parquet").to_pydict()
    for name, column in (("token_id", "token"), ("block", "block"), ("document", "document"), ("origin", "origin")):
        assert [row[name] for row in found] == tokens[column]
    assert [row["position"] for row in found] == list(range(TOKENS))
    assert [row["block_position"] for row in found] == [place % 32 for place in range(TOKENS)]
    encoder = Tokenizer.load(run / "tokenizer.json")
    assert [row["token"] for row in found] == [encoder.decode([number]) for number in tokens["token"]]
    texts = rows(run, "select document, text from documents where domain = 'fantasy' and split = 'test'")
    scored = rows(
        run, f"select document, string_agg(token, '' order by position) as text from scores {where} group by 1"
    )
    # A character of several bytes may be several tokens, which alone are no text.
    whole = {row["document"]: re.sub("[^ -~]", "", row["text"]) for row in texts}
    for row in scored:
        assert whole[row["document"]].startswith(re.sub("[^ -~]", "", row["text"]).removeprefix("<|endoftext|>"))


def test_trainings_of_a_model_are_told_apart_by_their_seed(run: Path) -> None:
    found = rows(run, "select * from metrics where model = 'demix' and seed = 2 order by domain nulls first")
    same = {"run": "made-up", "model": "demix", "seed": 2, "step": 1, "tokens": 64, "metric": "loss", "expert": None}
    assert found == [same | {"domain": None, "value": 2.5}, same | {"domain": "licenses", "value": 3}]
    assert not rows(run, "select 1 from metrics where model = 'demix-seed2'")


def test_losses_are_sums_of_scores(run: Path) -> None:
    (found,) = rows(
        run,
        "select count(*) as n, max(abs(nll - summed)) as off from losses join (select run, model, seed, domain, split, "
        "expert, document, -sum(logprob) as summed from scores group by all) "
        "using (run, model, seed, domain, split, expert, document)",
    )
    assert found["n"] == len(rows(run, "select 1 from losses"))
    assert found["off"] < 1e-6


def test_main_has_the_numbers_of_the_main_table(own: Path) -> None:
    """Of the systems of the first page, without oracles, and without rows of other seeds and numbers of experts."""
    results = read_parquet(own / "results.parquet").to_pandas()
    cached = results.query("experts == 'training' and method == 'cached' and variant == ''")
    others = [cached.assign(perplexity=1.0, **{name: 2}) for name in ("top_k", "seed")]
    written = pa.Table.from_pandas(pd.concat([results, *others]), preserve_index=False)
    write_parquet(written, own / "results.parquet")
    material = Material(Run.read(own))
    found = rows(own, "select system, kind, avg(perplexity) as mean, count(*) as n from main group by all")
    means = {(row["system"], row["kind"]): row["mean"] for row in found}
    expected = {
        (entry.label, kind): measured.mean
        for entry in ranking(material).entries
        for kind, measured in entry.on.items()
        if not (math.isnan(measured.mean) or measured.oracle)
    }
    assert means == pytest.approx(expected)
    assert {row["n"] for row in found} == {len(material.training), len(material.novel)}
    alone = rows(own, "select distinct method from main where kind = 'novel'")
    assert {row["method"] for row in alone} == {"dense", "average", "uniform", "updating", "cached", "fitted"}


def test_contexts_are_those_of_the_files(run: Path) -> None:
    found = rows(run, "select context, sum(nll) / sum(tokens) as nats from contexts group by all order by context")
    assert found == [{"context": 16, "nats": 5}, {"context": 32, "nats": 4.5}]
    kinds = {row["kind"]: row["n"] for row in rows(run, "select kind, count(*) as n from contexts group by all")}
    assert kinds == {"training": 3 * len(TRAINING), "novel": 3 * len(NOVEL)}


def test_only_the_files_that_a_query_needs_are_opened(own: Path) -> None:
    """All others are damaged, so that to open one is an error."""
    kept = {"scores/demix/fantasy.test/tokens.parquet", "scores/demix/fantasy.test/licenses.parquet"}
    kept |= {"config.json", "evaluations/fantasy.losses.parquet", "corpus/fantasy/test.parquet"}
    # These say what columns there are.
    kept |= {f"{name}.parquet" for name in ("results", "priors", "differences", "posteriors", "audit")}
    kept |= {"evaluations/fantasy.contexts.parquet"}
    for path in own.rglob("*"):
        if path.is_file() and str(path.relative_to(own)) not in kept:
            path.write_bytes(path.read_bytes()[:-20])
    alone = "model = 'demix' and domain = 'fantasy' and split = 'test' and expert in ('licenses', 'none')"
    assert rows(own, f"select count(*) as n, avg(logprob) from scores where {alone}")[0]["n"] == TOKENS
    join = "from scores s join documents using (run, domain, split, document) join losses l "
    join += "using (run, model, domain, split, expert, document)"
    assert rows(own, f"select distinct left(text, 9) as a {join} where {alone}")
    for query, broken in (
        ("select count(*) from scores where model = 'demix' and domain = 'fantasy' and split = 'test'", "fantasy.test"),
        (f"select max(token) from scores where {alone}", "tokenizer.json"),
        ("select max(leakage) from corpus where domain = 'licenses'", "corpus/licenses/card.json"),
        ("select * from overlap", "overlap.parquet"),
        ("select * from benchmarks where rule = 'train'", "train/demix.tsv"),
        ("select text from documents", ".parquet"),
        ("select * from metrics", ".jsonl"),
        ("select nll from contexts where domain = 'scripture'", "scripture.contexts.parquet"),
    ):
        told = said(["sql", str(own), query])
        assert told is not None, query
        assert told.startswith(f"demix: error: {own}/")
        assert broken in told
        assert "\n" not in told


FORBIDDEN = (
    "copy results to 'out.csv'",
    "copy (select 1 as a) to '{run}/out.parquet'",
    "export database 'out'",
    "import database 'out'",
    "attach 'out.db'",
    "attach ':memory:' as m",
    "install httpfs",
    "load httpfs",
    "create table t as select 1",
    "create view results as select 1",
    "insert into results select * from results",
    "update results set model = ''",
    "delete from results",
    "drop view results",
    "set enable_external_access = true",
    "reset lock_configuration",
    "pragma version",
    "call pragma_version()",
    "begin transaction",
    "vacuum analyze",
    "use memory",
    "explain analyze copy results to 'out.csv'",
    "explain select 1",
    "prepare p as select 1",
    "select 1; drop view results",
    "with t as (copy results to 'out.csv') select * from t",
    "with t as (copy results to '/dev/stdout') select * from t",
    "with t as (insert into results select * from results returning *) select * from t",
    "with t as (delete from results returning *) select * from t",
    "pivot results on model using avg(perplexity)",
    "select * from 'in.csv'",
    "select * from '{run}/results.parquet'",
    "select * from read_csv('in.csv')",
    "select * from read_csv('/dev/stdin')",
    "select * from read_text('/etc/passwd')",
    "select * from read_blob('/etc/passwd')",
    "select * from read_json('{run}/config.json')",
    "select * from parquet_metadata('{run}/results.parquet')",
    "select * from sniff_csv('in.csv')",
    "select * from glob('*')",
    "select * from read_csv('https://example.com/x.csv')",
    "select * from query('copy results to ''out.csv''')",
    "select getenv('HOME')",
    "select * from json_execute_serialized_sql('[]')",
    "select * from duckdb_secrets()",
    "select * from enable_logging()",
    "select * from local_variable",
    "select * from run",
)


def everything(folder: Path) -> dict[str, str]:
    return {str(path): sha256_file(path) if path.is_file() else "" for path in folder.rglob("*")}


@pytest.mark.parametrize("query", FORBIDDEN)
def test_a_query_neither_writes_nor_reads_elsewhere(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], query: str
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "in.csv").write_text("a,b\n1,2\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(home))
    before = everything(tmp_path) | everything(run)
    told = said(["sql", str(run), query.format(run=run)])
    assert told is not None
    assert re.fullmatch("demix: error: query[^\n]*", told), told
    assert capfd.readouterr() == ("", "")
    assert everything(tmp_path) | everything(run) == before
