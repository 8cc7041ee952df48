"""Llama, and what differs from it in few options: Mistral, Qwen 2, Qwen 3, OLMo 2."""

from typing import Any, Literal

from demix.config.architecture import Architecture
from demix.model.format import ACTIVATIONS, ANY, Activation, Format, Keys, Rope, Row, Vocabulary, first_of, rope_keys
from demix.settings import Items, Number, Positive, Switch, settings


@settings(kw_only=True)
class LlamaKeys(Keys):
    """The keys that these families share, with Llama's defaults."""

    num_hidden_layers: Positive = 32
    hidden_size: Positive = 4096
    num_attention_heads: Positive = 32
    num_key_value_heads: Positive | None = None
    head_dim: Positive | None = None
    intermediate_size: Positive = 11008
    max_position_embeddings: Positive = 2048
    vocab_size: Vocabulary = 32000
    hidden_act: Activation = "silu"
    rms_norm_eps: Number = 1e-6
    tie_word_embeddings: Switch = False
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    rope_theta: Number | None = None
    rope_scaling: Rope | None = None
    rope_parameters: Rope | None = None
    rope_interleaved: Literal[False] = False

    def options(self) -> dict[str, Any]:
        """As in `Keys`."""
        rope = first_of(self.rope_scaling, self.rope_parameters)
        sizes = {
            "layers": self.num_hidden_layers,
            "width": self.hidden_size,
            "heads": self.num_attention_heads,
            "context": self.max_position_embeddings,
            "inner": self.intermediate_size,
        }
        if self.num_key_value_heads not in (None, self.num_attention_heads):
            sizes["key_heads"] = self.num_key_value_heads
        if self.head_dim and self.head_dim * self.num_attention_heads != self.hidden_size:
            sizes["head_width"] = self.head_dim
        return rope.options(self.rope_theta, self.max_position_embeddings) | sizes | {
            "norm": "rms",
            "epsilon": self.rms_norm_eps,
            "gated": True,
            "activation": ACTIVATIONS[self.hidden_act],
            "biases": "none",
            "head": self.head,
        }  # fmt: skip


@settings(kw_only=True)
class MistralKeys(LlamaKeys):
    """The keys of Mistral."""

    num_key_value_heads: Positive | None = 8
    intermediate_size: Positive = 14336
    max_position_embeddings: Positive = 131_072
    sliding_window: Positive | None = 4096

    @property
    def window(self) -> int | None:
        """As in `Keys`."""
        return self.sliding_window


@settings(kw_only=True)
class Qwen2Keys(LlamaKeys):
    """The keys of Qwen 2."""

    intermediate_size: Positive = 22016
    max_position_embeddings: Positive = 32_768
    vocab_size: Vocabulary = 151_936
    use_sliding_window: Literal[False] = False
    # They say nothing without a window.
    sliding_window: Positive | None = None
    max_window_layers: int | None = None
    use_mrope: Literal[False] = False
    layer_types: Items[Literal["full_attention"]] | None = None

    def options(self) -> dict[str, Any]:
        """As in `Keys`."""
        return super().options() | {"biases": "qkv"}


@settings(kw_only=True)
class Qwen3Keys(Qwen2Keys):
    """The keys of Qwen 3."""

    num_key_value_heads: Positive | None = 32
    head_dim: Positive | None = 128

    def options(self) -> dict[str, Any]:
        """As in `Keys`."""
        return super().options() | {"biases": "none", "query_norm": "head"}


@settings(kw_only=True)
class Olmo2Keys(LlamaKeys):
    """The keys of OLMo 2."""

    vocab_size: Vocabulary = 50_304
    rms_norm_eps: Number = 1e-5

    def options(self) -> dict[str, Any]:
        """As in `Keys`."""
        return super().options() | {"query_norm": "all", "norm_place": "after"}


def _written(architecture: Architecture) -> dict[str, Any]:
    own_width = {"head_dim": architecture.head_width} if architecture.head_width else {}
    return rope_keys(architecture) | own_width | {
        "num_hidden_layers": architecture.layers,
        "hidden_size": architecture.width,
        "num_attention_heads": architecture.heads,
        "num_key_value_heads": architecture.key_value_heads,
        "intermediate_size": architecture.inner_width,
        "max_position_embeddings": architecture.context,
        "hidden_act": architecture.activation,
        "rms_norm_eps": architecture.epsilon,
        "attention_dropout": 0.0,
    }  # fmt: skip


def without_bias(architecture: Architecture) -> dict[str, Any]:
    """The keys of a family whose attention may have biases, without them."""
    return _written(architecture) | {"attention_bias": False}


def _llama(architecture: Architecture) -> dict[str, Any]:
    return without_bias(architecture) | {"mlp_bias": False}


def without_window(architecture: Architecture) -> dict[str, Any]:
    """The keys of a family whose attention may have a window, without one."""
    return _written(architecture) | {"sliding_window": None}


def _qwen2(architecture: Architecture) -> dict[str, Any]:
    return without_window(architecture) | {"use_sliding_window": False}


def qwen3(architecture: Architecture) -> dict[str, Any]:
    """The keys of Qwen 3."""
    return _qwen2(architecture) | {"attention_bias": False, "head_dim": architecture.unit}


def _rows(attention_norm: str, feedforward_norm: str) -> tuple[Row, ...]:
    ours, theirs = "blocks.{}.", "model.layers.{}."
    return (
        Row("token_embedding", ("model.embed_tokens.weight",)),
        Row("output_embedding", ("lm_head.weight",)),
        Row("final_norm.weight", ("model.norm.weight",)),
        Row(f"{ours}attention_norm.weight", (f"{theirs}{attention_norm}.weight",)),
        Row(f"{ours}attention.qkv.weight", tuple(f"{theirs}self_attn.{part}_proj.weight" for part in "qkv")),
        Row(f"{ours}attention.qkv.bias", tuple(f"{theirs}self_attn.{part}_proj.bias" for part in "qkv")),
        Row(f"{ours}attention.q_norm.weight", (f"{theirs}self_attn.q_norm.weight",)),
        Row(f"{ours}attention.k_norm.weight", (f"{theirs}self_attn.k_norm.weight",)),
        Row(f"{ours}attention.out.weight", (f"{theirs}self_attn.o_proj.weight",)),
        Row(f"{ours}feedforward_norm.weight", (f"{theirs}{feedforward_norm}.weight",)),
        Row(f"{ours}feedforward.up", (f"{theirs}mlp.gate_proj.weight", f"{theirs}mlp.up_proj.weight")),
        Row(f"{ours}feedforward.down", (f"{theirs}mlp.down_proj.weight",)),
    )


HOLDS = {
    "activation": tuple(ACTIVATIONS.values()), "norm": ("rms",), "position": ("rope",), "biases": ("none",),
    "gated": (True,), "head": ("tied", "untied"), "inner": ANY, "key_heads": ANY, "head_width": ANY, "epsilon": ANY,
    "rope_theta": ANY, "rope_scaling": ANY,
}  # fmt: skip
BEFORE, BUFFERS = _rows("input_layernorm", "post_attention_layernorm"), (".rotary_emb.inv_freq",)
AFTER = _rows("post_attention_layernorm", "post_feedforward_layernorm")
OLMO2 = HOLDS | {"query_norm": ("all",), "norm_place": ("after",)}
QWEN2, QWEN3 = HOLDS | {"biases": ("qkv",)}, HOLDS | {"query_norm": ("head",)}
FORMATS = (
    Format(
        "llama", "Llama", "LlamaForCausalLM", LlamaKeys, _llama, BEFORE, "model.", HOLDS, BUFFERS, divides=True
    ),
    Format(
        "mistral", "Mistral", "MistralForCausalLM", MistralKeys, without_window, BEFORE, "model.", HOLDS, BUFFERS
    ),
    Format("qwen2", "Qwen 2", "Qwen2ForCausalLM", Qwen2Keys, _qwen2, BEFORE, "model.", QWEN2, BUFFERS),
    Format("qwen3", "Qwen 3", "Qwen3ForCausalLM", Qwen3Keys, qwen3, BEFORE, "model.", QWEN3, BUFFERS),
    Format("olmo2", "OLMo 2", "Olmo2ForCausalLM", Olmo2Keys, without_bias, AFTER, "model.", OLMO2, BUFFERS),
)  # fmt: skip
