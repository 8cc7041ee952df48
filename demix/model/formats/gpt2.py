"""GPT-2 (Radford et al. 2019)."""

from torch import Tensor

from demix.config.architecture import Architecture
from demix.model.format import TIED, Format, Key


def _transposed(tensor: Tensor, architecture: Architecture) -> Tensor:
    # Conv1D keeps weights as [in, out], and a bias as it is.
    return tensor.T if tensor.dim() == 2 else tensor


FORMATS = (
    Format(
        name="gpt2",
        title="GPT-2",
        model_class="GPT2LMHeadModel",
        keys={
            "n_layer": Key("layers"),
            "n_embd": Key("width"),
            "n_head": Key("heads"),
            "n_positions": Key("context"),
            "n_inner": Key("inner", written="unusual"),
            "activation_function": Key("activation", "gelu_new", {"gelu": "gelu", "gelu_new": "gelu_new"}),
            "layer_norm_epsilon": Key("epsilon", 1e-5),
            "tie_word_embeddings": Key("head", True, TIED),
            "vocab_size": Key("vocab_size", written="never"),
        },
        must={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
        },
        writes={"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        blocks="transformer.h.{}.",
        outside={
            "token_embedding": "transformer.wte",
            "position_embedding": "transformer.wpe",
            "output_embedding": "lm_head",
            "final_norm": "transformer.ln_f",
        },
        block={
            "attention_norm": "ln_1",
            "attention.qkv": "attn.c_attn",
            "attention.out": "attn.c_proj",
            "feedforward_norm": "ln_2",
            "feedforward.up": "mlp.c_fc",
            "feedforward.down": "mlp.c_proj",
        },
        changes=dict.fromkeys(
            ("attention.qkv", "attention.out", "feedforward.up", "feedforward.down"), (_transposed, _transposed)
        ),
        prefix="transformer.",
        # The causal mask.
        buffers=(".attn.bias", ".attn.masked_bias"),
    ),
)
