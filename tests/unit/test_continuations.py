"""Continuations of contexts and whole texts under mixtures: against whole forward passes, `mix` and plain loops."""

from pathlib import Path

import numpy as np
import pytest
import torch

from demix.mix.mixtures import Mixture, Stream
from demix.mix.rules import History, weights_rule
from demix.model import continuations
from demix.model.continuations import (
    Continuation,
    MixedModel,
    continuation_log_probabilities,
    text_scores,
)
from demix.model.decode import Decoder, log_prior_of, weights_of
from demix.model.gpt import GPT
from support.decoding import LENGTH, in_blocks, next_tokens, whole
from support.errors import refused
from support.mixing import log_mixture
from support.models import THREE, alone, model_of, randomise

END = 49
PRIOR = log_prior_of(THREE, {"law": 0.2, "news": 0.3, "code": 0.5})
DRAWN = torch.randint(0, 49, (400,), generator=torch.Generator().manual_seed(5)).tolist()
RULES = [
    ("history", "updating", 0.3, None),
    ("history", "uniform", None, 2),
    ("released", "cached", None, None),
    ("tempered(0.3,0.9)", "uniform", None, None),
    ("tempered(0.3,0.9)", "fitted", None, 1),
    ("switching(0.2)", "fitted", None, 2),
    ("average", "uniform", None, None),
]


def mixture_of(weights: str, method: str, decay: float | None, top_k: int | None, trunks: list[GPT]) -> MixedModel:
    prior = PRIOR if method in ("cached", "fitted") else np.zeros(3)
    rule = weights_rule(weights_of(weights, Path()))
    return MixedModel(trunks, Mixture(rule, prior, decay, top_k))


def mixed_whole(mixture: MixedModel, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """log p [N, V] of all next tokens and log p [N] of those that came after `ids[0]`, as a score table is mixed."""
    every = next_tokens(mixture.trunks[0], torch.tensor([ids[:-1]]))[:, 0]
    scores = np.stack([every[:, place, token] for place, token in enumerate(ids[1:])], 1)
    table, mask = in_blocks(scores)
    log_g = mixture.mixture.weights(table, mask)[mask]
    return np.logaddexp.reduce(log_g.T[..., None] + every, axis=0), log_mixture(log_g, scores.T)


@pytest.mark.parametrize(("weights", "method", "decay", "top_k"), RULES)
@pytest.mark.parametrize("batch", [None, 3])
def test_continuations_have_the_probabilities_of_whole_texts(weights, method, decay, top_k, batch) -> None:
    """Contexts of one token to a whole window, shared or not, with continuations of one token to all that fit."""
    mixture = mixture_of(weights, method, decay, top_k, [model_of(THREE)])
    contexts = [(END, *DRAWN[:9]), (END, *DRAWN[20:27]), (END,), tuple(DRAWN[40:56]), (END, *DRAWN[:5])]
    wanted = [
        *(Continuation(contexts[0], tuple(DRAWN[k : k + n])) for k, n in ((60, 1), (70, 6), (80, 3), (60, 1))),
        *(Continuation(contexts[1], tuple(DRAWN[k : k + n])) for k, n in ((90, 9), (100, 2))),
        Continuation(contexts[2], tuple(DRAWN[110:126])),
        *(Continuation(contexts[3], (token,)) for token in range(50)),
        Continuation(contexts[4], ()),
    ]
    greedy = Continuation(contexts[1], (next_by(mixture, contexts[1]), DRAWN[3]))
    twice = Continuation(contexts[1], (greedy.tokens[0], next_by(mixture, (*contexts[1], greedy.tokens[0]))))
    wanted += [greedy, twice]
    for one, (found, is_greedy) in zip(wanted, continuation_log_probabilities(mixture, wanted, batch), strict=True):
        if not one.tokens:
            assert (found, is_greedy) == (0.0, True)
            continue
        every, came = mixed_whole(mixture, [*one.context, *one.tokens])
        asked = slice(len(one.context) - 1, None)
        assert found == pytest.approx(came[asked].sum(), abs=1e-9)
        assert is_greedy == (every[asked].argmax(-1) == np.array(one.tokens)).all()
        assert is_greedy == (one == twice) or len(one.tokens) == 1


def next_by(mixture: MixedModel, context: tuple[int, ...]) -> int:
    decoder = mixture.decoder(torch.tensor(context[:1]))
    decoder.read(torch.tensor([context[1:]], dtype=torch.long))
    return int(decoder.next_log_probabilities().argmax())


@pytest.mark.parametrize(("weights", "method", "decay", "top_k"), RULES)
def test_whole_texts_have_the_probabilities_of_mix(weights, method, decay, top_k, monkeypatch) -> None:
    monkeypatch.setattr(continuations, "MAX_SCORES", 150)
    mixture = mixture_of(weights, method, decay, top_k, [model_of(THREE)])
    texts = [DRAWN[:n] for n in (37, 1, 16, 17, 3, 0, 90, 32)]
    done: list[int] = []
    found = {number: float(log_p.sum()) for number, _, log_p, _ in text_scores(mixture, texts, END, done.append)}
    assert {*range(len(texts))} - found.keys() == {5}
    assert sum(done) == sum(map(len, texts))
    for number, log_p in found.items():
        assert log_p == pytest.approx(mixed_whole(mixture, [END, *texts[number]])[1].sum(), abs=1e-9)


def opinionated() -> GPT:
    """A model whose experts have likeliest tokens of their own, which differ from context to context."""
    model = model_of(THREE)
    with torch.no_grad():
        model.final_norm.bias.zero_()
        model.blocks[1].feedforward.up.mul_(20)
    return model


def test_whole_models_are_mixed_like_experts_of_one_trunk() -> None:
    model = opinionated()
    trunks = [alone(model, name, "model") for name in THREE]
    wanted = [Continuation((END, *DRAWN[k : k + 5]), tuple(DRAWN[j : j + 3])) for k in (0, 9, 14) for j in (40, 50)]
    whole = mixture_of("history", "uniform", None, None, [model])
    contexts = [(END, *DRAWN[k : k + 5]) for k in (3, 60, 71, 85, 90, 97)]
    wanted += [Continuation(context, (next_by(whole, context),)) for context in contexts]
    together, apart = (
        continuation_log_probabilities(mixture_of("history", "uniform", None, None, held), wanted, 2)
        for held in ([model], trunks)
    )
    assert [log_p for log_p, _ in together] == pytest.approx([log_p for log_p, _ in apart], abs=1e-10)
    assert [greedy for _, greedy in together] == [greedy for _, greedy in apart]
    assert sum(greedy for _, greedy in together) >= len(contexts)


def test_each_trunk_reads_with_its_own_weights() -> None:
    """Trunks that share nothing, their embeddings included, against whole forward passes."""
    trunks = [model_of((name,)) for name in ("law", "news")]
    randomise(trunks[1], seed=1)
    tokens = torch.randint(0, 50, (2, 2 * LENGTH + 5), generator=torch.Generator().manual_seed(0))
    decoder = Decoder(trunks, tokens[:, 0], Stream(Mixture(History(), np.zeros(2)), LENGTH, np.zeros(2)))
    found = torch.cat([decoder.read(piece)[0] for piece in tokens.split([3, 1, 20, 13], 1)], 2)
    expected = np.concatenate([whole(trunk, tokens, tokens[:, 0]) for trunk in trunks])
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-10, rtol=0)


def test_a_model_that_gives_no_probability_is_refused() -> None:
    model = model_of(THREE)
    with torch.no_grad():
        model.blocks[1].feedforward.down[1, 0, 0] = float("nan")
    with refused(f"expert {THREE[1]}"):
        continuation_log_probabilities(
            mixture_of("history", "uniform", None, None, [model]), [Continuation((1,), (2,))]
        )
