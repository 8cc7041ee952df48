"""The language model: a decoder whose feedforwards are stacks of experts. A dense model has one expert.

A model whose tokens choose their experts has one expert, too, whose feedforwards hold all that tokens choose from.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from demix.config.architecture import Architecture
from demix.errors import DemixError
from demix.files import seed_for
from demix.model.layers import (
    Attention,
    Auxiliary,
    Dropout,
    KeyValues,
    Masks,
    Rotations,
    attention_bias,
    dropped,
    feedforward,
    norm_of,
    normed,
    rotations,
    sinusoids,
)
from demix.model.softmax import target_log_probabilities

# The input in place of a token that a masked model is to fill in. It has no entry in the vocabulary.
MASKED = -1
# Which tensors belong to one expert: those of its feedforwards, or all tensors of the model.
SCOPES = ("feedforward", "model")
# Tensors with this in their name have an axis of experts.
_STACKED = ".feedforward."


class Block(nn.Module):
    """A transformer block: attention and a feedforward, each with a norm and a residual connection."""

    def __init__(self, architecture: Architecture, layer: int, experts: int):
        super().__init__()
        self.norm_place, self.parallel = architecture.norm_place, architecture.residual == "parallel"
        self.attention_norm = norm_of(architecture.norm, architecture.width, architecture.epsilon)
        self.attention = Attention(
            architecture.width, architecture.heads, architecture.attention != "bidirectional",
            key_heads=architecture.key_heads, unit=architecture.unit, biases=architecture.biases,
            query_norm=architecture.query_norm, epsilon=architecture.epsilon,
        )  # fmt: skip
        self.feedforward_norm = norm_of(architecture.norm, architecture.width, architecture.epsilon)
        self.feedforward = feedforward(architecture, layer, experts)

    def forward(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        past: KeyValues | None = None,
        auxiliary: list[Auxiliary] | None = None,
        turns: Rotations | None = None,
        masks: Masks | None = None,
    ) -> Tensor:
        """Map `x` [E or 1, B, T, D] to [E, B, T, D].

        `bias` comes from `attention_bias`, `turns` from `rotations` and `masks` from `Dropout.masks`; the others are as
        in `GPT.forward`.
        """
        if self.norm_place == "after":
            x = x + dropped(normed(self.attention(x, bias, past, turns), self.attention_norm), masks, 0)
            mixed: Tensor = self.feedforward(x, auxiliary)
            return x + dropped(normed(mixed, self.feedforward_norm), masks, 1)
        if self.norm_place == "post":
            x = normed(x + dropped(self.attention(x, bias, past, turns), masks, 0), self.attention_norm)
            return normed(x + dropped(self.feedforward(x, auxiliary), masks, 1), self.feedforward_norm)
        attended: Tensor = x + dropped(self.attention(normed(x, self.attention_norm), bias, past, turns), masks, 0)
        read = x if self.parallel else attended
        mixed = self.feedforward(normed(read, self.feedforward_norm), auxiliary)
        return attended + dropped(mixed, masks, 1)


def _in_training(
    block: nn.Module,
    x: Tensor,
    bias: Tensor | None,
    auxiliary: list[Auxiliary] | None,
    turns: Rotations | None,
    dropout: Dropout | None,
    layer: int,
) -> Tensor:
    """What the block number `layer` maps `x` to in a training pass. A recomputed pass draws the same masks again."""
    masks = None if dropout is None else dropout.masks(layer, x)
    mapped: Tensor = block(x, bias, None, auxiliary, turns, masks)
    return mapped


class GPT(nn.Module):
    """A decoder with one feedforward per expert in each layer; `demix.config.architecture.Options` says what else.

    Its positions are learned or sines, or there is no table of them, and attention is biased (`attention_bias`) or
    queries and keys are rotated (`rotations`). The head is the token embedding, or `output_embedding` where it is
    `untied`. With the head `clap` (of the fairseq fork of EIFY) embeddings have rows of length 1, as inputs and as
    outputs, and logits are multiplied by the learned `logit_scale`. The head `roberta` is a linear map, GELU and a
    norm, then the token embedding and `output_bias` (Liu et al. 2019, as in fairseq's RobertaLMHead).
    `experts` names the stacked experts in order. `domain_tokens` names the domains that can be the first input position
    (the domain-token baseline; paper, section 4.2). A domain token is an input and never a target. `expert_scope` says
    which tensors belong to one expert: those of its feedforwards (`feedforward`), or all tensors (`model`). A model of
    scope `model` holds one expert. `end_of_text` is the token before each document, by default the last of the
    vocabulary; attention within documents alone depends on it.
    """

    def __init__(
        self,
        architecture: Architecture,
        vocab_size: int,
        experts: tuple[str, ...],
        domain_tokens: tuple[str, ...] = (),
        expert_scope: str = "feedforward",
        end_of_text: int | None = None,
    ):
        super().__init__()
        if expert_scope not in SCOPES:
            raise DemixError(f"expert_scope {expert_scope}", "is not known", f"use one of {', '.join(SCOPES)}")
        if expert_scope == "model" and len(experts) != 1:
            raise DemixError(f"experts {', '.join(experts)}", "share no tensor", "load each expert as its own model")
        if architecture.routed and len(experts) != 1:
            cause = "are given to an architecture whose tokens choose among experts of their own"
            raise DemixError(f"experts {', '.join(experts)}", cause, "give one")
        self.architecture, self.vocab_size = architecture, vocab_size
        self.experts, self.domain_tokens = tuple(experts), tuple(domain_tokens)
        self.expert_scope = expert_scope
        self.end_of_text = vocab_size - 1 if end_of_text is None else end_of_text
        # The training loop sets this: backward then recomputes a block's activations, which saves memory.
        self.checkpoint_activations = False
        # `load_experts` sets this on a model that has no values because its weights stay in their file.
        self.read_weights: Callable[[], GPT] | None = None
        width = architecture.width
        self.token_embedding = nn.Parameter(torch.empty(vocab_size, width))
        if architecture.position == "learned":
            self.position_embedding = nn.Parameter(torch.empty(architecture.context + bool(domain_tokens), width))
        if architecture.head == "clap":
            self.logit_scale = nn.Parameter(torch.empty(1))
        if architecture.head == "untied":
            self.output_embedding = nn.Parameter(torch.empty(vocab_size, width))
        if architecture.head == "roberta":
            self.head_map = nn.Linear(width, width)
            self.head_norm = norm_of(architecture.norm, width, architecture.epsilon)
            self.output_bias = nn.Parameter(torch.empty(vocab_size))
        if architecture.mask == "learned":
            self.mask_embedding = nn.Parameter(torch.empty(width))
        if architecture.embedding_norm:
            self.embedding_norm = norm_of(architecture.norm, width, architecture.epsilon)
        if domain_tokens:
            self.domain_embedding = nn.Parameter(torch.empty(len(domain_tokens), width))
        self.blocks = nn.ModuleList(Block(architecture, layer, len(experts)) for layer in range(architecture.layers))
        if architecture.norm_place != "post":
            self.final_norm = norm_of(architecture.norm, width, architecture.epsilon)

    @contextmanager
    def with_weights(self) -> Iterator["GPT"]:
        """This model, or, where its weights stay in their file, a copy that has them until the context ends."""
        if self.read_weights is None:
            yield self
            return
        model = self.read_weights()
        try:
            yield model
        finally:
            # A loop still names this copy while it asks for the next one.
            model.to("meta")

    def initialise(self, seed: int) -> "GPT":
        """Draw weights from N(0, 0.02²); biases are 0, and all experts of a layer start equal but for routed ones.

        The outputs of residual branches are divided by sqrt(2 * layers). The seed of each tensor depends on its name,
        so that a tensor of the same name and shape starts with the same values in every model.
        """
        residual = ("attention.out.weight", "feedforward.down")
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith("bias"):
                    parameter.zero_()
                elif "norm" in name or name == "logit_scale":
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
        auxiliary: list[Auxiliary] | None = None,
        dropout: Dropout | None = None,
    ) -> Tensor:
        """Final hidden states [E, B, T, D] of `inputs` [E, B, T], or of [1, B, T] that every expert reads.

        A masked model reads zeros or `mask_embedding` in place of the embedding of MASKED. Each of its states predicts
        the token at its own place, and each state of a causal model predicts the next token.

        `domains` [E, B] are the domain tokens before the sequences. Only domain-token models take them, and no state is
        returned for their position. `dtype` is the type to compute in (by default the type of the parameters). `past`
        holds one entry per layer, from `no_past`: `inputs` follow the positions that it holds and are added to it, and
        no domain token stands before them then. It needs gradients to be off. A training pass gives the list
        `auxiliary`, to which layers that train a router append their losses, and in which experts that tokens choose
        have a capacity; and it may give a `dropout`.
        """
        if past and self.architecture.attention == "bidirectional":
            raise DemixError("a model with bidirectional attention", "cannot go on with a text", "use a causal model")
        start = past[0].seen if past else 0
        led = bool(self.domain_tokens) and not start
        self._refuse_outside(inputs, start + led + inputs.shape[-1], past)
        x = self.token_embedding[inputs]
        if led:
            if domains is None:
                raise DemixError("domains", "a domain-token model was given no domain token", "pass one per sequence")
            x = torch.cat([self.domain_embedding[domains].unsqueeze(2), x], dim=2)
        x = self._read(x, inputs, start).to(dtype or x.dtype)
        # All layers have seen the same positions before this pass, and share one bias and the same rotations.
        documents = self._documents(inputs, led, past) if self.architecture.attention == "documents" else None
        bias = attention_bias(self.architecture, x.shape[2], past[0] if past else None, x.device, x.dtype, documents)
        turns = rotations(self.architecture, start, x.shape[2], x)
        for number, block in enumerate(self.blocks):
            # A compiled block would be compiled again for each length of a list that all blocks append to.
            own: list[Auxiliary] | None = None if auxiliary is None else []
            if not torch.is_grad_enabled():
                # Evaluation has many shapes, and the compiled block would be compiled again for each.
                x = block.forward(x, bias, past[number] if past else None, own, turns)
            elif self.checkpoint_activations:
                x = checkpoint(_in_training, block, x, bias, own, turns, dropout, number, use_reentrant=False)
            else:
                x = _in_training(block, x, bias, own, turns, dropout, number)
            if auxiliary is not None and own:
                auxiliary += own
        if self.architecture.norm_place != "post":
            x = normed(x, self.final_norm)
        return x[:, :, 1:] if led else x

    def _refuse_outside(self, inputs: Tensor, positions: int, past: list[KeyValues] | None) -> None:
        """Raise DemixError for `inputs` that are no ids, and for more `positions` than the table or `past` has.

        Ids of training come from shards, and a GPU would have to be waited for to look at them.
        """
        rooms = [past[0].positions] if past else []
        rooms += [len(self.position_embedding)] if self.architecture.position == "learned" else []
        if positions > min(rooms, default=positions):
            raise DemixError("inputs", f"end at position {positions} of {min(rooms)}", "give fewer tokens")
        if inputs.numel() and not (inputs.is_cuda and torch.is_grad_enabled()):
            least, most = (int(bound) for bound in inputs.aminmax())
            if least < (MASKED if self.architecture.objective == "mlm" else 0) or most >= self.vocab_size:
                cause = f"have ids from {least} to {most}, and the vocabulary has {self.vocab_size}"
                raise DemixError("inputs", cause, "give ids of the model's own tokenizer")

    def _documents(self, inputs: Tensor, led: bool, past: list[KeyValues] | None) -> Tensor:
        """The numbers of the documents of what is in `past` and of `inputs` [E or 1, B, T]: [E or 1, B, seen + T].

        The document of an input is that of the token which it predicts. A domain token that has `led` is of all
        documents, and has the number -1.
        """
        numbers = (inputs == self.end_of_text).cumsum(-1)
        if led:
            numbers = F.pad(numbers, (1, 0), value=-1)
        if past:
            before = past[0].documents
            if before is not None:
                numbers = torch.cat([before, before[..., -1:] + numbers], -1)
            past[0].documents = numbers
        return numbers

    def _read(self, x: Tensor, inputs: Tensor, start: int) -> Tensor:
        """What the first block reads, for embeddings `x` [E, B, T, D] of `inputs` at positions from `start`."""
        options = self.architecture
        # A number below 0 counts from the end of the vocabulary.
        shown = (inputs != MASKED).unsqueeze(-1) if options.objective == "mlm" else None
        if shown is not None and options.mask == "learned":
            x = torch.where(shown, x, self.mask_embedding)
        if options.head == "clap" and options.clap_inputs == "unit":
            x = F.normalize(x, dim=-1)
        if shown is not None and options.mask == "zeros":
            x = x * shown
        if options.embedding_scale:
            x = x * math.sqrt(options.width)
        if options.position == "learned":
            x = x + self.position_embedding[start : start + x.shape[2]]
        if options.position == "sinusoidal":
            x = x + sinusoids(start, x.shape[2], options.width).to(x)
        return normed(x, self.embedding_norm) if options.embedding_norm else x

    def logits(self, hidden: Tensor) -> Tensor:
        """Unnormalised log-probabilities [..., V] of the token after each state of `hidden` [..., D], in its type."""
        states, weight = self._head(hidden)
        return states @ weight.T.to(hidden.dtype)

    def _head(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """States like `hidden` [..., D] and a weight [V, D] whose products are the logits; D + 1 with a bias."""
        head = self.architecture.head
        if head == "clap":
            return (hidden * self.logit_scale).to(hidden.dtype), F.normalize(self.token_embedding, dim=-1)
        if head == "roberta":
            weight, bias = (part.to(hidden.dtype) for part in (self.head_map.weight, self.head_map.bias))
            states = normed(F.gelu(F.linear(hidden, weight, bias)), self.head_norm)
            # A further unit, which is always 1, gives each logit its bias.
            with_one = torch.cat([states, states.new_ones(*states.shape[:-1], 1)], dim=-1)
            return with_one, torch.cat([self.token_embedding, self.output_bias[:, None]], dim=1)
        return hidden, self.output_embedding if head == "untied" else self.token_embedding

    def log_probabilities(self, hidden: Tensor, targets: Tensor, z_loss: float = 0.0) -> Tensor:
        """log p(target) in nats, at least fp32, for `hidden` [E, B, T, D] and `targets` [E or 1, B, T]: [E, B, T].

        The gradients of what is returned are those of log p - z_loss·log²Z, where Z is the sum of exp of the logits.
        At most `ROWS_AT_ONCE` rows of the [tokens x vocabulary] logits exist at a time, in forward and in backward.
        """
        E, B, T, D = hidden.shape
        states, weight = self._head(hidden.reshape(-1, D))
        wanted = targets.expand(E, B, T).reshape(-1)
        return target_log_probabilities(states, weight, wanted, z_loss).view(E, B, T)

    def no_past(self, positions: int | None = None) -> list[KeyValues]:
        """An empty key-value cache for each layer, with room for so many inputs, by default for a whole context."""
        room = (positions or self.architecture.context) + bool(self.domain_tokens)
        return [KeyValues(room) for _ in self.blocks]

    def compile_blocks(self) -> None:
        """Compile each block on its own for training: compilation time does not grow with the number of blocks."""
        for block in self.blocks:
            block.compile(dynamic=False)

    def owned(self, name: str) -> bool:
        """Whether the tensor `name` belongs to one expert. Training state has longer names that contain a tensor's."""
        return self.expert_scope == "model" or _STACKED in name

    def expert_tensors(self) -> dict[str, nn.Parameter]:
        """The parameters that belong to experts, by name. Those of feedforwards are stacked: [E, ...]."""
        return {name: p for name, p in self.named_parameters() if self.owned(name)}

    def shared_tensors(self) -> dict[str, nn.Parameter]:
        """The parameters that every expert uses, by name."""
        return {name: p for name, p in self.named_parameters() if not self.owned(name)}

    def only(self, expert: str) -> "GPT":
        """This model with the named one of its stacked experts alone, in the same memory."""
        with torch.device("meta"):
            single = GPT(self.architecture, self.vocab_size, (expert,), end_of_text=self.end_of_text)
        number = self.experts.index(expert)
        experts = {name: tensor.detach()[number : number + 1] for name, tensor in self.expert_tensors().items()}
        single.load_state_dict(self.shared_tensors() | experts, assign=True)
        return single

    def parted(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
        """Split named `tensors` of this model into (shared, own by expert). An expert's own have no axis of experts."""
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
        """The inverse of `parted`; `experts` may name more than this model has. A missing tensor raises KeyError."""
        own = [experts[name] for name in self.experts]
        return {**shared} | {
            name: torch.stack([tensors[name] for tensors in own]) if _STACKED in name else own[0][name]
            for name in dict.fromkeys(name for tensors in own for name in tensors)
        }


@contextmanager
def seeing(modules: Mapping[int, nn.Module], see: Callable[[int, Tensor], None]) -> Iterator[None]:
    """While this lasts, `see` is given the number and the input of each of `modules` that is about to compute."""

    def hook(number: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, inputs: see(number, inputs[0])

    hooks = [module.register_forward_pre_hook(hook(number)) for number, module in modules.items()]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()
