"""What the page asks: a text read by every expert, and a continuation, as plain values."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError
from demix.files import read_parquet
from demix.model.decode import Decoder, Posterior, decoded, generate, log_prior_of, named_prior, open_model, run_of
from demix.model.gpt import GPT
from demix.model.scoring import columns_of
from demix.settings import Integer, Items, Number, Text, settings

MOST_TOKENS = 4096
MOST_DRAWN = 500
BITS = 1 / math.log(2)


@dataclass
class Opened:
    """A model, its tokenizer, the domains whose cached priors lie in its run, and the text that was read last."""

    directory: Path
    trunks: list[GPT]
    tokenizer: Tokenizer
    domains: tuple[str, ...]
    lock: Lock = field(default_factory=Lock)
    last: tuple[str, list[int], torch.Tensor] | None = None

    @property
    def experts(self) -> tuple[str, ...]:
        """All experts of the model, in the order of its scores."""
        return columns_of(self.trunks)

    @property
    def context(self) -> int:
        """The length of a block."""
        return self.trunks[0].architecture.context


@settings()
class Mixing:
    """A text, the experts that are on, and the prior: updating, uniform or a domain."""

    text: Text
    experts: Items[Text]
    prior: Text


@settings()
class Drawing(Mixing):
    """`tokens` to add to a text; see `demix.model.decode.generate`."""

    tokens: Integer
    temperature: Number
    top_p: Number
    seed: Integer


def opened(directory: Path, tokenizer: Path | None) -> Opened:
    """The model in `directory`, ready to answer."""
    trunks, encoder = open_model(directory, None, tokenizer)
    priors, name = run_of(directory) / "priors.parquet", Path(directory).resolve().name
    rows = read_parquet(priors).to_pylist() if priors.is_file() else []
    wanted = {"model": name, "experts": "training", "weights": "history"}
    domains = dict.fromkeys(row["domain"] for row in rows if wanted.items() <= row.items())
    return Opened(directory, trunks, encoder, tuple(domains))


def about(given: Opened) -> dict[str, Any]:
    """What the page shows of the model."""
    return {
        "name": str(given.directory),
        "experts": given.experts,
        "context": given.context,
        "domains": given.domains,
        "most_tokens": MOST_TOKENS,
        "most_drawn": MOST_DRAWN,
    }


def analyse(given: Opened, asked: Mixing) -> dict[str, Any]:
    """Every token of a text: its bits under the mixture and under each expert, the weights that predicted it.

    `weights` has one row more, of the token that would follow. Forward passes are made once a text, whatever is mixed.
    """
    posterior = _posterior(given, asked)
    with given.lock:
        if given.last is None or given.last[0] != asked.text:
            ids = _ids(given, asked.text)
            unweighted = Posterior(torch.zeros(len(given.experts)), given.context)
            decoder = Decoder(given.trunks, _start(given), unweighted)
            given.last = asked.text, ids, decoder.read(torch.tensor([ids], dtype=torch.long))[0]
        _, ids, scores = given.last
    log_weights = posterior.observe(scores)
    return {
        "pieces": list(decoded(given.tokenizer, ids)),
        **_numbers(scores, log_weights),
        "weights": _rounded(torch.cat([log_weights[0], posterior.log_weights], 0).exp(), 4),
    }


def draw(given: Opened, asked: Drawing) -> Iterator[dict[str, Any]]:
    """The tokens that follow a text as they come, each with the values of `analyse` for it and the one after it."""
    for name, value, least, most in (
        ("tokens", asked.tokens, 1, MOST_DRAWN),
        ("temperature", asked.temperature, 0, 10),
        ("top_p", asked.top_p, 0.001, 1),
        ("seed", asked.seed, 0, 2**62),
    ):
        if not least <= value <= most:
            raise DemixError(name, f"is {value}", f"give {least} to {most}")
    ids, posterior = _ids(given, asked.text), _posterior(given, asked)

    def steps() -> Iterator[dict[str, Any]]:
        decoder = Decoder(given.trunks, _start(given), posterior)
        decoder.read(torch.tensor([ids], dtype=torch.long))
        drawn: list[dict[str, Any]] = []

        def tokens() -> Iterator[int]:
            for token, scores, log_weights in generate(
                decoder,
                asked.tokens,
                temperature=asked.temperature,
                top_p=asked.top_p,
                generator=torch.Generator().manual_seed(asked.seed),
                end=given.tokenizer.end_of_text,
            ):
                after = _rounded(decoder.posterior.log_weights.exp(), 4)
                drawn.append({**_numbers(scores, log_weights), "weights": after})
                yield int(token)

        for piece in decoded(given.tokenizer, tokens()):
            yield {"pieces": [piece], **drawn.pop()}

    return steps()


def _numbers(scores: torch.Tensor, log_weights: torch.Tensor) -> dict[str, Any]:
    """`bits` [N] under the mixture and `expert_bits` [N, E] of one text's scores [E, 1, N]."""
    by_expert = scores[:, 0].T
    mixed = (log_weights[0] + by_expert).logsumexp(-1)
    return {"bits": _rounded(-mixed * BITS, 3), "expert_bits": _rounded(-by_expert * BITS, 2)}


def _rounded(values: torch.Tensor, digits: int) -> list[Any]:
    rounded: list[Any] = (values.double().numpy().round(digits) + 0.0).tolist()
    return rounded


def _posterior(given: Opened, asked: Mixing | Drawing) -> Posterior:
    if asked.prior not in ("updating", "uniform", *given.domains):
        raise DemixError("prior", f"{asked.prior!r:.40} is not known", "choose one that the page offers")
    for name in asked.experts:
        if name not in given.experts:
            raise DemixError("experts", f"{name!r:.40} is no expert of this model", "choose one that the page shows")
    log_prior, decay = named_prior(asked.prior, given.directory, given.experts)
    weights = dict(zip(given.experts, log_prior.exp().tolist(), strict=True))
    log_prior = log_prior_of(given.experts, {name: weights[name] for name in asked.experts})
    return Posterior(log_prior, given.context, decay=decay)


def _ids(given: Opened, text: str) -> list[int]:
    try:
        ids: list[int] = given.tokenizer.encode(text).tolist()
    except UnicodeEncodeError:
        raise DemixError("text", "is not valid Unicode", "remove the unpaired surrogates") from None
    if len(ids) > MOST_TOKENS:
        raise DemixError("text", f"has {len(ids)} tokens", f"give at most {MOST_TOKENS}")
    return ids


def _start(given: Opened) -> torch.Tensor:
    return torch.tensor([given.tokenizer.end_of_text])
