"""Files of object stores such as S3, by fsspec and the library of each store: listed, fetched, resumed, checked."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from glob import has_magic
from pathlib import Path
from typing import Any

from demix.config.addresses import STORES
from demix.config.files import is_data
from demix.data import fetch
from demix.errors import DemixError
from demix.progress import progress

# Bytes that are asked for at one time.
BLOCK = 16 << 20
# What a server calls an error is a word; more of what a library says could hold credentials.
_CODE = re.compile("[A-Za-z0-9]{1,60}")
_MEND = "mend the bucket, the path or the glob"
_ASK = (
    "check the network and the credentials that the store's library takes from the environment "
    "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, GOOGLE_APPLICATION_CREDENTIALS, …)"
)


def stored(paths: Sequence[str], others: Counter[str] | None = None) -> list[str]:
    """The addresses of the files that these paths name in object stores, sorted: by an address, a glob or a folder.

    Of a folder all files below it are meant that are data (`demix.config.files.is_data`); the endings of the rest are
    added to `others`. Raises DemixError for a path that names no file, and for all that goes wrong on the way; no error
    shows what a library says.
    """
    found, others = set[str](), Counter() if others is None else others
    for path in paths:
        with _asked(path):
            store, name = _store(path)
            store.invalidate_cache()
            if has_magic(name) and not store.isfile(name):
                folder = re.split(r"[*?\[]", name)[0].rpartition("/")[0]
                files = [*_matching(store, folder, name[len(folder) + 1 :])]
            elif store.info(name)["type"] == "file":
                files = [name]
            else:
                # A file of such a name stands for a folder.
                inside = {one: one[len(name) :].lstrip("/") for one in store.find(name) if not one.endswith("/")}
                files = [one for one, path_there in inside.items() if is_data(path_there, others)]
            files = [one for one in files if not one.endswith("/")]
            if not files:
                raise DemixError(path, "names no file that can be read", _MEND)
            found |= {f"{path.partition('://')[0]}://{one}" for one in files}
    return sorted(found)


def fetch_stored(address: str, path: Path, *, size: int | None = None, sha256: str | None = None) -> None:
    """Fetch the file at `address` to `path` and check it, as `demix.data.fetch.fetch` does over HTTP.

    What was fetched stays beside `path` until it is whole, and a later call goes on from there if size and ETag are the
    same. Each request is tried again as the store's library does.
    """
    partial, note = fetch.beside(path)
    if not path.exists():
        with _asked(address):
            store, name = _store(address)
            version, length = _version(store, name)
        if size not in (None, length):
            raise fetch.other(address, f"has {length} bytes, not {size}")
        if not note.exists() or note.read_text() != version:
            fetch.discard(partial, note)
        start = partial.stat().st_size if partial.exists() else 0
        try:
            note.write_text(version)
            with open(partial, "ab") as file, progress(f"{address}: MB", length / 1e6, start / 1e6) as advance:
                while start < length:
                    with _asked(address, "rerun to go on where it ended, or "):
                        data = store.cat_file(name, start=start, end=min(start + BLOCK, length))
                        if not data:
                            raise EOFError
                    file.write(data)
                    start += len(data)
                    advance(len(data) / 1e6, "")
        except OSError as error:
            raise DemixError(path, f"cannot be written ({error.strerror})", "free space, then rerun") from None
        with _asked(address):
            after = _version(store, name)[0]
        if after != version or start > length:
            fetch.discard(partial, note)
            raise DemixError(address, "changed while it was fetched", "rerun once nobody writes it")
    fetch.finish(path, address, size, sha256)


def refusal(address: str, any_answer: bool = False) -> str:
    """Why a file at `address` cannot be fetched from this machine, as `demix.data.fetch.refusal`, in any store, too."""
    if address.partition("://")[0] not in STORES:
        return fetch.refusal(address, any_answer)
    try:
        stored([address])
    except DemixError as error:
        return f"{error.cause}; {error.cure}"
    return ""


def _matching(store: Any, folder: str, pattern: str) -> Iterator[str]:
    """The files below `folder` that a glob names. fsspec's own takes a folder that it cannot list for an empty one."""
    if "**" in pattern:
        from fsspec.utils import glob_translate

        yield from filter(re.compile(glob_translate(f"{folder}/{pattern}")).match, store.find(folder))
        return
    first, _, rest = pattern.partition("/")
    for info in store.ls(folder, detail=True):
        name = info["name"].rstrip("/")
        if fnmatchcase(name.rpartition("/")[2], first):
            if rest and info["type"] == "directory":
                yield from _matching(store, name, rest)
            elif not rest and info["type"] == "file":
                yield info["name"]


def _store(address: str) -> tuple[Any, str]:
    """The file system of an address, and the name of the file there."""
    import fsspec

    scheme, _, name = address.partition("://")
    return fsspec.filesystem(scheme), name.rstrip("/")


def _version(store: Any, name: str) -> tuple[str, int]:
    """What tells one version of a file from another, and its bytes."""
    store.invalidate_cache()
    info = {key.lower(): value for key, value in store.info(name).items()}
    return f"{info['etag']} {info['size']}", int(info["size"])


@contextmanager
def _asked(address: str, first: str = "") -> Iterator[None]:
    """Ask a store. Raises DemixError for all that goes wrong, with the names of errors alone."""
    try:
        yield
    except DemixError:
        raise
    except ImportError:
        import fsspec

        package = STORES[address.partition("://")[0]]
        # The libraries of stores ask for their own version of fsspec, and datasets for a range.
        cure = f"pip install {package} fsspec=={fsspec.__version__}"
        raise DemixError(address, f"needs {package}, which is not installed", cure) from None
    # The libraries raise nearly anything.
    except Exception as error:
        told = getattr(error.__cause__, "response", None) or {}
        code = _CODE.fullmatch(str(told.get("Error", {}).get("Code", "")))
        named = ": ".join([type(error).__name__, *([code[0]] if code else [])])
        cause, cure = ("is not there", _MEND) if isinstance(error, FileNotFoundError) else ("cannot be read", _ASK)
        raise DemixError(address, f"{cause} ({named})", first + cure) from None
