"""The memory of a process that computes, and the number types of its GPU."""

from contextlib import nullcontext

import pytest
import torch

from demix.model.device import compute_type, within_memory
from support.errors import refused


def test_a_gpu_without_bf16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "A100")
    assert compute_type("bf16") == torch.bfloat16
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (7, 5))
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
