"""MoE in every layer, with several experts per token: Mixtral, Qwen 3 MoE, FlexOlmo, OLMoE."""

from dataclasses import replace

from demix.model.format import Key, Modules
from demix.model.formats.llama import LLAMA, MISTRAL, OLMO2, QWEN3

# transformers reads `num_local_experts` as `num_experts`, and the other way round.
CHOSEN = {
    "num_local_experts": Key("routed.experts", written="never"),
    "num_experts": Key("routed.experts"),
    "num_experts_per_tok": Key("routed.top_k"),
    "router_aux_loss_coef": Key("routed.balance"),
    "norm_topk_prob": Key("routed.renormalise", False),
}
EXPERTS: Modules = {
    "feedforward.router": "mlp.gate",
    "feedforward.up": ("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj"),
    "feedforward.down": "mlp.experts.{expert}.down_proj",
}
W_EXPERTS: Modules = {
    "feedforward.router": "block_sparse_moe.gate",
    "feedforward.up": ("block_sparse_moe.experts.{expert}.w1", "block_sparse_moe.experts.{expert}.w3"),
    "feedforward.down": "block_sparse_moe.experts.{expert}.w2",
}
IGNORED = ("output_router_logits",)

FORMATS = (
    replace(
        MISTRAL,
        name="mixtral",
        title="Mixtral",
        model_class="MixtralForCausalLM",
        keys=MISTRAL.keys
        | {
            "rms_norm_eps": Key("epsilon", 1e-5),
            # What transformers uses without one.
            "rope_theta": Key("rope_theta", 1_000_000.0, written="never"),
            "num_local_experts": Key("routed.experts"),
            "num_experts": Key("routed.experts", written="never"),
            "num_experts_per_tok": Key("routed.top_k"),
            "router_aux_loss_coef": Key("routed.balance"),
        },
        fixed=MISTRAL.fixed | {"routed.renormalise": True},
        must=MISTRAL.must | {"router_jitter_noise": 0, "norm_topk_prob": True},
        ignored=IGNORED,
        block=MISTRAL.block | W_EXPERTS,
    ),
    replace(
        QWEN3,
        name="qwen3_moe",
        title="Qwen 3 MoE",
        model_class="Qwen3MoeForCausalLM",
        keys=QWEN3.keys
        | CHOSEN
        | {
            # Of blocks without experts, of which there are none.
            "intermediate_size": Key("inner", read=False),
            "moe_intermediate_size": Key("inner"),
        },
        # Every block has experts.
        must=QWEN3.must | {"decoder_sparse_step": 1, "mlp_only_layers": []},
        ignored=(*QWEN3.ignored, *IGNORED, "intermediate_size"),
        writes=QWEN3.writes | {"decoder_sparse_step": 1, "mlp_only_layers": []},
        block=QWEN3.block | EXPERTS,
    ),
    replace(
        OLMO2,
        name="flex_olmo",
        title="FlexOlmo",
        model_class="FlexOlmoForCausalLM",
        keys=OLMO2.keys
        | CHOSEN
        | {
            "rms_norm_eps": Key("epsilon", 1e-6),
            "rope_theta": Key("rope_theta", 500_000.0, written="never"),
        },
        ignored=IGNORED,
        # Its usual token of padding lies beyond a smaller vocabulary.
        writes=OLMO2.writes | {"pad_token_id": None},
        block=OLMO2.block | EXPERTS,
    ),
    replace(
        OLMO2,
        name="olmoe",
        title="OLMoE",
        model_class="OlmoeForCausalLM",
        keys=LLAMA.keys
        | CHOSEN
        | {
            "rms_norm_eps": Key("epsilon", 1e-5),
        },
        fixed=LLAMA.fixed | {"query_norm": "all"},
        must=LLAMA.must | {"clip_qkv": None},
        ignored=IGNORED,
        writes=OLMO2.writes | {"pad_token_id": None},
        block=LLAMA.block | EXPERTS,
    ),
)
