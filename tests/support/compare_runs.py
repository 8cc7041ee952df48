"""Are two runs of one config equal in everything that they computed? `python tests/support/compare_runs.py OLD NEW`

Prints each file that differs or that only one run has, and the number of files. The exit status is 1 where anything
differs. Seals, times and speeds do not count, nor does a column of a table that only one of the two runs has.
"""

import json
import sys
from pathlib import Path

import pandas as pd
from safetensors.numpy import load_file

COMPARED = (
    "*.parquet", "corpus/**/*.parquet", "tokenizer.json", "tokens/**/*.arrow", "models/**/*.safetensors",
    "scores/**/*.parquet", "metrics/**/*.jsonl", "report/tables/*.md", "report/figures/*.json",
)  # fmt: skip
NOT_COMPUTED = ["seal", "place", "rows", "tokens_per_second"]


def frame_of(path: Path) -> pd.DataFrame:
    """The rows of a file of Parquet or JSON lines; a last line with a seal is no row."""
    if path.suffix == ".parquet":
        return pd.read_parquet(path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return pd.DataFrame([row for row in rows if "step" in row]).drop(columns=NOT_COMPUTED, errors="ignore")


def value_of(path: Path) -> object:
    """What a JSON file says without its seal, the bytes of the tensors of a model, and all of another file."""
    if path.suffix == ".safetensors":
        return {name: (one.dtype, one.shape, one.tobytes()) for name, one in load_file(path).items()}
    if path.suffix == ".json":
        value = json.loads(path.read_text())
        return json.dumps({key: one for key, one in value.items() if key not in NOT_COMPUTED}, sort_keys=True)
    return path.read_bytes()


def difference(old: Path, new: Path) -> str:
    """How two files differ, in a line; empty where they are equal."""
    if not (old.exists() and new.exists()):
        return "is in one run only"
    if old.suffix not in (".parquet", ".jsonl"):
        return "" if value_of(old) == value_of(new) else "other content"
    frames = frame_of(old), frame_of(new)
    both = [name for name in frames[0] if name in frames[1]]
    try:
        pd.testing.assert_frame_equal(*(frame[both] for frame in frames), check_exact=True)
    except AssertionError as error:
        return "; ".join(str(error).splitlines())
    return ""


def compare_runs(old: Path, new: Path) -> dict[str, str]:
    """The differences of all files of the runs in two folders by their names; empty where a file is equal."""
    names = {str(path.relative_to(run)) for run in (old, new) for pattern in COMPARED for path in run.glob(pattern)}
    return {name: difference(old / name, new / name) for name in sorted(names)}


def main(old: Path, new: Path) -> int:
    """Print what differs; the exit status."""
    found = compare_runs(old, new)
    for name, how in found.items():
        if how:
            print(f"{name}: {how}")
    print(f"{len(found)} files, {sum(map(bool, found.values()))} of them differ")
    return int(any(found.values()) or not found)


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
