"""Tasks of EleutherAI's lm-evaluation-harness on a model of demix."""

import importlib.util
import logging
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from demix.data import hub
from demix.errors import DemixError
from demix.files import replacing
from demix.model.device import within_memory
from demix.model.directory import describe

SEEDS = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
# Bytes of a task's name in that of a file, which has 255 at most.
MOST_BYTES = 150
QUIET = hub.QUIET | {
    "HF_UPDATE_DOWNLOAD_COUNTS": "0",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Tasks:
    """What of the harness's tasks is evaluated, and how.

    `names` are tasks, groups, tags, patterns of these or paths of a task's YAML file; `folder` has YAML files of more
    tasks. `limit` is the number of documents of each task, below 1 their share. `demonstrations` (shots) and `drawing`
    (generation settings such as max_gen_toks=32) replace those of the tasks. `seed` is that of Python, numpy, torch and
    the choice of demonstrations.
    """

    names: tuple[str, ...]
    folder: Path | None = None
    limit: float | None = None
    demonstrations: int | None = None
    drawing: str = ""
    seed: int = 1234


def evaluate_tasks(
    model: Mapping[str, Any],
    tasks: Tasks,
    output: Path | None = None,
    samples: bool = False,
    known: tuple[Any, list[str]] | None = None,
) -> dict[str, Any]:
    """The results of `tasks` for the mixture with the arguments `model` of `demix.evaluate.harness_model.DemixLM`.

    They are what the harness returns. `output` is the JSON file to write, in the harness's format. With `samples`, the
    answers to every document of a task go to <output>.<task>.jsonl beside it. `known` is what `named_tasks` returned
    for the tasks, where a caller has it. Raises DemixError where the harness is missing, for an unknown or broken task,
    and for tasks that need more than text.
    """
    if samples and output is None:
        raise DemixError("--log-samples", "needs a file to write beside", "give --output FILE.json")
    if output is not None and (output.is_dir() or not output.resolve().parent.is_dir()):
        raise DemixError(f"--output {output}", "is no place for a file", "name a file in a folder that exists")
    describe(Path(model["pretrained"]))
    manager, names = known or named_tasks(tasks)
    from lm_eval import simple_evaluate
    from lm_eval.loggers import EvaluationTracker

    import demix.evaluate.harness_model  # noqa: F401, it registers the name `demix`

    # A task in a YAML file has a name of its own, which is known at the end.
    for name in names:
        if samples and not name.endswith(".yaml"):
            _refuse_path(name)
    run = {name: value for name, value in model.items() if name in ("batch_size", "device")}
    # What the harness prints on the way is no result.
    with TemporaryDirectory(prefix="demix.") as folder, redirect_stdout(sys.stderr):
        tracker = EvaluationTracker(output_path=folder)
        try:
            with within_memory("--batch-size", "give a smaller one"):
                results: dict[str, Any] = simple_evaluate(
                    "demix",
                    model_args={"seed": tasks.seed} | {name: model[name] for name in model.keys() - run.keys()},
                    tasks=names,
                    task_manager=manager,
                    num_fewshot=tasks.demonstrations,
                    limit=tasks.limit,
                    gen_kwargs=tasks.drawing or None,
                    log_samples=samples,
                    evaluation_tracker=tracker,
                    **dict.fromkeys(SEEDS, tasks.seed),
                    **run,
                )
        except DemixError:
            raise
        # A task may be anybody's program, and the harness raises nearly anything for a broken one.
        except Exception as error:
            reason = (str(error).strip().splitlines() or [""])[0][:300]
            cause = f"cannot be evaluated ({type(error).__name__}: {reason})"
            cure = "check the task's YAML file and its data, and the network if it reads any"
            raise DemixError(f"--tasks {','.join(tasks.names)}", cause, cure) from error
        answers: dict[str, Any] = results.pop("samples", {})
        for name in answers:
            _refuse_path(name)
        if output is not None:
            tracker.save_results_aggregated(results, answers)
            for task, found in answers.items():
                tracker.save_results_samples(task, found)
            _take(Path(folder), output, [*answers])
    return results


def tables_of(results: dict[str, Any]) -> list[str]:
    """The harness's own tables of `results`: of tasks, and of groups where there are any."""
    from lm_eval.utils import make_table

    return [make_table(results), *([make_table(results, "groups")] if "groups" in results else [])]


def named_tasks(tasks: Tasks) -> tuple[Any, list[str]]:
    """The harness's manager of tasks, and the names of those that `tasks` name.

    The harness reads the files of its own 15,000 tasks for a minute, which is for nothing where all are in the folder.
    Raises DemixError where the harness is missing, for a folder that is none, and for unknown tasks.
    """
    if tasks.folder is not None and not tasks.folder.is_dir():
        raise DemixError(f"--include-path {tasks.folder}", "is no folder", "name the folder of the tasks' YAML files")
    if importlib.util.find_spec("lm_eval") is None:
        raise DemixError("lm-eval", "is not installed", "pip install 'demix[lm-eval]'")
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    # The harness logs its every step.
    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    from lm_eval.tasks import TaskManager

    folder, names = tasks.folder and str(tasks.folder), [*tasks.names]
    manager = TaskManager(include_path=folder, include_defaults=folder is None)
    found = {name: _matched(manager, name) for name in names}
    # Tasks of a group may be the harness's own.
    if folder is not None and (not all(found.values()) or {*manager.all_groups} & {*chain(*found.values())}):
        manager = TaskManager(include_path=folder)
        found = {name: _matched(manager, name) for name in names}
    for name in names:
        if not found[name]:
            _check_yaml(tasks.folder)
            near = get_close_matches(name, manager.all_tasks, n=1)
            cure = f"did you mean {near[0]}?" if near else "`lm-eval ls tasks` lists the harness's own"
            raise DemixError(f"--tasks {name}", "names no task of the harness or of --include-path", cure)
    return manager, list(dict.fromkeys(chain(*found.values())))


def _check_yaml(folder: Path | None) -> None:
    """Raise DemixError for a file in the folder of tasks that is not YAML: the harness skips it without a word."""
    for path in sorted(folder.rglob("*.yaml")) if folder else ():
        try:
            yaml.compose(path.read_text())
        except (yaml.YAMLError, ValueError) as error:
            raise DemixError(path, f"is not YAML ({error})", "fix it, so that the harness finds its task") from None


def _matched(manager: Any, name: str) -> list[str]:
    if name.endswith(".yaml"):
        return [str(Path(name).absolute())] if Path(name).is_file() else []
    matched: list[str] = manager.match_tasks([name])
    return matched


def _refuse_path(task: str) -> None:
    """Raise DemixError for the name of a task that cannot be part of a file's name."""
    if "/" in task or "\0" in task or len(task.encode()) > MOST_BYTES:
        cause = "has a name that cannot be part of a file's name"
        raise DemixError(f"--tasks {task:.80}", cause, "rename the task, or leave out --log-samples")


def _take(folder: Path, output: Path, tasks: Sequence[str]) -> None:
    """Move what the harness wrote below `folder` to `output`, and the samples of `tasks` beside it."""
    results = next(folder.rglob("results_*.json"), folder / "results_.json")
    ending = results.stem.removeprefix("results")
    wanted = {output.with_suffix(f".{task}.jsonl"): f"samples_{task}{ending}.jsonl" for task in tasks}
    for target, source in {output: results.name, **wanted}.items():
        if not results.with_name(source).is_file():
            raise DemixError(target, "was not written by the harness", "run with LMEVAL_LOG_LEVEL=INFO to see why")
        with replacing(target) as temporary:
            shutil.copyfile(results.with_name(source), temporary)
