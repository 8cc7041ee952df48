"""Tokenizers of other families: any byte-level BPE in a tokenizer.json becomes the tokenizer of a run or a model."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HuggingFaceTokenizer

from demix.config.tokenizer import TokenizerSection, types_and_end
from demix.data.shared import made_once
from demix.data.tokenizer import Tokenizer, gpt2_tokenizer, own_definition, train_tokenizer
from demix.data.vocabulary import END_OF_TEXT, NO_END, OWN, foreign_vocabulary, steps_of, tokens_of
from demix.errors import DemixError
from demix.files import opened, read_json, write_json
from demix.files.json_files import SEAL, read_unsealed
from demix.files.kinds import TEXT, check_kind

# The largest merges.txt of the field has some 5 MiB, and a line of it takes 200 bytes of memory.
MOST_MERGES = 16 << 20
_CURE = "use a byte-level BPE"


def make_tokenizer(documents: list[Path], settings: TokenizerSection, output: Path) -> None:
    """Train a byte-level BPE on the training domains' text, or write GPT-2's tokenizer or that of another family."""
    if settings.kind == "gpt2":
        gpt2_tokenizer(output)
    elif settings.kind in ("file", "parent"):
        take_tokenizer(Path(settings.path or ""), output, settings.end_of_text, settings.types)
    else:
        make = partial(train_tokenizer, documents, settings.vocab_size, output, settings.words)
        made_once(output, [output], documents, asdict(settings), make)


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
        own = _as_own(content, end, types)
    except ValueError as error:
        cause, cure = (*error.args, _CURE)[:2]
        raise DemixError(source, f"is no tokenizer that demix takes ({cause})", cure) from None
    write_json(output, own or {**content, OWN: {"end_of_text": end, "types": types}}, sort_keys=False)
    try:
        tokenizer = Tokenizer.load(output)
        _refuse_loss(source, content, tokenizer)
        _refuse_renumbered(source, content)
    except DemixError as error:
        output.unlink()
        raise DemixError(source, error.cause, _CURE) from None
    return tokenizer


def from_merges(vocabulary: Mapping[str, int], merges: Path) -> dict[str, Any]:
    """The definition that `vocab.json` and the file `merges.txt` of GPT-2's format give."""
    with opened(merges) as stream:
        content = stream.read(MOST_MERGES + 1)
    check_kind(merges, content, TEXT)
    if len(content) > MOST_MERGES:
        raise DemixError(merges, f"has more than {MOST_MERGES:,} bytes", "get it again")
    try:
        lines = content.decode("utf-8-sig").split("\n")
        rows = (line.rstrip("\r").split(" ") for line in lines[lines[0].startswith("#version") :] if line.strip())
        return own_definition(vocabulary, [(left, right) for left, right in rows])
    # UnicodeDecodeError, and what the library raises.
    except Exception as error:
        raise DemixError(merges, f"does not fit vocab.json ({error})", "get it again") from None


def _id_of(content: Mapping[str, Any], token: int | str) -> int:
    tokens, added = tokens_of(content)
    known = tokens | {one["content"]: one["id"] for one in added}
    found = known.get(token) if isinstance(token, str) else token
    if found is None:
        raise ValueError(f"it has no token {token!r:.40}, which is to end a text", NO_END)
    return found


def _as_own(content: Mapping[str, Any], end_of_text: int, types: int) -> dict[str, Any] | None:
    """What demix makes of the vocabulary of a definition with GPT-2's rules, which gives each text the same ids.

    The token that ends a text may be an added one, as in the file of GPT-2 itself. None for other rules.
    """
    (tokens, added), model = tokens_of(content), content["model"]
    steps = [*steps_of(content, "normalizer"), *steps_of(content, "pre_tokenizer")]
    last = tokens.get(END_OF_TEXT) == end_of_text == len(tokens) - 1 == types - 1
    ended = all(one["content"] == END_OF_TEXT for one in added)
    if not (last and ended and len(steps) == 1 and steps[0].get("use_regex", True)) or model.get("ignore_merges"):
        return None
    merges = [one.split(" ") if isinstance(one, str) else one for one in model["merges"]]
    try:
        return own_definition(tokens, [(left, right) for left, right in merges])
    # What the library raises.
    except Exception as error:
        raise ValueError(f"its merges do not fit its vocabulary: {error}", "get it again") from None


def _refuse_loss(source: Path, content: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Raise DemixError for a tokenizer that loses text, and for one that finds the end of a text inside of it."""
    ends = tokenizer.decode([tokenizer.end_of_text])
    if tokenizer.end_of_text in tokenizer.encode(ends):
        raise DemixError(source, f"encodes the text {ends!r:.40} in a document as the end of it", _CURE)
    removed = any(step.get("behavior") == "Removed" for step in steps_of(content, "pre_tokenizer"))
    # The published patterns, which gigatoken knows, match all of a text.
    if removed and tokenizer.fast is None:
        raise DemixError(source, "removes text that its pattern does not match", _CURE)


def _refuse_renumbered(source: Path, content: Mapping[str, Any]) -> None:
    """Raise DemixError if an added token has another id in the file than the library gives it."""
    try:
        library = HuggingFaceTokenizer.from_str(json.dumps({**content}))
    # What the library raises, as for a special token that lacks a key.
    except Exception as error:
        raise DemixError(source, f"is not read by tokenizers ({error})", _CURE) from None
    for one in content.get("added_tokens") or ():
        if (number := library.token_to_id(one["content"])) != one["id"]:
            cause = (
                f"has the added token {one['content']!r:.40} with the id {one['id']}, which tokenizers makes {number}"
            )
            raise DemixError(source, cause, _CURE)
