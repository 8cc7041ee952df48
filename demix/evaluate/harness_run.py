"""Tasks of the standard harness in a run: their documents once, and what each model makes of them, as rows.

No network is asked, so that a run does not depend on what the hub has today: the data are local, or were fetched into
the cache of Hugging Face's datasets before (`write_documents` alone may fetch them).
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from demix.config.harness import HarnessTasks, HarnessWeights
from demix.config.training import Threads
from demix.errors import DemixError
from demix.evaluate.columns import HARNESS, TASKS, table_schema
from demix.evaluate.harness import Tasks, evaluate_tasks, named_tasks
from demix.files import read_parquet, write_parquet
from demix.files.batches import write_batches
from demix.model.device import set_threads
from demix.settings import DistinctItems, Seed, Text, settings

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
# One row per text of a document: the strings in its fields, in order.
DOCUMENTS = pa.schema(
    [
        pa.field("task", pa.dictionary(pa.int32(), pa.string()), False),
        pa.field("version", pa.string(), False),
        pa.field("document", pa.int32(), False),
        pa.field("text", pa.large_string(), False),
        pa.field("n_words", pa.int64(), False),
        pa.field("task_sha256", pa.string(), False),
    ]
)


@settings(kw_only=True)
class HarnessScoring(HarnessTasks):
    """What one model is asked, and how: its row and seed in tables, the experts that are mixed, and by which rules.

    A model without experts has none here.
    """

    model: Text
    seed: Seed
    experts: DistinctItems[Text] = ()
    weights: DistinctItems[HarnessWeights]
    threads: Threads


def write_documents(given: HarnessTasks, output: Path, *, offline: bool = True) -> None:
    """Write the documents that the tasks ask about, each of its texts a row, to Parquet `output` (`DOCUMENTS`).

    Raises DemixError for an unknown task, and for one whose data are not here, or with `offline` false not to be had.
    """
    with _as_keys():
        known = _opened(given, offline=offline)
        batches = (_batch(*task) for task in _documents(known, given.limit, offline=offline))
        write_batches(output, DOCUMENTS, batches, use_dictionary=["version", "task_sha256"])


def score_harness(directory: Path, documents: Path, given: HarnessScoring, output: Path) -> None:
    """Put a model to the tasks by each rule of weights, and write the rows to `output` (`TASKS` and `HARNESS`).

    `documents` is what `write_documents` wrote. Raises DemixError where the tasks have other documents by now.
    """
    set_threads(given.threads)
    table = read_parquet(documents, columns=["task", "task_sha256"]).to_pylist()
    pinned = {row["task"]: row["task_sha256"] for row in table}
    with _as_keys():
        known = _opened(given, offline=True)
        for name, _, _, found in _documents(known, given.limit, offline=True):
            if pinned.get(name) != found:
                cause = f"holds other documents of {name} than the task has"
                raise DemixError(documents, cause, "delete the file, and the tasks run again on what they have")
        rows = []
        for weights in given.weights if given.experts else ("dense",):
            mixed = {"experts": ",".join(given.experts), "weights": weights} if given.experts else {}
            results = evaluate_tasks({"pretrained": str(directory)} | mixed, _asked(given), known=known)
            about = {"model": given.model, "n_experts": max(1, len(given.experts)), "routing": weights}
            rows += [about | {"seed": given.seed} | row for row in rows_of(results, pinned)]
    write_parquet(pa.Table.from_pylist(rows, table_schema(TASKS | HARNESS)), output)


def rows_of(results: Mapping[str, Any], digests: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """What tasks.parquet has of each task, or group of tasks, and metric of the harness's `results`.

    A metric that a filter made has its name too: exact_match,strict-match. `digests` are those of the documents.
    """
    from lm_eval import __version__ as harness

    for task, found in results["results"].items():
        about = {
            "task": task,
            "shots": results["n-shot"].get(task),
            "examples": results["n-samples"].get(task, {}).get("effective"),
            "harness_version": harness,
            "task_version": str(results["versions"].get(task) or ""),
            "documents_sha256": digests.get(task, ""),
        }
        better = results["higher_is_better"].get(task) or {}
        for key, value in found.items():
            metric, _, chosen = key.partition(",")
            if not chosen or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = found.get(f"{metric}_stderr,{chosen}")
            yield about | {
                "metric": metric if chosen == "none" else key,
                "value": float(value),
                "stderr": float(error) if isinstance(error, int | float) else None,
                "higher_is_better": better.get(metric),
            }


def _opened(given: HarnessTasks, *, offline: bool) -> tuple[Any, list[str]]:
    """The harness's manager of tasks, and their names; the libraries below it read their settings when they load."""
    if offline:
        os.environ.update(OFFLINE)
    return named_tasks(_asked(given))


def _asked(given: HarnessTasks) -> Tasks:
    folder = Path(given.include_path) if given.include_path else None
    return Tasks(given.tasks, folder, given.limit, given.shots)


def _documents(
    known: tuple[Any, list[str]], limit: float | None, *, offline: bool
) -> Iterator[tuple[str, str, list[Any], str]]:
    """Each task by name: its version, the documents that are asked, and the digest of these."""
    from lm_eval.evaluator_utils import get_sample_size

    manager, names = known
    for name in names:
        try:
            found = {
                task: (str(made.VERSION), [one for _, one in made.doc_iterator(limit=get_sample_size(made, limit))])
                for task, made in manager.load([name])["tasks"].items()
            }
        # A task may be anybody's program, and the libraries raise nearly anything for data that are not there.
        except Exception as error:
            reason = (str(error).strip().splitlines() or [""])[0][:300]
            cause = f"has no data here ({type(error).__name__}: {reason})"
            cure = "check the task's YAML file, its data and the network"
            if offline:
                cure = "mend the task's data_files, or set lm_eval.offline: false where there is a network to fetch it"
            raise DemixError(f"--tasks {name}", cause, cure) from error
        for task, (version, documents) in found.items():
            text = json.dumps(documents, sort_keys=True, ensure_ascii=False, default=str)
            yield task, version, documents, hashlib.sha256(text.encode()).hexdigest()


def _batch(task: str, version: str, documents: Iterable[Any], sha256: str) -> pa.RecordBatch:
    texts = [(number, text) for number, one in enumerate(documents) for text in [*_texts(one)] or [""]]
    rows = [(task, version, number, text, len(text.split()), sha256) for number, text in texts]
    columns = [pa.array(values, field.type) for values, field in zip(zip(*rows, strict=True), DOCUMENTS, strict=True)]
    return pa.record_batch(columns, schema=DOCUMENTS)


def _texts(value: Any) -> Iterator[str]:
    """The strings in a document."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(each)


@contextmanager
def _as_keys() -> Iterator[None]:
    """Name the config key in place of the option of `demix lm-eval` that an error names."""
    try:
        yield
    except DemixError as error:
        if not error.subject.startswith("--"):
            raise
        option, _, value = error.subject.removeprefix("--").partition(" ")
        key = f"config key lm_eval.{option.replace('-', '_')}"
        raise error.but(f"{key}: {value}" if value else key) from error
