"""Mixtures of experts in every block, whose tokens choose several: Mixtral, Qwen 3 MoE, FlexOlmo, OLMoE."""

from typing import Any, Literal

from demix.config.architecture import Architecture, Routed
from demix.model.format import Format, Keys, Row, Vocabulary
from demix.model.formats import llama
from demix.settings import Items, Number, Positive, Switch, settings


@settings(kw_only=True)
class MoeKeys(llama.LlamaKeys):
    """The keys that these families share."""

    num_experts_per_tok: Positive = 2
    # transformers takes the second for the first.
    num_experts: Positive = 8
    num_local_experts: Positive | None = None
    router_aux_loss_coef: Number = 0.001
    output_router_logits: Switch = False
    norm_topk_prob: Switch = False

    @property
    def experts(self) -> int:
        """The experts of each block."""
        return self.num_local_experts or self.num_experts

    def options(self) -> dict[str, Any]:
        """As in `Keys`. An expert has room for all tokens."""
        routed = {
            "experts": self.experts,
            "top_k": self.num_experts_per_tok,
            "every": 1,
            "capacity": float(self.experts),
            "balance": self.router_aux_loss_coef,
        }
        return super().options() | {"routed": routed | ({} if self.norm_topk_prob else {"renormalise": False})}


@settings(kw_only=True)
class MixtralKeys(MoeKeys, llama.MistralKeys):
    """The keys of Mixtral, whose gates always have the sum 1. Thetas here are what transformers takes without one."""

    rms_norm_eps: Number = 1e-5
    rope_theta: Number | None = 1_000_000.0
    router_jitter_noise: Literal[0] = 0
    norm_topk_prob: Literal[True] = True


@settings(kw_only=True)
class Qwen3MoeKeys(MoeKeys, llama.Qwen3Keys):
    """The keys of Qwen 3 MoE."""

    num_key_value_heads: Positive | None = 4
    hidden_size: Positive = 2048
    num_hidden_layers: Positive = 24
    head_dim: Positive | None = None
    # Of blocks without experts, of which there are none.
    intermediate_size: Positive = 6144
    moe_intermediate_size: Positive = 768
    num_experts: Positive = 128
    num_experts_per_tok: Positive = 8
    decoder_sparse_step: Literal[1] = 1
    mlp_only_layers: Items[int] | None = None

    def options(self) -> dict[str, Any]:
        """As in `Keys`."""
        return super().options() | {"inner": self.moe_intermediate_size}


@settings(kw_only=True)
class OlmoeKeys(MoeKeys):
    """The keys of OLMoE."""

    hidden_size: Positive = 2048
    intermediate_size: Positive = 2048
    num_hidden_layers: Positive = 16
    num_attention_heads: Positive = 16
    max_position_embeddings: Positive = 4096
    vocab_size: Vocabulary = 50_304
    rms_norm_eps: Number = 1e-5
    num_experts: Positive = 64
    num_experts_per_tok: Positive = 8
    router_aux_loss_coef: Number = 0.01
    clip_qkv: Literal[None] = None

    def options(self) -> dict[str, Any]:
        """As in `Keys`."""
        return super().options() | {"query_norm": "all"}


@settings(kw_only=True)
class FlexOlmoKeys(MoeKeys, llama.Olmo2Keys):
    """The keys of FlexOlmo."""

    max_position_embeddings: Positive = 4096
    vocab_size: Vocabulary = 100_352
    rms_norm_eps: Number = 1e-6
    num_experts: Positive = 7
    num_experts_per_tok: Positive = 5
    router_aux_loss_coef: Number = 0.01
    rope_theta: Number | None = 500_000.0


def _routed(architecture: Architecture, count: str) -> dict[str, Any]:
    routed = architecture.routed
    assert isinstance(routed, Routed)
    return {
        count: routed.experts,
        "num_experts_per_tok": routed.top_k,
        "router_aux_loss_coef": routed.balance,
    }


def _mixtral(architecture: Architecture) -> dict[str, Any]:
    return llama.without_window(architecture) | _routed(architecture, "num_local_experts")


def _with_norm(architecture: Architecture) -> dict[str, Any]:
    routed = architecture.routed
    return _routed(architecture, "num_experts") | {"norm_topk_prob": bool(routed and routed.renormalise)}


def _qwen3_moe(architecture: Architecture) -> dict[str, Any]:
    # Every block has experts.
    none = {"decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": architecture.inner_width}
    return llama.qwen3(architecture) | _with_norm(architecture) | none


def _olmo(architecture: Architecture) -> dict[str, Any]:
    # FlexOlmo's usual token of padding lies beyond a smaller vocabulary.
    return llama.without_bias(architecture) | _with_norm(architecture) | {"pad_token_id": None}


def _rows(dense: tuple[Row, ...], layer: str, gate: str, up: str, down: str) -> tuple[Row, ...]:
    """The rows of a dense family, with those of experts in place of its feedforward."""
    ours, theirs = "blocks.{}.feedforward.", f"model.layers.{{}}.{layer}."
    experts = theirs + "experts.{expert}."
    return (
        *(row for row in dense if not row.ours.startswith(ours)),
        Row(f"{ours}router", (f"{theirs}gate.weight",)),
        Row(f"{ours}up", (f"{experts}{gate}.weight", f"{experts}{up}.weight")),
        Row(f"{ours}down", (f"{experts}{down}.weight",)),
    )


_NAMES = ("mlp", "gate_proj", "up_proj", "down_proj")
_BEFORE, _AFTER = _rows(llama.BEFORE, *_NAMES), _rows(llama.AFTER, *_NAMES)
_MIXTRAL = _rows(llama.BEFORE, "block_sparse_moe", "w1", "w3", "w2")
_OLMOE = llama.HOLDS | {"query_norm": ("all",)}


def _format(
    name: str, title: str, model_class: str, keys: type[Keys], written: Any, rows: tuple[Row, ...], holds: Any
) -> Format:
    return Format(name, title, model_class, keys, written, rows, "model.", holds, llama.BUFFERS, routed=True)


FORMATS = (
    _format("mixtral", "Mixtral", "MixtralForCausalLM", MixtralKeys, _mixtral, _MIXTRAL, llama.HOLDS),
    _format("qwen3_moe", "Qwen 3 MoE", "Qwen3MoeForCausalLM", Qwen3MoeKeys, _qwen3_moe, _BEFORE, llama.QWEN3),
    _format("flex_olmo", "FlexOlmo", "FlexOlmoForCausalLM", FlexOlmoKeys, _olmo, _AFTER, llama.OLMO2),
    _format("olmoe", "OLMoE", "OlmoeForCausalLM", OlmoeKeys, _olmo, _BEFORE, _OLMOE),
)
