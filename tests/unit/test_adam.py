"""Our AdamW against the class of torch, to the bit, and without what that class imports."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from demix.train.adam import AdamW


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_updates_have_the_bits_of_torchs_class(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours, theirs = ([nn.Parameter(torch.arange(float(size)).to(dtype) / 7) for size in (5, 33, 1)] for _ in range(2))
    mine = AdamW(iter(ours), weight_decay=0.1)
    peer = torch.optim.AdamW(theirs, betas=(0.9, 0.95), eps=1e-7, weight_decay=0.1, fused=True)
    for rate in (1e-2, 3e-3, 0.0, 1e-1):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        peer.param_groups[0]["lr"] = rate
        mine.step(rate)
        peer.step()
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)
            assert {name: value.tolist() for name, value in mine.state[a].items()} == {
                name: value.tolist() for name, value in peer.state[b].items()
            }


def test_a_training_step_imports_no_compiler() -> None:
    code = """
import sys
import torch
from demix.config.architecture import Architecture
from demix.model.gpt import GPT
from demix.train.adam import AdamW
model = GPT(Architecture(1, 8, 2, 4), 16, ("a", "b")).initialise(0)
ids = torch.zeros(2, 1, 4, dtype=torch.long)
model.log_probabilities(model(ids), ids).sum().backward()
AdamW(model.parameters(), 0.1).step(1e-3)
print(*(name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == []
