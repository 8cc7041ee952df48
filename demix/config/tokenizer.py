"""The section `tokenizer`: how text becomes tokens, and settings read from the files next to a foreign tokenizer."""

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
# Keys of only kind file.
_FOREIGN = ("path", "end_of_text", "types")


class TokenizerSection(Settings):
    """How text becomes tokens."""

    kind: Literal["bpe", "gpt2", "file"] = Field(
        default="gpt2",
        description="gpt2: GPT-2's vocabulary (50,257 tokens). bpe: a byte-level BPE, trained on the training "
        "domains. file: the byte-level BPE in the tokenizer.json at `path`.",
    )
    vocab_size: Integer = Field(
        default=GPT2_TYPES,
        ge=257,
        le=2**32 - 1,
        description="For kind bpe: vocabulary size, <|endoftext|> included. Other kinds ignore it.",
    )
    words: Positive = Field(
        default=200_000_000,
        description="For kind bpe: approximate number of words of training text. If there is more text, "
        "documents are chosen by their hash.",
    )
    path: Text | None = Field(
        default_factory=absent,
        description="For kind file: a tokenizer.json, in a folder from the hub or in one that `demix import` wrote.",
    )
    end_of_text: Annotated[Integer, Field(ge=0)] | Text | None = Field(
        default_factory=absent,
        description="For kind file: the token, or its id, that separates documents and precedes the first. Default: "
        "the eos token in tokenizer_config.json, config.json or generation_config.json next to the file.",
    )
    types: Annotated[Positive, Field(le=1 << 24)] | None = Field(
        default_factory=absent,
        description="For kind file: number of rows of the embedding, which may exceed the number of token ids. "
        "Default: vocab_size in the config.json next to the file, or else the number of ids.",
    )

    @property
    def size(self) -> int:
        """The vocabulary size."""
        if self.kind == "file":
            return self.types or 0
        return GPT2_TYPES if self.kind == "gpt2" else self.vocab_size


def completed_tokenizer(section: TokenizerSection) -> TokenizerSection:
    """The section `tokenizer` of a config, completed from the files of its tokenizer.

    Raises DemixError for keys that exclude each other, and for a file that is missing or lacks the needed values.
    """
    if section.kind != "file":
        if foreign := [key for key in _FOREIGN if getattr(section, key) is not None]:
            raise DemixError(f"{_KEY}.{foreign[0]}", f"is not a key of kind {section.kind}", "use kind: file")
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
    """`types` and `end_of_text`, from a tokenizer.json with this `content` at `path` and the files next to it.

    `end_of_text` is a token or an id. Raises DemixError if no file names it.
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
    """The token or id that ends a text, according to the files next to a tokenizer.json."""
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
    # In demix's own tokenizers and in GPT-2's, it is the last token.
    if "<|endoftext|>" in tokens:
        return "<|endoftext|>"
    cure = "set tokenizer.end_of_text in a config, or eos_token_id in its config.json"
    raise DemixError(path, "has no file next to it that names the end-of-text token", cure)


def _content(path: Path, required: bool = True) -> dict[str, Any]:
    """The object in a JSON file; an empty object if the file is missing and not required."""
    return read_unsealed(path) if required or path.is_file() else {}
