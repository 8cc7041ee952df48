"""The memory of a process that computes, and the number types of its GPU."""

import platform
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch

from demix.errors import DemixError
from demix.model.device import compute_type, refuse_lacking, within_memory

FREED = """
import psutil
import torch
from demix.model.device import set_threads
if {set}:
    set_threads(1)
before = psutil.Process().memory_info().rss
tensor = torch.ones(64 << 18)
del tensor
print(psutil.Process().memory_info().rss - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc, whose allocator is set")
def test_memory_that_a_tensor_leaves_stays_with_the_process() -> None:
    kept, returned = (
        int(subprocess.run([sys.executable, "-c", FREED.format(set=set)], capture_output=True, check=True).stdout)
        for set in (True, False)
    )
    assert kept > 60 << 20 > 4 * returned


def test_a_gpu_without_bf16_is_refused() -> None:
    with pytest.raises(DemixError, match=r"^precision bf16: is not of Tesla V100.* 7\.0 .*; set training\.precision"):
        refuse_lacking("bf16", (7, 0), "Tesla V100")
    refuse_lacking("bf16", (8, 0), "A100")
    refuse_lacking("fp16", (7, 0), "Tesla V100")


def test_a_lack_of_memory_is_one_line_and_other_errors_pass() -> None:
    told = pytest.raises(DemixError, match=r"^training: needs more memory than there is(: .*)?; lower it$")
    with told as caught, within_memory("training", "lower it"):
        torch.empty(1 << 60, dtype=torch.uint8)
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(RuntimeError, match="size"), within_memory("training", "lower it"):
        torch.ones(2) @ torch.ones(3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_lack_of_a_gpus_memory_is_one_line() -> None:
    told = pytest.raises(DemixError, match=r"^training: needs more memory than there is: .* GiB more; lower it$")
    with told, within_memory("training", "lower it"):
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")


def test_the_gpu_here_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A V100 in the place of torch's GPU."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (7, 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "Tesla V100")
    assert compute_type("fp16") == torch.float16
    with pytest.raises(DemixError, match="is not of Tesla V100"):
        compute_type("bf16")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_has_bf16_as_torch_says() -> None:
    refused = nullcontext() if torch.cuda.is_bf16_supported(including_emulation=False) else pytest.raises(DemixError)
    with refused:
        compute_type("bf16")
