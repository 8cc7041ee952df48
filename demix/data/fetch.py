"""Downloads: over HTTP with our own resuming, from object stores such as S3 with fsspec and each store's library.

Downloads are checked, and never leave an incomplete file under the final name.
"""

import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from errno import ENOSPC
from glob import has_magic
from logging import getLogger
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
from urllib3.exceptions import HTTPError, ProtocolError

from demix.config.addresses import STORES, local
from demix.config.domains import SourceSection
from demix.config.files import is_data
from demix.errors import DemixError, masked
from demix.files import fsync, sha256_file
from demix.progress import progress

RETRIED_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
ATTEMPTS = 8
# With a transfer encoding, ranges and lengths would not be those of the file.
HEADERS = {"Accept-Encoding": "identity", "User-Agent": "demix"}
# A server's error code is one word. Longer messages of a library could contain credentials.
_CODE = re.compile("[A-Za-z0-9]{1,60}")
NO_INTERNET = "; if compute nodes have no internet, set cluster.downloads: login"
_FIX = "fix the bucket, the path or the glob"
_ASK = (
    "check the network and the credentials that the store's library reads from the environment "
    "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, GOOGLE_APPLICATION_CREDENTIALS, …)"
)

_log = getLogger(__name__)


def fetch(
    address: str,
    path: Path,
    *,
    size: int | None = None,
    sha256: str | None = None,
    token: str | None = None,
    timeout: float = 60.0,
    backoff: float = 1.0,
) -> None:
    """Fetch `address` to `path` and check its `size` (bytes) and `sha256`; an existing file is only checked.

    Until the download is complete, the fetched bytes are next to `path` under another name. Over HTTP this call, or a
    later one, resumes from there if the server's ETag (or date) and length are still the same. After `ATTEMPTS`
    failures in a row without progress, raises DemixError; the pause after each is `backoff` seconds times a power of
    two, or the time that the server asks for. Raises DemixError at once if nothing shows whether the file is complete.
    `timeout` in seconds is for the connection and for each read. User and password come only from the netrc file;
    `token` is sent only to the host of `address`. A file of a store is fetched as a whole by the store's library, which
    retries.
    """
    one = _Fetched(address, path, size, sha256)
    if not path.exists():
        try:
            if one.scheme in STORES:
                _from_store(one)
            else:
                _over_http(one, token, timeout, backoff)
        except OSError as error:
            raise DemixError(path, f"cannot be written ({error.strerror})", "free space, then rerun") from None
    one.finish()


def mismatch(path: Path, size: int | None, sha256: str | None) -> str:
    """How a file differs from its expected size and digest, if they are given; empty if it does not differ."""
    if size not in (None, found := path.stat().st_size):
        return f"has {found} bytes, not {size}"
    if sha256 is not None and (digest := sha256_file(path)) != sha256:
        return f"has sha256 {digest}, not {sha256}"
    return ""


class _Fetched:
    """A partial download to `path`: the fetched bytes, in the same folder, and a note of the file's version."""

    def __init__(self, address: str, path: Path, size: int | None, sha256: str | None):
        self.address, self.path, self.size, self.sha256 = address, path, size, sha256
        self.partial, self.note = path.with_name(f".{path.name}.partial"), path.with_name(f".{path.name}.etag")
        parts = urlsplit(address)
        # The shown address has no user, password and query, which may be secret. A name in a store is not a URL.
        plain = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        self.scheme = parts.scheme
        self.shown = address if self.scheme in STORES else plain

    @property
    def done(self) -> int:
        """The number of bytes fetched so far."""
        return self.partial.stat().st_size if self.partial.exists() else 0

    def refused(self, problem: str) -> DemixError:
        """Remove the fetched bytes; return the error for a file that differs from the config's size or digest."""
        self.discard()
        return DemixError(self.shown, problem, "if the source was changed on purpose, change the config; else rerun")

    def discard(self) -> None:
        """Remove the fetched bytes. In this order, old bytes never have a new validator."""
        self.partial.unlink(missing_ok=True)
        self.note.unlink(missing_ok=True)

    def append(self, pieces: Iterable[bytes], version: str, length: int | None) -> None:
        """Append the rest of a `version` of the file, but stop if it is longer than `length`."""
        began, begun = time.monotonic(), self.done
        fetched = 0
        with open(self.partial, "ab") as file:
            if version:
                self.note.write_text(version)
            with progress(f"{self.shown}: MB", length / 1e6 if length else None, begun / 1e6) as advance:
                for data in pieces:
                    file.write(data)
                    fetched += len(data)
                    if length is not None and begun + fetched > length:
                        return
                    advance(len(data) / 1e6, f"{fetched / 1e6 / (time.monotonic() - began):.1f} MB/s")

    def finish(self) -> None:
        """Check the fetched file and rename it to its final name; a file that already has it is only checked.

        Raises DemixError if its bytes differ; they are then removed.
        """
        whole = self.path if self.path.exists() else self.partial
        if problem := mismatch(whole, self.size, self.sha256):
            whole.unlink()
            raise self.refused(problem)
        if whole == self.partial:
            fsync(self.partial)
            self.partial.replace(self.path)
            fsync(self.path.parent)
            self.note.unlink(missing_ok=True)


def check_network(sources: Iterable[SourceSection]) -> None:
    """Raise DemixError if there is no response at all from the first HTTP address of `sources`.

    Otherwise each source would be tried for minutes if there is no network. A store reports errors at once.
    """
    hub = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    for source in sources:
        if source.kind == "url" or (source.kind == "hub" and not local(source.paths)):
            address = source.paths[0] if source.kind == "url" else hub
            try:
                requests.get(address, headers=HEADERS, stream=True, timeout=20.0).close()
            except (requests.RequestException, HTTPError, ValueError) as error:
                cause = f"does not answer ({' '.join(masked(str(error)).split())})"
                cure = "fix the network, or set a proxy (export HTTPS_PROXY=…), then rerun"
                raise DemixError(address, cause, cure) from None
            return


def _over_http(one: _Fetched, token: str | None, timeout: float, backoff: float) -> None:
    failures, furthest = 0, one.done
    with requests.Session() as session:
        if token:
            session.headers["Authorization"] = f"Bearer {token}"
        while True:
            answer = None
            try:
                answer = _go_on(session, one, timeout)
                if answer is None:
                    return
                problem = f"it answers {answer.status_code}"
            except (ValueError, requests.TooManyRedirects) as error:
                # The address, or one to which it redirects, can never be fetched.
                raise DemixError(one.shown, f"cannot be fetched ({error})", "correct the address") from None
            except (requests.RequestException, HTTPError) as error:
                problem = masked(str(error))
            # If the file changes, or is sent from its start, at each attempt, there is no progress.
            failures = 1 if one.done > furthest else failures + 1
            furthest = max(furthest, one.done)
            if failures > ATTEMPTS:
                cure = f"rerun to resume the download{NO_INTERNET if answer is None else ''}"
                raise DemixError(one.shown, f"cannot be fetched ({problem})", cure)
            _log.info("%s: %s; retrying", one.shown, problem)
            wait = answer.headers.get("Retry-After", "") if answer is not None else ""
            time.sleep(min(int(wait), 600) if wait.isdecimal() else min(backoff * 2 ** (failures - 1), 60))


def _go_on(session: Any, one: _Fetched, timeout: float) -> Any:
    """Fetch the missing part of a file; returns None if it is complete, or a response after which to try again."""
    start = one.done if one.note.exists() else 0
    headers, known, first = dict(HEADERS), "", ""
    if start:
        known, _, first = one.note.read_text().partition("\n")
        headers |= {"Range": f"bytes={start}-", "If-Range": known}
    with session.get(one.address, headers=headers, stream=True, timeout=timeout) as response:
        status = response.status_code
        if status in RETRIED_STATUS:
            return response
        validator = _validator(response.headers)
        span = re.fullmatch(r"bytes ([0-9]+)-[0-9]+/([0-9]+|\*)", response.headers.get("Content-Range", ""))
        begins, total = (int(span[1]), first if span[2] == "*" else span[2]) if span else (-1, "")
        continued = start and begins == start and validator == known and total and total == (first or total)
        if (status == 206 and not continued) or (start and status == 416):
            one.discard()
            raise ProtocolError("the file has changed since its first part was fetched")
        if status not in (200, 206):
            cure = "check the address, and whether terms of use must be accepted"
            raise DemixError(one.shown, f"answers {status} {response.reason}", cure)
        page = response.headers.get("Content-Type", "").startswith("text/html")
        if page and not one.shown.endswith((".html", ".htm")):
            cure = "open it in a browser: you may have to accept terms of use"
            raise DemixError(one.shown, "returns a web page, not a file", cure)
        if status == 200:
            one.discard()
            total = response.headers.get("Content-Length", "")
        length = int(total) if total.isdecimal() else None
        if length is None and not (response.raw.chunked or one.size is not None or one.sha256):
            cause = "is sent without its length, so a truncated file would not be noticed"
            raise DemixError(one.shown, cause, "give source.sha256")
        if one.size is not None and length not in (one.size, None):
            raise one.refused(f"has {length} bytes, not {one.size}")
        # read1 returns the bytes that have arrived, so a stall loses nothing.
        pieces = iter(lambda: response.raw.read1(1 << 20, decode_content=False), b"")
        one.append(pieces, validator and f"{validator}\n{total}", one.size if length is None else length)
    if length is not None and one.done < length:
        raise ProtocolError(f"cut short at {one.done} of {length} bytes")
    if length is not None and one.done > length:
        one.discard()
        raise ProtocolError(f"sends more than its {length} bytes")
    return None


def _validator(headers: Mapping[str, str]) -> str:
    """The identifier of this version of the file: a strong ETag, else the date of its last change."""
    tag = headers.get("ETag", "")
    return tag if tag and not tag.startswith("W/") else headers.get("Last-Modified", "")


def stored(paths: Sequence[str], others: Counter[str] | None = None) -> list[str]:
    """The sorted addresses of the files that these paths (addresses, globs or folders) name in object stores.

    A folder stands for all data files below it (`demix.config.files.is_data`); the endings of other files are added to
    `others`. Raises DemixError for a path without files, and for any failure; errors never show a library's message.
    """
    from fsspec.utils import glob_translate

    found, others = set[str](), Counter() if others is None else others
    for path in paths:
        with _asked(path):
            store, name = _store(path)
            store.invalidate_cache()
            if has_magic(name) and not store.isfile(name):
                # fsspec's own glob treats a folder that it cannot list as empty.
                below = store.find(re.split(r"[*?\[]", name)[0].rpartition("/")[0])
                files = [*filter(re.compile(glob_translate(name)).match, below)]
            elif store.info(name)["type"] == "file":
                files = [name]
            else:
                # A file with such a name stands for a folder.
                inside = {one: one[len(name) :].lstrip("/") for one in store.find(name) if not one.endswith("/")}
                files = [one for one, path_there in inside.items() if is_data(path_there, others)]
            files = [one for one in files if not one.endswith("/")]
            if not files:
                raise DemixError(path, "names no file that can be read", _FIX)
            found |= {f"{path.partition('://')[0]}://{one}" for one in files}
    return sorted(found)


def _from_store(one: _Fetched) -> None:
    with _asked(one.address):
        store, name = _store(one.address)
        version, length = _version(store, name)
        if one.size not in (None, length):
            raise one.refused(f"has {length} bytes, not {one.size}")
        store.get_file(name, str(one.partial))
        if _version(store, name)[0] != version:
            one.discard()
            raise DemixError(one.address, "changed during the download", "rerun when nobody writes to it")


def _store(address: str) -> tuple[Any, str]:
    """The file system of an address, and the name of the file there."""
    import fsspec

    scheme, _, name = address.partition("://")
    return fsspec.filesystem(scheme), name.rstrip("/")


def _version(store: Any, name: str) -> tuple[str, int]:
    """The values that distinguish versions of a file, and its size in bytes."""
    store.invalidate_cache()
    info = {key.lower(): value for key, value in store.info(name).items()}
    return f"{info['etag']} {info['size']}", int(info["size"])


@contextmanager
def _asked(address: str) -> Iterator[None]:
    """Query a store. Raises DemixError for any failure; it shows only the names of errors."""
    try:
        yield
    except DemixError:
        raise
    except ImportError:
        import fsspec

        package = STORES[address.partition("://")[0]]
        # The libraries of stores require their own version of fsspec, and datasets a range of versions.
        cure = f"pip install {package} fsspec=={fsspec.__version__}"
        raise DemixError(address, f"needs {package}, which is not installed", cure) from None
    # The libraries raise exceptions of nearly any type.
    except Exception as error:
        if getattr(error, "errno", None) == ENOSPC:
            raise
        answer = getattr(error.__cause__, "response", None) or {}
        code = _CODE.fullmatch(str(answer.get("Error", {}).get("Code", "")))
        named = ": ".join([type(error).__name__, *([code[0]] if code else [])])
        cause, cure = ("is not there", _FIX) if isinstance(error, FileNotFoundError) else ("cannot be read", _ASK)
        raise DemixError(address, f"{cause} ({named})", cure) from None
