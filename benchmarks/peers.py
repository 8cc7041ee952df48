"""What stands beside ours in benchmarks/train.py: nanoGPT, nanochat, transformers' GPT-2, Llama and Mixtral block."""

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


class NanoChatBlock(nn.Module):
    """nanochat's block: norms without weights, rotated and normed queries and keys, ReLU squared, no biases."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.fc, self.out = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, D = x.shape
        normed = _rms(x)
        q, k, v = (part(normed).view(B, T, self.heads, -1) for part in (self.q, self.k, self.v))
        q, k = _rms(_turned(q, cos, sin)), _rms(_turned(k, cos, sin))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).contiguous().view(B, T, D))
        return x + self.out(F.relu(self.fc(_rms(x))).square())


def _rms(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos + second * sin, second * cos - first * sin], -1)


class NanoChat(nn.Module):
    """nanochat's model (github.com/karpathy/nanochat) without its cap on logits, which ours has not."""

    def __init__(self, sizes: Architecture, vocabulary: int):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, sizes.width)
        self.blocks = nn.ModuleList(NanoChatBlock(sizes.width, sizes.heads) for _ in range(sizes.layers))
        self.lm_head = nn.Linear(sizes.width, vocabulary, bias=False)
        self.apply(lambda m: nn.init.normal_(m.weight, std=0.02) if isinstance(m, nn.Linear | nn.Embedding) else None)
        turned = torch.arange(0, sizes.unit, 2) / sizes.unit
        angles = torch.outer(torch.arange(sizes.context).float(), 10_000.0**-turned)[:, None]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = _rms(self.wte(ids))
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.lm_head(_rms(x)).float()
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def llama(sizes: Architecture, vocabulary: int) -> nn.Module:
    """transformers' Llama of the same sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary, max_position_embeddings=sizes.context, hidden_size=sizes.width,
        num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads, intermediate_size=sizes.inner_width,
        num_key_value_heads=sizes.key_value_heads, rms_norm_eps=sizes.epsilon, use_cache=False,
        rope_parameters={"rope_type": "default", "rope_theta": sizes.rope_theta},
        tie_word_embeddings=sizes.head == "tied", attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config)


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
