"""Are two runs of one config equal in everything that they computed? `python tests/support/compare_runs.py OLD NEW`

Each kind of result has one line: how many files were compared, how many of them differ, and the first difference. The
exit status is 1 where anything differs, and where a file is in only one of the two runs. Seals, times and speeds do
not count. Columns that only one of the two tables has are named, and do not count either.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

TIMES = {"tokens_per_second"}


@dataclass(frozen=True)
class Kind:
    """Files of one kind. `differs` tells the first difference of two files, None where there is none."""

    name: str
    patterns: tuple[str, ...]
    differs: Callable[[Path, Path], str | None]


@dataclass(frozen=True)
class Compared:
    """What a kind came to: files in either run, how many of them differ, and the first difference."""

    name: str
    files: int
    different: int
    first: str | None
    columns: tuple[str, ...]


def is_equal(one: Any, other: Any) -> bool:
    """Equality in which NaN is equal to NaN and 1 is not True."""
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (one != one and other != other)
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def pair(old: Any, new: Any) -> str:
    """Two values beside each other; of long texts the place where they begin to differ."""
    a, b = repr(old), repr(new)
    if max(len(a), len(b)) > 160:
        at = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        a, b = (f"…{text[max(at - 40, 0) : at + 40]}…" for text in (a, b))
    return f"{a} against {b}"


def first_unequal(old: list[Any], new: list[Any]) -> int | None:
    """The first place at which two lists of one length differ."""
    return next((at for at, (a, b) in enumerate(zip(old, new, strict=True)) if not is_equal(a, b)), None)


def table_differs(old: pa.Table, new: pa.Table) -> str | None:
    """The first difference in the number of rows, or in a value of a column of both; the order of rows counts."""
    if old.num_rows != new.num_rows:
        return f"{old.num_rows} rows against {new.num_rows}"
    both = [name for name in old.column_names if name in new.column_names]
    if not both:
        return "no column is in both"
    for name in both:
        a, b = old[name], new[name]
        if a.type == b.type and a.equals(b):
            continue
        a, b = a.to_pylist(), b.to_pylist()
        if (row := first_unequal(a, b)) is not None:
            return f"column {name}, row {row}: {pair(a[row], b[row])}"
    return None


def parquet_differs(old: Path, new: Path) -> str | None:
    return table_differs(pq.read_table(old), pq.read_table(new))


def bytes_differ(old: Path, new: Path) -> str | None:
    """The first byte that differs; for an Arrow file also whether its values do."""
    a, b = old.read_bytes(), new.read_bytes()
    if a == b:
        return None
    at = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    found = f"byte {at} of {len(a)} and {len(b)}"
    if old.suffix == ".arrow":
        inside = table_differs(pa.ipc.open_file(str(old)).read_all(), pa.ipc.open_file(str(new)).read_all())
        found += f" ({inside or 'values are equal'})"
    return found


def tensors(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Type, shape and bytes of each tensor in a safetensors file (its header is JSON after eight bytes of length)."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        first, end = (start + offset for offset in entry["data_offsets"])
        found[name] = entry["dtype"], entry["shape"], data[first:end]
    return found


def tensors_differ(old: Path, new: Path) -> str | None:
    a, b = tensors(old), tensors(new)
    if only := sorted(a.keys() ^ b.keys()):
        return f"tensor {only[0]} is only in {'OLD' if only[0] in a else 'NEW'}"
    for name in a:
        if a[name][:2] != b[name][:2]:
            return f"tensor {name}: {a[name][:2]} against {b[name][:2]}"
        if a[name][2] != b[name][2]:
            return f"tensor {name}: other bytes"
    return None


def value_differs(old: Any, new: Any, at: str = "") -> str | None:
    """The first difference of two JSON values, with the path to it."""
    if isinstance(old, dict) and isinstance(new, dict):
        if only := sorted(old.keys() ^ new.keys()):
            return f"{at}/{only[0]} is only in {'OLD' if only[0] in old else 'NEW'}"
        return next((found for key in old if (found := value_differs(old[key], new[key], f"{at}/{key}"))), None)
    if isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            return f"{at}: {len(old)} entries against {len(new)}"
        found = (value_differs(a, b, f"{at}/{i}") for i, (a, b) in enumerate(zip(old, new, strict=True)))
        return next((one for one in found if one), None)
    return None if is_equal(old, new) else f"{at or 'value'}: {pair(old, new)}"


def json_value(path: Path) -> Any:
    """The value in a JSON file without its seal, which is a key or blanks around the value."""
    value = json.loads(path.read_text())
    return {key: item for key, item in value.items() if key != "seal"} if isinstance(value, dict) else value


def json_differs(old: Path, new: Path) -> str | None:
    return value_differs(json_value(old), json_value(new))


def json_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of JSON lines but for times; a last line of a seal is no row."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    if rows and "seal" in rows[-1] and rows[-1].keys() <= {"rows", "place", "seal"}:
        rows.pop()
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def rows_differ(old: Path, new: Path) -> str | None:
    return value_differs(json_rows(old), json_rows(new))


def cells_differ(old: Path, new: Path) -> str | None:
    """The first line of a printed table that differs; the text around the table does not count."""
    a, b = ([line for line in path.read_text().splitlines() if line.startswith("|")] for path in (old, new))
    return value_differs(a, b)


KINDS = (
    Kind("corpora", ("corpus/*.parquet", "corpus/*/*.parquet"), parquet_differs),
    Kind("tokenizer", ("tokenizer.json",), json_differs),
    Kind("tokens", ("tokens/**/*.arrow",), bytes_differ),
    Kind("tensors", ("models/**/*.safetensors",), tensors_differ),
    Kind("score tables", ("scores/**/*.parquet",), parquet_differs),
    Kind("results", ("results.parquet",), parquet_differs),
    Kind("priors", ("priors.parquet",), parquet_differs),
    Kind("differences", ("differences.parquet",), parquet_differs),
    Kind("posteriors", ("posteriors.parquet",), parquet_differs),
    Kind("audit", ("audit.parquet",), parquet_differs),
    Kind("metrics", ("metrics/**/*.jsonl",), rows_differ),
    Kind("report tables", ("report/tables/*.md",), bytes_differ),
    Kind("report cells", ("report/tables/*.md",), cells_differ),
    Kind("figures", ("report/figures/*.json",), json_differs),
)


def files_of(kind: Kind, run: Path) -> set[str]:
    return {path.relative_to(run).as_posix() for pattern in kind.patterns for path in run.glob(pattern)}


def columns_of(path: Path) -> set[str]:
    return set(pq.read_schema(path).names) if path.suffix == ".parquet" else set()


def compare(kind: Kind, old: Path, new: Path) -> Compared:
    """All files of one kind in two runs."""
    before, after = files_of(kind, old), files_of(kind, new)
    found, columns = [], set()
    for name in sorted(before | after):
        if name not in before or name not in after:
            found.append(f"{name}: only in {'OLD' if name in before else 'NEW'}")
            continue
        if difference := kind.differs(old / name, new / name):
            found.append(f"{name}: {difference}")
        columns |= columns_of(old / name) ^ columns_of(new / name)
    return Compared(kind.name, len(before | after), len(found), found[0] if found else None, tuple(sorted(columns)))


def compare_runs(old: Path, new: Path) -> list[Compared]:
    """One row per kind of result."""
    return [compare(kind, old, new) for kind in KINDS]


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print("usage: compare_runs.py OLD NEW", file=sys.stderr)
        return 2
    rows = compare_runs(Path(arguments[0]), Path(arguments[1]))
    for row in rows:
        line = f"{row.name:14} {row.files:4} files, {row.different:4} different"
        line += f"; columns in one only: {', '.join(row.columns)}" if row.columns else ""
        print(line + (f"; {row.first}" if row.first else ""))
    if not any(row.files for row in rows):
        print("neither folder has a run", file=sys.stderr)
        return 2
    return int(any(row.different for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
