"""The pins of a config's sources: digests of files, and commits of data sets."""

from pathlib import Path
from typing import Any

from demix.config.addresses import COMMIT, local
from demix.data.fetch import fetch, stored
from demix.data.hub import commit_of
from demix.data.sources import Source, file_name
from demix.errors import DemixError
from demix.files import sha256_file


def pins(source: Source, folder: Path) -> dict[str, Any]:
    """The keys that pin the text of a source, with values: `sha256` or `revision`; empty if the source has them.

    A file with an address is fetched to `folder` and then removed. Raises DemixError if a source cannot be read, or if
    one value cannot pin it.
    """
    if source.kind == "hub":
        if COMMIT.fullmatch(source.revision or "") or local(source.paths):
            return {}
        commits = {commit_of(repository, source.revision) for repository in source.paths}
        if len(commits) > 1:
            raise DemixError("source.revision", "cannot pin several data sets", "use one domain for each")
        return {"revision": commits.pop()}
    local_files = source.kind == "files"
    places = source.names if local_files else stored(source.paths) if source.kind == "store" else source.paths
    if not places:
        raise DemixError("source.path", f"no file matches {source.path!r}", source.instructions or "fix the path")
    names = {place: Path(place).name if local_files else file_name(place) for place in places}
    digests: dict[str, str] = {}
    if all(name in source.sha256 for name in names.values()):
        return {}
    for place, name in names.items():
        path = Path(place)
        if not local_files:
            path = folder / name
            fetch(place, path)
        digest = sha256_file(path)
        if digests.setdefault(name, digest) != digest:
            raise DemixError(f"source.sha256.{name}", "is the name of several files", "use one domain for each")
        if not local_files:
            path.unlink()
    return {"sha256": digests}
