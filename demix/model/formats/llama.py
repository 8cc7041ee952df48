"""Llama, and what differs from it in few options: Mistral, Qwen 2, Qwen 3, OLMo 2."""

from dataclasses import replace

from demix.model.format import ACTIVATIONS, ROPES, TIED, Format, Key

LLAMA = Format(
    name="llama",
    title="Llama",
    model_class="LlamaForCausalLM",
    keys=ROPES
    | {
        "num_hidden_layers": Key("layers"),
        "hidden_size": Key("width"),
        "num_attention_heads": Key("heads"),
        "num_key_value_heads": Key("key_heads"),
        "head_dim": Key("head_width", written="unusual"),
        "max_position_embeddings": Key("context"),
        "intermediate_size": Key("inner"),
        "hidden_act": Key("activation", "silu", ACTIVATIONS),
        "rms_norm_eps": Key("epsilon", 1e-6),
        "rope_theta": Key("rope_theta", written="never"),
        "tie_word_embeddings": Key("head", False, TIED),
        "vocab_size": Key("vocab_size", written="never"),
    },
    fixed={"norm": "rms", "gated": True, "biases": "none", "position": "rope"},
    must={"attention_bias": False, "mlp_bias": False, "rope_interleaved": False},
    writes={"attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0},
    blocks="model.layers.{}.",
    outside={"token_embedding": "model.embed_tokens", "output_embedding": "lm_head", "final_norm": "model.norm"},
    block={
        "attention_norm": "input_layernorm",
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "attention.out": "self_attn.o_proj",
        "feedforward_norm": "post_attention_layernorm",
        "feedforward.up": ("mlp.gate_proj", "mlp.up_proj"),
        "feedforward.down": "mlp.down_proj",
    },
    prefix="model.",
    buffers=(".rotary_emb.inv_freq",),
    heads_divide_width=True,
)
MISTRAL = replace(
    LLAMA,
    name="mistral",
    title="Mistral",
    model_class="MistralForCausalLM",
    keys=LLAMA.keys | {"sliding_window": Key("window", 4096, written="never")},
    writes={"sliding_window": None, "attention_dropout": 0.0},
    heads_divide_width=False,
)
QWEN2 = replace(
    MISTRAL,
    name="qwen2",
    title="Qwen 2",
    model_class="Qwen2ForCausalLM",
    keys=LLAMA.keys,
    fixed=LLAMA.fixed | {"biases": "qkv"},
    must=LLAMA.must | {"use_sliding_window": False, "use_mrope": False, "layer_types": ["full_attention"]},
    # They say nothing without a window.
    ignored=("sliding_window", "max_window_layers"),
    writes=MISTRAL.writes | {"use_sliding_window": False},
)
QWEN3 = replace(
    QWEN2,
    name="qwen3",
    title="Qwen 3",
    model_class="Qwen3ForCausalLM",
    keys=QWEN2.keys | {"head_dim": Key("head_width")},
    fixed=LLAMA.fixed | {"query_norm": "head"},
    writes=QWEN2.writes | {"attention_bias": False},
)
OLMO2 = replace(
    LLAMA,
    name="olmo2",
    title="OLMo 2",
    model_class="Olmo2ForCausalLM",
    keys=LLAMA.keys | {"rms_norm_eps": Key("epsilon", 1e-5)},
    fixed=LLAMA.fixed | {"query_norm": "all", "norm_place": "after"},
    writes={"attention_bias": False, "attention_dropout": 0.0},
    block=LLAMA.block
    | {"attention_norm": "post_attention_layernorm", "feedforward_norm": "post_feedforward_layernorm"},
    heads_divide_width=False,
)
FORMATS = (LLAMA, MISTRAL, QWEN2, QWEN3, OLMO2)
