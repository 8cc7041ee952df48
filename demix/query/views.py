"""What a run can be asked: the table of views, and the files of a run that each view is made of.

A view reads files through the functions that check their seals and places, and only the files that a query needs.
"""

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from demix.errors import DemixError
from demix.files import REMAKE, parquet_reader, read_json, read_json_lines, read_parquet
from demix.files.batches import read_batches
from demix.model.manifest import parent_of
from demix.run.run import Run
from demix.run.systems import main_systems

# The approximate tokens of a score table that are read at once, under all experts that a query names.
TOKENS = 1 << 16

TEXT, WHOLE, REAL = pa.string(), pa.int64(), pa.float64()


@dataclass(frozen=True)
class AskedRun:
    """A run that is asked, with its name in the column `run`."""

    name: str
    of: Run

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.of.folder


@dataclass(frozen=True)
class Part:
    """Rows of a view that lie at one path and are alike in some columns. A query that excludes `same` never opens it.

    Parts of one path are read together.
    """

    run: AskedRun
    path: Path
    same: Mapping[str, str | int]


# Rows of the parts of one path, in pieces; of the columns that a query needs, all that the path has.
Reader = Callable[[Sequence[Part], Sequence[str]], Iterable[pa.Table | pa.RecordBatch]]


@dataclass(frozen=True)
class View:
    """A table that queries name. `columns` follow the column `run`; None stands for those of the Parquet files."""

    holds: str
    columns: Mapping[str, pa.DataType] | None
    parts: Callable[[AskedRun], Iterable[Part]]
    read: Reader
    optional: bool = False


def _parquet(parts: Sequence[Part], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows of a Parquet file. A column that the file lacks is left out."""
    with parquet_reader(parts[0].path) as file:
        known = file.schema_arrow.names
    # At least one column, because a batch without columns has no number of rows.
    yield from read_batches(parts[0].path, [name for name in columns if name in known] or known[:1])


def _rows(make: Callable[[Part], Iterable[dict[str, Any]]]) -> Reader:
    """The reader of a small file, whose rows `make` gives. Values that are missing are NULL."""

    def read(parts: Sequence[Part], columns: Sequence[str]) -> Iterator[pa.Table]:
        rows, own = [*make(parts[0])], set(columns) - {"run", *parts[0].same}
        # A table without columns has no number of rows.
        yield pa.table({"": pa.nulls(len(rows))} | {name: [row.get(name) for row in rows] for name in own})

    return read


def _found(*patterns: str, kind: bool = False, **alike: str) -> Callable[[AskedRun], Iterator[Part]]:
    """The parts of a run at paths like `patterns`, whose {names} are columns that all rows of a part have alike.

    {folder} of a model gives the columns model and seed, as in results. With `kind` a domain's kind is a column too.
    """
    names = [re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/]+)", re.escape(pattern))) for pattern in patterns]

    def parts(run: AskedRun) -> Iterator[Part]:
        for pattern, name in zip(patterns, names, strict=True):
            for path in sorted(run.folder.glob(re.sub(r"{\w+}", "*", pattern))):
                found = name.fullmatch(path.relative_to(run.folder).as_posix())
                same: dict[str, str | int] = {**alike, **(found.groupdict() if found else {})}
                if "folder" in same:
                    same["model"], same["seed"] = run.of.row_of(str(same.pop("folder")))
                if kind:
                    same["kind"] = run.of.kind_of(str(same["domain"]))
                yield Part(run, path, same)

    return parts


def _one(name: str) -> Callable[[AskedRun], list[Part]]:
    """The part that is one file, which a run must have."""
    return lambda run: [Part(run, run.folder / name, {})]


def _as_it_is(holds: str, pattern: str) -> View:
    """The view of Parquet files that a run need not have, with their own columns."""
    return View(holds, None, _found(pattern), _parquet, optional=True)


def _jobs(run: AskedRun) -> Iterator[Part]:
    """One part per benchmark file of Snakemake: the rule's folder, and the wildcards of the job below it."""
    for path in sorted(run.folder.glob("benchmarks/**/*.tsv")):
        rule, *wildcards = path.relative_to(run.folder).with_suffix("").parts[1:]
        yield Part(run, path, {"rule": rule, "wildcards": "/".join(wildcards)})


def _scored(run: AskedRun) -> Iterator[Part]:
    """One part per column of each score table; the path is that of the table."""
    for part in _found("scores/{folder}/{domain}.{split}/{expert}.parquet")(run):
        if part.same["expert"] != "tokens":
            yield replace(part, path=part.path.parent)


def _scores(parts: Sequence[Part], columns: Sequence[str]) -> Iterator[pa.Table]:
    from demix.evaluate.score_tables import stream_scores

    start = block = 0
    for chunk in stream_scores(parts[0].path, [str(part.same["expert"]) for part in parts], at_once=TOKENS):
        count, (blocks, length) = len(chunk.tokens), chunk.mask.shape
        place = np.arange(count)
        found = {
            "document": chunk.documents,
            "origin": chunk.origins,
            "position": start + place,
            "block": block + place // length,
            "block_position": place % length,
            "token_id": chunk.tokens,
        }
        if "token" in columns:
            found["token"] = _vocabulary(parts[0].run.folder / "tokenizer.json").take(pa.array(chunk.tokens))
        for number, part in enumerate(parts):
            found["logprob"] = chunk.scores[..., number].reshape(-1)[:count].astype(np.float32)
            yield pa.table(found | {"expert": pa.repeat(part.same["expert"], count)})
        start, block = start + count, block + blocks


@lru_cache(maxsize=8)
def _vocabulary(path: Path) -> pa.Array:
    """The text of each token id of a tokenizer; bytes that are not UTF-8 become U+FFFD."""
    from demix.data.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(path)
    return pa.array([tokenizer.decode([number]) for number in range(tokenizer.vocab_size)])


def _documents(parts: Sequence[Part], columns: Sequence[str]) -> Iterator[pa.Table]:
    start = 0
    for batch in _parquet(parts, columns):
        numbers = pa.array(np.arange(start, start + batch.num_rows))
        yield pa.Table.from_batches([batch]).append_column("document", numbers)
        start += batch.num_rows


def _main(part: Part) -> Iterator[dict[str, Any]]:
    """The rows of results that the main table takes its means of, but for oracles."""
    run, told = part.run.of, ("top_k", "variant", "split", "oracle", "seed")
    labels = {system.key: system.label for _, system in main_systems(run)}
    plain = (None, "", "test", False, run.seed)
    for row in read_parquet(part.path, [*told, *(name for name in _MAIN if name != "system")]).to_pylist():
        label = labels.get((row["model"], row["experts"], row["method"], row["weights"]))
        if label and tuple(row[name] for name in told) == plain:
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
            "origins_in_train": origins.get(f"{split}_in_train"),
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


def _job(part: Part) -> list[dict[str, float]]:
    used = {}
    try:
        with open(part.path, encoding="utf-8", newline="") as stream:
            (row,) = csv.DictReader(stream, delimiter="\t")
        for column, name in (("seconds", "s"), ("cpu_seconds", "cpu_time"), ("max_rss_mib", "max_rss")):
            used[column] = float(row[name])
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise DemixError(part.path, f"is damaged ({error!r})", REMAKE) from None
    return [used]


def _settings(part: Part) -> Iterator[dict[str, str]]:
    for key, value in _flat(read_json(part.path), ()):
        yield {"key": key, "value": value if isinstance(value, str) else json.dumps(value)}


def _flat(value: Any, above: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, (*above, key))
    else:
        yield ".".join(above), value


_COUNTS = {"words": WHOLE, "budget": WHOLE, "origins": WHOLE, "origins_in_train": WHOLE}
_WHICH = {"model": TEXT, "seed": WHOLE}
_WHERE = {"domain": TEXT, "split": TEXT}
_MAIN = {"system": TEXT, **_WHICH, "experts": TEXT, "method": TEXT, "weights": TEXT, "domain": TEXT, "kind": TEXT} | (
    dict.fromkeys(("perplexity", "perplexity_low", "perplexity_high"), REAL)
)

VIEWS = {
    "results": View("one row per evaluation: perplexities with intervals", None, _one("results.parquet"), _parquet),
    "main": View(
        "the main table: perplexity of each of its systems on each domain", _MAIN, _one("results.parquet"), _rows(_main)
    ),
    "suites": _as_it_is("one row per evaluation on a domain of a suite", "suites.parquet"),
    "differences": View("systems against others on the same documents", None, _one("differences.parquet"), _parquet),
    "priors": View("cached and fitted priors by domain and expert", None, _one("priors.parquet"), _parquet),
    "posteriors": View("the posterior after each block", None, _one("posteriors.parquet"), _parquet),
    "audit": _as_it_is("how much of removed documents models continue word for word", "audit.parquet"),
    "tasks": _as_it_is(
        "accuracy on tasks by model and routing, with intervals and chance; values of the harness's tasks",
        "tasks.parquet",
    ),
    "task_weights": _as_it_is(
        "the mean weight of each expert over the tests of a task, by routing", "task_weights.parquet"
    ),
    "clusters": View(
        "the cluster of each document, for models that learn from clusters",
        {"clustering": TEXT, **_WHERE, "document": WHOLE, "cluster": WHOLE, "distance": REAL},
        _found("clusters/{clustering}/assigned/{domain}.{split}.parquet"),
        _documents,
        optional=True,
    ),
    "contamination": _as_it_is(
        "how much of the harness's tasks the training text of a domain has, in 13-grams of words",
        "harness/contamination/*.parquet",
    ),
    "overlap": View(
        "shares of bigrams that test has in common with train", None, _one("corpus/overlap.parquet"), _parquet
    ),
    "corpus": View(
        "one row per domain and split: sizes, budgets, leakage",
        {"domain": TEXT, "kind": TEXT, "split": TEXT, "documents": WHOLE, **_COUNTS, "leakage": REAL},
        _found("corpus/{domain}/card.json", kind=True),
        _rows(_card),
    ),
    "corpus_counts": View(
        "what was rejected, replaced or normalised in each domain",
        {"domain": TEXT, "kind": TEXT, "what": TEXT, "name": TEXT, "count": WHOLE},
        _found("corpus/{domain}/card.json", kind=True),
        _rows(_counts),
    ),
    "documents": View(
        "the documents of the splits; document is the number in the split",
        {**_WHERE, "kind": TEXT, "document": WHOLE, "id": TEXT, "n_words": WHOLE, "text": TEXT}
        | {"origin": TEXT, "metadata": TEXT},
        _found("corpus/{domain}/{split}.parquet", kind=True),
        _documents,
    ),
    "scores": View(
        "one row per token and expert: the token's log-probability in nats",
        {**_WHICH, **_WHERE, "expert": TEXT, "document": WHOLE, "origin": WHOLE, "position": WHOLE, "block": WHOLE}
        | {"block_position": WHOLE, "token_id": WHOLE, "token": TEXT, "logprob": pa.float32()},
        _scored,
        _scores,
    ),
    "losses": View(
        "one row per document of a test split, model and expert: nll in nats",
        {**_WHICH, **_WHERE, "expert": TEXT, "document": WHOLE, "origin": WHOLE, "tokens": WHOLE, "nll": REAL},
        _found("evaluations/{domain}.losses.parquet", split="test"),
        _parquet,
    ),
    "contexts": View(
        "losses by length of blocks and position in them: nll in nats",
        None,
        _found("evaluations/{domain}.contexts.parquet", kind=True),
        _parquet,
        optional=True,
    ),
    "metrics": View(
        "one row per step and metric of a training, that of a single expert named; domain is NULL for the whole batch",
        {**_WHICH, "expert": TEXT, "step": WHOLE, "tokens": WHOLE, "metric": TEXT, "domain": TEXT, "value": REAL},
        _found("metrics/{folder}.jsonl", "metrics/{folder}/{expert}.jsonl"),
        _rows(_metrics),
    ),
    "models": View(
        "one row per model: its name in tables, size, training, parent",
        {**_WHICH, "label": TEXT, "kind": TEXT, "layers": WHOLE, "width": WHOLE, "heads": WHOLE, "context": WHOLE}
        | {"shared_parameters": WHOLE, "expert_parameters": WHOLE, "steps": WHOLE, "tokens": WHOLE}
        | {"learning_rate": REAL, "parent": TEXT, "shared_sha256": TEXT},
        _found("models/{folder}/model.json"),
        _rows(_model),
    ),
    "experts": View(
        "the lineage of each expert",
        {**_WHICH, "expert": TEXT, "parent": TEXT, "parent_prior": REAL, "lowest_dev_loss_expert": TEXT}
        | {"learning_rate_factor": REAL, "steps": WHOLE, "steps_run": WHOLE, "tokens": WHOLE, "sha256": TEXT},
        _found("models/{folder}/experts/{expert}.json"),
        _rows(_expert),
    ),
    "trials": View(
        "dev losses before and after each learning rate that an adaptation tried, in nats",
        {**_WHICH, "expert": TEXT, "factor": REAL, "chosen": pa.bool_(), "domain": TEXT, "before": REAL, "after": REAL},
        _found("models/{folder}/experts/{expert}.json", "models/{folder}/model.json"),
        _rows(_trials),
        optional=True,
    ),
    "benchmarks": View(
        "time and memory of each job",
        {"rule": TEXT, "wildcards": TEXT, "seconds": REAL, "cpu_seconds": REAL, "max_rss_mib": REAL},
        _jobs,
        _rows(_job),
    ),
    "settings": View(
        "the run, one row per key; values that are no text are JSON",
        {"key": TEXT, "value": TEXT},
        _one("config.json"),
        _rows(_settings),
    ),
}
