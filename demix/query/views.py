"""The tables of a run that can be queried (views), and the files that each view reads.

A view reads files through the functions that check their checksums and paths, and only the files that a query needs.
"""

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from demix.files import parquet_reader, read_json, read_json_lines, read_parquet
from demix.files.batches import read_batches
from demix.model.manifest import parent_of
from demix.run.run import Run
from demix.run.systems import main_systems

TYPES = {"text": pa.string(), "int": pa.int64(), "real": pa.float64(), "float": pa.float32(), "bool": pa.bool_()}


@dataclass(frozen=True)
class QueryRun:
    """A run that is queried, with its name in the column `run`."""

    name: str
    of: Run

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.of.folder


@dataclass(frozen=True)
class Part:
    """The rows of a view in one file. `same` are columns with one value in all rows; a query that excludes this value
    does not open the file."""

    run: QueryRun
    path: Path
    same: Mapping[str, str | int]


@dataclass(frozen=True)
class View:
    """A table for queries: an entry of views.toml, whose first lines describe each field."""

    holds: str
    files: tuple[str, ...]
    rows: str = ""
    numbers: str = ""
    columns: Sequence[str] = ()
    alike: Mapping[str, str] = field(default_factory=dict)
    kind: bool = False
    optional: bool = False

    @property
    def types(self) -> dict[str, pa.DataType]:
        """The columns after `run`; empty if they are the columns of the Parquet files."""
        return {name: TYPES[kind] for name, _, kind in (column.partition(": ") for column in self.columns)}

    def read(self, part: Part, columns: Sequence[str]) -> Iterator[pa.Table]:
        """The rows of a part, in pieces, with the columns that the query needs and the file has."""
        if self.rows:
            rows, own = [*MADE[self.rows](part)], set(columns) - {"run", *part.same}
            # A table without columns has no number of rows.
            yield pa.table({"": pa.nulls(len(rows))} | {name: [row.get(name) for row in rows] for name in own})
            return
        with parquet_reader(part.path) as file:
            known = file.schema_arrow.names
        start = 0
        # At least one column, because a batch without columns has no number of rows.
        for batch in read_batches(part.path, [name for name in columns if name in known] or known[:1]):
            numbers = pa.array(range(start, start + batch.num_rows))
            start += batch.num_rows
            yield pa.Table.from_batches([batch]).append_column(self.numbers, numbers)

    def parts(self, run: QueryRun) -> Iterator[Part]:
        """The parts of a run. A file that the run must have is a part even if it is missing."""
        for pattern in self.files:
            name = re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/]+)", re.escape(pattern)))
            place = re.sub(r"{\w+}", "*", pattern)
            paths = sorted(run.folder.glob(place))
            if not paths and "*" not in place and not self.optional:
                paths = [run.folder / pattern]
            for path in paths:
                found = name.fullmatch(path.relative_to(run.folder).as_posix())
                same: dict[str, str | int] = {**self.alike, **(found.groupdict() if found else {})}
                if "folder" in same:
                    same["model"], same["seed"] = run.of.row_of(str(same.pop("folder")))
                if self.kind:
                    same["kind"] = run.of.kind_of(str(same["domain"]))
                # tokens.parquet is in the folder of the experts' files.
                if same.get("expert") != "tokens":
                    yield Part(run, path, same)


def _main(part: Part) -> Iterator[dict[str, Any]]:
    """The rows of results from which the means of the main table are computed, except oracles."""
    run, plain_columns = part.run.of, ("top_k", "variant", "split", "oracle", "seed")
    labels = {system.key: system.label for _, system in main_systems(run)}
    plain = (None, "", "test", False, run.seed)
    for row in read_parquet(
        part.path, [*plain_columns, *(name for name in VIEWS["main"].types if name != "system")]
    ).to_pylist():
        label = labels.get((row["model"], row["experts"], row["method"], row["weights"]))
        if label and tuple(row[name] for name in plain_columns) == plain:
            yield row | {"system": label}


def _card(part: Part) -> Iterator[dict[str, Any]]:
    card = read_json(part.path)
    origins, leakage = card.get("origins", {}), card.get("leakage", {})
    for split, documents in card["documents"].items():
        yield {
            "split": split,
            "documents": documents,
            "words": card["words"].get(split),
            "budget": card.get("budgets", {}).get(split),
            "origins": origins.get(split),
            "leakage": leakage.get("ngrams", {}).get(split),
        }


def _counts(part: Part) -> Iterator[dict[str, Any]]:
    card = read_json(part.path)
    for what in ("duplicates", "rejected", "replacements", "normalised"):
        for name, count in card.get(what, {}).items():
            yield {"what": what, "name": name, "count": count}


def _metrics(part: Part) -> Iterator[dict[str, Any]]:
    for row in read_json_lines(part.path):
        for key, value in row.items():
            if key not in ("step", "tokens") and isinstance(value, int | float | None):
                metric, _, domain = key.partition("/")
                yield {
                    "step": row["step"],
                    "tokens": row["tokens"],
                    "metric": metric,
                    "domain": domain or None,
                    "value": value,
                }


def _model(part: Part) -> Iterator[dict[str, Any]]:
    model, name = read_json(part.path), part.path.parent.name
    parent = model.get("parent")
    own = {**model.get("training", {}), **model.get("architecture", {}), **model}
    label = next((one.label for one in part.run.of.planned if one.name == name), None)
    yield own | {"label": label, "parent": parent["model"] if isinstance(parent, dict) else parent}


def _expert(part: Part) -> Iterator[dict[str, Any]]:
    expert = read_json(part.path)
    rate = expert.get("adaptation", {}).get("learning_rate_factor")
    yield {**expert, "parent": parent_of(expert), "learning_rate_factor": rate}


def _trials(part: Part) -> Iterator[dict[str, Any]]:
    about = read_json(part.path)
    for trial in about.get("trials", ()):
        factor = trial["learning_rate_factor"]
        tried = {"factor": factor, "chosen": factor == about["adaptation"]["learning_rate_factor"]}
        for key, before in trial["start"].items():
            yield tried | {"domain": key.partition("/")[2], "before": before, "after": trial["best"].get(key)}


def _job(part: Part) -> Iterator[dict[str, Any]]:
    names, values = (line.split("\t") for line in part.path.read_text(encoding="utf-8").splitlines())
    row = dict(zip(names, values, strict=True))
    columns = {"seconds": "s", "cpu_seconds": "cpu_time", "max_rss_mib": "max_rss"}
    # The folder of the rule, and below it the wildcards of the job.
    _, rule, *wildcards = part.path.relative_to(part.run.folder).with_suffix("").parts
    numbers = {column: float(row[name]) for column, name in columns.items()}
    yield {"rule": rule, "wildcards": "/".join(wildcards)} | numbers


def _vocabulary(part: Part) -> Iterator[dict[str, Any]]:
    from demix.data.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(part.path)
    for token in range(tokenizer.vocab_size):
        yield {"token": token, "text": tokenizer.decode([token])}


def _settings(part: Part) -> Iterator[dict[str, str]]:
    for key, value in _flat(read_json(part.path), ()):
        yield {"key": key, "value": value if isinstance(value, str) else json.dumps(value)}


def _flat(value: Any, above: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, (*above, key))
    else:
        yield ".".join(above), value


MADE: dict[str, Callable[[Part], Iterable[dict[str, Any]]]] = {
    "main": _main,
    "card": _card,
    "counts": _counts,
    "metrics": _metrics,
    "model": _model,
    "expert": _expert,
    "trials": _trials,
    "job": _job,
    "vocabulary": _vocabulary,
    "settings": _settings,
}
VIEWS = {
    name: View(**row) for name, row in tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8")).items()
}
