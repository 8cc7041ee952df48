"""What a computation runs on: the device, the number of threads, the type of its numbers."""

import os

import torch

from demix.errors import DemixError

# The type of activations. Weights and optimizer state are fp32 but for fp64, which is for exact comparisons.
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def compute_type(precision: str) -> torch.dtype:
    """The type that a config's `precision` names."""
    if precision not in PRECISIONS:
        raise DemixError(f"precision {precision}", "is not known", f"use one of {', '.join(PRECISIONS)}")
    return PRECISIONS[precision]


def set_threads(threads: int) -> None:
    """Let torch use so many CPU threads; results depend on it in their last bits."""
    if threads < 1:
        raise DemixError("threads", f"is {threads}", "give 1 or more")
    torch.set_num_threads(threads)


def own_device() -> torch.device:
    """This process's GPU, that of its LOCAL_RANK, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
