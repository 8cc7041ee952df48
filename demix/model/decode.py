"""Text generation with a mixture of experts, token by token.

Texts are cut into blocks (docs/explanation/demix-layers.md), as in training and scoring. When a block fills the model's
context, the next block starts with the last token as its only context. An updating prior carries the evidence about the
domain from block to block. Generated and given tokens get the probabilities that `demix.mix` computes with the same
weights.
"""

import codecs
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from demix.config.evaluation import DECAY
from demix.config.mixing import DEFAULTS, Weights, parsed_weights
from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError, nearest
from demix.mix.mixtures import Stream
from demix.model.clusters import clusters_of
from demix.model.device import set_threads
from demix.model.directory import CPU, describe, load_experts, refuse_masked, tokenizer_of
from demix.model.gpt import GPT
from demix.model.manifest import run_of, tempered_of
from demix.model.merge import parse_weights, prior_weights

# The product of one token with a matrix of this size needs about a millisecond on one core.
ONE_THREAD = 2**22


class Decoder:
    """B growing texts under every expert of a model, and the mixture's prediction of the next token of each text.

    `trunks` hold the E experts together, as `load_experts` returns them. `before` [B] are the tokens before the texts.
    `posterior` holds the weights of the experts on the B empty texts. All experts read the same texts. The decoder
    keeps each expert's keys and values; the experts of a trunk share the first layer's.
    """

    @torch.no_grad()
    def __init__(self, trunks: Sequence[GPT], before: Tensor, posterior: Stream):
        self.trunks, self.posterior = trunks, posterior
        self._predicted: Tensor
        self._see(before[:, None], before[:, None][:, :0], new_block=True)

    @torch.no_grad()
    def read(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Append `tokens` [B, N] to the texts.

        Returns log p [E, B, N] of each token under every expert, and log g [B, N, E], the weights that predicted each
        token. Both are float64 and on the CPU.
        """
        tokens = tokens.to(self._predicted.device)
        scores, weights = [], []
        while tokens.shape[1]:
            room = self.posterior.room
            piece, tokens = tokens[:, :room], tokens[:, room:]
            first = self._predicted.gather(2, piece[None, :, :1].expand(len(self._predicted), -1, -1))
            ends = piece.shape[1] == room
            # The last token of a block is the first input of the next block.
            rest = self._see(piece[:, :-1] if ends else piece, piece[:, 1:])
            scored = torch.cat([first, rest], 2).double().cpu()
            scores.append(scored)
            weights.append(torch.from_numpy(self.posterior.observe(scored.numpy(), piece.cpu().numpy())))
            if ends:
                self._see(piece[:, -1:], piece[:, :0], new_block=True)
        E, B = self._predicted.shape[:2]
        return torch.cat([torch.zeros(E, B, 0), *scores], 2), torch.cat([torch.zeros(B, 0, E), *weights], 1)

    @torch.no_grad()
    def next_log_probabilities(self) -> Tensor:
        """log p [B, V] of the next token of each text under the mixture (paper, Eq. 4)."""
        log_weights = torch.from_numpy(self.posterior.log_weights)
        return (log_weights.T[..., None].to(self._predicted) + self._predicted).logsumexp(0)

    def _see(self, inputs: Tensor, targets: Tensor, new_block: bool = False) -> Tensor:
        """Give the next `inputs` [B, T] to each trunk; returns log p [E, B, N] of `targets` [B, N], N <= T.

        Target n follows input n. Stores every expert's log p [E, B, V] of the token after the inputs.
        """
        if new_block:
            self._pasts = [trunk.no_past() for trunk in self.trunks]
        if not inputs.shape[1]:
            return self._predicted[:, :, :0]
        scores, predicted = [], []
        for trunk, past in zip(self.trunks, self._pasts, strict=True):
            device = trunk.token_embedding.device
            hidden = trunk(inputs[None].to(device), past=past)
            scores.append(trunk.log_probabilities(hidden[:, :, : targets.shape[1]], targets[None].to(device)))
            logits = trunk.logits(hidden[:, :, -1])
            predicted.append(logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1))
        self._predicted = torch.cat(predicted)
        if bool(self._predicted.isnan().any()):
            raise DemixError("model", "does not give tokens a probability", "train it again, or use other experts")
        return torch.cat(scores)


def generate(
    decoder: Decoder,
    tokens: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    end: int | None = None,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Sample up to `tokens` more tokens for each text of `decoder`.

    Yields (tokens [B, 1], log p, log g) for each position; `Decoder.read` returns the last two. `temperature` 0 chooses
    the likeliest token. `generator` is a CPU generator. If there is only one text, the token `end` ends it and is not
    yielded.
    """
    for _ in range(tokens):
        chosen = choose(decoder.next_log_probabilities(), temperature, top_p, generator)[:, None]
        if end is not None and len(chosen) == 1 and int(chosen) == end:
            return
        yield chosen, *decoder.read(chosen)


class Drawn(NamedTuple):
    """A token that was sampled for one text: its text and id, its log p [E, 1, 1] and its log g [1, 1, E]."""

    piece: str
    token: int
    scores: Tensor
    log_weights: Tensor


def continuation(
    decoder: Decoder, tokenizer: Tokenizer, tokens: int, temperature: float, top_p: float, seed: int
) -> Iterator[Drawn]:
    """Sample up to `tokens` more tokens for the one text of `decoder`, as `generate` does, until the text ends.

    A character comes with the token that holds its last UTF-8 byte. When a token is yielded, `decoder.posterior` has
    seen it.
    """
    spell, generator = speller(tokenizer), torch.Generator().manual_seed(seed)
    how = {"temperature": temperature, "top_p": top_p}
    for chosen, scores, log_weights in generate(decoder, tokens, generator=generator, end=tokenizer.end_of_text, **how):
        yield Drawn(spell(int(chosen)), int(chosen), scores, log_weights)


def refuse_outside(**bounds: tuple[float, float, float]) -> None:
    """Raise DemixError for the first named (value, least, most) whose value is not from least to most."""
    for name, (value, least, most) in bounds.items():
        if not least <= value <= most:
            raise DemixError(name, f"is {value}", f"give a value from {least} to {most}")


def choose(log_p: Tensor, temperature: float, top_p: float, generator: torch.Generator | None = None) -> Tensor:
    """One token for each row of log p [B, V], sampled from the nucleus `top_p` of p^(1/temperature): [B]."""
    if temperature == 0:
        return log_p.argmax(-1).cpu()
    log_p = log_p.double().cpu()
    # Values of at most zero, divided by a tiny temperature, become -inf, but never NaN.
    probabilities = nucleus(((log_p - log_p.amax(-1, keepdim=True)) / temperature).softmax(-1), top_p)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


def nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """`probabilities` [..., V] of the fewest likeliest tokens whose sum reaches `top_p`, renormalised; 0 elsewhere."""
    if top_p >= 1:
        return probabilities
    ordered, order = torch.sort(probabilities, stable=True, dim=-1, descending=True)
    ordered[..., 1:][(ordered.cumsum(-1) - ordered)[..., 1:] >= top_p] = 0
    kept = torch.zeros_like(probabilities).scatter_(-1, order, ordered)
    return kept / kept.sum(-1, keepdim=True)


def log_prior_of(experts: Sequence[str], weights: dict[str, float]) -> np.ndarray:
    """The log of `weights`, normalised, in the order of `experts`. Experts without an entry get weight 0.

    Raises DemixError when a weight names an unknown expert or is negative, or when no weight is above 0.
    """
    for name, weight in weights.items():
        if name not in experts:
            cure = nearest(name, experts, "add an expert")
            raise DemixError(f"prior of {name}", "is given, but the model has no such expert", cure)
        if not 0 <= weight < math.inf:
            raise DemixError(f"prior of {name}", f"is {weight}", "give a number of at least 0")
    total = sum(weights.values())
    if not 0 < total < math.inf:
        raise DemixError("prior", f"has weights that sum to {total}", "give weights with a finite sum above 0")
    with np.errstate(divide="ignore"):
        log_prior: np.ndarray = np.log([weights.get(name, 0.0) / total for name in experts])
    return log_prior


def weights_of(name: str, directory: Path) -> Weights:
    """The mixing rule called `name`, with the parameters of the model in `directory`.

    `name` is a value of `evaluation.weights`, or `average`: only the prior, which text does not change (`switching(1)`,
    docs/explanation/mixing.md). If `name` has no parameters, `tempered` has the parameters in the model's mixing.json,
    and cluster rules have the temperature from `clusters_of`. Without mixing.json, and for `switching`, the parameters
    are in `DEFAULTS`.
    """
    try:
        weights = parsed_weights("switching(1)" if name == "average" else name)
    except ValueError as error:
        raise DemixError(f"--weights {name:.40}", *error.args) from None
    if weights.rules.routed and weights.open:
        return replace(weights, parameters=(clusters_of(directory).temperature,))
    if name == "tempered":
        return replace(weights, parameters=tempered_of(directory))
    return replace(weights, parameters=weights.parameters or DEFAULTS.get(weights.family, ()))


def named_prior(
    name: str, directory: Path, experts: Sequence[str], weights: Weights
) -> tuple[np.ndarray, float | None]:
    """The prior called `name` over `experts` of the model in `directory`: (log prior [E], decay).

    `name` is `updating`, `uniform`, weights such as law=2,news=1, or a domain with a prior in the model's run. The
    prior of a domain is `cached`, or `fitted` if the rule `weights` uses earlier blocks. "" means `updating`, or
    `uniform` if the rule uses earlier blocks or distances. A prior over more experts is restricted to `experts`.
    """
    refused = weights.rules.refused
    name = name or ("uniform" if refused or weights.rules.routed else "updating")
    if name in refused:
        raise DemixError(f"--prior {name}", f"would count {weights.family}'s evidence twice", "use uniform or a domain")
    if name in ("updating", "uniform"):
        return log_prior_of(experts, dict.fromkeys(experts, 1.0)), DECAY if name == "updating" else None
    if "=" in name:
        return log_prior_of(experts, parse_weights(name, "--prior")), None
    path, kind = run_of(directory) / "priors.parquet", "fitted" if refused else "history"
    model = Path(directory).resolve().name
    found = prior_weights(path, model, name, "training", kind)
    if not set(experts) <= found.keys():
        found = prior_weights(path, model, name, "all", kind)
    return log_prior_of(experts, {expert: found[expert] for expert in experts if expert in found}), None


def open_model(
    directory: Path,
    experts: Sequence[str] | None = None,
    tokenizer: Path | None = None,
    device: torch.device = CPU,
) -> tuple[list[GPT], Tokenizer]:
    """The trunks of a model with `experts` (all by default) on `device`, and the model's tokenizer.

    Trunks are the GPTs that hold the experts (`load_experts`). Without `tokenizer`, the tokenizer comes from the
    model's folder or run. Raises DemixError if the model has no experts to mix or was trained with another tokenizer.
    """
    if experts is not None and len({*experts}) < len(experts):
        raise DemixError("--experts", "names an expert twice", "name each expert once")
    _, encoder = tokenizer_of(directory, tokenizer)
    refuse_masked(directory, "cannot continue a text")
    if describe(directory).domain_tokens:
        raise DemixError(directory, "is a domain-token model, which has no experts to mix", "choose another model")
    trunks = load_experts(directory, None if experts is None else tuple(experts), device)
    return [trunk.requires_grad_(False) for trunk in trunks], encoder


def use_one_thread(trunks: Sequence[GPT]) -> None:
    """Let this process compute with one thread if the largest matrix of a model is small (`ONE_THREAD`).

    For a single token, two threads then gain at most a millisecond per product, but lose about 30 ms if another process
    uses their cores, because each thread waits for the other.
    """
    if max(parameter.numel() for trunk in trunks for parameter in trunk.parameters()) <= ONE_THREAD:
        set_threads(1)


def decoded(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """The text of each token of `ids`. A character comes with the token that holds its last UTF-8 byte."""
    return map(speller(tokenizer), map(int, ids))


def speller(tokenizer: Tokenizer) -> Callable[[int | None], str]:
    """A function that maps each id of a text, in order, to its text, and None to the incomplete last bytes (U+FFFD)."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pieces = tokenizer.vocabulary.pieces
    return lambda token: decoder.decode(b"", True) if token is None else decoder.decode(pieces[token])
