"""What the workflow changes of Snakemake, in its process alone."""

import os
from collections.abc import Awaitable, Callable
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from snakemake.io import _IOFile

# The places in a run of text that another run may have made (`demix.data.shared`).
_TEXT = frozenset({"documents", "corpus", "tokens", "tokenizer.json"})


def patch_snakemake() -> None:
    """Make all of these changes."""
    end_at_errors()
    read_once()
    keep_shared_times()


def end_at_errors() -> None:
    """Let an error in finding out how a file is made end Snakemake, of a file that is there already, too.

    Snakemake by itself warns and takes such a file as it is: the run ends well, with old results.
    """
    # This module cannot be the first of Snakemake's that is imported, and neither can those below.
    from snakemake import dag
    from snakemake.exceptions import RuleException

    def end(error: Exception, *_: object) -> None:
        # Snakemake catches all errors but this one where the file is there.
        raise RuleException(str(error), rule=getattr(error, "rule", None)) from error

    dag.print_exception_warning = end


def read_once() -> None:
    """Let Snakemake read a file once for its checksum, as long as the file stays the same.

    When a job ends, Snakemake notes with each file that the job made the checksums of all files that the job read, and
    reads these files again for each: nine times the text of a domain that is tokenized, and the text of all training
    domains three times for each domain when their documents are assigned to clusters.
    """
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


def keep_shared_times() -> None:
    """Let Snakemake leave the time of text that several runs share as it is.

    Snakemake sets the time of every file that a job has made, and of all files with --touch. Of a hard link that is the
    time in the other run too, whose training would then be older than its tokens, and run again.
    """
    from snakemake import io

    touch = io._IOFile.touch

    def touch_own(file: "_IOFile", times: Any = None) -> None:
        parts = PurePath(str(file)).parts
        if not (parts[2:3] and parts[2] in _TEXT and os.path.exists(file) and os.stat(file).st_nlink > 1):
            touch(file, times)

    io._IOFile.touch = touch_own
