"""GPT-NeoX (Black et al. 2022), and Pythia (Biderman et al. 2023)."""

from typing import Any, Literal

from pydantic import Field
from torch import Tensor

from demix.config.architecture import Architecture
from demix.model.format import (
    ACTIVATIONS,
    ANY,
    Activation,
    Format,
    Keys,
    Rope,
    Row,
    Vocabulary,
    first_of,
    rope_keys,
    rows_of,
)
from demix.settings import Number, Positive, Switch, settings


@settings(kw_only=True)
class NeoxRope(Rope):
    """Rope that rotates a share of a head."""

    partial_rotary_factor: Number | None = None


@settings(kw_only=True)
class NeoxKeys(Keys):
    """The keys of GPT-NeoX."""

    num_hidden_layers: Positive = 44
    hidden_size: Positive = 6144
    num_attention_heads: Positive = 64
    max_position_embeddings: Positive = 2048
    vocab_size: Vocabulary = 50432
    intermediate_size: Positive = 24576
    hidden_act: Activation = "gelu"
    layer_norm_eps: Number = 1e-5
    use_parallel_residual: Switch = True
    attention_bias: Literal[True] = True
    tie_word_embeddings: Switch = False
    rotary_pct: Number = Field(default=0.25, gt=0, le=1)
    rotary_emb_base: Number | None = None
    rope_theta: Number | None = None
    rope_scaling: NeoxRope | None = None
    rope_parameters: NeoxRope | None = None
    is_decoder: Switch = False

    def options(self) -> dict[str, Any]:
        """As in `Keys`."""
        rope = first_of(self.rope_scaling, self.rope_parameters)
        turned = rope.options(self.rotary_emb_base, self.max_position_embeddings)
        own_inner = {} if self.intermediate_size == 4 * self.hidden_size else {"inner": self.intermediate_size}
        return turned | own_inner | {
            "layers": self.num_hidden_layers,
            "width": self.hidden_size,
            "heads": self.num_attention_heads,
            "context": self.max_position_embeddings,
            "activation": ACTIVATIONS[self.hidden_act],
            "epsilon": self.layer_norm_eps,
            "residual": "parallel" if self.use_parallel_residual else "sequential",
            "rope_share": rope.partial_rotary_factor or self.rotary_pct,
            "head": self.head,
        }  # fmt: skip


def _written(architecture: Architecture) -> dict[str, Any]:
    rope = rope_keys(architecture, partial_rotary_factor=architecture.rope_share)
    return {
        "num_hidden_layers": architecture.layers,
        "hidden_size": architecture.width,
        "num_attention_heads": architecture.heads,
        "max_position_embeddings": architecture.context,
        "intermediate_size": architecture.inner_width,
        "hidden_act": architecture.activation,
        "layer_norm_eps": architecture.epsilon,
        "use_parallel_residual": architecture.residual == "parallel",
        "rotary_pct": architecture.rope_share,
        "rotary_emb_base": rope.pop("rope_theta"),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    } | rope


# Rows of queries, keys and values lie side by side in each head.
def _by_part(tensor: Tensor, architecture: Architecture) -> Tensor:
    heads = tensor.view(architecture.heads, 3, architecture.unit, *tensor.shape[1:])
    return heads.transpose(0, 1).reshape(tensor.shape)


def _by_head(tensor: Tensor, architecture: Architecture) -> Tensor:
    parts = tensor.view(3, architecture.heads, architecture.unit, *tensor.shape[1:])
    return parts.transpose(0, 1).reshape(tensor.shape)


_OURS, _THEIRS = "blocks.{}.", "gpt_neox.layers.{}."
_NAMES = (
    ("attention_norm", "input_layernorm"),
    ("feedforward_norm", "post_attention_layernorm"),
    ("attention.out", "attention.dense"),
)
FORMATS = (
    Format(
        name="gpt_neox",
        title="GPT-NeoX",
        model_class="GPTNeoXForCausalLM",
        keys=NeoxKeys,
        written=_written,
        prefix="gpt_neox.",
        holds={
            "activation": tuple(ACTIVATIONS.values()), "position": ("rope",), "head": ("tied", "untied"),
            "residual": ("sequential", "parallel"), "inner": ANY, "epsilon": ANY, "rope_theta": ANY, "rope_share": ANY,
            "rope_scaling": ANY,
        },
        buffers=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
        rows=(
            Row("token_embedding", ("gpt_neox.embed_in.weight",)),
            Row("output_embedding", ("embed_out.weight",)),
            *rows_of([("final_norm", "gpt_neox.final_layer_norm")]),
            *rows_of(_NAMES, _OURS, _THEIRS),
            *(
                Row(f"{_OURS}attention.qkv.{kind}", (f"{_THEIRS}attention.query_key_value.{kind}",), _by_part, _by_head)
                for kind in ("weight", "bias")
            ),
            Row(f"{_OURS}feedforward.up", (f"{_THEIRS}mlp.dense_h_to_4h.weight",)),
            Row(f"{_OURS}feedforward.up_bias", (f"{_THEIRS}mlp.dense_h_to_4h.bias",)),
            Row(f"{_OURS}feedforward.down", (f"{_THEIRS}mlp.dense_4h_to_h.weight",)),
            Row(f"{_OURS}feedforward.down_bias", (f"{_THEIRS}mlp.dense_4h_to_h.bias",)),
        ),
    ),
)  # fmt: skip
