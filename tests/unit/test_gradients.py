"""Gradients of the stacked layers' operators and of the softmax, against torch."""

import pytest
import torch
from torch import nn

from demix.config.architecture import Architecture
from demix.model import heads
from demix.model.moe import DEMixLayer


def numbers(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_the_compiler_sees_one_graph() -> None:
    layer = DEMixLayer(Architecture(layers=1, width=8, heads=2, context=4), (2,))
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 3, 4, 8)
    results = []
    for module in (layer, compiled):
        output = module(x)
        results.append((output, torch.autograd.grad(output.square().sum(), [*layer.parameters()])))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("needed", [False, True])
def test_the_softmax_of_a_gpu_is_that_of_a_cpu(needed: bool) -> None:
    """With columns that fill the rows up, which get no probability and no gradient."""
    logits, targets = 9 * numbers(7, 5), torch.arange(7) % 5
    padded = torch.cat([logits, torch.full((7, 3), 50.0)], 1)
    found = heads._normalise_padded(padded, targets, 5, needed)
    expected = heads._normalise_in_cache(logits, targets, 5, needed)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    if needed:
        torch.testing.assert_close(padded, torch.cat([logits, torch.zeros(7, 3)], 1), rtol=1e-12, atol=1e-12)


def test_a_gradient_of_bf16_keeps_the_digits_of_a_likely_target() -> None:
    logits, target = torch.tensor([[9.0, 0.0, 0.0]]).bfloat16(), torch.tensor([0])
    exact = logits.double().softmax(1)[0, 0].item() - 1
    heads._normalise_padded(logits, target, 3, True)
    assert logits[0, 0].item() == pytest.approx(exact, rel=2**-8)
