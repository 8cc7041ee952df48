"""One command for each stage. The rules of the workflow run these commands.

A stage is a function in the module that does its work. Each parameter of the function is an option of the command,
except those that `STAGES` lists as arguments. The first parameter that is a settings object becomes `--settings`, in
JSON. A sequence of names becomes one option with names separated by commas.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from demix.files import read_json
from demix.files.json_files import SEAL, read_unsealed
from demix.settings import settings_from

SEQUENCES = (list, tuple, Sequence, Iterable)
_NAMED = inspect.Parameter.KEYWORD_ONLY
# Stages in the order of the workflow: the function (a path below demix), and its parameters that are arguments.
STAGES = {
    "read": ("data.sources.read", "domain"),
    "download": ("data.sources.download", "domain"),
    "anonymize": ("data.sources.anonymize_once", "raw"),
    "divide": ("data.divide.divide", "name"),
    "deduplicate": ("data.corpus.deduplicate", "documents"),
    "split": ("data.corpus.split_once", "domain documents"),
    "tokenizer": ("data.tokenizer.make_tokenizer", "documents"),
    "tokenize": ("data.shards.tokenize_splits", "documents"),
    "fit-clusters": ("data.cluster.fit_clusters", "documents"),
    "assign": ("data.cluster.assign", "clusterer documents"),
    "cluster-shards": ("data.cluster.cluster_shards", "clusterer tokens"),
    "overlap": ("data.overlap.overlap", "shards"),
    "choose-rate": ("train.sweep.choose_rate", "metrics"),
    "train": ("commands.training.train", "kind shards"),
    "seed": ("commands.training.seed", "kind shards"),
    "join-branches": ("model.merge.join_trained", "branches"),
    "adapt": ("commands.training.adapt", "model shards"),
    "average-experts": ("evaluate.choice.average_experts", "model"),
    "merge-routed": ("model.merge.merge_routed", "directory"),
    "score": ("evaluate.score.score_models", "models shards"),
    "score-ngrams": ("evaluate.combined.score_ngrams", "paths"),
    "combine": ("evaluate.combined.combine", "name paths"),
    "route": ("evaluate.routing.route", "folder shards"),
    "choose-mixing": ("evaluate.choice.choose_mixing", "scores"),
    "evaluate": ("evaluate.domain.evaluate", "domain"),
    "contexts": ("evaluate.domain.evaluate_contexts", "domain"),
    "audit": ("evaluate.memorization.audit_domain", "domain"),
    "examples": ("data.examples.write_examples", "task"),
    "fewshot": ("evaluate.fewshot.score_task", "directory examples"),
    "harness-documents": ("evaluate.harness.write_documents", ""),
    "contamination": ("data.leakage.contamination", "documents train"),
    "harness": ("evaluate.harness.score_harness", "directory"),
    "classify": ("evaluate.classification.classify", "run"),
    "join": ("evaluate.columns.join", "inputs"),
    "run-config": ("run.run.write_run_config", ""),
    "report": ("report.report_of", "run"),
    "card": ("report.card.write_cards", "run models"),
    "track": ("track.store.track_folder", "run"),
}
HELP = {
    "domain": "Name of the domain.",
    "settings": "The settings of the stage, as JSON or @FILE.",
    "output": "The file or folder to write.",
    "manifest": "A file with the digests of all written files; it is written last.",
    "part": "Number of the source's part, from 0 to source.parts - 1.",
    "tokenizer": "tokenizer.json of the run.",
    "experts": "Experts, separated by commas.",
    "metrics": "File of metrics (JSON lines).",
    "counts": "File of counts by category, or by domain and value (JSON).",
    "checkpoints": "Folder of checkpoints; a training that was killed resumes from them.",
    "ranks": "Number of processes on this machine that train together.",
    "how": "Keys of the config section training that change only time and memory, as JSON.",
    "cluster": "The config section cluster, as JSON or @FILE: where and how ranks are started.",
}


def add_stage(app: typer.Typer, name: str) -> None:
    """Add the command of the stage `name` to `app`. Imports the module that does its work."""
    place, arguments = STAGES[name]
    app.command(name, epilog="snakemake -p prints the whole command of each job: copy one as an example.")(
        command_of(function_of(place), arguments.split())
    )


def list_stages() -> None:
    """List the stages of the workflow, which Snakemake runs as commands. `demix split --help` explains the stage split.

    `snakemake -n -p` prints each command with its arguments. Example: demix stages
    """
    for name, (place, _) in STAGES.items():
        line, *_ = (inspect.getdoc(function_of(place)) or "").splitlines()
        print(f"{name:18} {line}")


def function_of(place: str) -> Callable[..., object]:
    """The function of a stage, by its place below demix."""
    module, _, function = place.rpartition(".")
    return getattr(import_module(f"demix.{module}"), function)  # type: ignore[no-any-return]


def command_of(function: Callable[..., object], arguments: Sequence[str]) -> Callable[..., None]:
    """The command that calls `function`: its parameters are options, except those in `arguments`."""
    hints, parameters = get_type_hints(function), list[inspect.Parameter]()
    read, has_settings = dict[str, Callable[[Any], Any]](), False
    for name, parameter in inspect.signature(function).parameters.items():
        kind, option = _without_none(hints[name]), name.replace("_", "-")
        shown, default = hints[name], parameter.default
        if hasattr(kind, "__pydantic_fields__"):
            option = option if has_settings else "settings"
            has_settings = True
            shown, read[name] = str, partial(_settings, kind, f"--{option}")
            default = "" if default is None else default
        elif get_origin(kind) in SEQUENCES:
            shown = list[get_args(kind)[0]]  # type: ignore[misc]
            if get_args(kind)[0] is str and name not in arguments:
                shown, read[name] = str, _names
                default = ",".join(default) if default is not inspect.Parameter.empty else default
        about: dict[str, Any] = {"help": HELP.get(option, ""), "show_default": default not in ("", None, ())}
        flag = f"--{option}/--no-{option}" if kind is bool else f"--{option}"
        given = typer.Argument(**about) if name in arguments else typer.Option(flag, **about)
        parameters.append(parameter.replace(annotation=Annotated[shown, given], default=default, kind=_NAMED))

    def command(**values: Any) -> None:
        function(**{name: read[name](value) if name in read else value for name, value in values.items()})

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    command.__name__, command.__doc__ = function.__name__, inspect.getdoc(function)
    return command


def run_command(arguments: Sequence[str]) -> None:
    """Run the command of one stage in this process. Errors are raised to the caller."""
    app = typer.Typer()
    # Without a callback typer would not expect the name of a single command as an argument.
    app.callback()(lambda: None)
    add_stage(app, arguments[0])
    # typer reports an interrupted command by a status, not by an exception.
    if status := app(list(arguments), standalone_mode=False):
        raise SystemExit(status)


def _without_none(kind: Any) -> Any:
    """The type of a parameter without None."""
    found = [one for one in get_args(kind) if one is not NoneType]
    return found[0] if NoneType in get_args(kind) else kind


def _settings(kind: type, subject: str, text: str) -> Any:
    """The settings object of class `kind` from an option: JSON or @FILE. A file's checksum, if any, is verified.

    Linux limits one argument to 128 KiB; `demix.run.stage_settings.StageSettings.argument` writes longer ones to files.
    """
    if text.startswith("@"):
        values = read_unsealed(text[1:])
        return settings_from(kind, read_json(text[1:]) if SEAL in values else values, subject)
    return settings_from(kind, text, subject) if text else None


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()
