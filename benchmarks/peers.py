"""What stands beside ours in benchmarks/train.py: nanoGPT's model, and transformers' GPT-2 and Mixtral block."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demix.config.architecture import Architecture


class NanoBlock(nn.Module):
    """nanoGPT's block, with the exact GELU that ours has."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = (
            part.view(B, T, self.heads, D // self.heads).transpose(1, 2)
            for part in self.c_attn(self.ln_1(x)).split(D, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(mixed.transpose(1, 2).contiguous().view(B, T, D))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """nanoGPT's model (github.com/karpathy/nanoGPT), without dropout: tied embeddings, logits and loss in forward."""

    def __init__(self, sizes: Architecture, vocabulary: int):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, sizes.width), nn.Embedding(sizes.context, sizes.width)
        self.blocks = nn.ModuleList(NanoBlock(sizes.width, sizes.heads) for _ in range(sizes.layers))
        self.ln_f = nn.LayerNorm(sizes.width)
        self.lm_head = nn.Linear(sizes.width, vocabulary, bias=False)
        self.apply(lambda m: nn.init.normal_(m.weight, std=0.02) if isinstance(m, nn.Linear | nn.Embedding) else None)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def hugging_face(sizes: Architecture, vocabulary: int) -> nn.Module:
    """transformers' GPT-2 of the same sizes, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary, n_positions=sizes.context, n_embd=sizes.width, n_layer=sizes.layers,
        n_head=sizes.heads, activation_function="gelu", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        use_cache=False, bos_token_id=None, eos_token_id=None, attn_implementation="sdpa",
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def mixtral_inner(width: int) -> int:
    """Units of an expert of three matrices with as many weights as one of two matrices and 4·D units, or few less."""
    return 8 * width // 3 // 16 * 16


def mixtral_block(width: int, experts: int, top_k: int, implementation: str) -> nn.Module:
    """transformers' Mixtral block of about as many weights as our routed layer, without noise in its router."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=width, intermediate_size=mixtral_inner(width), num_local_experts=experts,
        num_experts_per_tok=top_k, router_jitter_noise=0.0,
    )  # fmt: skip
    config._experts_implementation = implementation
    return MixtralSparseMoeBlock(config)
