"""Tokenizers: demix's own and GPT-2's, and those of other families with their own ids and their own end of a text."""

import hashlib
import json
import os
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HuggingFaceTokenizer

from demix.config.config import Config
from demix.config.tokenizer import TokenizerSection
from demix.data.shards import TokenShard, blocks, join_documents, tokenize
from demix.data.tokenizer import (
    END_OF_TEXT,
    Tokenizer,
    byte_lengths,
    convert_tokenizer,
    gpt2_tokenizer,
    train_tokenizer,
)
from demix.files import read_json, write_json
from demix.model.import_hf import imported_tokenizer
from support.byte_level import NORMALISED, PLAIN, SPECIAL, definition, sample, write_folder
from support.configs import small
from support.errors import refused

KINDS = sorted(SPECIAL)
TOKENS = [token for named in (SPECIAL, PLAIN) for tokens in named.values() for token in tokens]
ODD = [*" \n\t'\r\u00a0\u2003\u2028\x1c\x85aZ9é漢😀ſ", "'ll", "'LL", "  ", "e\u0301", "\u212b", "1234", *TOKENS]
ANY_TEXT = st.lists(st.sampled_from(ODD) | st.text(st.characters(codec="utf-8"), max_size=3)).map("".join)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    paths = [tmp_path_factory.mktemp("texts") / f"{domain}.parquet" for domain in ("jargon", "parliament")]
    for path in paths:
        pq.write_table(pa.table({"text": list(sample(path.stem))}), path)
    return paths


@pytest.fixture(scope="module", params=["bpe", "gpt2"])
def path(request, texts, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    if request.param == "gpt2":
        gpt2_tokenizer(path)
    else:
        train_tokenizer(texts, 2000, path)
    return path


@pytest.fixture(scope="module")
def ours(path):
    return Tokenizer.load(path)


@pytest.fixture(scope="module")
def theirs(ours):
    return HuggingFaceTokenizer.from_str(ours.definition)


def test_the_ids_are_those_of_hugging_face_and_the_published_ones(ours, theirs):
    assert ours.vocab_size in (2000, 50257)
    assert theirs.get_vocab_size() == ours.vocab_size == ours.end_of_text + 1
    assert theirs.token_to_id(END_OF_TEXT) == ours.end_of_text
    if ours.vocab_size == 50257:
        assert ours.encode("Hello world").tolist() == [15496, 995]
        assert ours.encode(END_OF_TEXT).tolist() == [27, 91, 437, 1659, 5239, 91, 29]
    assert ours.decode([ours.end_of_text]) == END_OF_TEXT
    some = [*sample()[:60], *sample("parliament")[:60]]
    ids, edges = ours.encode_batch(some)
    for start, end, expected in zip(edges, edges[1:], theirs.encode_batch(some), strict=False):
        assert ids[start:end].tolist() == expected.ids
    for fast, exact in zip((ids, edges), ours.encode_batch(some, exact=True), strict=True):
        assert np.array_equal(fast, exact)


@pytest.mark.parametrize("text", ["a" * 100_000, "x" + " " * 1_200_000 + "y", "\n" * 1_200_000, "\n a" * 50_000])
def test_monotonous_text(ours, text):
    assert ours.decode(ours.encode(text)) == text


def test_training_gives_the_same_bytes_anywhere(texts, tmp_path):
    program = (
        "import sys; from pathlib import Path; from demix.data.tokenizer import train_tokenizer;"
        "train_tokenizer([*map(Path, sys.argv[2:])], 1500, Path(sys.argv[1]))"
    )
    outputs = []
    for threads, seed, inputs in ((1, "1", texts), (3, "77", texts[::-1])):
        outputs.append(tmp_path / f"{threads}.json")
        environment = {**os.environ, "RAYON_NUM_THREADS": str(threads), "PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", program, outputs[-1], *inputs], env=environment, check=True)
    assert outputs[0].read_bytes() == outputs[1].read_bytes()


def test_little_text_gives_fewer_ids_and_the_fewest_are_bytes(tmp_path, caplog):
    pq.write_table(pa.table({"text": ["abab abab", END_OF_TEXT]}), tmp_path / "a.parquet")
    for asked, least, most in ((1000, 258, 299), (257, 257, 257)):
        train_tokenizer([tmp_path / "a.parquet"], asked, tmp_path / "t.json")
        tokenizer = Tokenizer.load(tmp_path / "t.json")
        assert least <= tokenizer.vocab_size <= most
        assert tokenizer.decode(tokenizer.encode("any 漢 text")) == "any 漢 text"
    assert len(tokenizer.encode("漢")) == 3
    assert [record.levelname for record in caplog.records] == ["WARNING"], "of the 1000 ids asked for"


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content["model"]["vocab"].pop("a"),
        lambda content: content["model"]["vocab"].pop(END_OF_TEXT),
        lambda content: content["model"]["vocab"].update({END_OF_TEXT: 5}),
        lambda content: content.pop("model"),
        lambda content: content["model"]["vocab"].update({"\n": 5}),
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused(tokens, tmp_path, damage):
    content = read_json(tokens / "tokenizer.json")
    damage(content)
    write_json(tmp_path / "t.json", content)
    with refused("t.json"):
        Tokenizer.load(tmp_path / "t.json")


def learned(folder, texts, words):
    """The tokenizer that is learned from so many words of documents in two files."""
    folder.mkdir()
    half = len(texts) // 2
    for name, some in (("a", texts[:half]), ("b", texts[half:])):
        table = {"text": some, "n_words": [len(text.split()) for text in some]}
        pq.write_table(pa.table(table), folder / f"{name}.parquet")
    train_tokenizer([folder / "a.parquet", folder / "b.parquet"], 3000, folder / "t.json", words)
    return (folder / "t.json").read_bytes(), Tokenizer.load(folder / "t.json")


def test_much_text_is_sampled_by_its_content(tmp_path):
    """Each document has a word of its own, which becomes a token where the document is learned from."""
    letters = str.maketrans("0123456789", "ghijklmnop")
    names = [hashlib.sha256(str(number).encode()).hexdigest()[:6].translate(letters) for number in range(400)]
    texts = [f"{name} " * 9 for name in names]
    counts = []
    for share, words in (("all", 9 * 400), ("some", 9 * 100)):
        data, tokenizer = learned(tmp_path / share, texts, words)
        assert learned(tmp_path / f"{share} turned", texts[::-1], words)[0] == data
        counts.append(sum(len(tokenizer.encode(f" {name}")) == 1 for name in names))
    assert counts[0] == 400
    assert 70 < counts[1] < 130


@pytest.fixture(scope="module", params=KINDS)
def taken(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Tokenizer]:
    """A kind, its tokenizer.json and demix's tokenizer of it."""
    source = write_folder(tmp_path_factory.mktemp(request.param), request.param)
    return request.param, source, convert_tokenizer(source, source.with_name("taken.json"))


def encoder_of(kind: str) -> HuggingFaceTokenizer:
    """The library's encoder as it reads the family's file, for which special tokens in a text are text."""
    encoder = HuggingFaceTokenizer.from_str(definition(kind))
    encoder.encode_special_tokens = True
    return encoder


def test_any_text_gets_the_ids_of_the_library(taken: tuple[str, Path, Tokenizer]) -> None:
    kind, _, tokenizer = taken
    theirs, lengths = encoder_of(kind), tokenizer.vocabulary.byte_lengths
    special = {theirs.token_to_id(token) for token in SPECIAL[kind]}

    @settings(max_examples=300, deadline=None)
    @given(ANY_TEXT)
    def check(text: str) -> None:
        (ids, _), exact = tokenizer.encode_batch([text]), tokenizer.encode(text)
        assert ids.tolist() == exact.tolist() == theirs.encode(text, add_special_tokens=False).ids
        assert not special & {*ids.tolist()}
        encoded = unicodedata.normalize("NFC", text) if kind in NORMALISED else text
        assert tokenizer.decode(ids) == encoded
        assert lengths[ids].sum() == len(encoded.encode())

    check()
    texts = [*sample()[300:500], *sample("parliament")[:100]]
    ids, edges = tokenizer.encode_batch(texts)
    wanted = [each.ids for each in theirs.encode_batch(texts, add_special_tokens=False)]
    assert [ids[start:end].tolist() for start, end in pairwise(edges)] == wanted
    assert tokenizer.fast is not None
    for token in PLAIN.get(kind, ()):
        assert theirs.token_to_id(token) in tokenizer.encode(f"a{token}b")


def texts_of_all_kinds() -> list[str]:
    """Characters of every block of Unicode that has some, all spaces, and numbers of any length."""
    groups = (map(chr, range(low, low + 256)) for low in range(0, 0x20000, 256))
    written = ["".join(one for one in group if unicodedata.category(one) not in ("Cn", "Cs", "Co")) for group in groups]
    spaces = [" ", "\t", "\n", "\r\n", "\u00a0", "\u2003", "\u3000", "\u200b", "\x85", "\u2028"]
    runs = [f"a{one * count}b{other}c{one}" for one in spaces for other in spaces for count in (1, 2, 5)]
    numbers = [f"x{'1234567890' * 2:.{count}} {'٣' * count}" for count in range(1, 20)]
    return [*(" ".join([group[::2], group[1::2], group]) for group in written if group), *runs, *numbers]


def test_every_block_of_unicode_gets_the_ids_of_the_library(taken: tuple[str, Path, Tokenizer]) -> None:
    """Also where its tables of normal forms are older than those of others, as for marks of Samaritan."""
    kind, _, tokenizer = taken
    theirs, texts = encoder_of(kind), texts_of_all_kinds()
    ids, edges = tokenizer.encode_batch(texts)
    for text, start, end in zip(texts, edges, edges[1:], strict=False):
        assert ids[start:end].tolist() == theirs.encode(text, add_special_tokens=False).ids, text


def test_what_ends_a_text_is_the_family_s_own(taken: tuple[str, Path, Tokenizer]) -> None:
    kind, source, tokenizer = taken
    theirs = HuggingFaceTokenizer.from_str(definition(kind))
    assert tokenizer.end_of_text == theirs.token_to_id(SPECIAL[kind][0])
    assert tokenizer.vocab_size == theirs.get_vocab_size()
    assert tokenizer.decode([tokenizer.end_of_text]) == SPECIAL[kind][0]
    lengths = byte_lengths(source.with_name("taken.json"))
    assert lengths[tokenizer.end_of_text] == 0
    assert len(lengths) == tokenizer.vocab_size
    again = convert_tokenizer(source.with_name("taken.json"), source.with_name("again.json"))
    assert again.sha256 == tokenizer.sha256


def test_transformers_reads_the_definition_of_a_run_s_tokenizer(taken: tuple[str, Path, Tokenizer]) -> None:
    from transformers import AutoTokenizer

    kind, source, tokenizer = taken
    folder = source.with_name("exported")
    folder.mkdir()
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[kind][0], "split_special_tokens": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    (folder / "tokenizer.json").write_text(tokenizer.definition)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert json.loads(tokenizer.definition) == json.loads(definition(kind))
    for text in (*sample()[300:330], "".join(ODD)):
        assert theirs(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text).tolist()
    assert theirs.eos_token_id == tokenizer.end_of_text


def test_the_files_beside_a_tokenizer_name_what_ends_a_text(tmp_path: Path) -> None:
    theirs = HuggingFaceTokenizer.from_str(definition("llama3"))
    end, begin, turn = (theirs.token_to_id(token) for token in SPECIAL["llama3"])
    source = write_folder(tmp_path, "llama3", [("config.json", {"eos_token_id": turn, "vocab_size": 1600})])
    tokenizer = convert_tokenizer(source, tmp_path / "t.json")
    assert (tokenizer.end_of_text, tokenizer.vocab_size) == (end, 1600)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|begin_of_text|>"}}))
    assert convert_tokenizer(source, tmp_path / "t.json").end_of_text == begin
    (tmp_path / "tokenizer_config.json").unlink()
    assert convert_tokenizer(source, tmp_path / "t.json").end_of_text == turn
    (tmp_path / "config.json").unlink()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, turn]}))
    assert convert_tokenizer(source, tmp_path / "t.json").end_of_text == end
    for named in ("<|begin_of_text|>", begin):
        assert convert_tokenizer(source, tmp_path / "t.json", named).end_of_text == begin
    (tmp_path / "generation_config.json").unlink()
    for named, types in ((None, None), ("<end>", 1600)):
        with refused(source):
            convert_tokenizer(source, tmp_path / "u.json", named, types)
    assert not (tmp_path / "u.json").exists()


def test_an_embedding_may_have_more_rows_than_there_are_ids(tmp_path: Path) -> None:
    source = write_folder(tmp_path, "qwen3")
    tokenizer, padded = (convert_tokenizer(source, tmp_path / "t.json", types=types) for types in (None, 1600))
    assert (tokenizer.vocab_size, padded.vocab_size) == (1505, 1600)
    assert padded.end_of_text == tokenizer.end_of_text == 1500
    assert padded.sha256 != tokenizer.sha256
    assert padded.vocabulary.byte_lengths[1505:].sum() == 0
    assert padded.decode([*padded.encode("ab"), 1599]) == "ab"
    with refused(source):
        convert_tokenizer(source, tmp_path / "u.json", types=1504)


def tokenized(texts: list[str], folder: Path) -> TokenShard:
    """The shard of these documents by the tokenizer t.json in `folder`."""
    table = pa.table({"text": pa.array(texts, pa.large_string())})
    pq.write_table(table, folder / "dev.parquet", row_group_size=100)
    tokenize(folder / "t.json", folder / "dev.parquet", folder / "dev.arrow")
    return TokenShard.open(folder / "dev.arrow", verify=True)


def documents_of(shard: TokenShard) -> list[list[int]]:
    """The ids of the documents of a shard, without the one before each."""
    return [part[1:].tolist() for part in np.split(shard.read(0, len(shard)), shard.offsets[1:])]


def test_a_shard_begins_documents_with_the_family_s_own_end(tmp_path: Path) -> None:
    tokenizer = convert_tokenizer(write_folder(tmp_path, "qwen3"), tmp_path / "t.json", types=1600)
    texts = [*sample()[:3], "", "a<|endoftext|>b<think>"]
    shard = tokenized(texts, tmp_path)
    assert read_json(tmp_path / "dev.json")["end_of_text"] == 1500
    assert (shard.end_of_text, shard.vocab_size, shard.tokenizer_sha256) == (1500, 1600, tokenizer.sha256)
    assert np.flatnonzero(shard.read(0, len(shard)) == 1500).tolist() == shard.offsets.tolist()
    assert documents_of(shard) == [tokenizer.encode(text).tolist() for text in texts]
    assert blocks(shard, 8)[0][0, 0] == 1500
    join_documents([tmp_path / "dev.arrow"], [np.array([2])], tmp_path / "s.arrow")
    assert TokenShard.open(tmp_path / "s.arrow", verify=True).end_of_text == 1500
    write_json(tmp_path / "dev.json", read_json(tmp_path / "dev.json") | {"end_of_text": 0})
    assert TokenShard.open(tmp_path / "dev.arrow").end_of_text == 0
    for wrong in (1600, -1, "x", None):
        write_json(tmp_path / "dev.json", read_json(tmp_path / "dev.json") | {"end_of_text": wrong})
        with refused("dev.json"):
            TokenShard.open(tmp_path / "dev.arrow")


@pytest.mark.parametrize("digits", [True, False])
def test_rules_that_gigatoken_does_not_follow_are_encoded_by_tokenizers(
    digits: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It says that it does not know some rules, and leaves others aside."""
    source = write_folder(tmp_path, "gpt2")
    content = json.loads(source.read_text())
    content["pre_tokenizer"]["use_regex"] = digits
    if digits:
        first = {"type": "Digits", "individual_digits": True}
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [first, content["pre_tokenizer"]]}
    source.write_text(json.dumps(content))
    assert convert_tokenizer(source, tmp_path / "t.json").fast is None
    theirs, texts = HuggingFaceTokenizer.from_str(json.dumps(content)), [*sample()[:3], "12345 a1"]
    assert documents_of(tokenized(texts, tmp_path)) == [each.ids for each in theirs.encode_batch(texts)]
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize(("place", "differ"), [(0, True), (254, False), (256, True), (512, True)])
def test_one_document_in_256_that_differs_from_tokenizers_has_all_encoded_by_it(
    place: int, differ: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = convert_tokenizer(write_folder(tmp_path / "qwen", "qwen3"), tmp_path / "t.json")
    other = convert_tokenizer(write_folder(tmp_path / "llama", "llama3"), tmp_path / "u.json").vocabulary.encoding
    wrong = replace(own, vocabulary=replace(own.vocabulary, encoding=other))
    monkeypatch.setattr(Tokenizer, "load", staticmethod(lambda path: wrong))
    texts = [*["a"] * place, *["1234 <think>"] * 2]
    ids, edges = wrong.renewed().encode_batch(texts, exact=differ)
    wanted = [ids[start:end].tolist() for start, end in pairwise(edges)]
    assert (wanted == [own.encode(text).tolist() for text in texts]) == differ
    assert documents_of(tokenized(texts, tmp_path)) == wanted
    assert [record.levelname for record in caplog.records] == ["WARNING"] * differ


def _added(**changed: Any) -> dict[str, Any]:
    marks = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return marks | {"id": 1505, "content": "<x>"} | changed


# All of the probe, and no private character.
SOME = {"Regex": r"\P{Co}"}
HOSTILE: list[Callable[[Any], object]] = [
    lambda content: content.pop("model"),
    lambda content: content["model"]["vocab"].update({"zz": -1}),
    lambda content: content["model"]["vocab"].update({"zz": 5}),
    lambda content: content["model"]["vocab"].update({"zz": 2**40}),
    lambda content: content["model"]["vocab"].update({"\n": 1505}),
    lambda content: content["model"]["vocab"].pop("Ġ"),
    lambda content: content["model"].update(type="Unigram"),
    lambda content: content["model"].update(byte_fallback=True),
    lambda content: content["model"].update(end_of_word_suffix="</w>"),
    lambda content: content["model"].update(merges=None),
    lambda content: content["model"]["merges"].append(["zz", "qq"]),
    lambda content: content.update(added_tokens=["a"]),
    lambda content: content["added_tokens"].append(_added(content="")),
    lambda content: content["added_tokens"].append(_added(id=None)),
    lambda content: content["added_tokens"].append(_added(id=7)),
    lambda content: content["added_tokens"].append(_added(content="a")),
    lambda content: content["added_tokens"].append(_added(lstrip=True)),
    lambda content: content["added_tokens"].append(_added(id=1509)),
    lambda content: content["added_tokens"].append({"id": 1505, "content": "<x>", "special": True}),
    lambda content: content.update(pre_tokenizer=None),
    lambda content: content["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True),
    lambda content: content["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed"),
    lambda content: content["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": "(a"}),
    lambda content: content["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed", invert=True, pattern=SOME),
    lambda content: content["pre_tokenizer"]["pretokenizers"].insert(0, {"type": "WhitespaceSplit"}),
    lambda content: content["pre_tokenizer"]["pretokenizers"].insert(0, content["pre_tokenizer"]["pretokenizers"][1]),
    lambda content: content.update(normalizer={"type": "Lowercase"}),
]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_what_is_no_byte_level_bpe_is_refused_and_leaves_nothing(number: int, tmp_path: Path) -> None:
    source, content = write_folder(tmp_path, "qwen3"), json.loads(definition("qwen3"))
    HOSTILE[number](content)
    source.write_text(json.dumps(content))
    with refused(source):
        convert_tokenizer(source, tmp_path / "t.json")
    assert not (tmp_path / "t.json").exists()


def test_a_pattern_that_gives_up_on_a_text_is_an_error(tmp_path: Path) -> None:
    source, content = write_folder(tmp_path, "qwen3"), json.loads(definition("qwen3"))
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(x+x+)+y"
    source.write_text(json.dumps(content))
    tokenizer = convert_tokenizer(source, tmp_path / "t.json")
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch([text])):
        with refused("tokenizer"):
            encode("x" * 40)


def test_what_is_no_definition_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    source = write_folder(tmp_path, "qwen3")
    for text in ("", "[]", "{", '{"model": ' * 2000):
        source.write_text(text)
        with refused(source):
            convert_tokenizer(source, tmp_path / "t.json")
    with source.open("wb") as file:
        file.truncate((64 << 20) + 1)
    with refused(source):
        convert_tokenizer(source, tmp_path / "t.json")
    assert not (tmp_path / "t.json").exists()


@pytest.mark.parametrize(
    "about", [{}, {"end_of_text": 1500}, {"end_of_text": 9999, "types": 1600}, {"end_of_text": 0, "types": 9}, 5, []]
)
def test_a_damaged_file_of_a_run_is_refused(about: object, tmp_path: Path) -> None:
    convert_tokenizer(write_folder(tmp_path, "qwen3"), tmp_path / "t.json")
    write_json(tmp_path / "u.json", read_json(tmp_path / "t.json") | {"demix": about})
    for read in (Tokenizer.load, byte_lengths):
        with refused("u.json"):
            read(tmp_path / "u.json")


def test_a_tokenizer_of_demix_stays_its_own(tmp_path: Path) -> None:
    """Sealed, or without its seal as in an export; of other types it is another one."""
    pq.write_table(pa.table({"text": list(sample()[:50])}), tmp_path / "a.parquet")
    train_tokenizer([tmp_path / "a.parquet"], 400, tmp_path / "own.json")
    own = Tokenizer.load(tmp_path / "own.json")
    (tmp_path / "bare.json").write_text(own.definition)
    for name in ("own", "bare"):
        taken = convert_tokenizer(tmp_path / f"{name}.json", tmp_path / "t.json")
        assert taken.sha256 == own.sha256
        assert (tmp_path / "t.json").read_bytes() == (tmp_path / "own.json").read_bytes()
    padded = convert_tokenizer(tmp_path / "own.json", tmp_path / "t.json", types=500)
    assert (padded.vocab_size, padded.end_of_text) == (500, own.end_of_text)
    for text in ("".join(ODD), *sample()[50:80]):
        assert padded.encode(text).tolist() == own.encode(text).tolist()


def test_a_checkpoint_s_tokenizer_is_read_from_the_files_that_it_has(tmp_path: Path) -> None:
    gpt2_tokenizer(tmp_path / "gpt2.json")
    gpt2 = Tokenizer.load(tmp_path / "gpt2.json")
    with refused(tmp_path):
        imported_tokenizer(tmp_path, tmp_path / "t.json", 50257)
    # The file at the hub marks the last id as special.
    content, end = json.loads(gpt2.definition), {"id": 50256, "content": "<|endoftext|>", "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | {"added_tokens": [end]}))
    assert imported_tokenizer(tmp_path, tmp_path / "t.json", 50257).sha256 == gpt2.sha256
    # Its merges are those of merges.txt, whatever its vocabulary.
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text(json.dumps(content["model"]["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    found = imported_tokenizer(tmp_path, tmp_path / "t.json", 50257)
    assert found.decode(found.encode("the")[:1]) == found.decode(found.encode_batch(["the"])[0][:1]) == "t"
    # OPT's, whose special tokens are ordinary entries.
    content = json.loads(definition("neox"))
    merges = [" ".join(pair) for pair in content["model"]["merges"]]
    (tmp_path / "vocab.json").write_text(json.dumps(content["model"]["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    found = imported_tokenizer(tmp_path, tmp_path / "t.json", 1512)
    assert (found.end_of_text, found.vocab_size) == (0, 1512)
    theirs = HuggingFaceTokenizer.from_str(json.dumps(content | {"normalizer": None, "added_tokens": []}))
    for text in sample()[:50]:
        assert found.encode(text).tolist() == theirs.encode(text).ids
    for wrong in ("a b c\n", "\n" * (17 << 20)):
        (tmp_path / "merges.txt").write_text(wrong)
        with refused("merges.txt"):
            imported_tokenizer(tmp_path, tmp_path / "u.json", 1512)


def _permuted(content: Any) -> None:
    vocabulary = content["model"]["vocab"]
    numbers = np.random.default_rng(0).permutation(len(vocabulary) - 1).tolist()
    content["model"]["vocab"] = {token: numbers[n] if n < len(numbers) else n for token, n in vocabulary.items()}


CHANGED: list[Callable[[Any], object]] = [
    _permuted,
    lambda content: content["model"]["merges"].__delitem__(slice(100, None)),
    lambda content: content["model"]["merges"].clear(),
    lambda content: content["model"]["merges"].reverse(),
    lambda content: content["model"]["merges"].extend(content["model"]["merges"][:300]),
    lambda content: content["model"].update(ignore_merges=True, merges=content["model"]["merges"][:100]),
    lambda content: content["pre_tokenizer"].update(use_regex=False),
]


@pytest.mark.parametrize("number", range(len(CHANGED)))
def test_merges_that_do_not_give_the_ids_in_their_order_give_those_of_tokenizers(number: int, tmp_path: Path) -> None:
    """In a file whose last id is `<|endoftext|>`, as in demix's own."""
    content = json.loads(definition("gpt2"))
    content["model"]["vocab"]["<|endoftext|>"], content["added_tokens"] = len(content["model"]["vocab"]), []
    CHANGED[number](content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = convert_tokenizer(tmp_path / "tokenizer.json", tmp_path / "t.json")
    theirs = HuggingFaceTokenizer.from_str(json.dumps(content))
    for text in (*sample()[:30], "".join(ODD)):
        wanted = theirs.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text).tolist() == tokenizer.encode_batch([text])[0].tolist() == wanted


def section(**tokenizer: Any) -> TokenizerSection:
    """The section `tokenizer` of a small config, completed."""
    return Config.complete(small(tokenizer=tokenizer)).tokenizer


def test_a_config_says_what_the_files_of_a_tokenizer_say(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "hub", "qwen3")
    found = section(kind="file", path=str(source))
    assert (found.end_of_text, found.types, found.size) == ("<|endoftext|>", 1505, 1505)
    (tmp_path / "hub" / "config.json").write_text(json.dumps({"vocab_size": 1600, "eos_token_id": 3}))
    assert section(kind="file", path=str(source)).size == 1600
    found = section(kind="file", path=str(source), types=1700, end_of_text=1502)
    assert (found.end_of_text, found.size) == (1502, 1700)
    assert section(kind="file", path=str(source), types=1700).size == 1700
    # Who gives both needs no file yet: a rule may fetch it.
    assert section(kind="file", path="hub/later.json", types=9, end_of_text="<e>").size == 9
    # A model's folder has the tokenizer that was made of such files.
    (tmp_path / "model").mkdir()
    convert_tokenizer(source, tmp_path / "model" / "tokenizer.json")
    found = section(kind="file", path=f"{tmp_path}/model/tokenizer.json")
    assert (found.end_of_text, found.size) == (1500, 1600)
    assert section(kind="bpe", vocab_size=300).size == 300
    assert section(kind="gpt2", vocab_size=300).size == 50257
    assert section(kind="bpe", vocab_size=300, path=None).size == 300


@pytest.mark.parametrize(
    ("wrong", "subject"),
    [
        ({"kind": "file"}, "tokenizer.path"),
        ({"kind": "file", "path": "no.json"}, "no.json"),
        ({"kind": "file", "path": "a{b}/t.json"}, "a{b}/t.json"),
        ({"kind": "file", "path": "tokenizer.json", "types": 0}, "tokenizer.types"),
        ({"kind": "bpe", "path": "tokenizer.json"}, "tokenizer.path"),
        ({"types": 60000}, "tokenizer.types"),
        ({"kind": "file", "path": "added.json"}, "added.json"),
        ({"kind": "file", "path": "model.json"}, "model.json"),
        ({"kind": "file", "path": "demix.json"}, "tokenizer.types"),
    ],
)
def test_keys_of_a_tokenizer_that_do_not_go_together_are_refused(
    wrong: dict[str, Any], subject: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path, "qwen3")
    damaged = {
        "added": {"model": {"vocab": {}}, "added_tokens": 7},
        "model": {"model": 5},
        "demix": {"demix": {"types": "x"}},
    }
    for name, content in damaged.items():
        Path(f"{name}.json").write_text(json.dumps(content))
    with refused(subject):
        section(**wrong)
