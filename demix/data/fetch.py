"""Files fetched over HTTP: resumed, retried, checked, and never half a file under the final name."""

import logging
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
from urllib3.exceptions import HTTPError, MaxRetryError, ProtocolError
from urllib3.util import Retry

from demix.errors import DemixError, masked
from demix.files import fsync, sha256_file
from demix.progress import progress

RETRIED_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
ATTEMPTS = 8
# Encoded on the way, neither ranges nor lengths would be those of the file.
HEADERS = {"Accept-Encoding": "identity", "User-Agent": "demix"}

_log = logging.getLogger(__name__)


def fetch(
    url: str,
    path: Path,
    *,
    size: int | None = None,
    sha256: str | None = None,
    token: str | None = None,
    timeout: float = 60.0,
    backoff: float = 1.0,
) -> None:
    """Fetch `url` to `path` and check its `size` (bytes) and `sha256` where given; one that is there is only checked.

    What was fetched stays beside `path` under another name until it is complete, so that this call, or a later one,
    goes on from there if the server's ETag (or date) and length still are the same. After `ATTEMPTS` failures in a row
    that bring the file no further than before, each waited for `backoff` seconds times a power of two or as the server
    asks, DemixError is raised; at once for a file of which nothing tells whether it is whole. `timeout` in seconds is
    for the connection and for each read. User and password come from the netrc file alone; `token` goes to the host of
    `url` alone.
    """
    partial, note = beside(path)
    shown = _shown(url)
    if not path.exists():
        fresh = Retry(total=ATTEMPTS, backoff_factor=backoff, backoff_max=60, retry_after_max=600)
        retry, furthest = fresh, _size(partial)
        with requests.Session() as session:
            if token:
                session.headers["Authorization"] = f"Bearer {token}"
            while True:
                try:
                    response = _go_on(session, url, shown, partial, note, timeout, size, sha256)
                    if response is None:
                        break
                    problem: Exception | None = None
                except (ValueError, requests.TooManyRedirects) as error:
                    # The address, or one that it leads to, cannot be fetched at any time.
                    raise DemixError(shown, f"cannot be fetched ({error})", "correct the address") from None
                except (requests.RequestException, HTTPError) as error:
                    response, problem = None, ProtocolError(masked(str(error)))
                except OSError as error:
                    raise DemixError(path, f"cannot be written ({error.strerror})", "free space, then rerun") from None
                # A file that changes each time, or is sent from its start each time, comes no further.
                if _size(partial) > furthest:
                    retry, furthest = fresh, _size(partial)
                try:
                    retry = retry.increment("GET", shown, response=response, error=problem)
                except (MaxRetryError, ProtocolError):
                    cause = problem or f"it answers {response.status}"
                    raise DemixError(shown, f"cannot be fetched ({cause})", "rerun to go on where it ended") from None
                _log.info("%s: %s, trying again", shown, problem or f"answers {response.status}")
                _wait(retry, response)
    finish(path, shown, size, sha256)


def beside(path: Path) -> tuple[Path, Path]:
    """Where what was fetched of `path` waits to be whole, and the note of the version that it is of."""
    return path.with_name(f".{path.name}.partial"), path.with_name(f".{path.name}.etag")


def finish(path: Path, shown: str, size: int | None, sha256: str | None) -> None:
    """Check what was fetched, and give it the name `path`; a file that has it is only checked.

    Raises DemixError that names `shown` for other bytes, which are removed.
    """
    partial, note = beside(path)
    whole = path if path.exists() else partial
    problem = None
    if size is not None and _size(whole) != size:
        problem = f"has {_size(whole)} bytes, not {size}"
    elif sha256 is not None and (found := sha256_file(whole)) != sha256:
        problem = f"has sha256 {found}, not {sha256}"
    if problem:
        discard(whole, note)
        raise other(shown, problem)
    if whole == partial:
        fsync(partial)
        partial.replace(path)
        fsync(path.parent)
        note.unlink(missing_ok=True)


def refusal(url: str, any_answer: bool = False, timeout: float = 20.0) -> str:
    """Why a file at `url` cannot be fetched from this machine; empty if its server gives it, or asks to try again.

    With `any_answer` whatever the server says is an answer. Only the head of the answer is read.
    """
    try:
        with requests.get(url, headers=HEADERS, stream=True, timeout=timeout) as response:
            fine = any_answer or response.ok or response.status_code in RETRIED_STATUS
            return "" if fine else f"{response.status_code} {response.reason}"
    except (requests.RequestException, HTTPError, ValueError) as error:
        return " ".join(masked(str(error)).split())


def _wait(retry: Retry, response: Any) -> None:
    """Wait as the server asks, where it asks in a way that can be read."""
    try:
        retry.sleep(response)
    except (HTTPError, ValueError, OverflowError):
        retry.sleep()


def _go_on(
    session: Any, url: str, shown: str, partial: Path, note: Path, timeout: float, size: int | None, sha256: str | None
) -> Any:
    """Fetch what is missing of `partial`; returns None when it is whole, or an answer after which to try again.

    `note` holds what names the version that `partial` is of, and its length.
    """
    start = _size(partial) if note.exists() else 0
    headers, known, first = dict(HEADERS), "", ""
    if start:
        known, _, first = note.read_text().partition("\n")
        headers |= {"Range": f"bytes={start}-", "If-Range": known}
    with session.get(url, headers=headers, stream=True, timeout=timeout) as response:
        status = response.status_code
        if status in RETRIED_STATUS:
            return response.raw
        validator = _validator(response.headers)
        span = re.fullmatch(r"bytes ([0-9]+)-[0-9]+/([0-9]+|\*)", response.headers.get("Content-Range", ""))
        begins, total = (int(span[1]), first if span[2] == "*" else span[2]) if span else (-1, "")
        continued = start and begins == start and validator == known and total and total == (first or total)
        if (status == 206 and not continued) or (start and status == 416):
            discard(partial, note)
            raise ProtocolError("the file has changed since its first part was fetched")
        if status not in (200, 206):
            raise DemixError(
                shown, f"answers {status} {response.reason}", "check the address, and whether terms must be accepted"
            )
        if response.headers.get("Content-Type", "").startswith("text/html") and not shown.endswith((".html", ".htm")):
            raise DemixError(
                shown, "gives a web page, not a file", "open it in a browser: terms may wait to be accepted"
            )
        if status == 200:
            discard(partial, note)
            start, total = 0, response.headers.get("Content-Length", "")
        length = int(total) if total.isdecimal() else None
        if length is None and not (response.raw.chunked or size is not None or sha256):
            cause = "is sent without its length, so that a cut one would look whole"
            raise DemixError(shown, cause, "give source.bytes or source.sha256")
        if size is not None and length not in (size, None):
            discard(partial, note)
            raise other(shown, f"has {length} bytes, not {size}")
        with open(partial, "ab") as file:
            if validator:
                note.write_text(f"{validator}\n{total}")
            _copy(response.raw, file, shown, start, size if length is None else length)
    if length is not None and _size(partial) < length:
        raise ProtocolError(f"cut short at {_size(partial)} of {length} bytes")
    if length is not None and _size(partial) > length:
        discard(partial, note)
        raise ProtocolError(f"sends more than its {length} bytes")
    return None


def discard(partial: Path, note: Path) -> None:
    """Remove what was fetched. In this order, no moment leaves the old bytes beside a new validator."""
    partial.unlink(missing_ok=True)
    note.unlink(missing_ok=True)


def _copy(stream: Any, file: Any, shown: str, done: int, length: int | None) -> None:
    """Append what comes to a file of `done` bytes, but no more than shows that it is longer than `length`."""
    began, fetched = time.monotonic(), 0
    with progress(f"{shown}: MB", length / 1e6 if length else None, done / 1e6) as advance:
        # read1 gives what has come, so that a stall loses nothing.
        while data := stream.read1(1 << 20, decode_content=False):
            file.write(data)
            fetched += len(data)
            if length is not None and done + fetched > length:
                return
            advance(len(data) / 1e6, f"{fetched / 1e6 / (time.monotonic() - began):.1f} MB/s")


def _validator(headers: Mapping[str, str]) -> str:
    """What names this version of the file: a strong ETag, else the date it was changed."""
    tag = headers.get("ETag", "")
    return tag if tag and not tag.startswith("W/") else headers.get("Last-Modified", "")


def other(shown: str, problem: str) -> DemixError:
    """The error for a file that differs from what the config says of it."""
    return DemixError(shown, problem, "if the source has changed on purpose, change the config; else rerun")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _shown(url: str) -> str:
    """The address without user, password and query, which may be secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
