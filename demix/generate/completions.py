"""Completions of texts by a mixture of experts, for requests in the form of OpenAI's completions API."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field

from demix.config.mixing import METHODS
from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError
from demix.files import read_parquet
from demix.model.continuations import MixedModel, mixture_of
from demix.model.decode import generate, open_model, speller, use_one_thread
from demix.model.device import device_named
from demix.model.gpt import GPT
from demix.model.manifest import run_of
from demix.model.scoring import columns_of
from demix.settings import DistinctItems, Integer, Items, Number, Settings, Switch, Text

# The maximum tokens of a prompt, and of a completion. For a model with a longer context, the maximum is its context.
MAX_TOKENS = 4096
MAX_PROMPTS = 32
MAX_STOPS = 16


class CompletionRequest(Settings):
    """The body of a request to /v1/completions.

    Names and ranges are OpenAI's, except those of `experts`, `weights`, `prior` and `by_expert`. With `by_expert` the
    response has the experts' scores of each token (see `by_expert_of`). `best_of` and the fields after it accept only
    the value that has no effect.
    """

    model: Text
    prompt: Text | Annotated[Items[Text], Field(min_length=1, max_length=MAX_PROMPTS)]
    experts: DistinctItems[Text] | None = None
    weights: Text | None = None
    prior: Text | None = None
    by_expert: Switch = False
    max_tokens: Annotated[Integer, Field(ge=1)] = 16
    temperature: Annotated[Number, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[Number, Field(ge=0, le=1)] = 1.0
    seed: Annotated[Integer, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Text | Annotated[Items[Text], Field(max_length=MAX_STOPS)] = ()
    stream: Switch = False
    user: Text = ""
    best_of: Annotated[Integer, Field(ge=1, le=1)] = 1
    n: Annotated[Integer, Field(ge=1, le=1)] = 1
    frequency_penalty: Annotated[Number, Field(ge=0, le=0)] = 0.0
    presence_penalty: Annotated[Number, Field(ge=0, le=0)] = 0.0
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] = Field(default={})
    suffix: Annotated[Text, Field(max_length=0)] = ""

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings before which a completion ends."""
        return tuple(one for one in ((self.stop,) if isinstance(self.stop, str) else self.stop) if one)


@dataclass(frozen=True)
class Opened:
    """A model that answers requests; `weights`, `prior` and `top_k` are the defaults of requests."""

    directory: Path
    trunks: list[GPT]
    tokenizer: Tokenizer
    tokenizer_file: Path | None
    weights: str
    prior: str
    top_k: int | None

    @property
    def name(self) -> str:
        """The name of the model's folder."""
        return self.directory.resolve().name

    @property
    def experts(self) -> tuple[str, ...]:
        """All experts of the model, in the order of scores and weights."""
        return columns_of(self.trunks)

    @property
    def max_tokens(self) -> int:
        """The maximum number of tokens of a prompt, and of a completion."""
        return max(MAX_TOKENS, self.trunks[0].architecture.context)

    @cached_property
    def domains(self) -> tuple[str, ...]:
        """The domains with a cached prior in the model's run."""
        priors = run_of(self.directory) / "priors.parquet"
        rows = read_parquet(priors).to_pylist() if priors.is_file() else []
        wanted = {"model": self.name, "experts": "training", "weights": "history"}
        return tuple(dict.fromkeys(row["domain"] for row in rows if wanted.items() <= row.items()))

    def mixture(
        self, experts: Sequence[str] | None = None, weights: str | None = None, prior: str | None = None
    ) -> MixedModel:
        """The mixture for a request. Raises DemixError for an unknown expert, rule or prior."""
        if prior is not None and prior not in ("", *METHODS[1:3], *self.domains):
            raise DemixError("prior", f"{prior!r:.40} is not known", "use updating, uniform or a domain of the run")
        rule, known = weights or self.weights, self.prior if prior is None else prior
        return mixture_of(self.directory, self.trunks, self.tokenizer, rule, known, experts, self.top_k)


def opened(
    directory: Path,
    experts: Sequence[str] | None = None,
    weights: str = "tempered",
    prior: str = "",
    top_k: int | None = None,
    tokenizer: Path | None = None,
    device: str | None = None,
) -> Opened:
    """Open the model in `directory` for requests. Raises DemixError if the rule or the prior does not fit it."""
    trunks, encoder = open_model(directory, experts, tokenizer, device_named(device))
    use_one_thread(trunks)
    model = Opened(directory, trunks, encoder, tokenizer, weights, prior, top_k)
    model.mixture().begin(np.array([encoder.end_of_text]))
    return model


def prompts_of(model: Opened, asked: CompletionRequest) -> list[list[int]]:
    """The tokens of each prompt of a request. Raises DemixError for more tokens than a request may have."""
    texts = [asked.prompt] if isinstance(asked.prompt, str) else asked.prompt
    prompts = [model.tokenizer.encode(text).tolist() for text in texts]
    for name, most in (("prompt", max(map(len, prompts))), ("max_tokens", asked.max_tokens)):
        if most > model.max_tokens:
            raise DemixError(f"request.{name}", f"has too many tokens ({most})", f"ask for at most {model.max_tokens}")
    return prompts


@dataclass
class Part:
    """The next token of a completion: the text that it completes, and, if requested, the result of `by_expert_of`.

    In the last part, `finish` is the reason why the completion ended.
    """

    text: str = ""
    finish: Literal["stop", "length"] | None = None
    by_expert: dict[str, Any] | None = None


def completed(model: Opened, mixture: MixedModel, asked: CompletionRequest, prompt: Sequence[int]) -> Iterator[Part]:
    """Complete one prompt, part by part.

    A prompt follows `<|endoftext|>`. Prompt and completion are one text, in blocks as in scoring
    (docs/explanation/demix-layers.md). A stop string is not part of a completion, but its tokens are counted.
    `<|endoftext|>` ends a completion and has no text.
    """
    end, spell, text, sent = model.tokenizer.end_of_text, speller(model.tokenizer), "", 0
    decoder, generator = mixture.decoder(torch.tensor([end])), torch.Generator()
    decoder.read(torch.tensor([prompt], dtype=torch.long))
    if asked.seed is None:
        generator.seed()
    else:
        generator.manual_seed(asked.seed)
    sampling: dict[str, Any] = {"temperature": asked.temperature, "top_p": asked.top_p, "generator": generator}
    for number, (chosen, scores, log_g) in enumerate(generate(decoder, asked.max_tokens, **sampling), 1):
        token, last = int(chosen), number == asked.max_tokens
        part = Part()
        text += "" if token == end else spell(token)
        text += spell(None) if token == end or last else ""
        stops = [place for stop in asked.stops if (place := text.find(stop)) >= 0]
        if stops or token == end:
            part.finish = "stop"
        elif last:
            part.finish = "length"
        until = min(stops) if stops else len(text) if part.finish else _certain(text, asked.stops, sent)
        part.text, sent = text[sent:until], until
        if asked.by_expert:
            part.by_expert = by_expert_of(scores, log_g.numpy(), decoder.posterior.log_weights)
        yield part
        if part.finish:
            return


def _certain(text: str, stops: Sequence[str], sent: int) -> int:
    """How many characters of `text` can be sent, if `sent` are already sent: a stop string may begin near its end."""
    for place in range(max(sent, len(text) - max(map(len, stops), default=1) + 1), len(text)):
        if any(stop.startswith(text[place:]) for stop in stops):
            return place
    return len(text)


def by_expert_of(scores: torch.Tensor, log_g: np.ndarray, after: np.ndarray) -> dict[str, Any]:
    """The values of E experts for N tokens, from `scores` [E, 1, N] and the weights log g [1, N, E] of each token.

    `nats` [N] are under the mixture, `expert_nats` [N, E] under each expert, and `weights` [N + 1, E] have one more
    row, `after` [1, E]: the weights that predict the next token.
    """
    of_experts = scores[:, 0].T.numpy()
    numbers = {
        "nats": (-np.logaddexp.reduce(log_g[0] + of_experts, axis=-1), 3),
        "expert_nats": (-of_experts, 3),
        "weights": (np.exp(np.concatenate([log_g[0], after])), 4),
    }
    return {name: (values.round(digits) + 0.0).tolist() for name, (values, digits) in numbers.items()}
