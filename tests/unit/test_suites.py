"""`evaluation.suites`: texts that are scored as those of novel domains are, and take part in nothing else."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import yaml

from demix.data.anonymize import SCHEMA
from demix.data.corpus import Budget, Splitting, mark_duplicates, split
from demix.evaluate.domain import Evaluation
from demix.files import read_json, read_parquet, write_json, write_parquet
from demix.report import report_files
from demix.run.check import completed_run, load_run
from demix.run.evaluated import evaluated
from demix.run.run import Run, config_fingerprint
from support.cli import demix
from support.configs import domains, small, small_run
from support.errors import refused
from support.frozen import rows_of, run_data
from support.report import table_of
from support.scored import evaluate_domain, write_table

TRAINING = ("law", "news", "code")
SOURCE = {"source": {"path": "c4.jsonl"}}
SUITES: dict[str, Any] = {"paloma": {"c4": SOURCE, "songs": SOURCE}, "own": {"mail": SOURCE}}
WEIGHTS = ("history", "released", "tempered(0.5,0.9)", "switching")
RUN = small_run(domains=domains(TRAINING, ("songs",)), evaluation={"weights": ["history"], "suites": SUITES})


def evaluation(run: Run, domain: str) -> Evaluation:
    return Evaluation(
        kind=run.kind_of(domain),
        tables=evaluated(run, domain),
        dev_blocks=6,
        weights=WEIGHTS,
        top_k=(2,),
        seed=run.seed,
    )


def test_a_suite_is_evaluated_as_a_novel_domain_without_a_dev_split(tmp_path: Path) -> None:
    """Its rows are those of a novel domain of the same tokens and scores, but for what dev decides there."""
    experts = {"domain_token": TRAINING, "demix": (*TRAINING, "songs"), "dense": ("dense",)}
    experts |= {"dense_unbalanced": ("dense",), "dense-dapt-songs": ("dense",)}
    found = {}
    for domain in ("songs", "paloma_c4"):
        for number, (model, columns) in enumerate(experts.items()):
            for text, part in enumerate(("dev", "test"), 1):
                if part == "test" or domain == "songs":
                    write_table(tmp_path / "scores" / model / f"{domain}.{part}", columns, seed=number, text=text)
        output = tmp_path / f"{domain}.parquet"
        evaluate_domain(tmp_path / "scores", domain, evaluation(RUN, domain), output, np.full(300, 3))
        found[domain] = pd.read_parquet(output)
        assert pd.read_parquet(output.with_suffix(".losses.parquet"))["domain"].unique().tolist() == [domain]
    novel, suite = found["songs"], found["paloma_c4"]
    assert {*suite["kind"]} == {"suite"}
    assert {*suite["model"]} == {"demix", "dense", "dense_unbalanced", "domain_token"}
    key = ["model", "experts", "method", "weights", "top_k", "expert", "oracle"]
    same = novel.query("variant == '' and experts in ('training', 'dense') and not model.str.contains('dapt')")
    same = same.query("method not in ('cached', 'fitted', 'expert')")
    expected = same.set_index(key).sort_index()
    own = suite.set_index(key).sort_index()
    pd.testing.assert_index_equal(own.index, expected.index)
    for column in ("perplexity", "bits_per_byte", "nll", "tokens", "perplexity_low"):
        tolerance = 0.05 if column == "perplexity_low" else 1e-12
        np.testing.assert_allclose(own[column], expected[column], rtol=tolerance)


def write_documents(path: Path, texts: list[str]) -> Path:
    """What `demix read` writes of `texts`, with nothing rejected."""
    ids = [hashlib.sha256(text.encode()).hexdigest() for text in texts]
    columns = [ids, texts, [len(text.split()) for text in texts], ids]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
    write_parquet(pa.table(arrays, schema=SCHEMA), path)
    write_json(path.with_suffix(".json"), {"rejected": {}, "replacements": {}, "normalised": {}})
    return path


def test_all_text_that_training_does_not_hold_is_test(tmp_path: Path) -> None:
    texts = {
        "law": [f"law {number} of the land" for number in range(20)],
        "own_mail": [f"mail {number} of the day" for number in range(30)] + ["law 3 of the land", "mail 2 of the day"],
    }
    parts = {name: write_documents(tmp_path / f"{name}.parquet", some) for name, some in texts.items()}
    owners = tmp_path / "owners.parquet"
    mark_duplicates({"law": [parts["law"]]}, owners)
    for words, number in ((None, 30), (42, 9)):
        splitting = Splitting(words=Budget(test=words or 10**6), training=False, seed=1, test_only=True)
        split("own_mail", [parts["own_mail"]], owners, splitting, tmp_path / "out")
        rows = read_parquet(tmp_path / "out" / "test.parquet").to_pylist()
        assert len(rows) == number
        assert {row["text"] for row in rows} <= {*texts["own_mail"][:30]}
        card = read_json(tmp_path / "out" / "card.json")
        assert (card["documents"], card["words"]) == ({"test": number}, {"test": 5 * number})
        assert card["duplicates"] == {"within": 1, "across": 1}
        assert card["rejected"]["beyond_budget"] == 30 - number
        assert [path.name for path in sorted((tmp_path / "out").iterdir())] == ["card.json", "test.parquet"]
    # In the order in which a domain is split.
    whole = Splitting(words=Budget(dev=42, test=5), training=False, seed=1)
    split("own_mail", [parts["own_mail"]], owners, whole, tmp_path / "split")
    assert read_parquet(tmp_path / "split" / "dev.parquet").to_pylist() == rows
    mark_duplicates({"law": [parts["law"]], "mail": [parts["own_mail"]]}, owners)
    with refused("own_mail"):
        split("own_mail", [parts["own_mail"]], owners, splitting, tmp_path / "none")
    assert not (tmp_path / "none" / "test.parquet").exists()


def test_suites_change_a_config_and_no_domain_of_it() -> None:
    without = completed_run(small())
    run = completed_run(small(evaluation={"suites": SUITES}))
    assert "suites" not in without.config.values["evaluation"]
    assert config_fingerprint(without.config) != config_fingerprint(run.config)
    assert completed_run(run.config.values).config.values == run.config.values
    assert [*run.domains] == [*without.domains]
    assert [run.kind_of(name) for name in run.texts] == ["training", "training", "novel", *["suite"] * 3]


def test_missing_files_and_pins_name_a_source_of_a_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = small(evaluation={"suites": SUITES})
    Path("x.yaml").write_text(yaml.safe_dump(config))
    with refused("x.yaml"):
        load_run("x.yaml").config.refuse_missing_files(Path("x.yaml"))
    for name in ("text.jsonl", "c4.jsonl"):
        Path(name).write_text('{"text": "a"}\n')
    told = yaml.safe_load(demix("config", "--pin", "x.yaml").stdout)
    assert [*told["domains"]["training"]] == ["law", "news"]
    assert {suite: [*sources] for suite, sources in told["evaluation"]["suites"].items()} == {
        "paloma": ["c4", "songs"],
        "own": ["mail"],
    }
    pinned = told["evaluation"]["suites"]["own"]["mail"]["source"]["sha256"]["c4.jsonl"]
    assert len(pinned) == 64


def test_the_table_has_perplexity_and_bits_per_byte_by_source(frozen: Run) -> None:
    rows = rows_of(frozen, "suites")
    dense = rows.query("model == 'dense' and domain == 'paloma_songs' and seed == @frozen.seed").iloc[0]
    # An oracle is never the best.
    rows.loc[rows["oracle"], "perplexity"] = 1.0
    table = table_of("tasks", run_data(frozen, suites=rows))
    assert list(table.frame.columns)[-2:] == ["paloma: songs", "paloma: packages"]
    values = table.frame["paloma: songs"]
    assert values["Dense (Balanced)"] == dense["perplexity"]
    assert f"paloma: songs: {dense['tokens']:,.0f} tokens" in table.notes[0]
    assert table.beneath.loc["Dense (Balanced)", "paloma: songs"] == f"{dense['bits_per_byte']:.3f}"
    (best,) = values.index[table.best["paloma: songs"]]
    assert values[best] == min(value for value in values if value > 1)
    assert "tables/tasks.html" in report_files(frozen)
    assert "tables/tasks.html" not in report_files(small_run())
