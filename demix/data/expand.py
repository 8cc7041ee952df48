"""The bytes of files and of members of archives, decompressed within bounds. Damage raises DemixError."""

import gzip
import io
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from demix.config.files import COMPRESSIONS
from demix.errors import DemixError
from demix.files import opened
from demix.files.kinds import GZIP, HEAD, check_kind

MAX_RATIO = 200
RATIO_FREE_BYTES = 64 << 20
_OF_FORMATS = (zlib.error, zipfile.BadZipFile, tarfile.TarError, pa.ArrowException)
# The exceptions that readers of damaged bytes raise.
DAMAGE = (*_OF_FORMATS, OSError, ValueError, EOFError, NotImplementedError)


class Bound:
    """The number of bytes to which one file on disk may still expand, over all layers of compression."""

    def __init__(self, path: Path):
        self.path, self.size = path, path.stat().st_size
        self.left = max(RATIO_FREE_BYTES, MAX_RATIO * self.size)

    def spend(self, count: int) -> None:
        self.left -= count
        self.refuse(0)

    def spent_on(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """`batch` without dictionaries; its bytes in memory are subtracted from the bound."""
        decoded = [one.dictionary_decode() if pa.types.is_dictionary(one.type) else one for one in batch.columns]
        batch = pa.record_batch(decoded, names=batch.schema.names)
        self.spend(batch.nbytes)
        return batch

    def refuse(self, more: int) -> None:
        """Raise DemixError if `more` further bytes are too many."""
        if self.left < more:
            raise DemixError(
                self.path,
                f"expands to over {MAX_RATIO} times its {self.size} bytes",
                "if it is no decompression bomb, decompress it by hand, or write the Parquet file again",
            )


class _Decompressed(io.RawIOBase):
    """The bytes of a plain, gzip or zstd stream. Raises DemixError if it is damaged, truncated or a bomb."""

    def __init__(self, path: Path, stream: Any, bound: Bound | None, compression: str | None):
        self.path, self.bound = path, bound
        if compression == GZIP:
            # Unlike Arrow's reader, Python's skips zeros at the end, which tapes and block devices add.
            stream = gzip.GzipFile(fileobj=stream)
        elif compression:
            stream = pa.CompressedInputStream(pa.PythonFile(stream, mode="r"), compression)
        self.stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self.stream.read(len(buffer))
        except DAMAGE as e:
            cause, cure = f"is damaged or cut short ({e})", "fetch it again"
            if "too much memory" in str(e):
                cause, cure = "has a window of over 128 MiB", "compress it again: zstd -d --long=31 FILE, zstd FILE"
            raise DemixError(self.path, cause, cure) from None
        if self.bound:
            self.bound.spend(len(data))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self.stream.close()
        super().close()


@contextmanager
def expanded(path: Path, bound: Bound | None, wanted: str, stream: Any = None) -> Iterator[io.BufferedReader]:
    """The decompressed bytes of a file on disk, or of the member `path` of an archive, whose bytes `stream` has.

    Raises DemixError if the first bytes do not belong to the kind `wanted`, compressed as the name says.
    """
    compression = COMPRESSIONS.get(path.suffix.lower())
    with ExitStack() as stack:
        if stream is None:
            try:
                stream = stack.enter_context(opened(path))
            except OSError as error:
                cause = f"cannot be read ({error.strerror or error})"
                raise DemixError(path, cause, "fix its permissions") from None
            # An uncompressed file does not expand.
            outer, bound = None, (bound or Bound(path)) if compression else None
        else:
            outer = bound
        content = _buffered(stack, path, stream, outer, None)
        check_kind(path, content.peek(HEAD)[:HEAD], compression or wanted)
        if compression:
            content = _buffered(stack, path, content, bound, compression)
            check_kind(path, content.peek(HEAD)[:HEAD], wanted)
        yield content


def _buffered(
    stack: ExitStack, path: Path, stream: Any, bound: Bound | None, compression: str | None
) -> io.BufferedReader:
    return stack.enter_context(io.BufferedReader(_Decompressed(path, stream, bound, compression), 1 << 18))
