"""GPT-2 (Radford et al. 2019)."""

from typing import Any, Literal

from torch import Tensor

from demix.config.architecture import Architecture
from demix.model.format import ANY, Format, Keys, Row, Vocabulary, rows_of
from demix.settings import Number, Positive, settings


@settings(kw_only=True)
class Gpt2Keys(Keys):
    """The keys of GPT-2."""

    n_layer: Positive = 12
    n_embd: Positive = 768
    n_head: Positive = 12
    n_positions: Positive = 1024
    vocab_size: Vocabulary = 50257
    n_inner: Positive | None = None
    activation_function: Literal["gelu", "gelu_new"] = "gelu_new"
    layer_norm_epsilon: Number = 1e-5
    scale_attn_weights: Literal[True] = True
    scale_attn_by_inverse_layer_idx: Literal[False] = False
    add_cross_attention: Literal[False] = False

    def options(self) -> dict[str, Any]:
        """As in `Keys`."""
        own_inner = {} if self.n_inner in (None, 4 * self.n_embd) else {"inner": self.n_inner}
        return own_inner | {
            "layers": self.n_layer,
            "width": self.n_embd,
            "heads": self.n_head,
            "context": self.n_positions,
            "activation": self.activation_function,
            "epsilon": self.layer_norm_epsilon,
            "head": self.head,
        }


def _written(architecture: Architecture) -> dict[str, Any]:
    keys = {
        "activation_function": architecture.activation,
        "n_layer": architecture.layers,
        "n_embd": architecture.width,
        "n_head": architecture.heads,
        "n_positions": architecture.context,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "layer_norm_epsilon": architecture.epsilon,
    }
    return keys if architecture.inner_width == 4 * architecture.width else keys | {"n_inner": architecture.inner}


def _turned(tensor: Tensor, architecture: Architecture) -> Tensor:
    # Conv1D keeps weights as [in, out].
    return tensor.T


_OURS, _THEIRS = "blocks.{}.", "transformer.h.{}."
FORMATS = (
    Format(
        name="gpt2",
        title="GPT-2",
        model_class="GPT2LMHeadModel",
        keys=Gpt2Keys,
        written=_written,
        prefix="transformer.",
        holds={"activation": ("gelu", "gelu_new"), "head": ("tied", "untied"), "inner": ANY, "epsilon": ANY},
        # The causal mask.
        buffers=(".attn.bias", ".attn.masked_bias"),
        rows=(
            Row("token_embedding", ("transformer.wte.weight",)),
            Row("position_embedding", ("transformer.wpe.weight",)),
            Row("output_embedding", ("lm_head.weight",)),
            *rows_of([("final_norm", "transformer.ln_f")]),
            *rows_of([("attention_norm", "ln_1"), ("feedforward_norm", "ln_2")], _OURS, _THEIRS),
            Row(f"{_OURS}attention.qkv.weight", (f"{_THEIRS}attn.c_attn.weight",), _turned, _turned),
            Row(f"{_OURS}attention.qkv.bias", (f"{_THEIRS}attn.c_attn.bias",)),
            Row(f"{_OURS}attention.out.weight", (f"{_THEIRS}attn.c_proj.weight",), _turned, _turned),
            Row(f"{_OURS}attention.out.bias", (f"{_THEIRS}attn.c_proj.bias",)),
            Row(f"{_OURS}feedforward.up", (f"{_THEIRS}mlp.c_fc.weight",), _turned, _turned),
            Row(f"{_OURS}feedforward.up_bias", (f"{_THEIRS}mlp.c_fc.bias",)),
            Row(f"{_OURS}feedforward.down", (f"{_THEIRS}mlp.c_proj.weight",), _turned, _turned),
            Row(f"{_OURS}feedforward.down_bias", (f"{_THEIRS}mlp.c_proj.bias",)),
        ),
    ),
)
