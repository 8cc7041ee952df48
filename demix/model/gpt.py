"""The language model: a decoder whose feedforwards are stacks of experts. A dense model has one expert.

A token-routed model also has one such expert, whose feedforwards contain all experts that tokens can choose.
"""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demix.config.architecture import Architecture
from demix.config.counts import BIGRAM_ROWS
from demix.errors import DemixError
from demix.files import seed_for
from demix.model.heads import LanguageModel
from demix.model.moe import RouterLoss
from demix.model.positions import bias_of, cos_sin, sines
from demix.model.transformer import Dropout, KeyValues, norm_of

# The input that replaces a token which a masked model must predict. It is not in the vocabulary.
MASKED = -1
# The standard deviation of initial weights.
STD = 0.02
# Constants of the hash of a pair. They are odd, so that pairs with the same second token get different rows.
OF_TOKEN, OF_PREVIOUS = 1_000_003, 7_919
# The initial scale of bigram embeddings in each layer.
BIGRAM_SCALE = 0.1


def is_stacked(name: str) -> bool:
    """Whether the tensor `name` has an axis of experts. Training state has longer names that contain a tensor's."""
    return ".feedforward." in name or name.endswith("bigrams.expert_table")


class GPT(LanguageModel):
    """A decoder with one feedforward per expert in each layer, and the options of `demix.config.architecture.Options`.

    `experts` names the stacked experts in order. `domain_tokens` names the domains that can be the first input position
    (the domain-token baseline; paper, section 4.2). A domain token is an input and never a target. `expert_scope` says
    which tensors belong to one expert: its feedforwards and its table of bigrams (`feedforward`), or all tensors
    (`model`). A model of scope `model` holds one expert.
    """

    def __init__(
        self,
        architecture: Architecture,
        vocab_size: int,
        experts: tuple[str, ...],
        domain_tokens: tuple[str, ...] = (),
        expert_scope: str = "feedforward",
    ):
        if expert_scope == "model" and len(experts) != 1:
            raise DemixError(f"experts {', '.join(experts)}", "share no tensor", "load each as a model of its own")
        if architecture.routed and len(experts) != 1:
            cause = "are several, but a token-routed architecture has its experts inside one expert"
            raise DemixError(f"experts {', '.join(experts)}", cause, "give one name")
        super().__init__(architecture, vocab_size, len(experts))
        self.experts, self.domain_tokens = tuple(experts), tuple(domain_tokens)
        self.expert_scope = expert_scope
        self.masked = architecture.objective == "mlm"
        width, rows = architecture.width, architecture.context + bool(domain_tokens)
        self.position_embedding = nn.Parameter(torch.empty(rows, width)) if architecture.position == "learned" else None
        self.mask_embedding = nn.Parameter(torch.empty(width)) if architecture.mask == "learned" else None
        self.domain_embedding = nn.Parameter(torch.empty(len(domain_tokens), width)) if domain_tokens else None
        self.embedding_norm = norm_of(architecture) if architecture.norm_place == "post" else nn.Identity()
        self.bigrams = Bigrams(architecture, vocab_size, len(experts)) if architecture.bigrams != "none" else None
        values = architecture.layers, vocab_size, architecture.key_value_heads * architecture.unit
        self.value_embedding = nn.Parameter(torch.empty(values)) if architecture.value_embeddings else None

    def initialise(self, seed: int) -> "GPT":
        """Draw weights from N(0, 0.02²); biases and tables are 0. Experts start equal, except routed ones.

        The outputs of residual branches are divided by sqrt(2 * layers). The seed of each tensor depends on its name,
        so that a tensor of the same name and shape starts with the same values in every model.
        """
        residual = ("attention.out.weight", "feedforward.down")
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith(("bias", "table", "value_embedding", "value_gate")):
                    parameter.zero_()
                elif name == "bigrams.scale":
                    parameter.fill_(BIGRAM_SCALE)
                elif "norm" in name or name == "logit_scale":
                    parameter.fill_(1.0)
                else:
                    generator = torch.Generator().manual_seed(seed_for(seed, "initialise", name))
                    std = STD / math.sqrt(2 * self.architecture.layers) if name.endswith(residual) else STD
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
        auxiliary: list[RouterLoss] | None = None,
        dropout: Dropout | None = None,
    ) -> Tensor:
        """Final hidden states [E, B, T, D] of `inputs` [E, B, T], or of [1, B, T] that every expert reads.

        A masked model reads zeros or `mask_embedding` instead of the embedding of MASKED. Each of its states predicts
        the token at its own position; each state of a causal model predicts the next token.

        `domains` [E, B] are the domain tokens before the sequences. Only domain-token models have them, and no state is
        returned for their position. `dtype` is the type of the computation (default: the type of the parameters).
        `past`, from `no_past`, has the keys and values of earlier positions, one entry per layer. `inputs` then
        continue these positions without a domain token, and their keys and values are appended to `past`; gradients
        must be off. A training pass gives the list `auxiliary`, to which layers with a trained router append their
        losses. Only with `auxiliary` do routed experts have a capacity. A training pass may also give a `dropout`.
        """
        start = past[0].seen if past else 0
        led = bool(self.domain_tokens) and not start
        self._check_inputs(inputs, start + led + inputs.shape[-1], past)
        x = self._embedded(inputs, domains, start, led)  # [E or 1, B, T (+ 1), D]
        x, T = x.to(dtype or x.dtype), x.shape[2]
        bias = bias_of(self.architecture, start, T, x)
        turned = cos_sin(self.architecture, start, T, x) if self.architecture.position == "rope" else None
        tables = self._read_tables(inputs, past, led, x.dtype)
        x = self.through_blocks(x, bias, turned, past, auxiliary, dropout, *tables)
        return x[:, :, 1:] if led else x

    def _read_tables(
        self, inputs: Tensor, past: list[KeyValues] | None, led: bool, dtype: torch.dtype
    ) -> tuple[tuple[Tensor, Tensor] | None, Sequence[Tensor] | None]:
        """The bigram embeddings with their factors, and the value embeddings of each layer; a domain token has none."""
        added: tuple[Tensor, Tensor] | None = None
        values: Sequence[Tensor] | None = None
        if self.bigrams is not None:
            states = self.bigrams(inputs, past[0].last if past else None).to(dtype)
            added = F.pad(states, (0, 0, 1, 0)) if led else states, self.bigrams.scale.to(dtype)
            if past:
                past[0].last = inputs[..., -1]
        if self.value_embedding is not None:
            layers = torch.arange(len(self.blocks), device=inputs.device).view(-1, 1, 1, 1)
            read = F.embedding(inputs.long() + self.vocab_size * layers, self.value_embedding.flatten(0, 1)).to(dtype)
            values = (F.pad(read, (0, 0, 1, 0)) if led else read).unbind()
        return added, values

    def _embedded(self, inputs: Tensor, domains: Tensor | None, start: int, led: bool) -> Tensor:
        """The input of the first layer: `inputs` [E, B, T] at positions from `start`, after a domain token if `led`."""
        x = self.token_embedding[inputs]
        if self.masked:
            # A number below 0 counts from the end of the vocabulary.
            hidden = 0.0 if self.mask_embedding is None else self.mask_embedding
            x = torch.where((inputs != MASKED).unsqueeze(-1), x, hidden)
        if led:
            if domains is None or self.domain_embedding is None:
                raise DemixError("domains", "are missing: the model needs domain tokens", "pass one per sequence")
            x = torch.cat([self.domain_embedding[domains].unsqueeze(2), x], dim=2)
        if self.architecture.head == "clap":
            x = F.normalize(x, dim=-1)
        if self.position_embedding is not None:
            x = x + self.position_embedding[start : start + x.shape[2]]
        elif self.architecture.position == "sinusoidal":
            x = x + sines(start, x.shape[2], self.architecture.width).to(x)
        embedded: Tensor = self.embedding_norm(x)
        return embedded

    def _check_inputs(self, inputs: Tensor, positions: int, past: list[KeyValues] | None) -> None:
        """Raise DemixError for `inputs` that are not ids, and for more `positions` than the table or `past` has.

        Ids in training come from shards and are not checked, because that would have to wait for the GPU.
        """
        if past and self.masked:
            raise DemixError("a model with bidirectional attention", "cannot continue a text", "use a causal model")
        rooms = [past[0].positions] if past else []
        rooms += [] if self.position_embedding is None else [len(self.position_embedding)]
        if positions > min(rooms, default=positions):
            raise DemixError("inputs", f"need {positions} positions of only {min(rooms)}", "give fewer tokens")
        if inputs.numel() and not (inputs.is_cuda and torch.is_grad_enabled()):
            least, most = (int(bound) for bound in inputs.aminmax())
            if least < (MASKED if self.masked else 0) or most >= self.vocab_size:
                cause = f"have ids from {least} to {most}, but the vocabulary has {self.vocab_size}"
                raise DemixError("inputs", cause, "give ids of the model's own tokenizer")

    def no_past(self, positions: int | None = None) -> list[KeyValues]:
        """An empty key-value cache for each layer, with room for `positions` inputs (default: a whole context)."""
        room = (positions or self.architecture.context) + bool(self.domain_tokens)
        return [KeyValues(room) for _ in self.blocks]

    def owned(self, name: str) -> bool:
        """Whether the tensor `name` belongs to one expert, as in `is_stacked`."""
        return self.expert_scope == "model" or is_stacked(name)

    def only(self, expert: str) -> "GPT":
        """This model with only the named one of its stacked experts."""
        with torch.device("meta"):
            single = GPT(self.architecture, self.vocab_size, (expert,))
        single.load_state_dict(single.stacked(*self.parted()), assign=True)
        return single

    def parted(
        self, tensors: Mapping[str, Tensor] | None = None
    ) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
        """Split named `tensors` of this model, by default its parameters, into (shared, own by expert).

        The tensors of one expert have no axis of experts.
        """
        tensors = {name: p.detach() for name, p in self.named_parameters()} if tensors is None else tensors
        shared = {name: tensor for name, tensor in tensors.items() if not self.owned(name)}
        return shared, {
            expert: {
                name: tensor[number] if is_stacked(name) else tensor
                for name, tensor in tensors.items()
                if self.owned(name)
            }
            for number, expert in enumerate(self.experts)
        }

    def stacked(self, shared: Mapping[str, Tensor], experts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The inverse of `parted`; `experts` may name more experts than this model has.

        A missing tensor raises KeyError.
        """
        own = [experts[name] for name in self.experts]
        return {**shared} | {
            name: torch.stack([tensors[name] for tensors in own]) if is_stacked(name) else own[0][name]
            for name in dict.fromkeys(name for tensors in own for name in tensors)
        }


class Bigrams(nn.Module):
    """Bigram embeddings: a hash of the last two tokens chooses a row of a table.

    The row is added to the residual stream before each layer, times the layer's `scale` [layers]. All experts read the
    same `table` [R, D], or each its own in `expert_table` [E, R, D], with R = 5·V rows.
    """

    def __init__(self, architecture: Architecture, vocab_size: int, experts: int):
        super().__init__()
        self.rows, own = BIGRAM_ROWS * vocab_size, architecture.bigrams == "experts"
        shape = self.rows, architecture.width
        self.table = None if own else nn.Parameter(torch.empty(shape))
        self.expert_table = nn.Parameter(torch.empty(experts, *shape)) if own else None
        self.scale = nn.Parameter(torch.empty(architecture.layers))

    def forward(self, inputs: Tensor, before: Tensor | None = None) -> Tensor:
        """The states [E or 1, B, T, D] of `inputs` [E or 1, B, T], which follow the tokens `before` [E or 1, B].

        Without `before` the inputs begin a block; its first token is treated as if it followed token 0.
        """
        first = torch.zeros_like(inputs[..., :1]) if before is None else before[..., None]
        rows = hashed(inputs, torch.cat([first, inputs[..., :-1]], -1), self.rows)
        if self.expert_table is None:
            assert self.table is not None
            return F.embedding(rows, self.table)
        experts = torch.arange(len(self.expert_table), device=rows.device)[:, None, None]
        return F.embedding(rows + self.rows * experts, self.expert_table.flatten(0, 1))


def hashed(tokens: Tensor, previous: Tensor, rows: int) -> Tensor:
    """The row, from 0 to `rows` - 1, of each of `tokens` after each of `previous`."""
    found: Tensor = (tokens.long() * OF_TOKEN ^ previous.long() * OF_PREVIOUS) % rows
    return found
