"""Tokenizers of other families: any byte-level BPE in a tokenizer.json becomes the tokenizer of a run or a model."""

import json
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import decoders, models, pre_tokenizers

from demix.config.tokenizer import types_and_end
from demix.data.tokenizer import PROBE, Tokenizer
from demix.data.vocabulary import OWN, foreign_vocabulary, own_vocabulary, tokens_of
from demix.errors import DemixError
from demix.files import read_json, write_json
from demix.files.json_files import SEAL, read_unsealed

_CURE = "use a byte-level BPE"


def take_tokenizer(
    source: Path, output: Path, end_of_text: int | str | None = None, types: int | None = None
) -> Tokenizer:
    """Write the byte-level BPE of the tokenizer.json `source` as the sealed `output`, and return it.

    `end_of_text` is the token or the id that ends a document, `types` are the rows of a model's embedding; what is not
    given, the files beside `source` say. A file that demix wrote stays what it is. Raises DemixError, and leaves no
    `output`, for what is no such tokenizer.
    """
    content = read_unsealed(source)
    if SEAL in content:
        content = read_json(source)
    given = {"end_of_text": end_of_text, "types": types}
    said: dict[str, Any] = types_and_end(source, content) if None in given.values() else {}
    said |= {key: value for key, value in given.items() if value is not None}
    content.pop(OWN, None)
    return write_definition(source, content, output, said["end_of_text"], said["types"])


def write_definition(
    source: Path, content: Mapping[str, Any], output: Path, end_of_text: int | str, types: int
) -> Tokenizer:
    """Write the definition `content`, which is that of `source`, as `take_tokenizer` does."""
    try:
        end = _id_of(content, end_of_text)
        foreign_vocabulary(content, end, types)
    except ValueError as error:
        raise DemixError(source, f"is no tokenizer that demix takes ({error})", _CURE) from None
    said = {} if _is_own(content, end, types) else {OWN: {"end_of_text": end, "types": types}}
    write_json(output, {**content, **said}, sort_keys=False)
    try:
        tokenizer = Tokenizer.load(output)
        _refuse_loss(source, tokenizer)
    except DemixError as error:
        output.unlink()
        raise DemixError(source, error.cause, _CURE) from None
    return tokenizer


def from_merges(vocabulary: Mapping[str, int], merges: Path) -> dict[str, Any]:
    """The definition that `vocab.json` and the file `merges.txt` of GPT-2's format give."""
    try:
        lines = merges.read_text(encoding="utf-8").split("\n")
        rows = (line.split(" ") for line in lines[lines[0].startswith("#version") :] if line)
        pairs = [(left, right) for left, right in rows]
        found = HuggingFaceTokenizer(models.BPE(vocab=dict(vocabulary), merges=pairs))
    # UnicodeDecodeError, and what the library raises.
    except Exception as error:
        raise DemixError(merges, f"does not fit vocab.json ({error})", "get it again") from None
    found.pre_tokenizer, found.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return dict(json.loads(found.to_str()))


def _id_of(content: Mapping[str, Any], token: int | str) -> int:
    tokens, added = tokens_of(content)
    known = tokens | {one["content"]: one["id"] for one in added}
    found = known.get(token) if isinstance(token, str) else token
    if found is None:
        raise ValueError(f"it has no token {token!r:.40}, which is to end a text")
    return found


def _is_own(content: Mapping[str, Any], end_of_text: int, types: int) -> bool:
    """Whether a definition is what demix makes of its vocabulary: GPT-2's rules, no added tokens, no other end."""
    try:
        own = own_vocabulary(content)
    except (KeyError, TypeError, AttributeError, ValueError):
        return False
    if (end_of_text, types) != (own.end_of_text, len(own.pieces)):
        return False
    made = HuggingFaceTokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    empty, model = json.loads(made.to_str()), dict(content["model"])
    return bool({**content, "model": model | {"vocab": {}, "merges": []}} == empty)


def _refuse_loss(source: Path, tokenizer: Tokenizer) -> None:
    """Raise DemixError for a tokenizer that loses text, and for one that finds the end of a text inside of it."""
    ends = tokenizer.decode([tokenizer.end_of_text])
    ids = tokenizer.encode(PROBE + ends)
    if tokenizer.end_of_text in ids:
        raise DemixError(source, f"encodes the text {ends!r:.40} in a document as the end of it", _CURE)
    if tokenizer.decode(ids) not in (PROBE + ends, unicodedata.normalize("NFC", PROBE + ends)):
        raise DemixError(source, "loses or changes some text that it encodes", _CURE)
