"""Importing a checkpoint of the Hugging Face hub."""

import shutil
from pathlib import Path

from demix.data.hub import fetch_files, model_files, pinned_model
from demix.errors import DemixError
from demix.files import exclusive, refuse_used
from demix.model.import_hf import ADAPTER, INDEX, KEPT, WEIGHTS, an_adapter, import_hf, read_config, weight_map
from demix.model.verified import Verified, refuse_without_transformers


def import_hub(
    address: str, output: Path, context: int | None = None, verify: bool = False, text: Path | None = None
) -> Verified | None:
    """Write the model `hub:owner/name@commit` to `output`, as `import_hf` does that of a folder.

    Only config.json, the tokenizer's files and safetensors are fetched. They wait in a folder beside `output`, from
    which a later call goes on, until the model is written. Raises DemixError for what names no commit, for files that
    are absent, damaged or out of reach, and as `import_hf` does.
    """
    refuse_used(output)
    if verify:
        refuse_without_transformers()
    repository, commit = pinned_model(address)
    files, place = model_files(repository, commit), output.resolve()
    folder = place.with_name(f".{place.name}.{commit[:12]}")
    with exclusive(folder / ".lock", "fetches this checkpoint"):
        if ADAPTER in files:
            raise an_adapter(f"model {repository}")
        fetch_files(files, ["config.json"], folder)
        # What cannot come in is refused before its weights are fetched.
        read_config(folder / "config.json")
        fetch_files(files, [name for name in KEPT if name in files], folder)
        weights = {WEIGHTS}
        if WEIGHTS not in files:
            if INDEX not in files:
                cause = f"has neither {WEIGHTS} nor {INDEX} at this commit"
                raise DemixError(f"model {repository}", cause, "use a commit with safetensors; pickles are not read")
            fetch_files(files, [INDEX], folder)
            weights = set(weight_map(folder / INDEX).values())
        fetch_files(files, sorted(weights), folder)
        origin = {"repository": repository, "revision": commit}
        done = import_hf(folder, output, context, verify, text, origin)
        shutil.rmtree(folder)
    return done
