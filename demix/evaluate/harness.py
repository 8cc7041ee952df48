"""Tasks of EleutherAI's lm-evaluation-harness on a model of demix, for `demix lm-eval` and in a run.

A run does not use the network, so it does not depend on the current state of the hub. The data are local, or were
fetched before into the cache of Hugging Face's datasets (only `write_documents` may fetch them).
"""

import hashlib
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml

from demix.config.evaluation import HarnessTasks, HarnessWeights
from demix.config.training import Threads
from demix.data import hub
from demix.errors import DemixError, nearest
from demix.evaluate.columns import TASKS, table_schema
from demix.files import read_parquet, write_parquet, write_text
from demix.files.batches import write_batches
from demix.model.device import set_threads, within_memory
from demix.settings import DistinctItems, Seed, Text

SEEDS = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
# The harness's own default.
SEED = 1234
QUIET = hub.QUIET | {
    "HF_UPDATE_DOWNLOAD_COUNTS": "0",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
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


class HarnessScoring(HarnessTasks):
    """The tasks for one model: its row and seed in tables, the experts that are mixed, and the rules.

    For a model without experts, the list of experts is empty.
    """

    model: Text
    seed: Seed
    experts: DistinctItems[Text] = ()
    weights: DistinctItems[HarnessWeights]
    threads: Threads


@dataclass(frozen=True)
class KnownTasks:
    """The requested tasks in the harness: its task manager, and their names."""

    asked: HarnessTasks
    manager: Any
    names: list[str]

    @classmethod
    def of(cls, asked: HarnessTasks) -> "KnownTasks":
        """The tasks, groups, tags, patterns of these and paths of YAML files that `asked` names.

        The harness needs a minute to read the files of its own 15,000 tasks; this is skipped if all tasks are in the
        folder. Raises DemixError if the harness is not installed, for a path that is not a folder, and for unknown
        tasks.
        """
        folder = asked.include_path
        if folder is not None and not Path(folder).is_dir():
            raise DemixError(f"include_path {folder}", "is not a folder", "name the folder of the tasks' YAML files")
        if importlib.util.find_spec("lm_eval") is None:
            raise DemixError("lm-eval", "is not installed", "pip install 'demix[lm-eval]'")
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        # The harness logs every step.
        logging.getLogger("lm_eval").setLevel(logging.WARNING)
        from lm_eval.tasks import TaskManager

        manager = TaskManager(include_path=folder, include_defaults=folder is None)
        found = {name: _matched(manager, name) for name in asked.tasks}
        # A group may contain the harness's own tasks.
        if folder is not None and (not all(found.values()) or {*manager.all_groups} & {*chain(*found.values())}):
            manager = TaskManager(include_path=folder)
            found = {name: _matched(manager, name) for name in asked.tasks}
        for name in asked.tasks:
            if not found[name]:
                _check_yaml(folder)
                cure = nearest(name, manager.all_tasks, "`lm-eval ls tasks` lists the harness's own")
                raise DemixError(f"task {name}", "is neither in the harness nor in include_path", cure)
        return cls(asked, manager, list(dict.fromkeys(chain(*found.values()))))

    def documents(self, cure: str) -> Iterator[tuple[str, str, list[Any], str]]:
        """For each task: its name, its version, its documents, and their digest."""
        from lm_eval.evaluator_utils import get_sample_size

        limit = self.asked.limit
        for name in self.names:
            with hub.refused_as(f"task {name}", "has no local data", cure):
                found = {
                    task: (str(made.VERSION), [one for _, one in made.doc_iterator(limit=get_sample_size(made, limit))])
                    for task, made in self.manager.load([name])["tasks"].items()
                }
            for task, (version, documents) in found.items():
                if not documents:
                    raise DemixError(f"task {task}", "has no documents", "fix its data, or remove the task")
                text = json.dumps(documents, sort_keys=True, ensure_ascii=False, default=str)
                yield task, version, documents, hashlib.sha256(text.encode()).hexdigest()


def evaluate_tasks(
    model: Mapping[str, Any], tasks: KnownTasks, drawing: str = "", seed: int = SEED, samples: bool = False
) -> dict[str, Any]:
    """The harness's results of `tasks` for the mixture with the arguments `model` of `DemixLM` (`harness_model`).

    `drawing` (generation settings such as max_gen_toks=32) replaces the tasks' settings. `seed` is the random seed of
    Python, numpy, torch and the choice of demonstrations. With `samples` the results include the answers to every
    document. Raises DemixError for a broken task, and for tasks that need more than text.
    """
    from lm_eval import simple_evaluate

    import demix.evaluate.harness_model  # noqa: F401, it registers the name `demix`

    cure = "check the task's YAML file, its data and, if the task needs it, the network"
    refused = hub.refused_as(f"task {','.join(tasks.asked.tasks)}", "cannot be evaluated", cure)
    # The harness prints messages that are not results.
    with redirect_stdout(sys.stderr), refused, within_memory("--batch-size", "use a smaller one"):
        results: dict[str, Any] = simple_evaluate(
            "demix",
            model_args={"seed": seed, **model},
            tasks=tasks.names,
            task_manager=tasks.manager,
            num_fewshot=tasks.asked.shots,
            limit=tasks.asked.limit,
            gen_kwargs=drawing or None,
            log_samples=samples,
            **dict.fromkeys(SEEDS, seed),
        )
    return results


def write_results(results: dict[str, Any], output: Path) -> None:
    """Write the harness's results to the JSON file `output`."""
    from lm_eval.utils import handle_non_serializable

    text = json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False)
    write_text(output, text + "\n")


def tables_of(results: dict[str, Any]) -> list[str]:
    """The harness's own tables of `results`: of tasks, and of groups, if there are any."""
    from lm_eval.utils import make_table

    return [make_table(results), *([make_table(results, "groups")] if "groups" in results else [])]


def write_documents(asked: HarnessTasks, output: Path, *, offline: bool = True) -> None:
    """Write the documents of the tasks, with one row per text, to the Parquet file `output` (`DOCUMENTS`).

    Raises DemixError for an unknown task, and if a task's data are not local, or, with `offline` false, not available.
    """
    cure = "check the task's YAML file, its data and the network"
    if offline:
        os.environ.update(OFFLINE)
        cure = "fix the task's data_files, or set lm_eval.offline: false if there is a network to fetch them"
    batches = (_batch(*task) for task in KnownTasks.of(asked).documents(cure))
    write_batches(output, DOCUMENTS, batches, use_dictionary=["version", "task_sha256"])


def score_harness(directory: Path, documents: Path, given: HarnessScoring, output: Path) -> None:
    """Evaluate a model on the tasks with each mixing rule, and write the rows to `output` (`TASKS`).

    `documents` is the file from `write_documents`. Raises DemixError if the tasks now have other documents.
    """
    set_threads(given.threads)
    # Libraries of the harness read these variables when they are imported.
    os.environ.update(OFFLINE)
    table = read_parquet(documents, columns=["task", "task_sha256"]).to_pylist()
    pinned = {row["task"]: row["task_sha256"] for row in table}
    tasks = KnownTasks.of(given)
    for name, _, _, found in tasks.documents("write the documents of the tasks again"):
        if pinned.get(name) != found:
            cause = f"holds other documents of {name} than the task has"
            raise DemixError(documents, cause, "delete the file, then rerun")
    rows = []
    for weights in given.weights if given.experts else ("dense",):
        mixed = {"experts": ",".join(given.experts), "weights": weights} if given.experts else {}
        results = evaluate_tasks({"pretrained": str(directory)} | mixed, tasks)
        about = {"model": given.model, "n_experts": max(1, len(given.experts)), "routing": weights}
        rows += [about | {"seed": given.seed} | row for row in rows_of(results, pinned)]
    write_parquet(pa.Table.from_pylist(rows, table_schema(TASKS)), output)


def rows_of(results: Mapping[str, Any], digests: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """The rows of tasks.parquet for each task (or group of tasks) and metric in the harness's `results`.

    The name of a filtered metric includes the filter: exact_match,strict-match. `digests` are the documents' digests.
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


def _check_yaml(folder: str | None) -> None:
    """Raise DemixError for an invalid YAML file in the folder of tasks; the harness would skip it without a message."""
    for path in sorted(Path(folder).rglob("*.yaml")) if folder else ():
        try:
            yaml.compose(path.read_text())
        except (yaml.YAMLError, ValueError) as error:
            raise DemixError(path, f"is not YAML ({error})", "fix it, so that the harness can read its task") from None


def _matched(manager: Any, name: str) -> list[str]:
    if name.endswith(".yaml"):
        return [str(Path(name).absolute())] if Path(name).is_file() else []
    matched: list[str] = manager.match_tasks([name])
    return matched


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
