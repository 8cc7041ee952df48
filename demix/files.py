"""How files are written and read between stages: whole or not at all, and checked when read."""

import dataclasses
import fcntl
import glob
import hashlib
import json
import logging
import os
import shutil
import time
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from demix.errors import DemixError
from demix.orphans import is_alive
from demix.seals import BLANK, KEY, check_parquet, seal_parquet, sealed_text, unsealed_text

REMAKE = "delete it and rerun the stage that makes it"

log = logging.getLogger(__name__)

T = TypeVar("T")


@contextmanager
def replacing(path: str | Path, *, directory: bool = False) -> Iterator[Path]:
    """Yield a temporary name beside `path`; on success fsync it and rename it to `path`.

    On any exception the temporary file (or directory) is removed and `path` stays as it was.
    """
    path = Path(path)
    node = os.uname().nodename
    temporary = path.with_name(f".{path.name}.{node}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_left(path, node)
        if directory:
            # A process of the same number may have been killed here.
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
        yield temporary
        for written in [*temporary.rglob("*"), temporary] if directory else [temporary]:
            fsync(written)
        if directory and path.exists():
            shutil.rmtree(path)
        os.replace(temporary, path)
        fsync(path.parent)
    except OSError as error:
        if error.errno is None or isinstance(error, DemixError):
            raise
        raise cannot_be_written(path, error) from error
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        elif temporary.exists():
            temporary.unlink()


@contextmanager
def scratch(path: str | Path) -> Iterator[Path]:
    """Yield a folder beside `path` for what is needed while it is made, removed at the end.

    Raises DemixError naming `path` where it cannot be made or written to, as on a full disk.
    """
    path = Path(path)
    node = os.uname().nodename
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_left(path, node)
        with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.{node}.{os.getpid()}.") as name:
            yield Path(name)
    except OSError as error:
        # Those of other files name them.
        elsewhere = error.filename is not None and Path(error.filename).parent.parent != path.parent
        if error.errno is None or elsewhere:
            raise
        raise cannot_be_written(path, error) from error


def _remove_left(path: Path, node: str) -> None:
    """Remove what processes of this node left of `path` that were killed while they wrote it."""
    before = f".{path.name}.{node}."
    for left in path.parent.glob(f"{glob.escape(before)}*"):
        pid = left.name.removeprefix(before).partition(".")[0]
        if pid.isdigit() and not is_alive(int(pid)):
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


def cannot_be_written(path: Path, error: OSError) -> DemixError:
    """The error in which writing `path` ended, in the common form."""
    # Not error.strerror: Arrow's says more, at length.
    cause = f"cannot be written ({os.strerror(error.errno)})"
    return DemixError(path, cause, "free space or mend its permissions, then rerun")


@contextmanager
def exclusive(lock: Path, doing: str, patience: float = 0.0) -> Iterator[None]:
    """Hold the file `lock`, which no second process can; DemixError says who holds it after `patience` seconds.

    `doing` is what the holder does, for the message. It ends with the process, however that ends.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    give_up = time.monotonic() + patience
    with open(lock, "a+") as held:
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() < give_up:
                    time.sleep(0.5)
                    continue
                held.seek(0)
                cause = f"another process ({held.read().strip() or 'unknown'}) {doing}"
                raise DemixError(lock.parent, cause, "wait until it ends, or end it, then rerun") from None
            except OSError as error:
                log.warning("%s: no lock here (%s); see to it that no second process %s", lock, error, doing)
                break
        # On a full disk nobody is told who holds it, that is all.
        with suppress(OSError):
            held.truncate(0)
            os.pwrite(held.fileno(), f"{os.uname().nodename} {os.getpid()}\n".encode(), 0)
        yield


def holder(lock: Path) -> str | None:
    """Who holds the file `lock` (`exclusive`), as "node pid"; None if nobody does."""
    try:
        with open(lock) as held:
            try:
                fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return held.read().strip() or "unknown"
    except OSError:
        pass
    return None


def refuse_used(output: Path) -> None:
    """Raise DemixError unless `output` is free for a new directory: missing, or an empty folder."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise DemixError(output, "exists and is not empty", "name a new folder")


def fsync(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: str | Path, text: str) -> None:
    """Write `text` as UTF-8, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_sealed(path: str | Path, text: str) -> None:
    """Write JSON or JSON lines, whole or not at all, with a digest that `read_sealed` checks (`demix.seals`)."""
    with replacing(path) as temporary:
        temporary.write_bytes(sealed_text(text))


def read_sealed(path: str | Path) -> str:
    """The text in `path` without its seal; DemixError where the file is missing or not as it was written.

    JSON lines must have their seal: nothing else tells that the last of them are there.
    """
    path = Path(path)
    try:
        return unsealed_text(path.read_bytes(), required=path.suffix == ".jsonl").decode()
    except FileNotFoundError:
        raise DemixError(path, "is missing", "run the stage that makes it") from None
    except ValueError as error:
        raise DemixError(path, f"is damaged ({error})", REMAKE) from None


def check_sealed(path: Path) -> None:
    """Raise DemixError where a file of ours, whatever its kind, is not as it was written; others pass."""
    if path.suffix == ".parquet":
        with parquet_reader(path):
            pass
    elif path.suffix in (".json", ".jsonl"):
        read_sealed(path)


def write_json(path: str | Path, value: Any, *, sort_keys: bool = True) -> None:
    """Write `value` as indented JSON with its seal; NaN is refused."""
    write_sealed(path, json.dumps(value, indent=2, sort_keys=sort_keys, allow_nan=False) + "\n")


def read_json(path: str | Path) -> Any:
    """The JSON value in `path`, its seal verified."""
    text = read_sealed(path)
    try:
        return json.loads(text)
    except ValueError as error:
        raise DemixError(path, f"is not valid JSON ({error})", REMAKE) from None


def write_parquet(table: pa.Table, path: str | Path, **options: Any) -> None:
    """Write `table` as zstd Parquet, sealed, so that a flipped bit is found when it is read."""
    with parquet_writer(path, table.schema) as writer:
        writer.write_table(table, **options)


@contextmanager
def parquet_writer(
    path: str | Path, schema: pa.Schema, *, private: bool = False, **options: Any
) -> Iterator[pq.ParquetWriter]:
    """A writer of zstd Parquet with page checksums and a seal over all bytes; the file appears whole or not at all.

    `private` makes it readable by its owner only, from its first byte on; `options` are those of pq.ParquetWriter.
    """
    with replacing(path) as temporary:
        temporary.touch(0o600 if private else 0o666)
        with pq.ParquetWriter(temporary, schema, compression="zstd", write_page_checksum=True, **options) as writer:
            yield writer
            writer.add_key_value_metadata({KEY: BLANK})
        seal_parquet(temporary)


def read_parquet(path: str | Path, columns: list[str] | None = None) -> pa.Table:
    """The table in `path`, its seal and page checksums verified."""
    with parquet_reader(path) as file:
        return file.read(columns=columns)


@contextmanager
def parquet_reader(path: str | Path) -> Iterator[pq.ParquetFile]:
    """A Parquet file made by an earlier stage, its seal verified and its page checksums as they are read.

    Raises DemixError where the file is missing or damaged, also when that shows inside the block.
    """
    try:
        check_parquet(path)
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    except FileNotFoundError:
        raise DemixError(path, "is missing", "run the stage that makes it") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DemixError(path, f"is damaged ({error})", REMAKE) from None


def sha256_file(path: str | Path) -> str:
    """The hexadecimal sha256 of a file's bytes."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def seed_for(seed: int, *names: object) -> int:
    """A 63-bit seed that depends on the run's `seed` and on `names` alone, never on order, time or `hash()`."""
    digest = hashlib.sha256("\0".join([str(seed), *map(str, names)]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def settings_from(kind: type[T], values: dict[str, Any] | str, subject: str = "--settings") -> T:
    """A (nested) frozen dataclass from a mapping or its JSON text; unknown and missing keys are refused.

    Raises DemixError naming the key.
    """
    if isinstance(values, str):
        try:
            values = json.loads(values)
        except ValueError as error:
            raise DemixError(
                subject, f"is not JSON ({error})", "copy it from the command that snakemake prints"
            ) from None
    if not isinstance(values, dict):
        raise DemixError(subject, f"is {type(values).__name__}, not a mapping", f"give the fields of {kind.__name__}")
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in values:
        if key not in fields:
            raise DemixError(f"{subject}.{key}", "is not a known setting", f"allowed are {', '.join(fields)}")
    arguments = {}
    for name, field in fields.items():
        if name not in values:
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise DemixError(f"{subject}.{name}", "is missing", f"add it ({hints[name]})")
            continue
        value = values[name]
        nested = [a for a in (hints[name], *typing.get_args(hints[name])) if dataclasses.is_dataclass(a)]
        if nested and isinstance(value, dict) and not _is_mapping(hints[name]):
            value = settings_from(nested[0], value, f"{subject}.{name}")
        elif not _fits(value, hints[name]):
            raise DemixError(f"{subject}.{name}", f"is {value!r}", f"give {_told(hints[name])}")
        elif isinstance(value, list):
            value = tuple(value)
        arguments[name] = value
    return kind(**arguments)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value is of the type that a field declares; a list stands for a tuple."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if isinstance(hint, types.UnionType):
        return any(_fits(value, choice) for choice in inner)
    if origin is tuple:
        return isinstance(value, list) and all(_fits(item, inner[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(item, inner[1]) for item in value.values())
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


def _told(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def _is_mapping(hint: Any) -> bool:
    return typing.get_origin(hint) is dict
