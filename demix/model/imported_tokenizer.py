"""The tokenizer of a checkpoint of Hugging Face."""

import os
from pathlib import Path

from demix.config.tokenizer import GPT2_TYPES, types_and_end
from demix.data.tokenizer import Tokenizer, gpt2_tokenizer
from demix.data.tokenizer_files import from_merges, write_definition
from demix.errors import DemixError
from demix.files import read_json
from demix.files.json_files import read_unsealed

# Rows by which an embedding is padded so that its size divides well.
MOST_PADDING = 1024
# Tokenizers of other kinds: SentencePiece, WordPiece, tiktoken.
_OTHERS = ("*.model", "vocab.txt", "*.tiktoken")


def imported_tokenizer(folder: Path, output: Path, types: int, family: str) -> Tokenizer:
    """Write the tokenizer of the checkpoint in `folder`, whose embedding has `types` rows, to `output`.

    Its files are `tokenizer.json`, or `vocab.json` and `merges.txt`. A checkpoint of the `family` gpt2 without a file
    of a tokenizer has that of GPT-2. Raises DemixError for any other.
    """
    source, vocabulary, merges = (folder / name for name in ("tokenizer.json", "vocab.json", "merges.txt"))
    if os.path.lexists(source):
        definition = read_unsealed(source)
    elif vocabulary.is_file() and merges.is_file():
        source, definition = vocabulary, from_merges(read_unsealed(vocabulary), merges)
    else:
        _refuse_unless_gpt2(folder, types, family)
        gpt2_tokenizer(output)
        definition = read_json(output)
    end_of_text = types_and_end(folder / "tokenizer.json", definition)["end_of_text"]
    return write_definition(source, definition, output, end_of_text, types)


def _refuse_unless_gpt2(folder: Path, types: int, family: str) -> None:
    """Raise DemixError unless a checkpoint without a tokenizer of ours surely has that of GPT-2."""
    names = sorted(path.name for pattern in ("vocab.json", "merges.txt", *_OTHERS) for path in folder.glob(pattern))
    if family == "gpt2" and not names and GPT2_TYPES <= types < GPT2_TYPES + MOST_PADDING:
        return
    found = f", only {', '.join(names)}" if names else ""
    cause = f"has neither tokenizer.json nor vocab.json with merges.txt{found}"
    raise DemixError(folder, cause, "put the model's own tokenizer.json there")
