import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HuggingFaceTokenizer

from demix.data.sources import Source, download
from demix.data.tokenizer import END_OF_TEXT, Tokenizer, gpt2_tokenizer, train_tokenizer
from demix.files import read_json, write_json
from support.errors import refused

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


@pytest.fixture(scope="module")
def ours(path):
    return Tokenizer.load(path)


@pytest.fixture(scope="module")
def theirs(ours):
    return HuggingFaceTokenizer.from_str(ours.definition)


def test_the_ids_are_those_of_hugging_face_and_the_published_ones(ours, theirs, texts):
    assert ours.vocab_size in (2000, 50257)
    assert theirs.get_vocab_size() == ours.vocab_size == ours.end_of_text + 1
    assert theirs.token_to_id(END_OF_TEXT) == ours.end_of_text
    if ours.vocab_size == 50257:
        assert ours.encode("Hello world").tolist() == [15496, 995]
        assert ours.encode(END_OF_TEXT).tolist() == [27, 91, 437, 1659, 5239, 91, 29]
    assert ours.decode([ours.end_of_text]) == END_OF_TEXT
    some = [text for file in texts for text in pq.read_table(file)["text"].to_pylist()[:60]]
    ids, edges = ours.encode_batch(some)
    for start, end, expected in zip(edges, edges[1:], theirs.encode_batch(some), strict=False):
        assert ids[start:end].tolist() == expected.ids
    for fast, exact in zip((ids, edges), ours.encode_batch(some, exact=True), strict=True):
        assert np.array_equal(fast, exact)


def test_any_text_comes_back_and_hugging_face_agrees(ours, theirs):
    @settings(max_examples=200, deadline=None)
    @given(ANY_TEXT)
    @example(f"a{END_OF_TEXT}b")
    def check(text):
        ids = ours.encode(text)
        assert ours.decode(ids) == text
        assert ids.tolist() == theirs.encode(text).ids
        assert ours.end_of_text not in ids

    check()


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
    with refused("tokenizer.vocab_size"):
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
