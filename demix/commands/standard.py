"""The command that puts a model to the tasks of the standard harness."""

from pathlib import Path
from typing import Annotated

import typer

from demix.commands.options import Prior, Tokens, TopK, WeightsRule
from demix.errors import printable

app = typer.Typer()


@app.command("lm-eval")
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
    experts: Annotated[
        str | None,
        typer.Option(
            help="The experts to mix, separated by commas, by default all; of a domain-token model the domain whose "
            "token stands before the texts."
        ),
    ] = None,
    weights: WeightsRule = "tempered",
    prior: Prior = "",
    top_k: TopK = None,
    limit: Annotated[
        float | None, typer.Option(min=0.0001, help="Documents of each task; below 1, their share of its documents.")
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="Demonstrations before each document; by default those of the task.")
    ] = None,
    gen_kwargs: Annotated[
        str, typer.Option(help="How texts are generated, such as max_gen_toks=32,temperature=0.8,do_sample=True.")
    ] = "",
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Requests of a forward pass; by default what memory and cores suggest.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:<number>; by default the GPU where there is one.")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Seed of demonstrations and of sampled texts.")
    ] = 1234,
    output: Annotated[Path | None, typer.Option(help="The results (JSON) to write, in the harness's format.")] = None,
    log_samples: Annotated[
        bool, typer.Option("--log-samples", help="Write the answers to all documents too: <output>.<task>.jsonl.")
    ] = False,
    tokenizer: Tokens = None,
) -> None:
    """Evaluate a mixture of experts on tasks of EleutherAI's lm-evaluation-harness, and print the harness's table."""
    from demix.evaluate.harness import Tasks, evaluate_tasks, tables_of

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
    names = tuple(name for name in tasks.split(",") if name)
    asked = Tasks(names, include_path, limit, num_fewshot, gen_kwargs, seed)
    given = {name: value for name, value in arguments.items() if value is not None}
    for table in tables_of(evaluate_tasks(given, asked, output, log_samples)):
        # Names of tasks are anybody's.
        print(printable(table))
