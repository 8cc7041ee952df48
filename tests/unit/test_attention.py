"""Attention by whole matrices of scores, as bf16 training on a CPU takes it, against torch's own."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from demix.config.architecture import Architecture
from demix.model.layers import attention
from demix.model.layers.attention import Attention, attend, attention_bias

T, D, H = 9, 8, 3
ALIBI = {"position": "alibi"}
CASES = {
    "causal": {},
    "bidirectional": {"attention": "bidirectional", "objective": "mlm"},
    "alibi": ALIBI,
    "alibi both ways": ALIBI | {"attention": "bidirectional", "objective": "mlm", "alibi": "asymmetric"},
}


def numbers(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(len(size)), dtype=torch.float64)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_outputs_and_gradients_are_those_of_torch(options: dict[str, str]) -> None:
    sizes = Architecture(1, H * D, H, T, **options)
    bias = attention_bias(sizes, T, None, torch.device("cpu"), torch.float64)
    causal = bias is None and sizes.attention == "causal"
    incoming, found = numbers(2, H, T, D), []
    for function in (
        lambda q, k, v: attend(q, k, v, bias, causal),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal),
    ):
        # As the layer has them: views of one tensor.
        qkv = numbers(2, T, 3, H, D).requires_grad_()
        mixed = function(*qkv.permute(2, 0, 3, 1, 4))
        found.append((mixed.detach(), *torch.autograd.grad(mixed, qkv, incoming)))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


class Operators(TorchDispatchMode):
    """Notes the names of all operators of torch that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


@pytest.fixture
def layer() -> Attention:
    torch.manual_seed(1)
    return Attention(H * D, H)


@pytest.mark.parametrize(
    ("dtype", "gradients", "positions", "scores", "whole"),
    [
        (torch.bfloat16, True, T, 2 * H * T * T, True),
        (torch.bfloat16, True, T - 1, 2 * H * T * T, False),
        (torch.bfloat16, True, T, 2 * H * T * T - 1, False),
        (torch.bfloat16, False, T, 2 * H * T * T, False),
        (torch.float32, True, T, 2 * H * T * T, False),
    ],
    ids=["training", "longer", "larger", "scoring", "fp32"],
)
def test_only_training_in_bf16_takes_whole_matrices(
    dtype: torch.dtype,
    gradients: bool,
    positions: int,
    scores: int,
    whole: bool,
    layer: Attention,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "WHOLE_POSITIONS", positions)
    monkeypatch.setattr(attention, "WHOLE_SCORES", scores)
    x = numbers(1, 2, T, H * D)
    with nullcontext() if gradients else torch.no_grad(), Operators() as seen:
        found = layer(x.to(dtype))
    assert ("aten::baddbmm" in seen.names) == whole
    exact = layer.double()(x)
    assert (found - exact).norm() < 0.01 * exact.norm()
