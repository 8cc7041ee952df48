"""What a config takes of the model folder that its models begin with."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from demix.config.addresses import refuse_unnamable
from demix.config.architecture import Architecture
from demix.errors import DemixError
from demix.files import read_json
from demix.settings import settings_from

# A description has a few lines for each domain.
_MOST_BYTES = 4 << 20


def parent_folder(rows: Iterable[Mapping[str, Any] | None], key: str) -> str:
    """The one model folder that is the parent of `rows` of models, for the config key `key` that asks for it."""
    folders = {str(row["parent"]).rstrip("/") for row in rows if row and "/" in str(row.get("parent"))}
    if len(folders) != 1:
        cause = f"is parent, and rows of models have {len(folders)} model folders as parent"
        raise DemixError(f"config key {key}", cause, "give one row a folder as parent, or leave this out")
    return folders.pop()


def completed_architecture(section: Mapping[str, Any], rows: Iterable[Mapping[str, Any] | None]) -> dict[str, Any]:
    """The section `architecture` of a config with `rows` of models; with the preset `parent` that of their parent.

    Raises DemixError where there is not one parent, and for a folder that describes no model.
    """
    if section.get("preset") != "parent":
        return {**section}
    path = Path(refuse_unnamable(parent_folder(rows, "architecture.preset"))) / "model.json"
    if not path.is_file():
        raise DemixError(path, "is missing", "import or train the parent first")
    described = read_json(path, _MOST_BYTES).get("architecture")
    parents = settings_from(Architecture, described, f"{path}: architecture") if isinstance(described, dict) else None
    if parents is None or parents.routed:
        raise DemixError(path, "describes no dense model", "name the folder of one as parent")
    return parents.described | {key: value for key, value in section.items() if key != "preset"}
