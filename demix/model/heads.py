"""The output layer: heads, and the log-probabilities of targets.

Axes: N tokens, D width, V vocabulary. A head returns states [N, D] and a weight [V, D], whose products are the logits.
Only a chunk of the logits [N, V] is in memory at a time.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from demix.config.architecture import Architecture
from demix.model.transformer import Linear, Transformer, norm_of

# The number of rows of logits in memory at once. Few rows are fastest on a CPU; a GPU needs more.
ROWS_AT_ONCE = {"cpu": 512, "cuda": 4096}
# GPU matmuls are fast if dimensions are multiples of this number. GPT-2's vocabulary size, 50,257, is not.
ALIGNED = 64
# The number of logits for which a CPU computes the softmax at once: as many as fit into its cache.
NORMALISED_AT_ONCE = 1 << 20


class LanguageModel(Transformer):
    """A transformer with an embedding of tokens and a head.

    By the option `head`, the output layer is the token embedding (`tied`), an embedding of its own (`untied`), the
    token embedding with rows of norm 1, times a learned scale (`clap`: the fairseq fork of EIFY), or a linear map, GELU
    and a norm, then the token embedding and a bias (`roberta`: Liu et al. 2019, RobertaLMHead).
    """

    def __init__(self, architecture: Architecture, vocab_size: int, experts: int):
        super().__init__(architecture, experts)
        self.architecture, self.vocab_size = architecture, vocab_size
        width = architecture.width
        self.token_embedding = nn.Parameter(torch.empty(vocab_size, width))
        if architecture.head == "untied":
            self.output_embedding = nn.Parameter(torch.empty(vocab_size, width))
        elif architecture.head == "clap":
            self.logit_scale = nn.Parameter(torch.empty(1))
        elif architecture.head == "roberta":
            self.head_map, self.head_norm = Linear(width, width), norm_of(architecture)
            self.output_bias = nn.Parameter(torch.empty(vocab_size))

    def logits(self, hidden: Tensor) -> Tensor:
        """Unnormalised log-probabilities [..., V] of the token after each state of `hidden` [..., D], in its dtype."""
        states, weight = self._scoring(hidden)
        return states @ weight.T.to(hidden.dtype)

    def log_probabilities(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """log p(target) in nats, at least fp32, for `hidden` [E, B, T, D] and `targets` [E or 1, B, T]: [E, B, T].

        At most `ROWS_AT_ONCE` rows of the [tokens x vocabulary] logits are in memory at a time, forward and backward.
        """
        E, B, T, D = hidden.shape
        states, weight = self._scoring(hidden.reshape(-1, D))
        wanted = targets.expand(E, B, T).reshape(-1)
        if not torch.is_grad_enabled():
            return _log_probabilities(states, weight, wanted)[0].view(E, B, T)
        differentiable: Callable[[Tensor, Tensor, Tensor], Tensor] = _LogProbabilities.apply
        return differentiable(states, weight, wanted).view(E, B, T)

    def _scoring(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """States like `hidden` [..., D] and a weight [V, D] whose products are the logits; D + 1 with a bias."""
        head, embedding = self.architecture.head, self.token_embedding
        if head == "untied":
            return hidden, self.output_embedding
        if head == "clap":
            return (hidden * self.logit_scale).to(hidden.dtype), F.normalize(embedding, dim=-1)
        if head == "roberta":
            states = self.head_norm(F.gelu(self.head_map(hidden)))
            # An additional unit, which is always 1, adds the bias to each logit.
            with_one = torch.cat([states, states.new_ones(*states.shape[:-1], 1)], dim=-1)
            return with_one, torch.cat([embedding, self.output_bias[:, None]], dim=1)
        return hidden, embedding


class _LogProbabilities(torch.autograd.Function):
    """log softmax(states @ weight.T)[target] for rows [N, D], weight [V, D] and targets [N]: [N].

    The forward pass computes the gradient of the sum of -log p while it has the logits. The backward pass only scales
    this gradient, because in a loss all rows have the same factor. Scoring calls `_log_probabilities` directly, because
    `needs_input_grad` does not tell whether gradients are off.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        log_p, *ctx.gradients = _log_probabilities(states, weight, targets, ctx.needs_input_grad[:2])
        return log_p

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "gradients are scaled in place"
        assert bool((incoming == incoming[:1]).all()), "rows have different factors"
        # A Python number is not rounded to the type of the states, as a tensor would be. Without rows it is -0.
        scale = -incoming[:1].sum().item()
        for_states, for_weight = (None if gradient is None else gradient.mul_(scale) for gradient in gradients)
        return for_states, for_weight, None


def _log_probabilities(
    states: Tensor, weight: Tensor, targets: Tensor, needed: tuple[bool, ...] = (False, False)
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """log p [N], and gradients for states and weight where `needed`: those of the sum of -log p.

    Without gradients, products of half-precision numbers are summed and kept in fp32: in 8 bits of bf16, a logit of 16
    would be off by up to 0.06 nats.
    """
    cast, exact = weight.to(states.dtype), torch.promote_types(states.dtype, torch.float32)
    log_p = torch.empty(len(states), dtype=exact, device=states.device)
    for_states = torch.empty_like(states) if needed[0] else None
    for_weight = torch.zeros_like(weight) if needed[1] else None
    on_cpu, rows = states.device.type == "cpu", ROWS_AT_ONCE[states.device.type]
    wide = exact != states.dtype and not any(needed)
    if wide and on_cpu:
        cast = cast.to(exact)
    if not on_cpu:
        cast = F.pad(cast, (0, 0, 0, -len(cast) % ALIGNED))
        if not any(needed):
            # The softmax has its own buffer, in fp32 like the logits here, so half the rows need the same memory.
            rows //= 2
    # All chunks share these buffers, because allocating a buffer costs as much as filling it.
    product = states.new_empty((min(rows, len(states)), len(cast)), dtype=exact if wide else states.dtype)
    for first in range(0, len(states), rows):
        place = slice(first, first + rows)
        chunk = states[place]
        logits = product[: len(chunk)]
        if wide and not on_cpu:
            torch.mm(chunk, cast.T, out_dtype=exact, out=logits)
        else:
            torch.mm(chunk.to(logits.dtype), cast.T, out=logits)
        normalise = _normalise_in_cache if on_cpu else _normalise_padded
        log_p[place] = normalise(logits, targets[place], len(weight), any(needed))
        if for_states is not None:
            torch.mm(logits, cast, out=for_states[place])
        if for_weight is not None and weight.dtype == states.dtype:
            for_weight.addmm_(logits[:, : len(weight)].T, chunk)
        elif for_weight is not None:
            for_weight += (logits.T @ chunk)[: len(weight)]
    return log_p, for_states, for_weight


def _normalise_in_cache(logits: Tensor, targets: Tensor, vocabulary: int, needed: bool) -> Tensor:
    """log p [N] of the targets, at least fp32, on a CPU: as many `logits` [N, V] at once as fit into its cache.

    Where gradients are `needed`, those of `_log_probabilities` with respect to the logits replace the logits.
    """
    exact = torch.promote_types(logits.dtype, torch.float32)
    log_p = torch.empty(len(logits), dtype=exact)
    some = min(len(logits), max(1, NORMALISED_AT_ONCE // vocabulary))
    space = torch.empty_like(logits[:some], dtype=exact) if logits.dtype != exact or not needed else None
    for start in range(0, len(logits), some):
        place = slice(start, start + some)
        part, target = logits[place], targets[place, None]
        exactly = part if space is None else space[: len(part)]
        if not needed:
            log_p[place] = torch.log_softmax(part, 1, out=exactly).gather(1, target).squeeze(1)
            continue
        if space is not None:
            exactly.copy_(part)
        of_target = exactly.gather(1, target)
        largest = exactly.amax(1, keepdim=True)
        total = exactly.sub_(largest).exp_().sum(1, keepdim=True)
        log_p[place] = (of_target - largest - total.log()).squeeze(1)
        # With respect to the logits the gradient of -log p is softmax minus one-hot.
        exactly.div_(total)
        exactly.scatter_add_(1, target, torch.full_like(of_target, -1.0))
        if space is not None:
            part.copy_(exactly)
    return log_p


def _normalise_padded(logits: Tensor, targets: Tensor, vocabulary: int, needed: bool) -> Tensor:
    """`_normalise_in_cache` on a GPU, in few passes. Columns of `logits` beyond the vocabulary get no probability."""
    target = targets[:, None]
    logits[:, vocabulary:] = -torch.inf
    log_q = torch.log_softmax(logits, 1, dtype=torch.promote_types(logits.dtype, torch.float32))
    log_p = log_q.gather(1, target)
    if not needed:
        return log_p.squeeze(1)
    # The gradient is softmax - one-hot.
    torch.exp(log_q, out=logits)
    logits.scatter_(1, target, torch.expm1(log_p).to(logits.dtype))
    return log_p.squeeze(1)
