"""Continuations of contexts and whole texts under mixtures: against whole forward passes, `mix` and plain loops."""

from pathlib import Path

import numpy as np
import pytest
import torch

from demix.errors import DemixError
from demix.mix import mixtures
from demix.mix.logs import log_softmax
from demix.mix.mixtures import log_weights, mix
from demix.mix.rules import Chunk, weights_rule
from demix.model import continuations
from demix.model.continuations import (
    Continuation,
    MixedModel,
    continuation_log_probabilities,
    text_log_probabilities,
    within,
)
from demix.model.decode import Decoder, log_prior_of, posteriors_of, weights_of
from demix.model.gpt import GPT
from demix.model.scoring import log_probabilities
from support.decoding import LENGTH, in_blocks, whole
from support.models import SMALL, THREE, model_of, randomise

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
    begin = posteriors_of(weights_of(weights, Path()), prior, Path(), THREE, None, LENGTH, decay)
    return MixedModel(trunks, begin, top_k)


def mixed_by_loop(model: GPT, ids: list[int], weights: str, method: str, decay, top_k) -> tuple[np.ndarray, np.ndarray]:
    """log p [N, V] of all next tokens and log p [N] of those that came, after `ids[0]`, token by token in numpy."""
    text = torch.tensor([ids[1:]])
    table, mask = in_blocks(whole(model, text, torch.tensor(ids[:1]))[:, 0])
    how = {"decay": decay or 0.3, "log_prior": PRIOR, "top_k": top_k}
    rule = "switching(1)" if weights == "average" else weights
    came = mix(table, mask, method, rule, **how)[mask]
    priors = np.full((len(mask), 3), -np.log(3)) if method in ("uniform", "updating") else PRIOR[None]
    if method == "updating":
        priors = mixtures.log_prior_path(table, mask, rule, decay, "paper")[:-1]
    known = weights_rule(rule)
    evidence, _ = known.evidence(Chunk(table, mask), known.begin(priors[0]))
    log_g = log_weights(np.broadcast_to(priors, (len(mask), 3)), evidence, known.uniform_start)[mask]
    log_g = log_g if top_k is None else mixtures.keep_top(log_g, top_k)
    every = []
    for start in range(0, len(ids) - 1, LENGTH):
        with torch.no_grad():
            hidden = model(torch.tensor([[ids[start : start + LENGTH]]]))
            every.append((hidden @ model.token_embedding.T).log_softmax(-1)[:, 0])
    by_expert = torch.cat(every, 1).numpy()[:, : len(ids) - 1]
    return np.logaddexp.reduce(log_g.T[..., None] + by_expert, axis=0), came


@pytest.mark.parametrize(("weights", "method", "decay", "top_k"), RULES)
@pytest.mark.parametrize("batch", [None, 3])
def test_continuations_have_the_probabilities_of_a_loop(weights, method, decay, top_k, batch) -> None:
    """Contexts of one token to a whole window, shared or not, with continuations of one token to all that fit."""
    model = model_of(THREE)
    contexts = [(END, *DRAWN[:9]), (END, *DRAWN[20:27]), (END,), tuple(DRAWN[40:56]), (END, *DRAWN[:5])]
    wanted = [
        *(Continuation(contexts[0], tuple(DRAWN[k : k + n])) for k, n in ((60, 1), (70, 6), (80, 3), (60, 1))),
        *(Continuation(contexts[1], tuple(DRAWN[k : k + n])) for k, n in ((90, 9), (100, 2))),
        Continuation(contexts[2], tuple(DRAWN[110:126])),
        *(Continuation(contexts[3], (token,)) for token in range(50)),
        Continuation(contexts[4], ()),
    ]
    mixture = mixture_of(weights, method, decay, top_k, [model])
    greedy = Continuation(contexts[1], (next_by(mixture, contexts[1]), DRAWN[3]))
    twice = Continuation(contexts[1], (greedy.tokens[0], next_by(mixture, (*contexts[1], greedy.tokens[0]))))
    wanted += [greedy, twice]
    for one, (found, is_greedy) in zip(wanted, continuation_log_probabilities(mixture, wanted, batch), strict=True):
        if not one.tokens:
            assert (found, is_greedy) == (0.0, True)
            continue
        every, came = mixed_by_loop(model, [*one.context, *one.tokens], weights, method, decay, top_k)
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
    monkeypatch.setattr(continuations, "MOST_SCORES", 150)
    model = model_of(THREE)
    texts = [DRAWN[:n] for n in (37, 1, 16, 17, 3, 0, 90, 32)]
    done: list[int] = []
    found = text_log_probabilities(mixture_of(weights, method, decay, top_k, [model]), texts, END, done.append)
    assert found[5] == 0
    assert sum(done) == sum(map(len, texts))
    for text, log_p in zip(texts, found, strict=True):
        if text:
            expected = mixed_by_loop(model, [END, *text], weights, method, decay, top_k)[1].sum()
            assert log_p == pytest.approx(expected, abs=1e-9)


def opinionated() -> GPT:
    """A model whose experts have likeliest tokens of their own, which differ from context to context."""
    model = model_of(THREE)
    with torch.no_grad():
        model.final_norm.bias.zero_()
        model.blocks[1].feedforward.up.mul_(20)
    return model


def test_the_likeliest_token_is_that_of_the_mixture() -> None:
    """After 30 contexts, of which some have a likeliest token that is not that of the unweighted average."""
    model = opinionated()
    contexts = [(END, *DRAWN[k : k + 6]) for k in range(30)]
    mixture, average = (mixture_of(*how, [model]) for how in (("history", "cached", None, None), RULES[-1]))
    likeliest, otherwise = ([next_by(each, context) for context in contexts] for each in (mixture, average))
    assert likeliest != otherwise
    wanted = [Continuation(context, (token,)) for context in contexts for token in range(50)]
    found = continuation_log_probabilities(mixture, wanted)
    greedy = [one.tokens[0] for one, (_, is_greedy) in zip(wanted, found, strict=True) if is_greedy]
    assert greedy == likeliest


def test_whole_models_are_mixed_like_experts_of_one_trunk(monkeypatch) -> None:
    """Each is in memory for all batches of a part together."""
    model = opinionated()
    trunks, asked = [], []
    for number, name in enumerate(THREE):
        alone = GPT(SMALL, 50, (name,), expert_scope="model").double()
        own = model.expert_tensors()
        alone.load_state_dict({k: p[number : number + 1] if k in own else p for k, p in model.named_parameters()})
        trunk = GPT(SMALL, 50, (name,), expert_scope="model").to("meta")

        def read(alone: GPT = alone, name: str = name) -> GPT:
            asked.append(name)
            copy = GPT(SMALL, 50, alone.experts, expert_scope="model").double()
            copy.load_state_dict(alone.state_dict())
            return copy

        trunk.read_weights = read
        trunks.append(trunk)
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
    assert asked == [*THREE, *THREE]
    # Two parts of which each has the tokens of one batch and a half at most.
    monkeypatch.setattr(continuations, "MOST_PROBABILITIES", 9 * 50)
    asked.clear()
    parts = continuation_log_probabilities(mixture_of("history", "uniform", None, None, trunks), wanted, 2)
    assert parts == apart
    assert len(asked) == 6 * 4


def test_a_shared_context_is_scored_once(monkeypatch) -> None:
    model = model_of(THREE)
    seen: list[int] = []
    forward = GPT.forward

    def counted(self: GPT, inputs: torch.Tensor, *more: object, **named: object) -> torch.Tensor:
        seen.append(inputs.numel())
        return forward(self, inputs, *more, **named)

    monkeypatch.setattr(GPT, "forward", counted)
    contexts = [(END, *DRAWN[:12]), (END, *DRAWN[20:32])]
    wanted = [Continuation(context, (token,)) for context in contexts for token in range(8)]
    continuation_log_probabilities(mixture_of("history", "uniform", None, None, [model]), wanted)
    # Twelve inputs of each context, and each continuation's last input of its context.
    assert seen == [2 * 12, 16]
    seen.clear()
    monkeypatch.setattr(continuations, "EXPERT_TOKENS_AT_ONCE", 3 * (12 + 8))
    continuation_log_probabilities(mixture_of("history", "uniform", None, None, [model]), wanted)
    assert seen == [12, 8] * 2
    seen.clear()
    monkeypatch.setattr(continuations, "MOST_CACHED_BYTES", 4 * 13 * 8 * 3 * SMALL.layers * SMALL.width)
    continuation_log_probabilities(mixture_of("history", "uniform", None, None, [model]), wanted)
    assert seen == [12, 4] * 4


@pytest.mark.parametrize("domain", ["law", "code"])
def test_a_domain_token_stands_before_every_block(domain: str) -> None:
    """In likelihoods, in texts of several blocks, and in decoding piece by piece."""
    model = model_of(("dense",), domain_tokens=THREE)
    begin = posteriors_of(weights_of("history", Path()), np.zeros(1), Path(), (domain,), None, LENGTH, None)
    mixture = MixedModel([model], begin, None, domain)
    text = DRAWN[:40]

    def scored(ids: list[int]) -> np.ndarray:
        """log p [N] after ids[0], by whole passes of the model."""
        sequence = np.full(-(-(len(ids) - 1) // LENGTH) * LENGTH + 1, 0)
        sequence[: len(ids)] = ids
        mask = (np.arange(len(sequence) - 1) < len(ids) - 1).reshape(-1, LENGTH)
        blocks = sequence[:-1].reshape(-1, LENGTH), sequence[1:].reshape(-1, LENGTH)
        return log_probabilities(model, *blocks, mask, domain_tokens=(domain,))[0]

    expected = scored([END, *text])
    assert text_log_probabilities(mixture, [text], END)[0] == pytest.approx(expected.sum(), abs=1e-9)
    decoder = mixture.decoder(torch.tensor([END]))
    found = torch.cat([decoder.read(piece)[0] for piece in torch.tensor([text]).split([3, 1, 12, 7, 17], 1)], 2)
    np.testing.assert_allclose(found[0, 0], expected, atol=1e-10)
    context = (END, *text[:9])
    wanted = [Continuation(context, tuple(text[9:14])), Continuation(context, (3,)), Continuation((END,), (5,))]
    answers = continuation_log_probabilities(mixture, wanted)
    for one, (log_p, _) in zip(wanted, answers, strict=True):
        assert log_p == pytest.approx(scored([*one.context, *one.tokens])[len(one.context) - 1 :].sum(), abs=1e-9)
    with pytest.raises(DemixError, match="domain-token model"):
        Decoder([model], torch.tensor([END]), begin(torch.tensor([END])))


def test_a_long_context_loses_its_first_tokens() -> None:
    assert within([END, *DRAWN[:14]], DRAWN[14:16], 16) == Continuation((END, *DRAWN[:14]), tuple(DRAWN[14:16]))
    assert within([END, *DRAWN[:30]], DRAWN[30:32], 16) == Continuation(tuple(DRAWN[15:30]), tuple(DRAWN[30:32]))
    assert within([END, 1, 2], DRAWN[:16], 16) == Continuation((2,), tuple(DRAWN[:16]))
    with pytest.raises(DemixError, match="continuation: has 17 tokens, more than the 16 that the model sees"):
        within([END], DRAWN[:17], 16)


def test_a_model_that_gives_no_probability_is_refused() -> None:
    model = model_of(THREE)
    with torch.no_grad():
        model.blocks[1].feedforward.down[1, 0, 0] = float("nan")
    with pytest.raises(DemixError, match="model: gives tokens no probability"):
        continuation_log_probabilities(
            mixture_of("history", "uniform", None, None, [model]), [Continuation((1,), (2,))]
        )


def test_the_largest_weights_are_kept() -> None:
    log_g = np.random.default_rng(1).normal(size=(4, 7, 5))
    log_g[0, 0] = [1.0, 2.0, 2.0, 2.0, 0.0]
    log_g = log_softmax(log_g, axis=-1)
    for k in range(1, 7):
        kept = mixtures.keep_top(log_g, k)
        for row, before in zip(kept.reshape(-1, 5), log_g.reshape(-1, 5), strict=True):
            least = sorted(before, reverse=True)[min(k, 5) - 1]
            weights = np.where(before >= least, np.exp(before), 0)
            np.testing.assert_allclose(np.exp(row), weights / weights.sum(), atol=1e-12)
        # The three of weight 2 stay together.
        assert (kept[0, 0] > -np.inf).sum() == {1: 3, 2: 3, 3: 3, 4: 4}.get(k, 5)
    assert mixtures.keep_top(log_g, None) is log_g


def test_decoding_mixes_the_likeliest_experts_alone() -> None:
    model = model_of(THREE)
    randomise(model, 3)
    text, before = torch.tensor([DRAWN[:21]]), torch.tensor([END])
    for k in (1, 2):
        mixture = mixture_of("history", "uniform", None, k, [model])
        decoder = mixture.decoder(before)
        scores, log_g = decoder.read(text)
        # At the start of a block all weights are equal.
        expected = torch.where(torch.arange(21) % LENGTH == 0, len(THREE), k)
        assert ((log_g > -torch.inf).sum(-1) == expected).all()
        table, mask = in_blocks(scores[:, 0].numpy())
        mixed = (log_g[0].T + scores[:, 0]).logsumexp(0)
        np.testing.assert_allclose(mixed, mix(table, mask, "uniform", "history", top_k=k)[mask], atol=1e-10)
        assert decoder.next_log_probabilities().logsumexp(-1) == pytest.approx(0, abs=1e-6)
        foretold = decoder.next_log_probabilities()[0, 7]
        scores, log_g = decoder.read(torch.tensor([[7]]))
        assert foretold == pytest.approx(float((log_g[0, 0] + scores[:, 0, 0]).logsumexp(0)), abs=1e-6)
