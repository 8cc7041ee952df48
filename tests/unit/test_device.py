"""The memory of a process that computes, and the number types of its GPU."""

import platform
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch

from demix.model.device import compute_type, refuse_lacking, within_memory
from support.errors import refused

FREED = """
import psutil
import torch
from demix.model.device import set_threads
for setting in (False, True):
    if setting:
        set_threads(1)
    before = psutil.Process().memory_info().rss
    tensor = torch.ones(64 << 18)
    del tensor
    print(psutil.Process().memory_info().rss - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc, whose allocator is set")
def test_memory_that_a_tensor_leaves_stays_with_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", FREED], capture_output=True, check=True)
    returned, kept = map(int, ended.stdout.split())
    assert kept > 60 << 20 > 4 * returned


def test_a_gpu_without_bf16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a V100 in the place of torch's GPU."""
    with refused("precision bf16"):
        refuse_lacking("bf16", (7, 0), "Tesla V100")
    refuse_lacking("bf16", (8, 0), "A100")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (7, 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "Tesla V100")
    assert compute_type("fp16") == torch.float16
    with refused("precision bf16"):
        compute_type("bf16")


def test_a_lack_of_memory_is_one_line_and_other_errors_pass() -> None:
    with refused("training") as caught, within_memory("training", "lower it"):
        torch.empty(1 << 60, dtype=torch.uint8)
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(RuntimeError, match="size"), within_memory("training", "lower it"):
        torch.ones(2) @ torch.ones(3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_lack_of_a_gpus_memory_is_one_line() -> None:
    with refused("training"), within_memory("training", "lower it"):
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_has_bf16_as_torch_says() -> None:
    has = torch.cuda.is_bf16_supported(including_emulation=False)
    with nullcontext() if has else refused("precision bf16"):
        compute_type("bf16")
