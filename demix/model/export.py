"""Exporting one expert as a GPT-2 model of Hugging Face."""

import json
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from demix.errors import DemixError
from demix.files import refuse_used, replacing
from demix.model.checkpoint import describe, load_model, refuse_routed, save_tensors
from demix.model.tokenizer import tokenizer_of

# A block's tensors: their names here and in GPT-2, and whether they are transposed (Conv1D keeps weights as [in, out]).
_BLOCK = (
    ("attention_norm.weight", "ln_1.weight", False),
    ("attention_norm.bias", "ln_1.bias", False),
    ("attention.qkv.weight", "attn.c_attn.weight", True),
    ("attention.qkv.bias", "attn.c_attn.bias", False),
    ("attention.out.weight", "attn.c_proj.weight", True),
    ("attention.out.bias", "attn.c_proj.bias", False),
    ("feedforward_norm.weight", "ln_2.weight", False),
    ("feedforward_norm.bias", "ln_2.bias", False),
    ("feedforward.up", "mlp.c_fc.weight", True),
    ("feedforward.up_bias", "mlp.c_fc.bias", False),
    ("feedforward.down", "mlp.c_proj.weight", True),
    ("feedforward.down_bias", "mlp.c_proj.bias", False),
)
_OUTSIDE = (
    ("token_embedding", "wte.weight", False),
    ("position_embedding", "wpe.weight", False),
    ("final_norm.weight", "ln_f.weight", False),
    ("final_norm.bias", "ln_f.bias", False),
)


def gpt2_names(layers: int) -> Iterator[tuple[str, str, bool]]:
    """Each tensor's name here, its name in GPT-2 without the prefix `transformer.`, and whether GPT-2 transposes it."""
    yield from _OUTSIDE
    for number in range(layers):
        for ours, theirs, transposed in _BLOCK:
            yield f"blocks.{number}.{ours}", f"h.{number}.{theirs}", transposed


def export_hf(directory: Path, expert: str, tokenizer: Path | None, output: Path, card: str | None = None) -> None:
    """Write one expert of a model, with the tokenizer, as a Hugging Face GPT-2 directory.

    README.md holds `card` (`demix.report.card.exported_card`).

    The architecture is that of GPT-2, and `GPT2LMHeadModel` gives the same log-probabilities.
    Raises DemixError for a domain-token model (GPT-2 has no domain token as first input), for one whose tokens choose
    their experts, for options of `architecture` that GPT-2 lacks, for another tokenizer than that of the model, and for
    an `output` that is not empty.
    """
    output = output.resolve()
    refuse_used(output)
    description = describe(directory, "kind")
    if description["domain_tokens"]:
        raise DemixError(directory, "is a domain-token model, which GPT-2's format cannot hold", "export another model")
    # Mixtral has RMSNorm, rotary positions, SwiGLU and no biases.
    refuse_routed(
        directory, "GPT-2's format cannot hold, nor can Mixtral's (LayerNorm, biases, learned positions, GELU)"
    )
    for option in ("position", "head", "objective"):
        if value := description["architecture"].get(option):
            raise DemixError(
                directory, f"has {option} {value}, which GPT-2's format cannot hold", "export another model"
            )
    _, encoder = tokenizer_of(directory, tokenizer)
    model = load_model(directory, (expert,))
    sizes = model.architecture
    own = dict(model.named_parameters())
    tensors: dict[str, Tensor] = {}
    for ours, theirs, transposed in gpt2_names(sizes.layers):
        tensor = own[ours][0] if ".feedforward." in ours else own[ours]
        tensors[f"transformer.{theirs}"] = tensor.T if transposed else tensor
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": sizes.activation,
        "n_layer": sizes.layers,
        "n_embd": sizes.width,
        "n_head": sizes.heads,
        "n_positions": sizes.context,
        "vocab_size": model.vocab_size,
        "bos_token_id": encoder.end_of_text,
        "eos_token_id": encoder.end_of_text,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "layer_norm_epsilon": model.final_norm.eps,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "model_max_length": sizes.context,
        # Training takes the literal text <|endoftext|> in a document for ordinary text.
        "split_special_tokens": True,
    }
    with replacing(output, directory=True) as temporary:
        save_tensors(tensors, temporary / "model.safetensors", {"format": "pt"})
        # These files have no seal, because other software reads them.
        for name, value in (("config", config), ("tokenizer_config", tokenizer_config)):
            text = json.dumps(value, indent=2, sort_keys=True) + "\n"
            (temporary / f"{name}.json").write_text(text, encoding="utf-8")
        (temporary / "tokenizer.json").write_text(encoder.definition + "\n", encoding="utf-8")
        heading = f"# {directory.resolve().name}: expert {expert}\n\nOne expert of a DEMix model, exported as GPT-2.\n"
        (temporary / "README.md").write_text(card or heading, encoding="utf-8")
