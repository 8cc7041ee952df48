"""The commands that hand models to other software or to its tasks, and that import models."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from demix.commands.options import Device, Experts, Prior, Tokens, TopK, WeightsRule
from demix.errors import DemixError, printable

app = typer.Typer()


@app.command(rich_help_panel="Use")
def export(
    model: Annotated[Path, typer.Argument(help="A model directory.")],
    output: Annotated[Path, typer.Option(help="The directory to write.")],
    expert: Annotated[str | None, typer.Option(help="The expert to export (dense for a dense model).")] = None,
    mixture: Annotated[
        bool, typer.Option("--mixture", help="Export all experts, and code of their mixture by the rule tempered.")
    ] = False,
    tokenizer: Tokens = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="Type of the numbers in the file.")
    ] = "float32",
) -> None:
    """Export one expert, or the mixture of all experts, as a Hugging Face directory of its architecture's family.

    Example: demix export results/sample/models/demix --expert novels --output novels-hf
    """
    from demix.model.export import export_hf, export_mixture
    from demix.report.card import exported_card

    if mixture is (expert is not None):
        raise DemixError("--expert", "or --mixture must be given, and not both", "name an expert, or give --mixture")
    if expert is None:
        export_mixture(model, tokenizer, output, exported_card(model, None), dtype)
    else:
        export_hf(model, expert, tokenizer, output, exported_card(model, expert), dtype)
    print(f"wrote {output}; its README.md says how to load it")


@app.command("import", rich_help_panel="Train")
def import_(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="A folder of Hugging Face with config.json and model.safetensors, or several by an index; or "
            "hub:owner/name@commit, which is fetched."
        ),
    ],
    output: Annotated[Path, typer.Option(help="The model directory to write, with its tokenizer.json.")],
    context: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Tokens of a block. By default those of the checkpoint, without learned positions at most 2,048. A "
            "table of learned positions is cut to it, and cannot grow.",
        ),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare ids with tokenizers, logits with transformers.")
    ] = False,
) -> None:
    """Make a dense model of a checkpoint of GPT-2, OPT, GPT-NeoX, Llama, Mistral, Qwen 2 or 3, or OLMo 2.

    Mixtral, Qwen 3 MoE, OLMoE and FlexOlmo become token-routed models. Nothing is unpickled, and nothing but hub:… is
    fetched.

    Example: demix import gpt2-folder --output imported/gpt2
    """
    from demix.config.addresses import HUB
    from demix.model.import_hf import import_hf, import_hub

    if checkpoint.startswith(HUB):
        done = import_hub(checkpoint, output, context, verify)
    else:
        done = import_hf(Path(checkpoint), output, context, verify)
    if done:
        print(
            f"logits of {done.tokens} tokens differ by up to {done.difference:.1e} from those of transformers "
            f"(largest {done.largest:.3g}); the ids equal those of tokenizers"
        )
    print(f"wrote {output}; try it: demix eval {output} TEXT")


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
