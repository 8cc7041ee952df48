"""Numbers that no stage writes, in files with the right digest: refused by the file's name and the first bad place."""

import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from safetensors.torch import load_file, save_file

from demix.data.tokenizer import Tokenizer
from demix.evaluate.score_tables import read_scores, stream_scores, write_scores
from demix.files import read_json, read_parquet, sha256_file, write_json, write_parquet
from support.cli import succeeds
from support.errors import refused
from support.models import write_model
from support.scored import write_columns
from support.tokens import TRAINING

SIZE, LENGTH, BAD = 100, 8, 83


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A score table of two experts."""
    columns = dict.fromkeys(("law", "news"), np.full(SIZE, -3.0))
    write_columns(tmp_path, np.arange(SIZE, dtype=np.uint16), np.array([0, 50]), columns)
    return tmp_path


@pytest.mark.parametrize("value", [math.nan, 5.0, -math.inf, math.inf])
def test_a_score_that_is_no_log_p_is_refused_by_its_row(value: float, table: Path) -> None:
    path = table / "news.parquet"
    whole = read_parquet(path)
    column = whole["log_probability"].to_numpy().copy()
    column[[BAD, SIZE - 1]] = value
    write_parquet(pa.table([column], schema=whole.schema), path, row_group_size=30)
    # In pieces, too, rows are counted from the start of the file.
    for at_once in (LENGTH, 1 << 14):
        with refused("news.parquet") as told:
            list(stream_scores(table, ("law", "news"), at_once))
        assert str(BAD) in told.value.cause
    assert read_scores(table, ("law",)).tokens == SIZE
    with refused("new.parquet"):
        write_scores(table / "new.parquet", np.split(column, 2), {})
    assert not (table / "new.parquet").exists()


def test_rounding_above_zero_is_a_log_p(table: Path) -> None:
    write_scores(
        table / "law.parquet", [np.full(SIZE, 1e-6)], dict(read_parquet(table / "law.parquet").schema.metadata)
    )
    assert read_scores(table, ("law",)).scores.max() > 0


def test_json_of_an_evaluation_holds_no_nan(tokens: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(tokens / "tokenizer.json")
    write_model(tmp_path / "model", TRAINING, tokenizer.sha256, tokenizer.vocab_size)
    # Weights that are allowed, under which a perplexity is beyond the largest number.
    shared = tmp_path / "model" / "shared.safetensors"
    tensors = load_file(shared)
    tensors["token_embedding"] *= 1e5
    save_file(tensors, shared)
    for path in [tmp_path / "model" / "model.json", *(tmp_path / "model" / "experts").glob("*.json")]:
        write_json(path, read_json(path) | {"shared_sha256": sha256_file(shared), "experts": {}})
    (tmp_path / "text.txt").write_text("It is a truth universally acknowledged. " * 9)
    asked = (tmp_path / "model", tmp_path / "text.txt", "--tokenizer", tokens / "tokenizer.json")
    done = succeeds("eval", *asked, "--json")
    found = json.loads(done.stdout, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert {line["perplexity"] for line in found["experts"]} == {None}
