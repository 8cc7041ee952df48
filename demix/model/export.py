"""Exporting one expert as a GPT-2 model of Hugging Face."""

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError
from demix.files import refuse_used, replacing
from demix.model.checkpoint import describe, load_model, refuse_other_tokenizer


def export_hf(directory: Path, expert: str, tokenizer: Path, output: Path, card: str | None = None) -> None:
    """Write one expert of a model, with the tokenizer, as a Hugging Face GPT-2 directory.

    README.md names the expert and then holds `card`, the card of the whole model.

    The architecture is that of GPT-2 with the exact GELU, and `GPT2LMHeadModel` gives the same log-probabilities.
    Raises DemixError for a domain-token model (GPT-2 has no domain token as first input), for another tokenizer than
    that of the model, and for an `output` that is not empty.
    """
    output = output.resolve()
    refuse_used(output)
    description = describe(directory, "kind", "tokens", "steps")
    if description["domain_tokens"]:
        raise DemixError(directory, "is a domain-token model, which GPT-2's format cannot hold", "export another model")
    encoder = Tokenizer.load(tokenizer)
    refuse_other_tokenizer(directory, tokenizer, encoder.sha256, encoder.vocab_size)
    model = load_model(directory, (expert,))
    sizes = model.architecture
    tensors: dict[str, Tensor] = {
        "transformer.wte.weight": model.token_embedding,
        "transformer.wpe.weight": model.position_embedding,
        "transformer.ln_f.weight": model.final_norm.weight,
        "transformer.ln_f.bias": model.final_norm.bias,
    }
    for number, block in enumerate(model.blocks):
        own = dict(block.named_parameters())
        # GPT-2's Conv1D keeps its weights as [in, out].
        part = {
            "ln_1.weight": own["attention_norm.weight"],
            "ln_1.bias": own["attention_norm.bias"],
            "attn.c_attn.weight": own["attention.qkv.weight"].T,
            "attn.c_attn.bias": own["attention.qkv.bias"],
            "attn.c_proj.weight": own["attention.out.weight"].T,
            "attn.c_proj.bias": own["attention.out.bias"],
            "ln_2.weight": own["feedforward_norm.weight"],
            "ln_2.bias": own["feedforward_norm.bias"],
            "mlp.c_fc.weight": own["feedforward.up"][0].T,
            "mlp.c_fc.bias": own["feedforward.up_bias"][0],
            "mlp.c_proj.weight": own["feedforward.down"][0].T,
            "mlp.c_proj.bias": own["feedforward.down_bias"][0],
        }
        tensors |= {f"transformer.h.{number}.{name}": tensor for name, tensor in part.items()}
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu",
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
        contiguous = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
        save_file(contiguous, temporary / "model.safetensors", metadata={"format": "pt"})
        # These files have no seal, because other software reads them.
        for name, value in (("config", config), ("tokenizer_config", tokenizer_config)):
            text = json.dumps(value, indent=2, sort_keys=True) + "\n"
            (temporary / f"{name}.json").write_text(text, encoding="utf-8")
        (temporary / "tokenizer.json").write_text(encoder.definition + "\n", encoding="utf-8")
        origin = {"expert": expert} | {key: description[key] for key in ("kind", "tokens", "steps")}
        heading = (
            f"# {directory.resolve().name}: expert {expert}\n\n"
            "One expert of a DEMix language model, exported as GPT-2.\n\n"
            f"```json\n{json.dumps(origin, indent=2)}\n```\n"
        )
        (temporary / "README.md").write_text(_with_card(heading, card), encoding="utf-8")


def _with_card(heading: str, card: str | None) -> str:
    """`heading` and then `card`. The front matter of the card stays at the top of the file."""
    if card is None:
        return heading
    front, body = card.removeprefix("---\n").split("\n---\n", 1)
    return f"---\n{front}\n---\n\n{heading}\n{body.lstrip()}"
