"""The commands that hand models to other software, and that import models."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from demix.commands.options import Tokens
from demix.errors import DemixError

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
