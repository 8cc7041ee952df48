"""Files of the models of the Hugging Face hub, at a commit: sizes and digests are those that the hub tells."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from demix.config.addresses import COMMIT, HUB, hub_model
from demix.data.fetch import fetch
from demix.data.hub import asked, commit_of
from demix.errors import DemixError


@dataclass(frozen=True)
class HubFile:
    """A file of a repository: its address, its bytes, and its SHA-256 or, without one, its SHA-1 as a blob of git."""

    address: str
    size: int
    sha256: str | None
    blob: str


def pinned_model(address: str) -> tuple[str, str]:
    """The repository and the commit of `hub:owner/name@commit`.

    Raises DemixError for what names none. For a branch, a tag or nothing, the error gives the commit that it is today.
    """
    repository, revision = hub_model(address)
    if not COMMIT.fullmatch(revision):
        commit = commit_of(repository, revision or None, "model")
        cause = "names no commit: its files can change"
        raise DemixError(f"{HUB}{repository}@{revision or 'main'}", cause, f"use {HUB}{repository}@{commit}")
    return repository, revision


def model_files(repository: str, commit: str) -> dict[str, HubFile]:
    """The files of a model at `commit` by name. Raises DemixError if the hub does not say, or wants a token first."""
    with asked(f"model {repository}"):
        from huggingface_hub import HfApi, get_token, hf_hub_url

        info = HfApi().model_info(repository, revision=commit, files_metadata=True, timeout=60)
        if info.gated and not get_token():
            raise DemixError(f"model {repository}", "is gated", "accept its terms on its page, then set HF_TOKEN")
        return {
            one.rfilename: HubFile(
                hf_hub_url(repository, one.rfilename, revision=commit),
                int(one.size or 0),
                one.lfs.sha256 if one.lfs else None,
                str(one.blob_id),
            )
            for one in info.siblings or ()
        }


def fetch_files(files: Mapping[str, HubFile], names: Iterable[str], folder: Path) -> None:
    """Fetch the files `names` of a model to `folder`, and check them.

    A later call goes on where this one ended. Raises DemixError for a file that is absent, other than the hub says, or
    out of reach.
    """
    from huggingface_hub import get_token

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
                raise DemixError(file.address, f"is blob {found} of git, not {file.blob}", "rerun")
