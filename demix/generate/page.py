"""Answers to the page's requests as plain values: whose domain a text is, and its tokens."""

import math
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from threading import Lock
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field

from demix.config.mixing import parsed_weights
from demix.evaluate.own_text import Judge
from demix.evaluate.told import FILES_NOTE, HEADS, cells, doubt, headline
from demix.files import parquet_reader
from demix.files.json_files import without_nan
from demix.generate.completions import MAX_TOKENS, Opened, by_expert_of, tokens_of
from demix.model.clusters import has_clusters
from demix.model.decode import decoded
from demix.model.directory import tokenizer_of
from demix.model.manifest import run_of
from demix.settings import Items, Text, settings

# The characters of a text that are judged.
MAX_JUDGED = 1 << 16
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


@settings()
class TextRequest:
    """A request to tell whose domain a text is."""

    text: Annotated[Text, Field(max_length=MAX_JUDGED)]


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


@dataclass
class Page:
    """What the page is answered about a model; `last` are the text of the last request, its tokens and their scores."""

    model: Opened
    lock: Lock = field(default_factory=Lock)
    last: tuple[str, list[int], torch.Tensor] | None = None

    @cached_property
    def judge(self) -> Judge:
        """What `demix eval` judges a text by. The dense model of the run is loaded for the first text."""
        model, device = self.model, self.model.trunks[0].token_embedding.device
        path, _ = tokenizer_of(model.directory, model.tokenizer_file)
        return Judge.of(model.directory, model.trunks, path, model.tokenizer, device)

    @cached_property
    def example(self) -> str:
        """The beginnings of dev documents of some experts' domains; `EXAMPLE` where the run has fewer than two."""
        texts, folder = [], run_of(self.model.directory) / "corpus"
        paths = [path for name in self.model.experts if (path := folder / name / "dev.parquet").is_file()]
        for path in paths[:EXAMPLES]:
            with parquet_reader(path) as file:
                first = islice(file.iter_batches(batch_size=1, columns=["text"]), 1)
                texts += [rows["text"][0].as_py()[:EXAMPLE_LENGTH].rpartition(" ")[0] for rows in first if len(rows)]
        return "\n\n".join(texts if len(texts) > 1 else EXAMPLE)

    def facts(self) -> dict[str, Any]:
        """The facts about the model that the page shows."""
        rules = RULES + (BY_CLUSTER if has_clusters(self.model.directory) else ())
        return {
            "name": str(self.model.directory),
            "model": self.model.name,
            "experts": self.model.experts,
            "context": self.model.trunks[0].architecture.context,
            "domains": self.model.domains,
            "weights": rules,
            # These rules see earlier blocks, so that an updating prior would count the evidence of these twice.
            "all_text": [rule for rule in rules if "updating" in parsed_weights(rule).rules.refused],
            "example": self.example,
            "heads": HEADS,
            "note": FILES_NOTE,
            "most_judged": MAX_JUDGED,
        }

    def judged(self, asked: TextRequest) -> dict[str, Any]:
        """What `demix eval` says of a text: sentences, its line in a table of texts, and the experts, best first."""
        with self.lock:
            result = self.judge.result(asked.text, self.judge.read(asked.text))
        ranked = [{"name": line.name, "nats": math.log(line.perplexity)} for line in result.ranked]
        told = {"headline": headline(result), "doubt": doubt(result), "line": cells(result), "ranked": ranked}
        return dict(without_nan(told))

    def analysed(self, asked: MixRequest) -> dict[str, Any]:
        """What the experts say of each token of a text (`by_expert_of`), and the tokens (`pieces`).

        `left_out` is the number of tokens beyond MAX_TOKENS. A request with the same text as the request before, but
        another mixture, needs no forward pass.
        """
        model, end = self.model, torch.tensor([self.model.tokenizer.end_of_text])
        mixture = model.mixture(asked.experts, asked.weights, asked.prior)
        posterior = mixture.begin(end.numpy())
        with self.lock:
            if self.last is None or self.last[0] != asked.text:
                ids = tokens_of(model.tokenizer, asked.text)
                decoder = mixture.decoder(end)
                first = torch.tensor([ids[:MAX_TOKENS]], dtype=torch.long)
                self.last = asked.text, ids, decoder.read(first)[0]
            _, every, scores = self.last
        ids = every[:MAX_TOKENS]
        log_g = posterior.observe(scores.numpy(), np.array([ids], np.int64))
        pieces = list(decoded(model.tokenizer, ids))
        return {"pieces": pieces, "left_out": len(every) - len(ids)} | by_expert_of(
            scores, log_g, posterior.log_weights
        )
