"""The models that rows begin with, in folders or at the hub, and what a config takes of them."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from demix.config.addresses import HUB, REPOSITORY, refuse_unnamable
from demix.config.architecture import Architecture
from demix.errors import DemixError
from demix.files import read_json
from demix.settings import Settings, Text, settings_from

# A description has a few lines for each domain.
_MOST_BYTES = 4 << 20


class HubParent(Settings):
    """A model of the Hugging Face hub, which a run imports once."""

    hub: Text = Field(
        pattern=f"^{REPOSITORY}$",
        json_schema_extra={"patternErrorMessage": "of the form owner/name"},
        description="A model of the Hugging Face hub, such as allenai/OLMo-2-0425-1B.",
    )
    revision: Text = Field(
        pattern="^[0-9a-f]{40}$",
        json_schema_extra={"patternErrorMessage": "that is a commit, which `demix import` prints for a branch"},
        description="Its commit.",
    )

    @property
    def address(self) -> str:
        """The address that `demix import` takes."""
        return f"{HUB}{self.hub}@{self.revision}"

    def folder(self, run: str) -> str:
        """The folder that the run called `run` imports it to."""
        return f"results/{run}/parents/{self.hub.replace('/', '--')}-{self.revision[:12]}"


def parents_of(rows: Iterable[Mapping[str, Any] | None], run: str) -> dict[str, str]:
    """The model folders that `rows` of models of a run begin with; with each, what a user does where it is missing."""
    found = {}
    for parent in (row.get("parent") for row in rows if row):
        if isinstance(parent, dict):
            hub = settings_from(HubParent, parent)
            command = f"`demix import {hub.address} --output {hub.folder(run)}`"
            found[hub.folder(run)] = f"run {command} first, or give its architecture, types and end_of_text here"
        elif "/" in str(parent):
            found[str(parent).rstrip("/")] = "import or train the parent first"
    return found


def one_parent(parents: Mapping[str, str], key: str) -> tuple[str, str]:
    """The only one of `parents_of` a run, for the config key `key` that asks for it."""
    if len(parents) != 1:
        cause = f"is parent, and rows of models have {len(parents)} model folders as parent"
        raise DemixError(f"config key {key}", cause, "give one row a folder as parent, or leave this out")
    return next(iter(parents.items()))


def completed_architecture(section: Mapping[str, Any], parents: Mapping[str, str]) -> dict[str, Any]:
    """The section `architecture` of a config; with the preset `parent` that of the one of `parents`.

    Raises DemixError where there is not one parent, and for a folder that describes no model.
    """
    if section.get("preset") != "parent":
        return {**section}
    folder, cure = one_parent(parents, "architecture.preset")
    path = Path(refuse_unnamable(folder)) / "model.json"
    if not path.is_file():
        raise DemixError(path, "is missing", cure)
    described = read_json(path, _MOST_BYTES).get("architecture")
    parent = settings_from(Architecture, described, f"{path}: architecture") if isinstance(described, dict) else None
    if parent is None or parent.routed:
        raise DemixError(path, "describes no dense model", "name the folder of one as parent")
    return parent.described | {key: value for key, value in section.items() if key != "preset"}
