"""The command that puts a model to the tasks of the standard harness."""

from pathlib import Path
from typing import Annotated

import typer

from demix.commands.options import Device, Experts, Prior, Tokens, TopK, WeightsRule
from demix.errors import DemixError, printable

app = typer.Typer()


@app.command("lm-eval", rich_help_panel="Use")
def lm_eval(
    model: Annotated[Path, typer.Argument(help="A model directory, results/<run>/models/<model>.")],
    tasks: Annotated[
        str,
        typer.Option(
            help="Tasks, groups, tags or patterns of them, or YAML files of tasks, separated by commas: "
            "arc_easy,mmlu_*,mine.yaml."
        ),
    ],
    include_path: Annotated[Path | None, typer.Option(help="A folder with YAML files of more tasks.")] = None,
    experts: Experts = None,
    weights: WeightsRule = "tempered",
    prior: Prior = "",
    top_k: TopK = None,
    limit: Annotated[
        float | None, typer.Option(min=0.0001, help="Documents of each task; below 1, a fraction of its documents.")
    ] = None,
    num_fewshot: Annotated[
        int | None,
        typer.Option(min=0, help="Few-shot examples before each document; by default the task's own number."),
    ] = None,
    gen_kwargs: Annotated[
        str, typer.Option(help="How texts are generated, such as max_gen_toks=32,temperature=0.8,do_sample=True.")
    ] = "",
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Batch size: requests per forward pass; by default what memory and cores suggest."),
    ] = None,
    device: Device = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Seed of demonstrations and of sampled texts.")
    ] = 1234,
    output: Annotated[Path | None, typer.Option(help="Write the harness's results to this JSON file.")] = None,
    log_samples: Annotated[bool, typer.Option("--log-samples", help="Write the answers to all documents too.")] = False,
    tokenizer: Tokens = None,
) -> None:
    """Evaluate a mixture of experts on tasks of EleutherAI's lm-evaluation-harness, and print the harness's table.

    Example: demix lm-eval results/sample/models/demix --tasks arc_easy
    """
    from demix.config.evaluation import HarnessTasks
    from demix.evaluate.harness import KnownTasks, evaluate_tasks, tables_of, write_results
    from demix.model.directory import describe
    from demix.settings import settings_from

    _check_output(output, log_samples)
    describe(model)
    named = {"tasks": tuple(filter(None, tasks.split(","))), "shots": num_fewshot, "limit": limit}
    folder = None if include_path is None else str(include_path)
    known = KnownTasks.of(settings_from(HarnessTasks, named | {"include_path": folder}, "lm-eval"))
    arguments = {
        "pretrained": str(model),
        "experts": experts,
        "weights": weights,
        "prior": prior,
        "top_k": top_k,
        "tokenizer": None if tokenizer is None else str(tokenizer),
        "batch_size": batch_size,
        "device": device,
    }
    given = {name: value for name, value in arguments.items() if value is not None}
    results = evaluate_tasks(given, known, gen_kwargs, seed, log_samples)
    if output is not None:
        write_results(results, output)
    for table in tables_of(results):
        # Names of tasks are anybody's.
        print(printable(table))


def _check_output(output: Path | None, log_samples: bool) -> None:
    """Raise DemixError where what is to be written has no place."""
    if log_samples and output is None:
        raise DemixError("--log-samples", "needs an output file", "give --output FILE.json")
    if output is not None and (output.is_dir() or not output.resolve().parent.is_dir()):
        raise DemixError(
            f"--output {output}", "is not a file that can be written", "name a file in a folder that exists"
        )
