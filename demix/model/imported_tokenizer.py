"""The tokenizer of a checkpoint of Hugging Face."""

from pathlib import Path
from typing import Any

from demix.config.tokenizer import GPT2_TYPES, types_and_end
from demix.data.tokenizer import Tokenizer, gpt2_tokenizer
from demix.data.tokenizer_files import from_merges, write_definition
from demix.errors import DemixError
from demix.files import read_json
from demix.files.json_files import read_unsealed


def imported_tokenizer(folder: Path, output: Path, types: int) -> Tokenizer:
    """Write the tokenizer of the checkpoint in `folder`, whose embedding has `types` rows, to `output`.

    Its files are `tokenizer.json`, or `vocab.json` and `merges.txt`; a checkpoint without them has GPT-2's tokenizer.
    """
    source, beside = folder / "tokenizer.json", folder / "vocab.json"
    definition = _read(source)
    model = definition.get("model", {})
    if not isinstance(model, dict):
        raise DemixError(source, f"has a model that is {model!r:.40}", "get it again")
    vocabulary = model.get("vocab") or _read(beside)
    if not vocabulary or (isinstance(vocabulary, dict) and len(vocabulary) == GPT2_TYPES):
        gpt2_tokenizer(output)
        gpt2 = read_json(output)
        if vocabulary in ({}, gpt2["model"]["vocab"]):
            # Its file at the hub has the same rules and marks the last id as special.
            return write_definition(source, gpt2, output, GPT2_TYPES - 1, types)
    if not definition:
        source = beside
        if not (merges := folder / "merges.txt").is_file():
            raise DemixError(source, "is another vocabulary than GPT-2's", "get tokenizer.json or merges.txt, too")
        definition = from_merges(vocabulary, merges)
    end_of_text = types_and_end(folder / "tokenizer.json", definition)["end_of_text"]
    return write_definition(source, definition, output, end_of_text, types)


def _read(path: Path) -> dict[str, Any]:
    return dict(read_unsealed(path)) if path.is_file() else {}
