"""GPT-NeoX (Black et al. 2022), and Pythia (Biderman et al. 2023)."""

from torch import Tensor

from demix.config.architecture import Architecture
from demix.model.format import ACTIVATIONS, ROPES, TIED, Format, Key


# Rows of queries, keys and values lie side by side in each head.
def _by_part(tensor: Tensor, architecture: Architecture) -> Tensor:
    heads = tensor.view(architecture.heads, 3, architecture.unit, *tensor.shape[1:])
    return heads.transpose(0, 1).reshape(tensor.shape)


def _by_head(tensor: Tensor, architecture: Architecture) -> Tensor:
    parts = tensor.view(3, architecture.heads, architecture.unit, *tensor.shape[1:])
    return parts.transpose(0, 1).reshape(tensor.shape)


FORMATS = (
    Format(
        name="gpt_neox",
        title="GPT-NeoX",
        model_class="GPTNeoXForCausalLM",
        keys=ROPES
        | {
            "num_hidden_layers": Key("layers"),
            "hidden_size": Key("width"),
            "num_attention_heads": Key("heads"),
            "max_position_embeddings": Key("context"),
            "intermediate_size": Key("inner"),
            "hidden_act": Key("activation", "gelu", ACTIVATIONS),
            "layer_norm_eps": Key("epsilon", 1e-5),
            "use_parallel_residual": Key("residual", True, {True: "parallel", False: "sequential"}),
            "rotary_pct": Key("rope_share", 0.25),
            "rotary_emb_base": Key("rope_theta", written="never"),
            "tie_word_embeddings": Key("head", False, TIED),
            "vocab_size": Key("vocab_size", written="never"),
        },
        fixed={"position": "rope"},
        must={"attention_bias": True},
        ignored=("rope_theta",),
        writes={"hidden_dropout": 0.0, "attention_dropout": 0.0},
        blocks="gpt_neox.layers.{}.",
        outside={
            "token_embedding": "gpt_neox.embed_in",
            "output_embedding": "embed_out",
            "final_norm": "gpt_neox.final_layer_norm",
        },
        block={
            "attention_norm": "input_layernorm",
            "attention.qkv": "attention.query_key_value",
            "attention.out": "attention.dense",
            "feedforward_norm": "post_attention_layernorm",
            "feedforward.up": "mlp.dense_h_to_4h",
            "feedforward.down": "mlp.dense_4h_to_h",
        },
        changes={"attention.qkv": (_by_part, _by_head)},
        prefix="gpt_neox.",
        buffers=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
    ),
)
