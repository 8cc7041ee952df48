"""The pass without gradients, which scores: the same numbers as with gradients, whatever is computed at once."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch

from demix.config.architecture import Architecture
from demix.model import softmax as module
from demix.model.gpt import GPT
from demix.model.layers import demix as layer
from demix.model.scoring import MOST_ON_GPU, expert_tokens_at_once, log_probabilities

VOCABULARY = 50


@contextmanager
def at_once(monkeypatch: pytest.MonkeyPatch, rows: int) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(layer, "ROWS_AT_ONCE", rows)
        patch.setitem(module.ROWS_AT_ONCE, "cpu", 2 * rows)
        patch.setattr(module, "NORMALISED_AT_ONCE", rows * VOCABULARY)
        yield


@pytest.mark.parametrize("activation", ["gelu", "gelu_new"])
@pytest.mark.parametrize("shared", [True, False])
def test_scores_are_those_of_the_pass_with_gradients(
    activation: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Architecture(2, 16, 2, 12, activation=activation)
    model = GPT(shape, VOCABULARY, ("a", "b", "c")).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3
    inputs, targets = torch.randint(VOCABULARY, (2, 1 if shared else 3, 3, 12), generator=generator)
    found = {}
    # 36 rows of an expert and 108 of all: in one piece, in whole pieces, and with a short piece at the end.
    for rows in (0, 1000, 12, 7):
        with torch.no_grad() if rows else nullcontext(), at_once(monkeypatch, rows or 1000):
            hidden = model(inputs)
            found[rows] = model.log_probabilities(hidden, targets).detach().numpy()
    logits = torch.log_softmax(model.logits(model(inputs)), -1).detach()
    expected = logits.gather(-1, targets.expand(3, 3, 12)[..., None]).squeeze(-1).numpy()
    with torch.no_grad():
        assert model.log_probabilities(model(inputs[:, :0]), targets[:, :0]).shape == (3, 0, 12), "no text at all"
    for scores in found.values():
        np.testing.assert_allclose(scores, expected, rtol=1e-10)


def test_half_precision_has_logits_of_full_precision() -> None:
    """In 8 bits of bf16 a logit of 16 would be off by up to 0.06 nats."""
    generator = torch.Generator().manual_seed(1)
    states, weight = (torch.randn(rows, 64, generator=generator).bfloat16() for rows in (300, 500))
    targets = torch.randint(500, (300,), generator=generator)
    with torch.no_grad():
        found, *_ = module._log_probabilities(4 * states, weight, targets)
    exact = torch.log_softmax(4 * states.double() @ weight.double().T, -1).gather(1, targets[:, None]).squeeze(1)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found, exact, atol=1e-3)


def test_a_gpu_computes_as_much_at_once_as_fits() -> None:
    """12 x 768 in fp32: a block holds 17 vectors of 768 numbers for each token and expert, beside 824 MB of logits."""
    with torch.device("meta"):
        model = GPT(Architecture(12, 768, 12, 256), 50257, ("a", "b"))
    each, logits = 17 * 768 * 4, 4096 * 50257 * 4
    for fits, expected in ((0, 1), (1, 1), (1023, 512), (1024, 1024), (100_000, 65_536), (10**9, MOST_ON_GPU)):
        assert expert_tokens_at_once(model, free=2 * (logits + fits * each)) == expected
    assert expert_tokens_at_once(model, free=0) == 1
    # Of bf16 the vectors but the embeddings take half, and the logits half more.
    half = 768 * (16 * 2 + 4), 4096 * 50257 * 6
    assert expert_tokens_at_once(model, torch.bfloat16, free=2 * (half[1] + 1024 * half[0])) == 1024
    assert expert_tokens_at_once(model, torch.bfloat16, free=2 * (half[1] + 1024 * half[0]) - 2) == 512
    assert expert_tokens_at_once(GPT(Architecture(1, 8, 1, 8), 9, ("a",))) == 8192, "a CPU goes by its cache"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_a_gpu_computes_at_once_takes_no_more_than_was_free(dtype: torch.dtype | None) -> None:
    model = GPT(Architecture(4, 512, 8, 256), 32000, ("a", "b", "c", "d")).initialise(1).cuda()
    ids = np.random.default_rng(0).integers(0, 32000, (2, 256, 256))
    batch = expert_tokens_at_once(model, dtype)
    torch.cuda.reset_peak_memory_stats()
    before, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    found = log_probabilities(model, *ids, np.ones(ids[0].shape, bool), dtype)
    assert torch.cuda.max_memory_allocated() - before < free
    assert found.shape == (4, 256 * 256)
    assert expert_tokens_at_once(model, dtype) == batch, "what torch keeps is free"
