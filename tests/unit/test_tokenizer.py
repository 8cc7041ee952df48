import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HuggingFaceTokenizer

from demix.data.sources import Source, download
from demix.data.tokenizer import END_OF_TEXT, Tokenizer, _texts, gpt2_tokenizer, train_tokenizer
from demix.errors import DemixError
from demix.files import read_json, write_json

SAMPLE = Path(__file__).parents[2] / "resources" / "sample"
ODD = [*" \n\t'\u00a0\u2003\u2028\x1c\x85aZ9é漢😀", "'ll", "  ", END_OF_TEXT]
ANY_TEXT = st.lists(st.sampled_from(ODD) | st.text(st.characters(codec="utf-8"), max_size=3)).map("".join)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for domain in ("jargon", "parliament"):
        download(Source("files", str(SAMPLE / f"{domain}.jsonl.zst")), domain, folder / domain / "documents.parquet")
    return [folder / domain / "documents.parquet" for domain in ("jargon", "parliament")]


@pytest.fixture(scope="module", params=["bpe", "gpt2"])
def path(request, texts, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    if request.param == "gpt2":
        gpt2_tokenizer(path)
    else:
        train_tokenizer(texts, 2000, path)
    return path


def test_sizes(path):
    tokenizer = Tokenizer.load(path)
    assert tokenizer.vocab_size in (2000, 50257)
    assert tokenizer.end_of_text == tokenizer.vocab_size - 1
    known = HuggingFaceTokenizer.from_str(Tokenizer.load(path).definition)
    assert known.get_vocab_size() == tokenizer.vocab_size
    assert known.token_to_id(END_OF_TEXT) == tokenizer.end_of_text


def test_gpt2_ids_are_the_published_ones(tmp_path):
    gpt2_tokenizer(tmp_path / "gpt2.json")
    tokenizer = Tokenizer.load(tmp_path / "gpt2.json")
    assert tokenizer.encode("Hello world").tolist() == [15496, 995]
    assert tokenizer.encode(END_OF_TEXT).tolist() == [27, 91, 437, 1659, 5239, 91, 29]
    assert tokenizer.end_of_text == 50256


def test_any_text_comes_back_and_hugging_face_agrees(path):
    ours, theirs = Tokenizer.load(path), HuggingFaceTokenizer.from_str(Tokenizer.load(path).definition)

    @settings(max_examples=200, deadline=None)
    @given(ANY_TEXT)
    def check(text):
        ids = ours.encode(text)
        assert ours.decode(ids) == text
        assert ids.tolist() == theirs.encode(text).ids
        assert ours.end_of_text not in ids

    check()


def test_real_text_gets_the_ids_of_hugging_face(path, texts):
    ours, theirs = Tokenizer.load(path), HuggingFaceTokenizer.from_str(Tokenizer.load(path).definition)
    some = [text for file in texts for text in pq.read_table(file)["text"].to_pylist()[:60]]
    ids, edges = ours.encode_batch(some)
    for start, end, expected in zip(edges, edges[1:], theirs.encode_batch(some), strict=False):
        assert ids[start:end].tolist() == expected.ids
    for fast, exact in zip((ids, edges), ours.encode_batch(some, exact=True), strict=True):
        assert np.array_equal(fast, exact)


def test_end_of_text_in_a_document_is_text(path):
    tokenizer = Tokenizer.load(path)
    ids = tokenizer.encode(f"a{END_OF_TEXT}b")
    assert len(ids) > 5
    assert tokenizer.end_of_text not in ids
    assert tokenizer.decode(ids) == f"a{END_OF_TEXT}b"
    assert tokenizer.decode([tokenizer.end_of_text]) == END_OF_TEXT


@pytest.mark.parametrize("text", ["a" * 300_000, "x" + " " * 1_200_000 + "y", "\n" * 1_200_000, "\n a" * 100_000])
def test_monotonous_text(path, text):
    tokenizer = Tokenizer.load(path)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_long_white_space_is_cut_as_the_pattern_cuts_it(path, monkeypatch):
    """What `encode` falls back to, on runs short enough that tiktoken needs no help."""
    tokenizer = Tokenizer.load(path)
    words = ["a" + " " * 12_000 + "b", " " * 11_000, "\n" * 10_001 + "'s", "c" + "\t" * 10_500]
    text = "".join(words)
    expected = tokenizer.encode(text)
    encode = tokenizer.encoding.encode_to_numpy

    def refuse_long(some, **options):
        if len(some) > 12_000 and not some.isspace():
            raise ValueError("Max stack size exceeded for backtracking")
        return encode(some, **options)

    monkeypatch.setattr(tokenizer.encoding, "encode_to_numpy", refuse_long)
    assert np.array_equal(tokenizer.encode(text), expected)


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


def test_little_text_gives_fewer_ids_and_says_so(tmp_path, caplog):
    pq.write_table(pa.table({"text": ["abab abab", END_OF_TEXT]}), tmp_path / "a.parquet")
    train_tokenizer([tmp_path / "a.parquet"], 1000, tmp_path / "t.json")
    tokenizer = Tokenizer.load(tmp_path / "t.json")
    assert 257 < tokenizer.vocab_size < 300
    assert f"the text gives {tokenizer.vocab_size} of the 1000 ids asked for" in caplog.text
    assert tokenizer.decode(tokenizer.encode("any 漢 text")) == "any 漢 text"


def test_the_smallest_vocabulary_is_bytes(tmp_path):
    pq.write_table(pa.table({"text": ["abab abab"]}), tmp_path / "a.parquet")
    train_tokenizer([tmp_path / "a.parquet"], 257, tmp_path / "t.json")
    tokenizer = Tokenizer.load(tmp_path / "t.json")
    assert (tokenizer.vocab_size, len(tokenizer.encode("漢"))) == (257, 3)
    with pytest.raises(DemixError, match=r"tokenizer\.vocab_size: is 256; give at least 257"):
        train_tokenizer([tmp_path / "a.parquet"], 256, tmp_path / "u.json")
    assert not (tmp_path / "u.json").exists()


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
def test_a_file_that_is_no_tokenizer_is_refused(path, tmp_path, damage):
    content = read_json(path)
    damage(content)
    write_json(tmp_path / "t.json", content)
    with pytest.raises(DemixError, match=r"t\.json: is no tokenizer"):
        Tokenizer.load(tmp_path / "t.json")


def _texts_used(folder, texts, words):
    """The documents that a tokenizer learns from."""
    folder.mkdir()
    half = len(texts) // 2
    for name, some in (("a", texts[:half]), ("b", texts[half:])):
        words_of = [len(text.split()) for text in some]
        pq.write_table(pa.table({"text": some, "n_words": words_of}), folder / f"{name}.parquet")
    return sorted(text for some in _texts([folder / "a.parquet", folder / "b.parquet"], words) for text in some)


def test_much_text_is_sampled_by_its_content(tmp_path):
    texts = [f"document {number} " + "word " * (number % 50) for number in range(2000)]
    total = sum(len(text.split()) for text in texts)
    assert _texts_used(tmp_path / "all", texts, total) == sorted(texts)
    used = _texts_used(tmp_path / "some", texts, total // 4)
    assert abs(sum(len(text.split()) for text in used) - total / 4) < 0.1 * total
    assert _texts_used(tmp_path / "turned", texts[::-1], total // 4) == used
