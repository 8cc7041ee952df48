"""Records of Hugging Face data sets, streamed: nothing but what is read is fetched."""

import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from demix.config.addresses import COMMIT
from demix.data.readers import Row, unique
from demix.data.selection import column
from demix.errors import DemixError

# JSON lines are read as lines of text: the builder "json" wants one schema of all files, and refuses a nested field of
# another shape even where nobody asked for it.
BUILDERS = {".parquet": "parquet", ".jsonl": "text", ".json": "json", ".csv": "csv"}
# Nothing is told to anybody: neither who loads a data set nor which version of a library is here.
QUIET = {"HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}

_log = logging.getLogger(__name__)


def hub_rows(
    repository: str, revision: str | None, data_files: tuple[str, ...], paths: tuple[str, ...], part: int, parts: int
) -> Iterator[Row]:
    """The records of `data_files` (globs) in a data set `owner/name` at `revision`, or in a local folder.

    The files are read as what their names say and no code or settings of the repository run; bytes that are not UTF-8
    are refused, since `datasets` decodes them. Of its files, or where there are fewer of its rows, every one in `parts`
    is read. Raises DemixError for all that goes wrong on the way.
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
                    yield Row(Path(repository), number, _object(line, f"data set {repository}, line {number}"))


def commit_of(repository: str, revision: str | None, kind: Literal["data set", "model"] = "data set") -> str:
    """The commit that a revision of a data set or model is today. Raises DemixError if the hub does not say."""
    with asked(f"{kind} {repository}"):
        from huggingface_hub import HfApi

        ask = HfApi().model_info if kind == "model" else HfApi().dataset_info
        return str(ask(repository, revision=revision, timeout=60).sha)


@contextmanager
def asked(subject: str) -> Iterator[None]:
    """Ask the hub about `subject`, and tell it nothing else. Raises DemixError for all that goes wrong on the way."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        yield
    except DemixError:
        raise
    # The libraries below it raise nearly anything for a broken file or connection.
    except Exception as error:
        reason = str(error).strip().splitlines() or [""]
        raise DemixError(
            subject,
            f"cannot be read ({type(error).__name__}: {reason[0][:300]})",
            "check its name, revision and files, the network, and whether terms must be accepted (then set HF_TOKEN)",
        ) from error


def _object(line: str, place: str) -> dict[str, Any]:
    try:
        fields = json.loads(line, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise DemixError(place, f"is not valid JSON ({error})", "leave out the file, or use other files") from None
    if not isinstance(fields, dict):
        raise DemixError(place, "is not a JSON object", 'there must be one object a line, such as {"text": "..."}')
    return fields


def _root(repository: str, revision: str | None) -> str:
    if Path(repository).is_dir():
        return str(Path(repository).resolve())
    if not COMMIT.fullmatch(revision or ""):
        commit = commit_of(repository, revision)
        cure = "`demix config --pin` prints it"
        _log.warning("%s: %s is %s today and can change; %s", repository, revision or "main", commit, cure)
        revision = commit
    return f"hf://datasets/{repository}@{revision}"


def _builder(files: list[str]) -> str:
    suffixes = {Path(re.sub(r"\.(gz|zst|bz2|xz)$", "", name)).suffix for name in files}
    found = {BUILDERS.get(suffix) for suffix in suffixes}
    builder = found.pop() if len(found) == 1 else None
    if builder is None:
        raise DemixError(
            "source.data_files", f"name files {', '.join(sorted(suffixes))}", f"give one of {', '.join(BUILDERS)}"
        )
    return builder
