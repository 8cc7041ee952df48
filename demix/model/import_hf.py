"""Importing a GPT-2 checkpoint of Hugging Face as a dense model, the inverse of `demix.model.export`."""

from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from torch import Tensor

from demix.config.architecture import Architecture, parameters
from demix.config.models import DENSE_EXPERT
from demix.errors import DemixError
from demix.files import opened, refuse_used, replacing, sha256_file
from demix.files.json_files import read_unsealed
from demix.model.checkpoint import check_values, save_expert, save_shared
from demix.model.description import MOST_BYTES
from demix.model.export import gpt2_names
from demix.model.gpt import GPT
from demix.model.imported_tokenizer import imported_tokenizer
from demix.settings import Integer, Number, Positive, settings, settings_from

# What GPT-2 checkpoints hold beside their parameters: the causal mask.
_BUFFERS = (".attn.bias", ".attn.masked_bias")


@settings(kw_only=True, open=True)
class Gpt2Config:
    """The part of a checkpoint's config.json that says what the model computes, with the values that demix can have."""

    model_type: Literal["gpt2"]
    n_layer: Positive
    n_embd: Positive
    n_head: Positive
    n_positions: Positive
    vocab_size: Annotated[Positive, Field(le=1 << 24)]
    n_inner: Integer | None = None
    activation_function: Literal["gelu", "gelu_new"] = "gelu_new"
    layer_norm_epsilon: Number = 1e-5
    scale_attn_weights: Literal[True] = True
    scale_attn_by_inverse_layer_idx: Literal[False] = False
    add_cross_attention: Literal[False] = False
    tie_word_embeddings: Literal[True] = True


def import_hf(folder: Path, output: Path) -> None:
    """Write the GPT-2 checkpoint in `folder` (config.json, model.safetensors) as a dense model with its tokenizer.

    `GPT2LMHeadModel` gives the same logits. The tokenizer is GPT-2's, or that of an export of demix. Nothing is
    unpickled or fetched. Raises DemixError, and leaves no `output`, if a file is missing or damaged, and if the model
    computes something that demix does not.
    """
    refuse_used(output)
    config = folder / "config.json"
    sizes = settings_from(Gpt2Config, read_unsealed(config, MOST_BYTES), f"{config}: ")
    if sizes.n_inner not in (None, 4 * sizes.n_embd) or sizes.layer_norm_epsilon != 1e-5:
        cause = f"has n_inner {sizes.n_inner} and layer_norm_epsilon {sizes.layer_norm_epsilon}"
        raise DemixError(config, cause, f"demix has {4 * sizes.n_embd} and 1e-05")
    named = {"layers": sizes.n_layer, "width": sizes.n_embd, "heads": sizes.n_head, "context": sizes.n_positions}
    architecture = settings_from(Architecture, named | {"activation": sizes.activation_function}, f"{config}: ")
    with torch.device("meta"):
        model = GPT(architecture, sizes.vocab_size, (DENSE_EXPERT,))
    weights = folder / "model.safetensors"
    model.load_state_dict(_tensors(weights, model), assign=True)
    shared, own = parameters(architecture, sizes.vocab_size)
    with replacing(output.resolve(), directory=True) as temporary:
        encoder = imported_tokenizer(folder, temporary / "tokenizer.json", sizes.vocab_size)
        learned = {"tokenizer_sha256": encoder.sha256, "imported": {"format": "gpt2", "sha256": sha256_file(weights)}}
        counts = {"kind": "dense", "shared_parameters": shared, "expert_parameters": own}
        save_shared(model, temporary, counts | learned)
        save_expert(model, DENSE_EXPERT, temporary, {"parent": None} | learned)


def _tensors(path: Path, model: GPT) -> dict[str, Tensor]:
    """The parameters of `model` in fp32 from a GPT-2 checkpoint, whose tensors it must have and no others."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    try:
        # safetensors maps the file, and a mapping of a pipe would wait for a writer.
        opened(path).close()
        with safe_open(path, "pt") as file:
            names: set[str] = set(file.keys())
            prefix = "transformer." if any(name.startswith("transformer.") for name in names) else ""
            for ours, name, transposed in gpt2_names(model.architecture.layers):
                theirs = prefix + name
                if theirs not in names:
                    raise DemixError(path, f"has no tensor {theirs}", "import a GPT-2 checkpoint")
                names.remove(theirs)
                tensor: Tensor = file.get_tensor(theirs)
                tensor = (tensor.T if transposed else tensor).float().contiguous()
                tensors[ours] = tensor.unsqueeze(0) if len(shapes[ours]) > tensor.ndim else tensor
                if tuple(tensors[ours].shape) != shapes[ours]:
                    cause = f"holds {theirs} as {tuple(tensor.shape)}, of which config.json makes {shapes[ours]}"
                    raise DemixError(path, cause, "give the checkpoint its own config.json back")
            names = {name for name in names if not name.endswith(_BUFFERS)}
            if "lm_head.weight" in names and torch.equal(
                file.get_tensor("lm_head.weight").float(), tensors["token_embedding"]
            ):
                names.remove("lm_head.weight")
    except FileNotFoundError:
        raise DemixError(path, "is missing", "convert the checkpoint to safetensors, in one file") from None
    except SafetensorError as error:
        raise DemixError(path, f"is not a safetensors file ({error})", "get it again") from None
    if names:
        raise DemixError(
            path, f"holds {min(names)}, which GPT-2 with tied embeddings lacks", "import another checkpoint"
        )
    check_values(path, tensors.items())
    return tensors
