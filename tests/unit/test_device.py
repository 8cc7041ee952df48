"""The memory of a process that computes."""

import platform
import subprocess
import sys

import pytest

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
