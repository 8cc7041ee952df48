"""Checksums of the files that jobs read, where Snakemake notes them."""

import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from snakemake.io import _IOFile


def read_once() -> None:
    """Let Snakemake read a file once for its checksum, as long as the file stays the same.

    When a job ends, Snakemake notes with each file that the job made the checksums of all files that the job read, and
    reads these files again for each: nine times the text of a domain that is tokenized, and the text of all training
    domains three times for each domain when their documents are assigned to clusters.
    """
    # This module cannot be the first of Snakemake's that is imported.
    from snakemake import io

    checksum: Callable[..., Awaitable[str | None]] = io._IOFile.checksum
    known: dict[tuple[Any, ...], str | None] = {}

    async def of_unchanged(
        file: "_IOFile", threshold: int | None = None, force: bool = False, algorithm: Any = None
    ) -> str | None:
        if file.is_storage or not os.path.isfile(file):
            return await checksum(file, threshold, force, algorithm)
        found = os.stat(file)
        key = str(file), found.st_ino, found.st_size, found.st_mtime_ns, threshold, force, algorithm
        if key not in known:
            known[key] = await checksum(file, threshold, force, algorithm)
        return known[key]

    io._IOFile.checksum = of_unchanged
