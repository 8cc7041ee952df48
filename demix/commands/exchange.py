"""The commands that export and import models, and that evaluate models with lm-evaluation-harness."""

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
    expert: Annotated[str | None, typer.Option(help="The expert to export; `dense` for a dense model.")] = None,
    mixture: Annotated[
        bool, typer.Option("--mixture", help="Export all experts, with code that mixes them by the rule tempered.")
    ] = False,
    tokenizer: Tokens = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="Number type of the exported parameters.")
    ] = "float32",
) -> None:
    """Export one expert, or the mixture of all experts, as a Hugging Face directory of the model's architecture.

    Example: demix export results/sample/models/demix --expert novels --output novels-hf
    """
    from demix.model.export import export_hf, export_mixture
    from demix.report.card import exported_card

    if mixture is (expert is not None):
        raise DemixError("--expert and --mixture", "are both given or both missing", "give one of the two options")
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
            help="A Hugging Face folder with config.json and model.safetensors (or an index and several files), or "
            "hub:owner/name@commit, which is downloaded."
        ),
    ],
    output: Annotated[Path, typer.Option(help="The model directory to write, with its tokenizer.json.")],
    context: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Context length in tokens. Default: the checkpoint's, but at most 2,048 without learned positions. A "
            "table of learned positions is cut to this length and cannot grow.",
        ),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare token ids with the library tokenizers, logits with transformers.")
    ] = False,
) -> None:
    """Import a checkpoint of GPT-2, OPT, GPT-NeoX, Llama, Mistral, Qwen 2 or 3, or OLMo 2 as a dense model.

    Mixtral, Qwen 3 MoE, OLMoE and FlexOlmo become token-routed models. The import never unpickles a file, and downloads
    something only for hub:….

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
            f"(largest {done.largest:.3g}); token ids equal those of tokenizers"
        )
    print(f"wrote {output}; try it: demix eval {output} TEXT")


@app.command("lm-eval", rich_help_panel="Use")
def lm_eval(
    model: Annotated[Path, typer.Argument(help="A model directory, results/<run>/models/<model>.")],
    tasks: Annotated[
        str,
        typer.Option(
            help="Tasks, groups, tags, patterns of their names, or YAML files of tasks, separated by commas: "
            "arc_easy,mmlu_*,mine.yaml."
        ),
    ],
    include_path: Annotated[Path | None, typer.Option(help="A folder with YAML files that define more tasks.")] = None,
    experts: Experts = None,
    weights: WeightsRule = "tempered",
    prior: Prior = "",
    top_k: TopK = None,
    limit: Annotated[
        float | None, typer.Option(min=0.0001, help="Documents per task; a number below 1 is a fraction of them.")
    ] = None,
    num_fewshot: Annotated[
        int | None,
        typer.Option(min=0, help="Few-shot examples before each document; default: the task's own number."),
    ] = None,
    gen_kwargs: Annotated[
        str, typer.Option(help="Options of generation, such as max_gen_toks=32,temperature=0.8,do_sample=True.")
    ] = "",
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Batch size: requests per forward pass. Default: chosen from memory and cores."),
    ] = None,
    device: Device = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Random seed of few-shot examples and of sampled texts.")
    ] = 1234,
    output: Annotated[Path | None, typer.Option(help="Write the harness's results to this JSON file.")] = None,
    log_samples: Annotated[bool, typer.Option("--log-samples", help="Also write answers to all documents.")] = False,
    tokenizer: Tokens = None,
) -> None:
    """Evaluate a mixture of experts on tasks of EleutherAI's lm-evaluation-harness, and print its table of results.

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
        # A task's name may contain control characters of the terminal.
        print(printable(table))


def _check_output(output: Path | None, log_samples: bool) -> None:
    """Raise DemixError if `output` cannot be written, or if samples are asked for without it."""
    if log_samples and output is None:
        raise DemixError("--log-samples", "needs an output file", "give --output FILE.json")
    if output is not None and (output.is_dir() or not output.resolve().parent.is_dir()):
        raise DemixError(
            f"--output {output}", "is not a file that can be written", "name a file in a folder that exists"
        )
