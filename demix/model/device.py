"""The device, the number of threads and the number type of a computation."""

import ctypes
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

from demix.errors import DemixError

# The type of activations. Weights and optimizer state are fp32, except with fp64, which is for exact comparisons.
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
LACKING_CURE = "set training.precision to fp16, evaluation.precision to fp32, or use other GPUs"

# Options of glibc's mallopt (malloc.h).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4


def compute_type(precision: str) -> torch.dtype:
    """The torch type for a config's `precision`.

    Raises DemixError for bf16 on an NVIDIA GPU before compute capability 8.0, which torch would emulate slowly.
    """
    if precision == "bf16" and torch.cuda.is_available() and not torch.version.hip:
        name, (major, minor) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        if major < 8:
            cause = f"is not supported by {name}: its compute capability is {major}.{minor}, and bf16 needs 8.0"
            raise DemixError("precision bf16", cause, LACKING_CURE)
    return PRECISIONS[precision]


def set_threads(threads: int) -> None:
    """Let torch use `threads` CPU threads. The last bits of results depend on this number.

    From then on, the process keeps the memory of freed tensors.
    """
    torch.set_num_threads(threads)
    _keep_memory()


def _keep_memory() -> None:
    """Let glibc reuse freed memory for the next tensor, instead of returning it to the system.

    The system would fill each page with zeros when it is used again, which is a tenth of the time of a bf16 training
    step.
    """
    if platform.libc_ver()[0] == "glibc":
        allocator = ctypes.CDLL(None)
        for option, value in (_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 64 << 20):
            allocator.mallopt(option, value)


def free_memory(device: torch.device) -> int:
    """The free bytes on `device`: a GPU's own memory, or the machine's memory that is available without swapping.

    GPU memory that torch keeps for its next tensors counts as free.
    """
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0] + kept)


@contextmanager
def within_memory(name: str, cure: str) -> Iterator[None]:
    """Raise DemixError with the subject `name` and this `cure` if there is not enough memory for a tensor."""
    try:
        yield
    except RuntimeError as error:
        said = str(error).splitlines()[0]
        # torch has an exception class only for GPU memory.
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in said:
            wanted = re.search(r"allocate ([\d.]+ \w+)", said)
            more = f": {wanted[1]} more" if wanted else ""
            raise DemixError(name, f"needs more memory than there is{more}", cure) from error
        raise


def device_named(name: str | None) -> torch.device:
    """The device `cpu`, `cuda` or `cuda:<number>`; for None `own_device`. Raises DemixError if it is not available."""
    if name is None:
        return own_device()
    known = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    known += [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    if name not in known:
        raise DemixError(f"--device {name:.40}", "is not available on this machine", f"use one of {', '.join(known)}")
    return torch.device(name)


def own_device() -> torch.device:
    """The GPU with the number LOCAL_RANK; the CPU on a machine without a GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
