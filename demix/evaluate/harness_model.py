"""The models of demix as a model of EleutherAI's lm-evaluation-harness: importing this registers the name `demix`.

Before every text stands one `<|endoftext|>`, as in generation. Token by token, the posterior over the experts follows
the text of a request, over the context and the continuation.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs

from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError
from demix.files import seed_for
from demix.model.checkpoint import describe, load_experts
from demix.model.continuations import (
    MixedModel,
    continuation_log_probabilities,
    text_log_probabilities,
    within,
)
from demix.model.decode import choose, named_prior, open_model, posteriors_of, weights_of
from demix.model.device import device_named
from demix.model.gpt import GPT
from demix.model.scoring import EXPERT_TOKENS_AT_ONCE, columns_of
from demix.model.tokenizer import tokenizer_of
from demix.progress import progress

# New tokens where a task does not say how many, as the harness has it for its own models.
NEW_TOKENS = 256
DRAWING = {"until", "max_gen_toks", "do_sample", "temperature", "top_p"}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Drawing:
    """A text to be generated. `prompt` begins with the token before it; temperature 0 takes the likeliest tokens."""

    prompt: tuple[int, ...]
    until: tuple[str, ...]
    most: int
    temperature: float
    top_p: float
    seed: int


@dataclass(frozen=True)
class _Asked:
    """Which experts are mixed, and how: the further arguments of `DemixLM`."""

    experts: str | None = None
    weights: str = "tempered"
    prior: str = ""
    top_k: int | None = None
    tokenizer: str | None = None


class DemixLM(TemplateLM):  # type: ignore[misc]
    """A mixture of the experts of a model directory, for the tasks of the harness.

    `pretrained` is the directory. `seed` is that of sampled texts. `batch_size` is the number of requests of a forward
    pass, by default, and for `auto`, as many as `demix.model.scoring` takes. `device` is as in
    `demix.model.device.device_named`. Of the further arguments, `experts` (separated by commas, by default all),
    `weights`, `prior` and `tokenizer` are as in `demix generate`; of a domain-token model `experts` names the domain
    whose token stands before every block. `top_k` mixes the likeliest experts of each token alone.
    """

    def __init__(
        self,
        pretrained: str,
        seed: int = 1234,
        batch_size: int | str | None = None,
        device: str | None = None,
        **mixed: Any,
    ):
        super().__init__()
        directory, asked, self._seed, self._device = Path(pretrained), _Asked(**mixed), seed, device_named(device)
        self._batch = None if batch_size in (None, "auto") else int(batch_size)
        if asked.top_k is not None and asked.top_k < 1:
            raise DemixError(f"--top-k {asked.top_k}", "is not positive", "give 1 or more")
        trunks, self._tokenizer, domain = self._opened(directory, asked)
        names = columns_of(trunks) if domain is None else (domain,)
        rule, length = weights_of(asked.weights, directory), trunks[0].architecture.context
        log_prior, decay = named_prior(asked.prior, directory, names, rule)
        begin = posteriors_of(rule, log_prior, directory, names, self._tokenizer, length, decay)
        begin(np.array([self._tokenizer.end_of_text]))
        self._mixture = MixedModel(trunks, begin, asked.top_k, domain)
        self._info = {
            "model_num_parameters": sum(p.numel() for trunk in trunks for p in trunk.parameters()),
            "model_sha": describe(directory).shared_sha256,
            "tokenizer_sha": self._tokenizer.sha256,
            "max_length": length,
            "eot_token_id": self.eot_token_id,
            "experts": list(names),
            "weights": {"rule": rule.family, **dict(zip(rule.rules.parameters, rule.parameters, strict=True))},
            "prior": dict(zip(names, np.exp(log_prior).tolist(), strict=True)) | ({"decay": decay} if decay else {}),
        }

    def _opened(self, directory: Path, asked: _Asked) -> tuple[list[GPT], Tokenizer, str | None]:
        """The trunks, the tokenizer and, of a domain-token model, the domain whose token stands before the texts."""
        names = asked.experts.split(",") if asked.experts else None
        path = Path(asked.tokenizer) if asked.tokenizer else None
        domains = describe(directory).domain_tokens
        if not domains:
            return *open_model(directory, names, path, self._device), None
        if names is None or len(names) != 1 or names[0] not in domains:
            cause = f"does not name the domain whose token stands before the texts of {directory}"
            raise DemixError(f"--experts {asked.experts or ''}".strip(), cause, f"give one of {', '.join(domains)}")
        _, encoder = tokenizer_of(directory, path)
        return load_experts(directory, None, self._device), encoder, names[0]

    @property
    def eot_token_id(self) -> int:
        """The id of `<|endoftext|>`, which stands before every text."""
        return self._tokenizer.end_of_text

    @property
    def max_length(self) -> int:
        """The number of tokens of a block."""
        return self._mixture.context

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside the results: digests, the experts and how they were mixed."""
        return self._info

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **more: Any) -> list[int]:
        """The ids of `string`, in which `<|endoftext|>` is ordinary text."""
        ids: list[int] = self._tokenizer.encode(string).tolist()
        return ids

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **more: Any
    ) -> list[tuple[float, bool]]:
        """log p of each continuation, and whether it is the likeliest. Contexts that are too long begin later."""
        wanted, cut = [], 0
        for (_, continuation), context, tokens in requests:
            # An empty context comes as the token before it. A context may swallow the whole of a short continuation.
            before = context if context[:1] == [self.eot_token_id] else [self.eot_token_id, *context]
            wanted.append(within(before, tokens or self.tok_encode(continuation), self.max_length))
            cut += len(wanted[-1].context) < len(before)
        if cut:
            log.warning(
                "%d of %d contexts do not fit into %d tokens and begin later", cut, len(wanted), self.max_length
            )
        with progress("continuations", len({*wanted})) as advance:
            found = continuation_log_probabilities(self._mixture, wanted, self._batch, advance)
        for (words, _, _), answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", words, answer)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """log p of each text, in consecutive blocks as in scoring."""
        texts = [self.tok_encode(request.args[0]) for request in requests]
        with progress("tokens", sum(map(len, texts)) * len(self._mixture.trunks)) as advance:
            found = text_log_probabilities(self._mixture, texts, self.eot_token_id, advance)
        for request, answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answer)
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue each prompt until a stop sequence, `<|endoftext|>` or the task's number of tokens.

        A prompt keeps its last tokens: what leaves room for the new ones in a block, and half a block at least.
        """
        seen: Counter[str] = Counter()
        asked = []
        for request in requests:
            context, how = request.args
            asked.append(self._drawing(context, how, seen[context]))
            seen[context] += 1
        most = self._batch or max(1, EXPERT_TOKENS_AT_ONCE // (len(self._mixture.experts) * self.max_length))
        found = [""] * len(asked)
        order = sorted(range(len(asked)), key=lambda number: -len(asked[number].prompt))
        with progress("texts", len(asked)) as advance:
            for _, alike in groupby(order, lambda number: len(asked[number].prompt)):
                numbers = list(alike)
                for first in range(0, len(numbers), most):
                    some = numbers[first : first + most]
                    for number, text in zip(some, self._drawn([asked[number] for number in some]), strict=True):
                        found[number] = text
                    advance(len(some))
        for request, answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, answer)
        return found

    def _drawing(self, context: str, how: dict[str, Any], occurrence: int) -> _Drawing:
        given = normalize_gen_kwargs(how, NEW_TOKENS)
        if unknown := sorted(given.keys() - DRAWING):
            known = ", ".join(sorted(DRAWING))
            raise DemixError(
                f"generation_kwargs {unknown[0]}", "is not offered here", f"leave it out; known are {known}"
            )
        most, temperature = given["max_gen_toks"], given.get("temperature", 1.0) if given["do_sample"] else 0.0
        for name, value, least in (("max_gen_toks", most, 1), ("temperature", temperature, 0)):
            if value < least:
                raise DemixError(f"generation_kwargs {name}", f"is {value}", f"give at least {least}")
        keep = max(self.max_length - most, self.max_length // 2, 1)
        whole = (self.eot_token_id, *self.tok_encode(context))
        prompt = whole[-keep:]
        if len(prompt) < len(whole):
            log.warning("a prompt of %d tokens loses its first %d", len(whole) - 1, len(whole) - keep)
        until = tuple(stop for stop in given["until"] if stop)
        seed = seed_for(self._seed, "text", context, occurrence)
        return _Drawing(prompt, until, most, temperature, given.get("top_p", 1.0), seed)

    def _drawn(self, asked: Sequence[_Drawing]) -> list[str]:
        """The texts of drawings whose prompts have the same number of tokens."""
        prompts = torch.tensor([one.prompt for one in asked])
        decoder = self._mixture.decoder(prompts[:, 0])
        decoder.read(prompts[:, 1:])
        generators = [torch.Generator().manual_seed(one.seed) for one in asked]
        ids: list[list[int]] = [[] for _ in asked]
        texts: list[str | None] = [None] * len(asked)
        while True:
            log_p = decoder.next_log_probabilities()
            tokens = torch.cat(
                [
                    choose(row[None], one.temperature, one.top_p, generator)
                    for row, one, generator in zip(log_p, asked, generators, strict=True)
                ]
            )
            for number, (one, token) in enumerate(zip(asked, tokens.tolist(), strict=True)):
                if texts[number] is not None:
                    continue
                if token != self.eot_token_id:
                    ids[number].append(token)
                text = self._tokenizer.decode(ids[number])
                ends = [text.index(stop) for stop in one.until if stop in text]
                if ends or token == self.eot_token_id or len(ids[number]) == one.most:
                    texts[number] = text[: min(ends, default=len(text))]
            if None not in texts:
                return [text for text in texts if text is not None]
            decoder.read(tokens[:, None])


register_model("demix")(DemixLM)
