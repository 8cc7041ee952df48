"""The language model: a GPT whose every feedforward is a DEMix layer. A dense model has one expert."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demix.errors import DemixError
from demix.files import seed_for
from demix.model.config import Architecture
from demix.model.layers import Attention, DEMixLayer, layer_norm

# [tokens x vocabulary] logits held at once, in elements: 64 MiB of fp32.
LOGITS_AT_ONCE = 1 << 24


class Block(nn.Module):
    """Pre-norm attention and DEMix layer, both residual."""

    def __init__(self, architecture: Architecture, experts: int):
        super().__init__()
        self.attention_norm = nn.LayerNorm(architecture.width)
        self.attention = Attention(architecture.width, architecture.heads)
        self.feedforward_norm = nn.LayerNorm(architecture.width)
        self.feedforward = DEMixLayer(experts, architecture.width)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [E or 1, B, T, D] -> [E, B, T, D]."""
        x = x + self.attention(layer_norm(x, self.attention_norm))
        return x + self.feedforward(layer_norm(x, self.feedforward_norm))


class GPT(nn.Module):
    """A decoder with learned positions, tied embeddings and one feedforward per expert in each layer.

    `experts` names the stacked experts in order. `domain_tokens` names the domains that may be given as a
    first input position (the domain-token baseline); their embeddings are inputs only.
    """

    def __init__(
        self,
        architecture: Architecture,
        vocab_size: int,
        experts: tuple[str, ...],
        domain_tokens: tuple[str, ...] = (),
    ):
        super().__init__()
        self.architecture, self.vocab_size = architecture, vocab_size
        self.experts, self.domain_tokens = tuple(experts), tuple(domain_tokens)
        width = architecture.width
        self.token_embedding = nn.Parameter(torch.empty(vocab_size, width))
        self.position_embedding = nn.Parameter(torch.empty(architecture.context + bool(domain_tokens), width))
        if domain_tokens:
            self.domain_embedding = nn.Parameter(torch.empty(len(domain_tokens), width))
        self.blocks = nn.ModuleList(Block(architecture, len(experts)) for _ in range(architecture.layers))
        self.final_norm = nn.LayerNorm(width)

    def initialise(self, seed: int) -> "GPT":
        """N(0, 0.02), residual outputs divided by sqrt(2 * layers), zero biases, all experts of a layer alike.

        Each tensor is drawn from a seed of its own name, so that models that share a tensor start alike.
        """
        residual = ("attention.out.weight", "feedforward.down")
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith("bias"):
                    parameter.zero_()
                elif "norm" in name:
                    parameter.fill_(1.0)
                else:
                    generator = torch.Generator().manual_seed(seed_for(seed, "initialise", name))
                    std = 0.02 / math.sqrt(2 * self.architecture.layers) if name.endswith(residual) else 0.02
                    one_expert = name.endswith(("feedforward.up", "feedforward.down"))
                    drawn = torch.randn(parameter.shape[1:] if one_expert else parameter.shape, generator=generator)
                    parameter.copy_(drawn * std)
        return self

    def forward(self, inputs: Tensor, domains: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Final hidden states [E, B, T, D] of `inputs` [E, B, T], or of [1, B, T] seen by every expert.

        `domains` [E, B] are the domain tokens put before the sequences (domain-token models only; no state is
        returned for that position). `dtype` is the type to compute in; the parameters' own by default.
        """
        x = self.token_embedding[inputs]
        if self.domain_tokens:
            if domains is None:
                raise DemixError("domains", "a domain-token model was given no domain token", "pass one per sequence")
            x = torch.cat([self.domain_embedding[domains].unsqueeze(2), x], dim=2)
        x = (x + self.position_embedding[: x.shape[2]]).to(dtype or x.dtype)
        for block in self.blocks:
            x = block(x)
        x = layer_norm(x, self.final_norm)
        return x[:, :, 1:] if self.domain_tokens else x

    def log_probabilities(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """log p(target) in nats, at least fp32, for `hidden` [E, B, T, D] and `targets` [E or 1, B, T]: [E, B, T].

        No more than a chunk of the [tokens x vocabulary] logits exists at a time when no gradient is needed.
        """
        E, B, T, D = hidden.shape
        states, targets = hidden.reshape(-1, D), targets.expand(E, B, T).reshape(-1)
        chunk = max(1, LOGITS_AT_ONCE // self.vocab_size) if not torch.is_grad_enabled() else len(states)
        weight = self.token_embedding.to(hidden.dtype)
        losses = []
        for rows, wanted in zip(states.split(chunk), targets.split(chunk), strict=True):
            logits = rows @ weight.T
            logits = logits if logits.dtype == torch.float64 else logits.float()
            losses.append(F.cross_entropy(logits, wanted, reduction="none"))
        return -torch.cat(losses).view(E, B, T)

    def expert_tensors(self) -> dict[str, nn.Parameter]:
        """The stacked [E, ...] parameters that belong to experts, by name."""
        return {name: p for name, p in self.named_parameters() if ".feedforward." in name}

    def shared_tensors(self) -> dict[str, nn.Parameter]:
        """The parameters that every expert uses, by name."""
        return {name: p for name, p in self.named_parameters() if ".feedforward." not in name}
