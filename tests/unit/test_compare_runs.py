"""The comparison of two runs finds each kind of difference, and takes a seal in either form for none."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from support.compare_runs import KINDS, compare_runs, main

TABLES = ("results", "priors", "differences", "posteriors", "audit")
PRINTED = "**Table 3.** Caption.\n\n| model | loss |\n|:--|--:|\n| demix | 2.50 |\n"
METRICS = [{"step": 1, "loss": 6.25, "tokens_per_second": 10.0}, {"step": 2, "loss": 6.125, "tokens_per_second": 11.0}]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_table(path: Path, **columns: list) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


def write_arrow(path: Path, tokens: list[int], metadata: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"token": pa.array(tokens, pa.uint16())}).replace_schema_metadata({"sha256": metadata})
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)


def write_tensors(path: Path, *values: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"w": np.array(values, np.float32), "b": np.zeros(2, np.float32)}, path)


def write_lines(path: Path, rows: list[dict]) -> None:
    write(path, "".join(json.dumps(row) + "\n" for row in rows))


def write_run(run: Path) -> Path:
    """A run with one file or two of each kind."""
    write_table(run / "corpus/owners.parquet", id=["a"], domain=["news"])
    write_table(run / "corpus/news/train.parquet", id=["a", "b"], text=["one", "two"])
    write(run / "tokenizer.json", '{"vocabulary": {"a": 1}}')
    write_arrow(run / "tokens/news/train.arrow", [1, 2, 3])
    write_tensors(run / "models/demix/shared.safetensors", 1.0, 2.0)
    write_table(run / "scores/demix/news.test/news.parquet", log_probability=[-1.0, -2.0])
    for name in TABLES:
        write_table(run / f"{name}.parquet", model=["demix", "dense"], value=[1.0, math.nan])
    write_lines(run / "metrics/demix.jsonl", METRICS)
    write(run / "report/tables/table3.md", PRINTED)
    write(run / "report/figures/figure2.json", '{"data": [{"loss": 1.5}, {"loss": 2}]}')
    return run


SCORES = "scores/demix/news.test/news.parquet"
CHANGES: list[tuple[str, set[str], Callable[[Path], object]]] = [
    (
        "a text", {"corpora"},
        lambda run: write_table(run / "corpus/news/train.parquet", id=["a", "b"], text=["one", "two" * 999]),
    ),
    ("an id", {"corpora"}, lambda run: write_table(run / "corpus/owners.parquet", id=["b"], domain=["news"])),
    ("a merge", {"tokenizer"}, lambda run: write(run / "tokenizer.json", '{"vocabulary": {"a": 2}}')),
    ("a token", {"tokens"}, lambda run: write_arrow(run / "tokens/news/train.arrow", [1, 2, 4])),
    ("metadata", {"tokens"}, lambda run: write_arrow(run / "tokens/news/train.arrow", [1, 2, 3], "other")),
    ("a weight", {"tensors"}, lambda run: write_tensors(run / "models/demix/shared.safetensors", 1.0, 2.0000002)),
    ("a shape", {"tensors"}, lambda run: write_tensors(run / "models/demix/shared.safetensors", 1.0, 2.0, 0.0)),
    ("a score", {"score tables"}, lambda run: write_table(run / SCORES, log_probability=[-1.0, -2.0000001])),
    ("no score", {"score tables"}, lambda run: (run / SCORES).unlink()),
    ("one more", {"score tables"}, lambda run: write_table(run / "scores/b/a.test/c.parquet", log_probability=[-1.0])),
    *(
        (f"{what} of {name}", {name}, lambda run, name=name, rows=rows: write_table(run / f"{name}.parquet", **rows))
        for name in TABLES
        for what, rows in {
            "a value": {"model": ["demix", "dense"], "value": [1.5, math.nan]},
            "a NaN": {"model": ["demix", "dense"], "value": [1.0, 2.0]},
            "the order": {"model": ["dense", "demix"], "value": [math.nan, 1.0]},
            "a row": {"model": ["demix"], "value": [1.0]},
        }.items()
    ),
    (
        "a loss", {"metrics"},
        lambda run: write_lines(run / "metrics/demix.jsonl", [METRICS[0] | {"loss": 6.0}, METRICS[1]]),
    ),
    ("a step", {"metrics"}, lambda run: write_lines(run / "metrics/demix.jsonl", METRICS[:1])),
    (
        "a cell", {"report tables", "report cells"},
        lambda run: write(run / "report/tables/table3.md", PRINTED.replace("2.50", "2.51")),
    ),
    ("a caption", {"report tables"}, lambda run: write(run / "report/tables/table3.md", PRINTED.replace("Cap", "Tit"))),
    (
        "a point", {"figures"},
        lambda run: write(run / "report/figures/figure2.json", '{"data": [{"loss": 1.5}, {"loss": 3}]}'),
    ),
]  # fmt: skip


def test_a_run_is_equal_to_itself_and_each_kind_has_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "old"), write_run(tmp_path / "new")
    rows = compare_runs(tmp_path / "old", tmp_path / "new")
    assert [row.name for row in rows] == [kind.name for kind in KINDS]
    assert all(row.files and not row.different for row in rows)
    assert main([str(tmp_path / "old"), str(tmp_path / "new")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(KINDS)


@pytest.mark.parametrize(("kinds", "change"), [change[1:] for change in CHANGES], ids=[change[0] for change in CHANGES])
def test_a_difference_is_found(
    tmp_path: Path, kinds: set[str], change: Callable[[Path], object], capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = write_run(tmp_path / "old"), write_run(tmp_path / "new")
    change(new)
    for pair in ((old, new), (new, old)):
        assert {row.name for row in compare_runs(*pair) if row.different == 1} == kinds
        assert {row.name for row in compare_runs(*pair) if row.first} == kinds
        assert main([str(folder) for folder in pair]) == 1
    printed = capsys.readouterr().out
    assert printed.count("1 different") == 2 * len(kinds)
    assert max(map(len, printed.splitlines())) < 300


def test_seals_times_and_new_columns_do_not_count(tmp_path: Path) -> None:
    old, new = write_run(tmp_path / "old"), write_run(tmp_path / "new")
    write(old / "tokenizer.json", '\t{"vocabulary": {"a": 1}} \t\t  ')
    write(new / "tokenizer.json", '{"vocabulary": {"a": 1}, "seal": "5f"}\n')
    slower = [{**row, "tokens_per_second": 1.0} for row in METRICS]
    write(old / "metrics/demix.jsonl", "\t" + "\n".join(json.dumps(row) for row in slower) + " \t ")
    write_lines(new / "metrics/demix.jsonl", [*METRICS, {"rows": 2, "seal": "5f"}])
    write_table(new / "results.parquet", seed=[1, 1], value=[1.0, math.nan], model=["demix", "dense"])
    rows = compare_runs(old, new)
    assert not any(row.different for row in rows)
    assert {row.name: row.columns for row in rows if row.columns} == {"results": ("seed",)}


def test_two_empty_folders_are_no_equal_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), str(tmp_path)]) == 2
    assert "neither folder has a run" in capsys.readouterr().err
