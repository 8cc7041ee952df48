"""Answers to the page's requests as plain values: whose domain a text is, its tokens, and a continuation."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch

from demix.config.mixing import parsed_weights
from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError
from demix.evaluate.own_text import Judge
from demix.evaluate.told import FILES_NOTE, HEADS, cells, doubt, headline
from demix.files import parquet_reader, read_parquet
from demix.files.json_files import without_nan
from demix.generate.completions import tokens_of
from demix.mix.logs import logsumexp
from demix.mix.stream import Posterior
from demix.model.clusters import has_clusters
from demix.model.continuations import mixture_of
from demix.model.decode import (
    Decoder,
    continuation,
    decoded,
    open_model,
    read_alone,
    refuse_outside,
    weights_of,
)
from demix.model.description import run_of
from demix.model.gpt import GPT
from demix.model.scoring import columns_of
from demix.model.tokenizer import tokenizer_of
from demix.settings import Integer, Items, Number, Text, settings

# The tokens of a text that are shown, and the characters that are judged.
MOST_TOKENS, MOST_JUDGED = 4096, 1 << 16
MOST_DRAWN = 500
# The rules that the page offers. The first is that of `demix eval`, whose sentence the page shows. A change of experts
# once in 100 tokens follows a text that changes its domain sooner: over twelve texts of three dev documents of the
# sample (100 tokens each) the right expert has 80% of the weight at 5.71 nats per token, with `tempered` 56% at 5.80.
RULES = ("tempered", "switching(0.01)", "history", "released")
# Those that it offers where the model's run has a clustering of its experts.
BY_CLUSTER = ("cluster", "cluster+history")
# An example has the beginnings of texts of so many domains, of so many characters each.
EXAMPLES, EXAMPLE_LENGTH = 3, 400
EXAMPLE = (
    "And it came to pass in those days, that he went out into a mountain to pray, and continued all night in prayer. "
    "And when it was day, he called unto him his disciples.",
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n    return total",
    "I thank the Minister for his answer. Will the Government now publish the figures before the House rises, and tell "
    "us what the measure is expected to cost?",
)


@dataclass
class Opened:
    """A model, its tokenizer, the domains with a cached prior in its run, and the scores of the last text (`last`).

    `example` is a text that changes its domain.
    """

    directory: Path
    trunks: list[GPT]
    tokenizer: Tokenizer
    domains: tuple[str, ...]
    example: str
    tokenizer_file: Path | None = None
    lock: Lock = field(default_factory=Lock)
    last: tuple[str, list[int], torch.Tensor] | None = None

    @property
    def experts(self) -> tuple[str, ...]:
        """All experts of the model, in the order of the scores."""
        return columns_of(self.trunks)

    @property
    def context(self) -> int:
        """The length of a block in tokens."""
        return self.trunks[0].architecture.context

    @cached_property
    def judge(self) -> Judge:
        """What `demix eval` judges a text by. The dense model of the run is loaded for the first text."""
        path, _ = tokenizer_of(self.directory, self.tokenizer_file)
        return Judge.of(self.directory, self.trunks, path, self.tokenizer)


@settings()
class TextRequest:
    """A request to tell whose domain a text is."""

    text: Text


@settings()
class MixRequest:
    """A request to mix: a text, the experts in the mixture, and how.

    `weights` names the rule of the weights (`demix.model.decode.weights_of`), and `prior` is "" (the rule's default),
    updating, uniform or a domain.
    """

    text: Text
    experts: Items[Text]
    weights: Text
    prior: Text


@settings()
class DrawRequest(MixRequest):
    """A request to continue a text by at most `tokens` tokens (for the rest see `demix.model.decode.generate`)."""

    tokens: Integer
    temperature: Number
    top_p: Number
    seed: Integer


def opened(directory: Path, tokenizer: Path | None) -> Opened:
    """Open the model in `directory` for requests, as `demix.model.decode.open_model` does."""
    trunks, encoder = open_model(directory, None, tokenizer)
    read_alone(trunks)
    priors, name = run_of(directory) / "priors.parquet", Path(directory).resolve().name
    rows = read_parquet(priors).to_pylist() if priors.is_file() else []
    wanted = {"model": name, "experts": "training", "weights": "history"}
    domains = dict.fromkeys(row["domain"] for row in rows if wanted.items() <= row.items())
    example = _example(run_of(directory), columns_of(trunks))
    return Opened(directory, trunks, encoder, tuple(domains), example, tokenizer)


def _example(run: Path, experts: tuple[str, ...]) -> str:
    """The beginnings of dev documents of some of the experts' domains; `EXAMPLE` where the run has less than two."""
    texts = []
    for path in [path for name in experts if (path := run / "corpus" / name / "dev.parquet").is_file()][:EXAMPLES]:
        with parquet_reader(path) as file:
            first = islice(file.iter_batches(batch_size=1, columns=["text"]), 1)
            texts += [rows["text"][0].as_py()[:EXAMPLE_LENGTH].rpartition(" ")[0] for rows in first if len(rows)]
    return "\n\n".join(texts if len(texts) > 1 else EXAMPLE)


def model_facts(model: Opened) -> dict[str, Any]:
    """The facts about the model that the page shows."""
    rules = RULES + (BY_CLUSTER if has_clusters(model.directory) else ())
    return {
        "name": str(model.directory),
        "experts": model.experts,
        "context": model.context,
        "domains": model.domains,
        "weights": rules,
        # These rules see earlier blocks, so that an updating prior would count the evidence of these twice.
        "all_text": [rule for rule in rules if "updating" in parsed_weights(rule).rules.refused],
        "example": model.example,
        "heads": HEADS,
        "note": FILES_NOTE,
        "most_judged": MOST_JUDGED,
        "most_drawn": MOST_DRAWN,
    }


def judged(model: Opened, asked: TextRequest) -> dict[str, Any]:
    """What `demix eval` says of a text: its sentences, its line in a table of texts, and the experts, best first."""
    with model.lock:
        result = model.judge.result(asked.text, model.judge.read(asked.text))
    ranked = [{"name": line.name, "nats": math.log(line.perplexity)} for line in result.ranked]
    told = {"headline": headline(result), "doubt": doubt(result), "line": cells(result), "ranked": ranked}
    return dict(without_nan(told))


def analyse(model: Opened, asked: MixRequest) -> dict[str, Any]:
    """For each token of a text: its nats under the mixture and under each expert, and the weights that predicted it.

    `weights` has one more row, for the next token. `left_out` is the number of tokens beyond MOST_TOKENS. A request
    with the same text as the request before, but another mixture, needs no forward pass.
    """
    posterior = _posterior(model, asked)
    with model.lock:
        if model.last is None or model.last[0] != asked.text:
            ids = tokens_of(model.tokenizer, asked.text)
            unweighted = Posterior(np.zeros(len(model.experts)), model.context)
            decoder = Decoder(model.trunks, _start(model), unweighted)
            shown = torch.tensor([ids[:MOST_TOKENS]], dtype=torch.long)
            model.last = asked.text, ids, decoder.read(shown)[0]
        _, every, scores = model.last
    ids = every[:MOST_TOKENS]
    log_weights = posterior.observe(scores.numpy(), np.array([ids], np.int64))
    return {
        "pieces": list(decoded(model.tokenizer, ids)),
        "left_out": len(every) - len(ids),
        **_numbers(scores, log_weights),
        "weights": _rounded(np.exp(np.concatenate([log_weights[0], posterior.log_weights])), 4),
    }


def draw(model: Opened, asked: DrawRequest) -> Iterator[dict[str, Any]]:
    """Generate the continuation of a text, token by token, with the nats of each token as in `analyse`.

    `weights` are those after the token. Raises DemixError for a value out of range.
    """
    refuse_outside(
        tokens=(asked.tokens, 1, MOST_DRAWN),
        temperature=(asked.temperature, 0, 10),
        top_p=(asked.top_p, 0.001, 1),
        seed=(asked.seed, 0, 2**62),
    )
    ids, posterior = tokens_of(model.tokenizer, asked.text), _posterior(model, asked)
    if len(ids) > MOST_TOKENS:
        raise DemixError("text", f"has {len(ids)} tokens", f"shorten it to at most {MOST_TOKENS}")

    def steps() -> Iterator[dict[str, Any]]:
        decoder = Decoder(model.trunks, _start(model), posterior)
        decoder.read(torch.tensor([ids], dtype=torch.long))
        sampling = asked.tokens, asked.temperature, asked.top_p, asked.seed
        for drawn in continuation(decoder, model.tokenizer, *sampling):
            after = _rounded(np.exp(decoder.posterior.log_weights), 4)
            yield {"pieces": [drawn.piece], **_numbers(drawn.scores, drawn.log_weights.numpy()), "weights": after}

    return steps()


def _numbers(scores: torch.Tensor, log_weights: np.ndarray) -> dict[str, Any]:
    """`nats` [N] under the mixture and `expert_nats` [N, E], from the scores [E, 1, N] of one text."""
    by_expert = scores[:, 0].T.numpy()
    mixed = logsumexp(log_weights[0] + by_expert)
    return {"nats": _rounded(-mixed, 3), "expert_nats": _rounded(-by_expert, 3)}


def _rounded(values: np.ndarray, digits: int) -> list[Any]:
    rounded: list[Any] = (values.round(digits) + 0.0).tolist()
    return rounded


def _posterior(model: Opened, asked: MixRequest) -> Posterior:
    if asked.prior not in ("", "updating", "uniform", *model.domains):
        raise DemixError("prior", f"{asked.prior!r:.40} is not known", "choose a prior that the page offers")
    if weights_of(asked.weights, model.directory).window:
        raise DemixError("weights", "are a number of tokens", "choose a rule that the page offers")
    mixture = mixture_of(model.directory, model.trunks, model.tokenizer, asked.weights, asked.prior, asked.experts)
    return mixture.begin(_start(model).numpy())


def _start(model: Opened) -> torch.Tensor:
    return torch.tensor([model.tokenizer.end_of_text])
