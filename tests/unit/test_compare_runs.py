"""The comparison of the files of two runs finds each kind of difference."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load_file, save_file

from demix.files import read_json_lines, write_json_lines
from demix.run.run import Run
from support.compare_runs import compare_runs, main


def other_value(path: Path) -> None:
    frame = pd.read_parquet(path)
    column = next(name for name in frame if frame[name].dtype.kind == "f" and frame[name].notna().all())
    frame.loc[1, column] = np.nextafter(frame.loc[1, column], np.inf, dtype=frame[column].dtype)
    frame.to_parquet(path)


def fewer_rows(path: Path) -> None:
    pd.read_parquet(path).iloc[1:].to_parquet(path)


def turned_round(path: Path) -> None:
    pd.read_parquet(path).iloc[::-1].to_parquet(path)


def other_text(path: Path) -> None:
    frame = pd.read_parquet(path)
    frame.loc[0, "text"] += "x"
    frame.to_parquet(path)


def other_tensor(path: Path) -> None:
    tensors = load_file(path)
    name = min(tensors)
    tensors[name] = np.nextafter(tensors[name], np.float32(np.inf))
    save_file(tensors, path)


def other_loss(path: Path) -> None:
    rows = read_json_lines(path)
    write_json_lines(path, [rows[0] | {"loss": rows[0]["loss"] + 1e-9}, *rows[1:]])


def other_json(path: Path) -> None:
    value = json.loads(path.read_text())
    path.write_text(json.dumps(value | {"added": 1}))


def other_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"x")


CHANGES: dict[str, Callable[[Path], object]] = {
    "results.parquet": other_value,
    "priors.parquet": fewer_rows,
    "differences.parquet": turned_round,
    "audit.parquet": Path.unlink,
    "corpus/parliament/train.parquet": other_text,
    "tokenizer.json": other_json,
    "tokens/parliament/train.arrow": other_byte,
    "models/demix/shared.safetensors": other_tensor,
    "scores/demix/fantasy.test/licenses.parquet": other_value,
    "metrics/demix.jsonl": other_loss,
}


def test_every_difference_is_found(frozen: Run, frozen_copy: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for name, change in CHANGES.items():
        change(frozen_copy.folder / name)
    found = compare_runs(frozen_copy.folder, frozen.folder)
    assert {name for name, how in found.items() if how} == {*CHANGES}
    assert main(frozen.folder, frozen_copy.folder) == 1
    assert {line.partition(":")[0] for line in capsys.readouterr().out.splitlines()[:-1]} == {*CHANGES}


def test_seals_speeds_and_further_columns_do_not_count(frozen: Run, frozen_copy: Run, tmp_path: Path) -> None:
    metrics, results = frozen_copy.folder / "metrics/demix.jsonl", frozen_copy.folder / "results.parquet"
    rows = [{**row, "tokens_per_second": 1.0} for row in read_json_lines(metrics)]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pd.read_parquet(results).assign(added=1).to_parquet(results)
    assert main(frozen.folder, frozen_copy.folder) == 0
    found = compare_runs(frozen.folder, frozen_copy.folder)
    assert {name.split("/")[0] for name in found} >= {"corpus", "tokens", "models", "scores", "metrics"}
    assert main(tmp_path / "none", tmp_path / "none") == 1, "no runs are no equal runs"
