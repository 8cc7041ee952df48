"""Gradients of the stacked layers' operators and of the softmax, against torch."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from demix.model import softmax
from demix.model.layers import demix


def numbers(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_operators_are_what_the_compiler_takes_them_for(dtype: torch.dtype) -> None:
    x, weight, bias = numbers(3, 4, 8).to(dtype), numbers(3, 6, 8), numbers(3, 6)
    weight, bias = (weight, bias) if dtype == torch.float64 else (weight.float(), bias.float())
    checked = ("test_schema", "test_autograd_registration", "test_faketensor")
    args = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    torch.library.opcheck(demix._stacked_linear, args, test_utils=checked)
    found = demix._stacked_linear(*args)
    plain = torch.einsum("eni,eoi->eno", x, weight.to(dtype)) + bias.to(dtype)[:, None]
    tolerance = 1e-12 if dtype == torch.float64 else 0.05
    torch.testing.assert_close(found, plain, rtol=tolerance, atol=tolerance)
    incoming = numbers(3, 4, 6, seed=1).to(dtype)
    backward = [incoming, *(tensor.detach() for tensor in args[:2])]
    torch.library.opcheck(demix._stacked_linear_backward, backward, test_utils=("test_schema", "test_faketensor"))
    ours, theirs = (torch.autograd.grad(output, args, incoming) for output in (found, plain))
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=2 * tolerance)


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_the_compiler_sees_one_graph() -> None:
    layer = demix.DEMixLayer(2, 8)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 3, 4, 8)
    results = []
    for module in (layer, compiled):
        output = module(x)
        results.append((output, torch.autograd.grad(output.square().sum(), [*layer.parameters()])))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("factor", [lambda found: 1.0, lambda found: torch.arange(len(found)).double()])
def test_a_second_backward_gives_the_same_gradients(factor: Callable) -> None:
    states, weight = numbers(7, 3).requires_grad_(), numbers(5, 3, seed=1).requires_grad_()
    targets = torch.arange(7) % 5
    found = softmax._LogProbabilities.apply(states, weight, targets)
    plain = -F.cross_entropy(states @ weight.T, targets, reduction="none")
    theirs = torch.autograd.grad((plain * factor(plain)).sum(), (states, weight))
    for last in (False, True):
        ours = torch.autograd.grad((found * factor(found)).sum(), (states, weight), retain_graph=not last)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("needed", [False, True])
def test_the_softmax_of_a_gpu_is_that_of_a_cpu(needed: bool, weighted: bool, z_loss: float) -> None:
    """With columns that fill the rows up, which get no probability and no gradient."""
    logits, targets = 9 * numbers(7, 5), torch.arange(7) % 5
    factors = numbers(7, seed=1) if weighted else None
    padded = torch.cat([logits, torch.full((7, 3), 50.0)], 1)
    found = softmax._normalise_padded(padded, targets, 5, needed, factors, z_loss)
    expected = softmax._normalise_in_cache(logits, targets, 5, needed, factors, z_loss)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    if needed:
        torch.testing.assert_close(padded, torch.cat([logits, torch.zeros(7, 3)], 1), rtol=1e-12, atol=1e-12)


def test_a_gradient_of_bf16_keeps_the_digits_of_a_likely_target() -> None:
    logits, target = torch.tensor([[9.0, 0.0, 0.0]]).bfloat16(), torch.tensor([0])
    exact = logits.double().softmax(1)[0, 0].item() - 1
    softmax._normalise_padded(logits, target, 3, True, None, 0.0)
    assert logits[0, 0].item() == pytest.approx(exact, rel=2**-8)
