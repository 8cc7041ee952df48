"""OPT (Zhang et al. 2022), the models from which the experts of c-BTM start."""

import torch
from torch import Tensor

from demix.config.architecture import Architecture
from demix.model.format import ACTIVATIONS, TIED, Format, Key


def _without_first(table: Tensor, architecture: Architecture) -> Tensor:
    # OPT's table of positions begins with two rows that nothing reads.
    return table[2:]


def _with_first(table: Tensor, architecture: Architecture) -> Tensor:
    return torch.cat([table.new_zeros(2, table.shape[1]), table])


FORMATS = (
    Format(
        name="opt",
        title="OPT",
        model_class="OPTForCausalLM",
        keys={
            "num_hidden_layers": Key("layers"),
            "hidden_size": Key("width"),
            # Embeddings are as wide as layers.
            "word_embed_proj_dim": Key("width"),
            "num_attention_heads": Key("heads"),
            "max_position_embeddings": Key("context"),
            "ffn_dim": Key("inner"),
            "activation_function": Key("activation", "relu", ACTIVATIONS),
            "enable_bias": Key("biases", True, {True: "all", False: "none"}),
            "tie_word_embeddings": Key("head", True, TIED),
            "vocab_size": Key("vocab_size", written="never"),
        },
        # Models whose norms come after attention and feedforward (OPT-350m) are refused.
        must={
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "layer_norm_elementwise_affine": True,
        },
        writes={"do_layer_norm_before": True, "dropout": 0.0, "attention_dropout": 0.0},
        blocks="model.decoder.layers.{}.",
        outside={
            "token_embedding": "model.decoder.embed_tokens",
            "position_embedding": "model.decoder.embed_positions",
            "output_embedding": "lm_head",
            "final_norm": "model.decoder.final_layer_norm",
        },
        block={
            "attention_norm": "self_attn_layer_norm",
            "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "attention.out": "self_attn.out_proj",
            "feedforward_norm": "final_layer_norm",
            "feedforward.up": "fc1",
            "feedforward.down": "fc2",
        },
        changes={"position_embedding": (_without_first, _with_first)},
        prefix="model.",
    ),
)
