"""What pins the sources of a config: the digests of files, the commits of data sets."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from demix.config.addresses import COMMIT, local
from demix.data.fetch import fetch, refusal, stored
from demix.data.hub import commit_of
from demix.data.sources import Source, file_name, pinned
from demix.errors import DemixError
from demix.files import sha256_file


def check_network(sources: Iterable[Source]) -> None:
    """Raise DemixError where nobody answers at the first address that pins of `sources` ask for.

    Without a network each source would be tried by itself, for minutes. A store says at once what it lacks.
    """
    unpinned = (one for one in sources if one.kind != "store" and pinned(one, 0) is None)
    asked = (one for one in unpinned if not (one.kind == "hub" and local(one.paths)))
    if first := next(asked, None):
        hub = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
        address = first.paths[0] if first.kind == "url" else hub
        if why := refusal(address, any_answer=True):
            cure = "fix the network, or name a proxy (export HTTPS_PROXY=…), then rerun"
            raise DemixError(address, f"does not answer ({why})", cure)


def pins(source: Source, folder: Path) -> dict[str, Any]:
    """The keys of a source and their values that pin its text: `sha256` or `revision`; empty if they are there.

    A file with an address is fetched to `folder` and then removed. Raises DemixError for what cannot be read, and for a
    source that one value cannot pin.
    """
    if source.kind == "hub":
        if COMMIT.fullmatch(source.revision or "") or local(source.paths):
            return {}
        commits = {commit_of(repository, source.revision) for repository in source.paths}
        if len(commits) > 1:
            raise DemixError("source.revision", "cannot pin several data sets", "make each a domain of its own")
        return {"revision": commits.pop()}
    local_files = source.kind == "files"
    places = source.names if local_files else stored(source.paths) if source.kind == "store" else source.paths
    if not places:
        raise DemixError("source.path", f"no file matches {source.path!r}", source.instructions or "fix the path")
    digests: dict[str, str] = {}
    if all(_name(source, place) in source.sha256 for place in places):
        return {}
    for place in places:
        name = _name(source, place)
        path = Path(place)
        if not local_files:
            path = folder / name
            fetch(place, path)
        digest = sha256_file(path)
        if digests.setdefault(name, digest) != digest:
            raise DemixError(f"source.sha256.{name}", "is the name of several files", "make each a domain of its own")
        if not local_files:
            path.unlink()
    return {"sha256": digests}


def _name(source: Source, place: str) -> str:
    return Path(place).name if source.kind == "files" else file_name(place)
