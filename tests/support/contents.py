"""What a folder holds, to see whether it changed."""

from pathlib import Path

from demix.files import sha256_file


def contents(folder: Path) -> dict[str, str]:
    """The sha256 of each file below a folder, but for locks, by its path in there."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {path.relative_to(folder).as_posix(): sha256_file(path) for path in files}
