"""The pass without gradients, which scores: the same numbers as with gradients, whatever is computed at once."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch

from demix.config.architecture import Architecture
from demix.model import gpt as module
from demix.model.gpt import GPT
from demix.model.layers import demix as layer


@contextmanager
def at_once(monkeypatch: pytest.MonkeyPatch, rows: int) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(layer, "ROWS_AT_ONCE", rows)
        patch.setitem(module.ROWS_AT_ONCE, "cpu", 2 * rows)
        patch.setattr(module, "NORMALISED_AT_ONCE", rows)
        yield


@pytest.mark.parametrize("activation", ["gelu", "gelu_new"])
@pytest.mark.parametrize("shared", [True, False])
def test_scores_are_those_of_the_pass_with_gradients(
    activation: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Architecture(2, 16, 2, 12, activation=activation)
    model = GPT(shape, 50, ("a", "b", "c")).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3
    inputs, targets = torch.randint(50, (2, 1 if shared else 3, 3, 12), generator=generator)
    found = {}
    # 36 rows of an expert and 108 of all: in one piece, in whole pieces, and with a short piece at the end.
    for rows in (0, 1000, 12, 7):
        with torch.no_grad() if rows else nullcontext(), at_once(monkeypatch, rows or 1000):
            hidden = model(inputs)
            found[rows] = model.log_probabilities(hidden, targets).detach().numpy()
    logits = torch.log_softmax(model.logits(model(inputs)), -1).detach()
    expected = logits.gather(-1, targets.expand(3, 3, 12)[..., None]).squeeze(-1).numpy()
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
