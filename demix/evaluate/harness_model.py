"""demix models as a model of EleutherAI's lm-evaluation-harness. Importing this module registers the name `demix`.

One `<|endoftext|>` precedes every text, as in generation. The posterior over experts is updated at each token of a
request's context and continuation.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs

from demix.errors import DemixError
from demix.files import seed_for
from demix.model.continuations import continuation_log_probabilities, mixture_of, text_scores, within
from demix.model.decode import generate, open_model, refuse_outside, weights_of
from demix.model.device import device_named
from demix.model.directory import describe
from demix.progress import progress

# Default number of new tokens of a task, as in the harness's own models.
NEW_TOKENS = 256
DRAWING = {"until", "max_gen_toks", "do_sample", "temperature", "top_p"}

log = logging.getLogger(__name__)


class DemixLM(TemplateLM):  # type: ignore[misc]
    """A mixture of the experts of a model directory, for the tasks of the harness.

    `pretrained` is the directory. `seed` is the random seed of sampled texts. `batch_size` is the number of
    continuations per forward pass; by default, and for `auto`, it is chosen as in `demix.model.scoring`. Texts are
    generated one by one. `device` is as in `demix.model.device.device_named`. `experts` (separated by commas, by
    default all), `weights`, `prior` and `tokenizer` are as in `demix generate`. `top_k` mixes only the likeliest
    experts of each token.
    """

    def __init__(
        self,
        pretrained: str,
        seed: int = 1234,
        batch_size: int | str | None = None,
        device: str | None = None,
        experts: str | None = None,
        tokenizer: str | None = None,
        **mixing: Any,
    ):
        super().__init__()
        directory, self._seed, self._device = Path(pretrained), seed, device_named(device)
        self._batch = None if batch_size in (None, "auto") else int(batch_size)
        names, path = experts.split(",") if experts else None, Path(tokenizer) if tokenizer else None
        trunks, self._tokenizer = open_model(directory, names, path, self._device)
        mixed = mixture_of(directory, trunks, self._tokenizer, **mixing)
        mixed.begin(np.array([self._tokenizer.end_of_text]))
        self._mixture, mixture = mixed, mixed.mixture
        rule = weights_of(mixing.get("weights", "tempered"), directory)
        shares = dict(zip(mixed.experts, np.exp(mixture.log_prior).tolist(), strict=True))
        self._info = {
            "model_num_parameters": sum(p.numel() for trunk in trunks for p in trunk.parameters()),
            "model_sha": describe(directory).shared_sha256,
            "tokenizer_sha": self._tokenizer.sha256,
            "max_length": mixed.context,
            "eot_token_id": self.eot_token_id,
            "experts": list(mixed.experts),
            "weights": {"rule": rule.family, **dict(zip(rule.rules.parameters, rule.parameters, strict=True))},
            "prior": shares | ({"decay": mixture.decay} if mixture.decay else {}),
        }

    @property
    def eot_token_id(self) -> int:
        """The id of `<|endoftext|>`, which precedes every text."""
        return self._tokenizer.end_of_text

    @property
    def max_length(self) -> int:
        """The context length."""
        return self._mixture.context

    def get_model_info(self) -> dict[str, Any]:
        """Information that the harness adds to the results: digests, the experts and how they were mixed."""
        return self._info

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **more: Any) -> list[int]:
        """The ids of `string`, in which `<|endoftext|>` is ordinary text."""
        ids: list[int] = self._tokenizer.encode(string).tolist()
        return ids

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **more: Any
    ) -> list[tuple[float, bool]]:
        """log p of each continuation, and whether it is the likeliest. Long contexts lose their beginning."""
        wanted, cut = [], 0
        for (_, continuation), context, tokens in requests:
            # An empty context consists of the token before it. Tokens of a short continuation may all be in the
            # context.
            before = context if context[:1] == [self.eot_token_id] else [self.eot_token_id, *context]
            wanted.append(within(before, tokens or self.tok_encode(continuation), self.max_length))
            cut += len(wanted[-1].context) < len(before)
        if cut:
            log.warning(
                "%d of %d contexts exceed %d tokens and lose their beginning", cut, len(wanted), self.max_length
            )
        with progress("continuations", len({*wanted})) as advance:
            return continuation_log_probabilities(self._mixture, wanted, self._batch, advance)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """log p of each text, in consecutive blocks as in scoring."""
        texts = [self.tok_encode(request.args[0]) for request in requests]
        with progress("tokens", sum(map(len, texts)) * len(self._mixture.trunks)) as advance:
            scored = text_scores(self._mixture, texts, self.eot_token_id, advance)
            found = {number: float(log_p.sum()) for number, _, log_p, _ in scored}
        return [found.get(number, 0.0) for number in range(len(texts))]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue each prompt until a stop sequence, `<|endoftext|>` or the task's number of tokens."""
        seen: Counter[str] = Counter()
        found = []
        with progress("texts", len(requests)) as advance:
            for request in requests:
                context, how = request.args
                found.append(self._text(context, how, seen[context]))
                seen[context] += 1
                advance(1)
        return found

    def _text(self, context: str, how: dict[str, Any], occurrence: int) -> str:
        """The continuation of a prompt, of which only the last tokens are kept, so that new ones fit into a block.

        At least half a block is kept. The seed depends on the prompt and on how often it has occurred before.
        """
        given = normalize_gen_kwargs(how, NEW_TOKENS)
        if unknown := sorted(given.keys() - DRAWING):
            known = ", ".join(sorted(DRAWING))
            raise DemixError(f"generation_kwargs {unknown[0]}", "is not supported", f"remove it; known are {known}")
        most, temperature = given["max_gen_toks"], given.get("temperature", 1.0) if given["do_sample"] else 0.0
        refuse_outside(max_gen_toks=(most, 1, 2**31), temperature=(temperature, 0, 100))
        whole = [self.eot_token_id, *self.tok_encode(context)]
        prompt = whole[-max(self.max_length - most, self.max_length // 2, 1) :]
        if len(prompt) < len(whole):
            log.warning("a prompt of %d tokens loses its first %d", len(whole) - 1, len(whole) - len(prompt))
        decoder = self._mixture.decoder(torch.tensor(prompt[:1]))
        decoder.read(torch.tensor([prompt[1:]], dtype=torch.long))
        generator = torch.Generator().manual_seed(seed_for(self._seed, "text", context, occurrence))
        sampling = {"temperature": temperature, "top_p": given.get("top_p", 1.0), "generator": generator}
        ids: list[int] = []
        text = ""
        for token, *_ in generate(decoder, most, end=self.eot_token_id, **sampling):
            ids.append(int(token))
            text = self._tokenizer.decode(ids)
            if ends := [text.index(stop) for stop in given["until"] if stop and stop in text]:
                return text[: min(ends)]
        return text


register_model("demix")(DemixLM)
