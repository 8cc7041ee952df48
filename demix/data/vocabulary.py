"""The vocabulary of a byte-level BPE in a tokenizer.json: the bytes of its ids, and the definition for encoding.

Two kinds of file are read. In one of demix's own the ids are 0 to the last, `<|endoftext|>`, an ordinary entry of the
model's vocabulary that no merge produces. In an imported file, the key `demix` gives the id that ends a document and
the number of rows of a model's embedding: `{"end_of_text": 151643, "types": 151936}`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

END_OF_TEXT = "<|endoftext|>"
# The key of a tokenizer.json that holds demix's additions to an imported definition.
OWN = "demix"
NO_END = "name the token that ends a text: tokenizer.end_of_text in a config, eos_token_id in its config.json"
# Both encoders reserve memory up to the largest id.
MAX_TYPES = 1 << 24


@dataclass(frozen=True)
class Vocabulary:
    """A byte-level BPE.

    `pieces` are the bytes of each row of the embedding; rows without an id have none, because an embedding may have
    more rows than ids. A document ends with `end_of_text`, to which no text encodes. The library `tokenizers` reads
    `definition`; `encoding` is the same without special added tokens, which are ordinary text in a document. `plain` is
    False for rules that gigatoken would accept but not follow. With `nfc` a text is first brought to this normal form.
    """

    pieces: tuple[bytes, ...]
    end_of_text: int
    definition: str
    encoding: str
    plain: bool
    nfc: bool

    @property
    def byte_lengths(self) -> np.ndarray:
        """The number of bytes of text that each token represents, int64; 0 for `end_of_text`."""
        lengths = np.array([len(piece) for piece in self.pieces], np.int64)
        lengths[self.end_of_text] = 0
        return lengths


def own_vocabulary(content: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary of a file of demix's own. Raises ValueError for other files."""
    tokens, _ = tokens_of(content)
    end = len(tokens) - 1
    if tokens.get(END_OF_TEXT) != end or sorted(tokens.values()) != list(range(end + 1)):
        raise ValueError(f"ids are not 0 to {end} with {END_OF_TEXT} last")
    return foreign_vocabulary(content, end, end + 1)


def foreign_vocabulary(content: Mapping[str, Any], end_of_text: int, types: int) -> Vocabulary:
    """The vocabulary of the definition of any byte-level BPE. Raises ValueError that says why it is not one.

    An id has the bytes of its token in the table of GPT-2; an added token has the bytes of its text. Text is encoded
    without loss, except for its normal form: with a normaliser NFC a text's ids have the bytes of the text in NFC.
    """
    if not isinstance(types, int) or not 0 < types <= MAX_TYPES:
        raise ValueError(f"it has {types!r:.40} tokens, but 1 to {MAX_TYPES:,} are allowed")
    _check_model(content)
    tokens, added = tokens_of(content)
    pieces = [b""] * types
    by_id: dict[int, str] = {}
    ids = tokens | {one["content"]: one["id"] for one in added}
    last, most = max(ids.items(), key=lambda item: item[1])
    if most >= types:
        raise ValueError(
            f"its token {last!r:.40} has the id {most:,}, but the embedding has {types:,} rows",
            "remove the tokens that have no row, or resize the model's embedding and save it again",
        )
    for token, number in ids.items():
        if (other := by_id.setdefault(number, token)) != token:
            raise ValueError(f"the tokens {other!r:.40} and {token!r:.40} have the same id {number:,}")
    names = {one["content"] for one in added}
    for number, token in by_id.items():
        pieces[number] = token.encode() if token in names else to_bytes(token)
    if missing := byte_of_character().keys() - tokens.keys():
        raise ValueError(f"its vocabulary lacks {len(missing)} of the 256 bytes")
    if end_of_text not in by_id:
        raise ValueError(f"no token has the id {end_of_text!r:.40}, which ends a text", NO_END)
    kept = [one for one in added if not one.get("special") and one["id"] != end_of_text]
    for one in kept:
        if rule := next((rule for rule in ("lstrip", "rstrip", "single_word") if one.get(rule)), None):
            raise ValueError(f"its added token {one['content']!r:.40} has {rule}")
    # `tokenizers` renumbers added tokens unless the vocabulary of the model has their ids.
    model = content["model"] | {"vocab": tokens | {one["content"]: one["id"] for one in kept}}
    changes = {"model": model, "added_tokens": kept, "post_processor": None, "truncation": None, "padding": None}
    definition, encoding = (json.dumps(one, ensure_ascii=False) for one in (content, {**content, **changes}))
    return Vocabulary(
        tuple(pieces), end_of_text, definition, encoding, _is_plain(content), bool(steps_of(content.get("normalizer")))
    )


def tokens_of(content: Mapping[str, Any]) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """The vocabulary of the model, and the added tokens. Raises ValueError for a definition without them."""
    model = content.get("model")
    tokens = model.get("vocab") if isinstance(model, dict) else None
    added = content.get("added_tokens") or []
    if not isinstance(tokens, dict) or not tokens or not isinstance(added, list):
        raise ValueError("it has no vocabulary")
    for one in added:
        if not isinstance(one, dict) or not isinstance(one.get("content"), str) or not one["content"]:
            raise ValueError(f"{one!r:.40} is not an added token")
        if tokens.get(one["content"], one.get("id")) != one.get("id"):
            raise ValueError(f"the token {one['content']!r:.40} has two ids")
    for token, number in (*tokens.items(), *((one["content"], one.get("id")) for one in added)):
        if type(number) is not int or number < 0:
            raise ValueError(f"the token {token!r:.40} has the id {number!r:.40}")
    return tokens, added


def _check_model(content: Mapping[str, Any]) -> None:
    """Raise ValueError if a definition is not that of a byte-level BPE which encodes text without loss."""
    model = content.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        raise ValueError("it is not a byte-level BPE")
    if model.get("byte_fallback"):
        raise ValueError("it is not a byte-level BPE: bytes are only a fallback for characters, as in SentencePiece")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise ValueError(f"its model has {key}, which demix does not support")
    if not isinstance(model.get("merges"), list):
        raise ValueError("it has no list of merges")
    steps = steps_of(content.get("pre_tokenizer"))
    if not steps or steps[-1].get("type") != "ByteLevel":
        raise ValueError("it is not a byte-level BPE: its pre-tokenizer does not end with ByteLevel")
    if any(step.get("add_prefix_space") for step in steps):
        raise ValueError("it puts a space before each text (add_prefix_space)")
    for step in steps[:-1]:
        # These remove something from a text: punctuation, matches of a pattern, or everything else.
        by_id = step.get("behavior") == "Removed" and not (step["type"] == "Split" and step.get("invert") is True)
        if step.get("type") not in ("Split", "Digits", "Punctuation") or by_id:
            raise ValueError(f"its pre-tokenizer {step.get('type')!r:.40} may lose or change some text")
    for step in steps_of(content.get("normalizer")):
        if step.get("type") != "NFC":
            raise ValueError(f"its normaliser {step.get('type')!r:.40} changes a text in more ways than NFC does")


def _is_plain(content: Mapping[str, Any]) -> bool:
    """Whether gigatoken follows a definition.

    It ignores how a pattern splits, whether ByteLevel also splits, and all except the first of equal merges.
    """
    *splits, last = steps_of(content.get("pre_tokenizer"))
    whole = all(step.get("behavior") in ("Isolated", "Removed") for step in splits)
    merges = [" ".join(map(str, one)) if isinstance(one, list) else str(one) for one in content["model"]["merges"]]
    return whole and last.get("use_regex", True) is not bool(splits) and len({*merges}) == len(merges)


def steps_of(part: Any) -> list[dict[str, Any]]:
    """The steps of the pre-tokenizer or the normaliser of a definition, in order."""
    if part is None:
        return []
    several = isinstance(part, dict) and part.get("type") == "Sequence"
    steps = part.get("pretokenizers", part.get("normalizers")) if several else [part]
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise ValueError(f"its steps are {part!r:.40}, not a list")
    return [inner for step in steps for inner in (steps_of(step) if step.get("type") == "Sequence" else [step])]


@cache
def byte_of_character() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the others are the characters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


def to_bytes(token: str) -> bytes:
    """The bytes of a token of the model's vocabulary, whose characters represent one byte each."""
    table = byte_of_character()
    try:
        return bytes([table[character] for character in token])
    except KeyError:
        raise ValueError(f"the token {token!r:.40} holds characters that do not represent bytes") from None
