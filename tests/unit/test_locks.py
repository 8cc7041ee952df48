"""A lock that cannot be taken for want of a file is an error, never a run without a lock."""

from pathlib import Path

import pytest

from demix.files import exclusive


def test_a_lock_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.mkdir()
    with pytest.raises(IsADirectoryError) as refused, exclusive(lock, "trains this run"):
        pytest.fail("the work began without a lock")
    assert refused.value.filename == str(lock)
