"""When files were made, where several runs share them."""

import os
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from snakemake.io import _IOFile

# The places in a run of text that another run may have made (`demix.data.shared`).
_TEXT = frozenset({"documents", "corpus", "tokens", "tokenizer.json"})


def keep_shared_times() -> None:
    """Let Snakemake leave the time of text that several runs share as it is.

    Snakemake sets the time of every file that a job has made, and of all files with --touch. Of a hard link that is the
    time in the other run too, whose training would then be older than its tokens, and run again.
    """
    # This module cannot be the first of Snakemake's that is imported.
    from snakemake import io

    touch = io._IOFile.touch

    def touch_own(file: "_IOFile", times: Any = None) -> None:
        parts = PurePath(str(file)).parts
        if not (parts[2:3] and parts[2] in _TEXT and os.path.exists(file) and os.stat(file).st_nlink > 1):
            touch(file, times)

    io._IOFile.touch = touch_own
