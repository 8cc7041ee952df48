"""The language model: a GPT whose feedforwards are stacks of experts. A dense model has one expert."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from demix.config.architecture import Architecture
from demix.errors import DemixError
from demix.files import seed_for
from demix.model.layers import Attention, KeyValues, attention_bias, feedforward, layer_norm

# Tokens whose logits over the vocabulary exist at once. So few are the fastest on CPU; a GPU wants more.
ROWS_AT_ONCE = {"cpu": 512, "cuda": 4096}
# Which tensors may belong to an expert alone; names with this part have an axis of experts.
SCOPES = ("feedforward", "model")
_STACKED = ".feedforward."


class Block(nn.Module):
    """Pre-norm attention and feedforward, both residual."""

    def __init__(self, architecture: Architecture, layer: int, experts: int):
        super().__init__()
        self.architecture = architecture
        self.attention_norm = nn.LayerNorm(architecture.width)
        self.attention = Attention(architecture.width, architecture.heads)
        self.feedforward_norm = nn.LayerNorm(architecture.width)
        self.feedforward = feedforward(architecture, layer, experts)

    def forward(self, x: Tensor, past: KeyValues | None = None, auxiliary: list[Tensor] | None = None) -> Tensor:
        """`x` [E or 1, B, T, D] -> [E, B, T, D]."""
        bias = attention_bias(self.architecture, x.shape[2], past, x.device)
        x = x + self.attention(layer_norm(x, self.attention_norm), bias, past)
        mixed: Tensor = self.feedforward(layer_norm(x, self.feedforward_norm), auxiliary)
        return x + mixed


class GPT(nn.Module):
    """A decoder with learned positions, tied embeddings and one feedforward per expert in each layer.

    `experts` names the stacked experts in order. `domain_tokens` names the domains that may be given as a
    first input position (the domain-token baseline); their embeddings are inputs only. `expert_scope` says which
    tensors belong to an expert alone: those of its feedforwards (`feedforward`), or all (`model`), and then the model
    holds one expert.
    """

    def __init__(
        self,
        architecture: Architecture,
        vocab_size: int,
        experts: tuple[str, ...],
        domain_tokens: tuple[str, ...] = (),
        expert_scope: str = "feedforward",
    ):
        super().__init__()
        if expert_scope not in SCOPES:
            raise DemixError(f"expert_scope {expert_scope}", "is not known", f"use one of {', '.join(SCOPES)}")
        if expert_scope == "model" and len(experts) != 1:
            raise DemixError(f"experts {', '.join(experts)}", "share no tensor", "load each as a model of its own")
        self.architecture, self.vocab_size = architecture, vocab_size
        self.experts, self.domain_tokens = tuple(experts), tuple(domain_tokens)
        self.expert_scope = expert_scope
        # Set by who trains: compute a block's activations again in backward instead of keeping them.
        self.checkpoint_activations = False
        width = architecture.width
        self.token_embedding = nn.Parameter(torch.empty(vocab_size, width))
        self.position_embedding = nn.Parameter(torch.empty(architecture.context + bool(domain_tokens), width))
        if domain_tokens:
            self.domain_embedding = nn.Parameter(torch.empty(len(domain_tokens), width))
        self.blocks = nn.ModuleList(Block(architecture, layer, len(experts)) for layer in range(architecture.layers))
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

    def forward(
        self,
        inputs: Tensor,
        domains: Tensor | None = None,
        dtype: torch.dtype | None = None,
        past: list[KeyValues] | None = None,
        auxiliary: list[Tensor] | None = None,
    ) -> Tensor:
        """Final hidden states [E, B, T, D] of `inputs` [E, B, T], or of [1, B, T] seen by every expert.

        `domains` [E, B] are the domain tokens put before the sequences (domain-token models only; no state is
        returned for that position). `dtype` is the type to compute in; the parameters' own by default.
        `past` (one a layer, from `no_past`; without gradients): `inputs` follow what it has seen, and are added to it.
        `auxiliary`: layers that train a router add their losses to this list, in nats: [E, B] each, one number for
        a sequence, already times its weight.
        """
        x = self.token_embedding[inputs]
        if self.domain_tokens:
            if domains is None:
                raise DemixError("domains", "a domain-token model was given no domain token", "pass one per sequence")
            x = torch.cat([self.domain_embedding[domains].unsqueeze(2), x], dim=2)
        start = past[0].seen if past else 0
        x = (x + self.position_embedding[start : start + x.shape[2]]).to(dtype or x.dtype)
        for number, block in enumerate(self.blocks):
            if not torch.is_grad_enabled():
                # Not the compiled one: evaluation comes in many shapes.
                x = block.forward(x, past[number] if past else None, auxiliary)
            elif self.checkpoint_activations:
                x = checkpoint(block, x, None, auxiliary, use_reentrant=False)
            else:
                x = block(x, None, auxiliary)
        x = layer_norm(x, self.final_norm)
        return x[:, :, 1:] if self.domain_tokens else x

    def logits(self, hidden: Tensor) -> Tensor:
        """Unnormalised log-probabilities [..., V] of what follows the states `hidden` [..., D], in their type."""
        return hidden @ self.token_embedding.T.to(hidden.dtype)

    def log_probabilities(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """log p(target) in nats, at least fp32, for `hidden` [E, B, T, D] and `targets` [E or 1, B, T]: [E, B, T].

        No more than `ROWS_AT_ONCE` rows of the [tokens x vocabulary] logits exist at a time, forward and backward.
        """
        E, B, T, D = hidden.shape
        states, wanted = hidden.reshape(-1, D), targets.expand(E, B, T).reshape(-1)
        if torch.is_grad_enabled():
            differentiable: Callable[[Tensor, Tensor, Tensor], Tensor] = _LogProbabilities.apply
            return differentiable(states, self.token_embedding, wanted).view(E, B, T)
        return _log_probabilities(states, self.token_embedding, wanted)[0].view(E, B, T)

    def no_past(self) -> list[KeyValues]:
        """An empty memory of keys and values for each layer, with room for a whole context."""
        return [KeyValues(self.architecture.context) for _ in self.blocks]

    def compile_blocks(self) -> None:
        """Compile each block by itself, for training: the time it takes does not grow with their number."""
        for block in self.blocks:
            block.compile(dynamic=False)

    def owned(self, name: str) -> bool:
        """Whether the tensor `name`, or what training keeps of it under a longer name, belongs to an expert alone."""
        return self.expert_scope == "model" or _STACKED in name

    def expert_tensors(self) -> dict[str, nn.Parameter]:
        """The parameters that belong to experts, by name; those of feedforwards are stacked, [E, ...]."""
        return {name: p for name, p in self.named_parameters() if self.owned(name)}

    def shared_tensors(self) -> dict[str, nn.Parameter]:
        """The parameters that every expert uses, by name."""
        return {name: p for name, p in self.named_parameters() if not self.owned(name)}

    def parted(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
        """Named `tensors` of this model as the shared ones and each expert's own, which have no axis of experts."""
        shared = {name: tensor for name, tensor in tensors.items() if not self.owned(name)}
        return shared, {
            expert: {
                name: tensor[number] if _STACKED in name else tensor
                for name, tensor in tensors.items()
                if self.owned(name)
            }
            for number, expert in enumerate(self.experts)
        }

    def stacked(self, shared: Mapping[str, Tensor], experts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """What `parted` parted. `experts` may name more than this model has. Raises KeyError where tensors differ."""
        own = [experts[name] for name in self.experts]
        return {**shared} | {
            name: torch.stack([tensors[name] for tensors in own]) if _STACKED in name else own[0][name]
            for name in dict.fromkeys(name for tensors in own for name in tensors)
        }


class _LogProbabilities(torch.autograd.Function):
    """log softmax(states @ weight.T)[target] for rows [N, D], weight [V, D] and targets [N]: [N].

    The gradient is computed with the output, while the logits are there, as that of the sum of -log p; backward scales
    it. Only where the incoming gradients differ among rows must the logits be computed again. For scoring call
    `_log_probabilities`: what needs a gradient is not known from within where none is recorded.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        found, *gradients = _log_probabilities(states, weight, targets, ctx.needs_input_grad[:2])
        ctx.save_for_backward(states, weight, targets, *gradients)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        states, weight, targets, *gradients = ctx.saved_tensors
        if bool((incoming == incoming[0]).all()):
            # A number, which unlike a tensor is not rounded to the type of the states.
            scale = -incoming[0].item()
        else:
            scale = -1.0
            _, *gradients = _log_probabilities(states, weight, targets, ctx.needs_input_grad[:2], incoming)
        for_states, for_weight = (None if gradient is None else gradient * scale for gradient in gradients)
        return for_states, for_weight, None


def _log_probabilities(
    states: Tensor,
    weight: Tensor,
    targets: Tensor,
    needed: tuple[bool, ...] = (False, False),
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """log p [N] and, where `needed`, the gradients of the sum of -log p (times `factors` [N]) for states and weight."""
    cast, exact = weight.to(states.dtype), torch.promote_types(states.dtype, torch.float32)
    found = torch.empty(len(states), dtype=exact, device=states.device)
    for_states = torch.empty_like(states) if needed[0] else None
    for_weight = torch.zeros_like(weight) if needed[1] else None
    rows = ROWS_AT_ONCE[states.device.type]
    # One piece of memory for all chunks: making it anew costs as much as filling it.
    shape = (min(rows, len(states)), len(weight))
    product = torch.empty(shape, dtype=states.dtype, device=states.device)
    space = product if exact == states.dtype else torch.empty(shape, dtype=exact, device=states.device)
    for first in range(0, len(states), rows):
        some, target = states[first : first + rows], targets[first : first + rows, None]
        logits = space[: len(some)]
        torch.mm(some, cast.T, out=product[: len(some)])
        if space is not product:
            logits.copy_(product[: len(some)])
        of_target = logits.gather(1, target)
        largest = logits.amax(1, keepdim=True)
        total = logits.sub_(largest).exp_().sum(1, keepdim=True)
        found[first : first + rows] = (of_target - largest - total.log()).squeeze(1)
        if not any(needed):
            continue
        # softmax - one-hot
        logits.div_(total).scatter_add_(1, target, torch.full_like(of_target, -1.0))
        if factors is not None:
            logits.mul_(factors[first : first + rows, None])
        if space is not product:
            logits = product[: len(some)].copy_(logits)
        if for_states is not None:
            torch.mm(logits, cast, out=for_states[first : first + rows])
        if for_weight is not None and weight.dtype == states.dtype:
            for_weight.addmm_(logits.T, some)
        elif for_weight is not None:
            for_weight += logits.T @ some
    return found, for_states, for_weight
