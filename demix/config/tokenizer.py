"""The section `tokenizer`: how text becomes tokens, and what files next to a tokenizer of another family say of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from demix.config.addresses import refuse_unnamable
from demix.errors import DemixError
from demix.files.json_files import read_unsealed
from demix.settings import Integer, Positive, Settings, Text, absent, settings_from

GPT2_TYPES = 50257
_KEY = "config key tokenizer"
# What only a tokenizer of another family has.
_FOREIGN = ("path", "end_of_text", "types")


class TokenizerSection(Settings):
    """How text becomes tokens."""

    kind: Literal["bpe", "gpt2", "file"] = Field(
        default="gpt2",
        description="gpt2: GPT-2's own vocabulary (50,257 types). bpe: a byte-level BPE trained on the training "
        "domains. file: the byte-level BPE in the tokenizer.json at `path`.",
    )
    vocab_size: Integer = Field(
        default=GPT2_TYPES,
        ge=257,
        le=2**32 - 1,
        description="Vocabulary size of a bpe tokenizer, <|endoftext|> included. Not used by the other kinds.",
    )
    words: Positive = Field(
        default=200_000_000,
        description="Approximate number of words that a bpe tokenizer is trained on. Where there is more text, "
        "documents are chosen by their hash.",
    )
    path: Text | None = Field(
        default_factory=absent,
        description="Of kind file: a tokenizer.json, in a folder of the hub or in one that `demix import` wrote.",
    )
    end_of_text: Annotated[Integer, Field(ge=0)] | Text | None = Field(
        default_factory=absent,
        description="Of kind file: the token, or its id, that ends a document and precedes each. Not "
        "given: the eos token of tokenizer_config.json, config.json or generation_config.json next to the file.",
    )
    types: Annotated[Positive, Field(le=1 << 24)] | None = Field(
        default_factory=absent,
        description="Of kind file: the rows of the embedding, which may be more than the tokenizer's ids. "
        "Not given: vocab_size of the config.json next to the file, or else the ids.",
    )

    @property
    def size(self) -> int:
        """The number of types."""
        if self.kind == "file":
            return self.types or 0
        return GPT2_TYPES if self.kind == "gpt2" else self.vocab_size


def completed_tokenizer(section: TokenizerSection) -> TokenizerSection:
    """The section `tokenizer` of a config, with what the files of its tokenizer say.

    Raises DemixError for keys that do not go together, and for a file that is missing or says nothing.
    """
    if section.kind != "file":
        if foreign := [key for key in _FOREIGN if getattr(section, key) is not None]:
            raise DemixError(f"{_KEY}.{foreign[0]}", f"is given to kind {section.kind}", "use kind: file")
        return section
    if not section.path:
        raise DemixError(f"{_KEY}.path", "is missing", "name the tokenizer.json")
    path = Path(refuse_unnamable(section.path))
    if section.types is not None and section.end_of_text is not None:
        return section
    if not path.is_file():
        cure = "name a tokenizer.json, import the model first, or give types and end_of_text"
        raise DemixError(path, "is missing", cure)
    said = types_and_end(path, _content(path))
    given = {key: getattr(section, key) for key in section.model_fields_set}
    return settings_from(TokenizerSection, given | {key: said[key] for key in said if given.get(key) is None}, _KEY)


def types_and_end(path: Path, content: Mapping[str, Any]) -> dict[str, int | str]:
    """What a tokenizer.json of this `content` at `path` and the files next to it say: `types` and `end_of_text`.

    `end_of_text` is a token or an id. Raises DemixError where none is named.
    """
    own, config = content.get("demix"), _content(path.with_name("config.json"), required=False)
    if isinstance(own, dict):
        return {key: own[key] for key in ("types", "end_of_text") if key in own}
    tokens = content["model"].get("vocab") if isinstance(content.get("model"), dict) else None
    added = content.get("added_tokens") or []
    if not isinstance(tokens, dict) or not isinstance(added, list):
        raise DemixError(path, "has no vocabulary", "name the tokenizer.json of a byte-level BPE")
    ids = [*tokens.values(), *(one.get("id") for one in added if isinstance(one, dict))]
    most = max((number for number in ids if type(number) is int), default=0) + 1
    types = config.get("vocab_size")
    return {"types": types if type(types) is int else most, "end_of_text": _end(path, tokens)}


def _end(path: Path, tokens: Mapping[str, Any]) -> int | str:
    """The token or the id that ends a text, by the files next to a tokenizer.json."""
    for file, key in (
        ("tokenizer_config.json", "eos_token"),
        ("config.json", "eos_token_id"),
        ("generation_config.json", "eos_token_id"),
    ):
        said = _content(path.with_name(file), required=False).get(key)
        said = said[0] if isinstance(said, list) and said else said
        said = said.get("content") if isinstance(said, dict) else said
        if isinstance(said, str) or type(said) is int:
            return said
    # The last of demix's own tokenizers and of GPT-2's.
    if "<|endoftext|>" in tokens:
        return "<|endoftext|>"
    cure = "set tokenizer.end_of_text in a config, or eos_token_id in its config.json"
    raise DemixError(path, "has no file next to it that names the end-of-text token", cure)


def _content(path: Path, required: bool = True) -> dict[str, Any]:
    """The object in a JSON file; an empty one for a missing file that is not required."""
    return read_unsealed(path) if required or path.is_file() else {}
