"""OPT (Zhang et al. 2022), the seed models of c-BTM."""

from typing import Any, Literal

import torch
from torch import Tensor

from demix.config.architecture import Architecture
from demix.errors import DemixError
from demix.model.format import ACTIVATIONS, ANY, Activation, Format, Keys, Row, Vocabulary, rows_of
from demix.settings import Positive, Switch, settings


@settings(kw_only=True)
class OptKeys(Keys):
    """The keys of OPT. Models whose norms come after attention and feedforward (OPT-350m) are refused."""

    num_hidden_layers: Positive = 12
    hidden_size: Positive = 768
    num_attention_heads: Positive = 12
    max_position_embeddings: Positive = 2048
    vocab_size: Vocabulary = 50272
    ffn_dim: Positive = 3072
    activation_function: Activation = "relu"
    do_layer_norm_before: Literal[True] = True
    _remove_final_layer_norm: Literal[False] = False
    word_embed_proj_dim: Positive | None = None
    enable_bias: Switch = True
    layer_norm_elementwise_affine: Literal[True] = True

    def __post_init__(self) -> None:
        if self.word_embed_proj_dim not in (None, self.hidden_size):
            cause = f"is {self.word_embed_proj_dim}, and hidden_size {self.hidden_size}"
            raise DemixError("word_embed_proj_dim", cause, "import a model whose embeddings are as wide as its layers")

    def options(self) -> dict[str, Any]:
        """As in `Keys`."""
        return {
            "layers": self.num_hidden_layers,
            "width": self.hidden_size,
            "heads": self.num_attention_heads,
            "context": self.max_position_embeddings,
            "activation": ACTIVATIONS[self.activation_function],
            "biases": "all" if self.enable_bias else "none",
            "head": self.head,
        } | ({} if self.ffn_dim == 4 * self.hidden_size else {"inner": self.ffn_dim})


def _written(architecture: Architecture) -> dict[str, Any]:
    return {
        "num_hidden_layers": architecture.layers,
        "hidden_size": architecture.width,
        "word_embed_proj_dim": architecture.width,
        "num_attention_heads": architecture.heads,
        "max_position_embeddings": architecture.context,
        "ffn_dim": architecture.inner_width,
        "activation_function": architecture.activation,
        "enable_bias": architecture.biases == "all",
        "do_layer_norm_before": True,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _without_first(table: Tensor, architecture: Architecture) -> Tensor:
    # OPT's table of positions begins with two rows that nothing reads.
    return table[2:]


def _with_first(table: Tensor, architecture: Architecture) -> Tensor:
    return torch.cat([table.new_zeros(2, table.shape[1]), table])


_OURS, _THEIRS, _PREFIX = "blocks.{}.", "model.decoder.layers.{}.", "model.decoder."
_NAMES = (
    ("attention_norm", "self_attn_layer_norm"),
    ("feedforward_norm", "final_layer_norm"),
    ("attention.out", "self_attn.out_proj"),
)
FORMATS = (
    Format(
        name="opt",
        title="OPT",
        model_class="OPTForCausalLM",
        keys=OptKeys,
        written=_written,
        prefix="model.",
        holds={
            "activation": tuple(ACTIVATIONS.values()), "biases": ("all", "none"), "head": ("tied", "untied"),
            "inner": ANY,
        },
        rows=(
            Row("token_embedding", (f"{_PREFIX}embed_tokens.weight",)),
            Row("position_embedding", (f"{_PREFIX}embed_positions.weight",), _without_first, _with_first),
            Row("output_embedding", ("lm_head.weight",)),
            *rows_of([("final_norm", f"{_PREFIX}final_layer_norm")]),
            *rows_of(_NAMES, _OURS, _THEIRS),
            *(
                Row(f"{_OURS}attention.qkv.{kind}", tuple(f"{_THEIRS}self_attn.{part}_proj.{kind}" for part in "qkv"))
                for kind in ("weight", "bias")
            ),
            Row(f"{_OURS}feedforward.up", (f"{_THEIRS}fc1.weight",)),
            Row(f"{_OURS}feedforward.up_bias", (f"{_THEIRS}fc1.bias",)),
            Row(f"{_OURS}feedforward.down", (f"{_THEIRS}fc2.weight",)),
            Row(f"{_OURS}feedforward.down_bias", (f"{_THEIRS}fc2.bias",)),
        ),
    ),
)  # fmt: skip
