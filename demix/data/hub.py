"""The Hugging Face hub: records of data sets, streamed, and the files of models, with their sizes and digests.

Only data that are read are fetched, and no code of a repository runs.
"""

import hashlib
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from demix.config.addresses import COMMIT, HUB, hub_model
from demix.data.readers import Row, column, json_object
from demix.errors import DemixError

# JSON lines are read as lines of text, because the builder "json" needs one schema for all files, and fails if a nested
# field has another shape, even if the field is not used.
BUILDERS = {".parquet": "parquet", ".jsonl": "text", ".json": "json", ".csv": "csv"}
# Library telemetry is off.
QUIET = {"HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}

_log = logging.getLogger(__name__)


def hub_rows(
    repository: str, revision: str | None, data_files: tuple[str, ...], paths: tuple[str, ...], part: int, parts: int
) -> Iterator[Row]:
    """The records of `data_files` (globs) in a data set `owner/name` at `revision`, or in a local folder.

    The format of a file follows from its name; code and settings of the repository are not used. Bytes that are not
    UTF-8 are an error, because `datasets` decodes them. Every `parts`-th file is read, or every `parts`-th row if there
    are fewer files. Raises DemixError for any failure.
    """
    with asked(f"data set {repository}"):
        import datasets

        files = [f"{_root(repository, revision)}/{pattern}" for pattern in data_files]
        builder = _builder(files)
        dataset = datasets.load_dataset(builder, data_files=files, split="train", streaming=True)
        by_file = dataset.num_shards >= parts
        if by_file:
            dataset = dataset.shard(parts, part, contiguous=False)
        names = dataset.column_names
        if names and builder != "text":
            dataset = dataset.select_columns(sorted({column(path, names) for path in paths} & set(names)))
        for number, fields in enumerate(dataset, 1):
            if by_file or (number - 1) % parts == part:
                if builder != "text":
                    yield Row(Path(repository), number, fields)
                elif line := fields["text"].strip():
                    place = f"data set {repository}, line {number}"
                    yield Row(Path(repository), number, json_object(line.encode(), place))


def commit_of(repository: str, revision: str | None, kind: Literal["data set", "model"] = "data set") -> str:
    """The current commit of a revision of a data set or model. Raises DemixError if the hub does not give it."""
    with asked(f"{kind} {repository}"):
        from huggingface_hub import HfApi

        ask = HfApi().model_info if kind == "model" else HfApi().dataset_info
        return str(ask(repository, revision=revision, timeout=60).sha)


@contextmanager
def asked(subject: str) -> Iterator[None]:
    """Query the hub about `subject`, without telemetry. Raises DemixError for any failure."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    cure = "check its name, revision and files, the network (if compute nodes have none, set cluster.downloads: "
    cure += "login), and whether terms must be accepted (then set HF_TOKEN)"
    with refused_as(subject, "cannot be read", cure):
        yield


@contextmanager
def refused_as(subject: str, cause: str, cure: str) -> Iterator[None]:
    """Raise DemixError instead of any other error. For broken files or connections, libraries raise many types."""
    try:
        yield
    except DemixError:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0][:300]
        raise DemixError(subject, f"{cause} ({type(error).__name__}: {reason})", cure) from error


def _root(repository: str, revision: str | None) -> str:
    if Path(repository).is_dir():
        return str(Path(repository).resolve())
    if not COMMIT.fullmatch(revision or ""):
        commit = commit_of(repository, revision)
        cure = "`demix config --pin` prints it"
        _log.warning("%s: %s is now %s and can change; %s", repository, revision or "main", commit, cure)
        revision = commit
    return f"hf://datasets/{repository}@{revision}"


def _builder(files: list[str]) -> str:
    suffixes = {Path(re.sub(r"\.(gz|zst|bz2|xz)$", "", name)).suffix for name in files}
    found = {BUILDERS.get(suffix) for suffix in suffixes}
    if len(found) > 1 or None in found:
        cause = f"name files of other or several formats: {', '.join(sorted(suffixes))}"
        raise DemixError("source.data_files", cause, f"give one of {', '.join(BUILDERS)}")
    return str(*found)


@dataclass(frozen=True)
class HubFile:
    """A file of a repository: its address, its size, and its SHA-256 or, without one, its SHA-1 as a blob of git."""

    address: str
    size: int
    sha256: str | None
    blob: str


def pinned_model(address: str) -> tuple[str, str]:
    """The repository and the commit of `hub:owner/name@commit`.

    Raises DemixError if there is no commit. For a branch, a tag or no revision, the error gives the current commit.
    """
    repository, revision = hub_model(address)
    if not COMMIT.fullmatch(revision):
        commit = commit_of(repository, revision or None, "model")
        cause = "does not name a commit, so its files can change"
        raise DemixError(f"{HUB}{repository}@{revision or 'main'}", cause, f"use {HUB}{repository}@{commit}")
    return repository, revision


def model_files(repository: str, commit: str) -> dict[str, HubFile]:
    """The files of a model at `commit` by name. Raises DemixError if the hub does not list them or needs a token."""
    with asked(f"model {repository}"):
        from huggingface_hub import HfApi, get_token, hf_hub_url

        info = HfApi().model_info(repository, revision=commit, files_metadata=True, timeout=60)
        if info.gated and not get_token():
            raise DemixError(f"model {repository}", "is gated", "accept its terms on its page, then set HF_TOKEN")
        files = {}
        for one in info.siblings or ():
            address = hf_hub_url(repository, one.rfilename, revision=commit)
            digest = one.lfs.sha256 if one.lfs else None
            files[one.rfilename] = HubFile(address, int(one.size or 0), digest, str(one.blob_id))
        return files


def fetch_files(files: Mapping[str, HubFile], names: Iterable[str], folder: Path) -> None:
    """Fetch the files `names` of a model to `folder`, and check them.

    A later call resumes where this one ended. Raises DemixError if a file is absent, differs from the hub's record, or
    cannot be reached.
    """
    # Importing requests needs 0.1 s.
    from huggingface_hub import get_token

    from demix.data.fetch import fetch

    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if name not in files:
            raise DemixError(name, "is not in the repository at this commit", "use another commit or model")
        file, path = files[name], folder / name
        fetch(file.address, path, size=file.size, sha256=file.sha256, token=get_token())
        if file.sha256 is None:
            content = path.read_bytes()
            found = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
            if found != file.blob:
                path.unlink()
                raise DemixError(file.address, f"has the git hash {found}, not {file.blob}", "rerun")
