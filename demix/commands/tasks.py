"""The stages of tasks: their examples, the log-probabilities of labels, accuracy by routing, and the harness's."""

from pathlib import Path
from typing import Annotated

import typer

from demix.commands.options import Output, Settings

app = typer.Typer()


@app.command()
def examples(
    task: Annotated[str, typer.Argument(help="Name of the task.")],
    tokenizer: Annotated[Path, typer.Option(help="tokenizer.json of the run.")],
    settings: Settings,
    output: Output,
    documents: Annotated[
        list[Path] | None,
        typer.Argument(help="corpus/<domain>/test.parquet and dev.parquet, for a task that is made of them."),
    ] = None,
) -> None:
    """Read or make the examples of a task, with texts that fit into a model's context."""
    from demix.config.tasks import ExamplesRecipe
    from demix.data.examples import write_examples
    from demix.settings import settings_from

    files: dict[str, dict[str, Path]] = {"test": {}, "dev": {}}
    for path in documents or ():
        files.setdefault(path.stem, {})[path.parent.name] = path
    write_examples(task, settings_from(ExamplesRecipe, settings), files, tokenizer, output)


@app.command()
def fewshot(
    model: Annotated[Path, typer.Argument(help="A model directory.")],
    examples: Annotated[list[Path], typer.Argument(help="examples/<task>.parquet of each task.")],
    tokenizer: Annotated[Path, typer.Option(help="tokenizer.json of the run.")],
    settings: Settings,
    output: Annotated[Path, typer.Option(help="The model's folder of scored tasks.")],
    experts: Annotated[str, typer.Option(help="Experts, separated by commas.")],
) -> None:
    """Score the labels of tasks under experts: write the log-probability of every token of texts and labels."""
    from demix.evaluate.fewshot import TaskScoring, score_tasks
    from demix.settings import settings_from

    score_tasks(model, tuple(experts.split(",")), examples, tokenizer, settings_from(TaskScoring, settings), output)


@app.command()
def classify(
    run: Annotated[Path, typer.Argument(help="The run's folder, with examples/, tasks/, models/ and clusters/ in it.")],
    settings: Settings,
    output: Output,
    weights: Annotated[
        Path | None, typer.Option(help="Also write the mean weight of each expert on each task, by routing.")
    ] = None,
    harness: Annotated[
        list[Path] | None, typer.Option(help="Also join the rows of this file of `demix harness`; for each file once.")
    ] = None,
) -> None:
    """Route scored tasks in every way, and write the accuracy of each. Runs no forward pass."""
    from demix.evaluate.classification import Classification
    from demix.evaluate.classification import classify as run_on
    from demix.settings import settings_from

    run_on(run, settings_from(Classification, settings), output, weights, harness or ())


@app.command()
def harness_documents(
    settings: Settings,
    output: Output,
    offline: Annotated[
        bool, typer.Option(help="Ask nothing of the network; else fetch what the cache of datasets lacks.")
    ] = True,
) -> None:
    """Read the documents of tasks of the lm-evaluation-harness, which a run's models are asked."""
    from demix.config.harness import HarnessTasks
    from demix.evaluate.harness_run import write_documents
    from demix.settings import settings_from

    write_documents(settings_from(HarnessTasks, settings), output, offline=offline)


@app.command()
def contamination(
    documents: Annotated[Path, typer.Argument(help="The documents of tasks, by `demix harness-documents`.")],
    train: Annotated[Path, typer.Argument(help="corpus/<domain>/train.parquet.")],
    output: Output,
) -> None:
    """Count the documents of tasks, and their 13-grams of words, that a domain's training text holds."""
    from demix.data.contamination import contamination as run_on

    run_on(documents, train, output)


@app.command()
def harness(
    model: Annotated[Path, typer.Argument(help="A model directory.")],
    documents: Annotated[Path, typer.Option(help="The documents of the tasks, by `demix harness-documents`.")],
    settings: Settings,
    output: Output,
) -> None:
    """Put a model to tasks of the lm-evaluation-harness, offline, and write a row per task, metric and rule."""
    from demix.evaluate.harness_run import HarnessScoring, score_harness
    from demix.settings import settings_from

    score_harness(model, documents, settings_from(HarnessScoring, settings), output)
