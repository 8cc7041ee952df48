"""Made-up inputs for readers, anonymizer, splitter, token shards and JSON: no crash, and what must hold holds."""

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from demix.data.anonymize import CATEGORIES, anonymize, anonymize_texts
from demix.data.corpus import Budget, Splitting, split
from demix.data.duplicates import mark_duplicates
from demix.data.shards import TokenShard, tokenize
from demix.data.sources import Source, download
from demix.data.tokenizer import train_tokenizer
from demix.errors import DemixError
from demix.files import digest, read_json, read_json_lines, write_json, write_json_lines
from support.breaking import Note, json_value

Fuzz = Callable[..., None]


@pytest.fixture
def fuzz(request: pytest.FixtureRequest, note: Note) -> Fuzz:
    """Runs a check on made-up values: 40 in `make test`, as many as asked for in `make faults`."""
    whole = bool(request.config.getoption("--all-faults", default=False))
    cases = request.config.getoption("--fuzz") if whole else 40

    def run(what: str, check: Callable[..., None], **strategies: st.SearchStrategy) -> None:
        start = time.monotonic()
        # A case that hangs is found by its deadline.
        chosen = settings(
            max_examples=cases,
            deadline=20_000,
            derandomize=not whole,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        chosen(given(**strategies)(check))()
        note.add(f"fuzzed: {what}, {cases} cases", "no crash, no hang, invariants hold", time.monotonic() - start)

    return run


# Pieces that the patterns are made of, so that near misses come up.
PIECES = st.sampled_from([
    "@", ".", "-", "+", " ", "\n", "(", ")", "/", ":", "\0", "\r\n", "0", "1", "12", "123", "4111", "555", "a", "bob",
    "example.org", "facebook.com/", "@[", "]", "call", "phone:", "SSN", "<EMAIL>", "<USER>", "０", "\u2011", "K", "ü",
])  # fmt: skip
TEXTS = st.one_of(st.text(max_size=200), st.lists(PIECES, max_size=40).map("".join))


def test_anonymizer(fuzz: Fuzz) -> None:
    def check(text: str) -> None:
        once, counts = anonymize(text)
        again, more = anonymize(once)
        assert again == once
        assert set(more.values()) == {0}
        assert sum(once.count(f"<{name}>") - text.count(f"<{name}>") for name in CATEGORIES) <= sum(counts.values())
        try:
            text.encode()
        except UnicodeEncodeError:
            return
        column, found = anonymize_texts(pa.array([text], pa.large_string()))
        assert (column.to_pylist(), found) == ([once], counts)

    fuzz("anonymizer", check, text=TEXTS)


FORMS = ["jsonl", "csv", "txt", "json", "parquet", "jsonl.gz", "jsonl.zst", "zip", "tar", "tgz"]


def test_readers_of_any_bytes(fuzz: Fuzz, tmp_path: Path) -> None:
    starts = st.sampled_from([
        b"", b'{"text": "', b'{"text": "a"}\n', b"text\n", b'text,id\n"a', b"PAR1", b"\x1f\x8b\x08\0", b"PK\x03\x04",
        b"\x28\xb5\x2f\xfd", b"\xef\xbb\xbf", b"[[[[", b"\xff\xfe",
    ])  # fmt: skip

    def check(form: str, start: bytes, data: bytes) -> None:
        path, raw = tmp_path / f"a.{form}", tmp_path / "raw.parquet"
        path.write_bytes(start + data)
        try:
            count = download(Source("files", str(path)), "d", raw)
        except DemixError as error:
            refused = str(error)
        else:
            refused = None
        if refused is not None:
            assert "a." in refused or "d.source" in refused
            return
        rows = pq.read_table(raw).to_pylist()
        assert len(rows) == count
        "".join(row["text"] + row["id"] for row in rows).encode()

    fuzz("readers", check, form=st.sampled_from(FORMS), start=starts, data=st.binary(max_size=300))


def test_splitter(fuzz: Fuzz, tmp_path: Path) -> None:
    def check(texts: list[str], dev: int, test: int, train: int | None, seed: int, near: float | None) -> None:
        ids = [hashlib.sha256(text.encode()).hexdigest() for text in texts]
        words = [len(text.split()) for text in texts]
        columns = {"id": ids, "text": pa.array(texts, pa.large_string()), "n_words": words, "origin": ids}
        columns["metadata"] = pa.array(["{}"] * len(texts), pa.large_string())
        documents, counts, owners = (tmp_path / name for name in ("d.parquet", "d.json", "o.parquet"))
        pq.write_table(pa.table(columns), documents)
        write_json(counts, {"rejected": {}, "replacements": {}, "normalised": {}})
        outputs = {name: tmp_path / f"{name}.parquet" for name in ("train", "dev", "test")}
        mark_duplicates({"d": [documents]}, owners)
        try:
            words = Budget(train, dev, test)
            splitting = Splitting(words=words, near_duplicates=near, training=True, seed=seed)
            split("d", [documents], owners, splitting, tmp_path)
        except DemixError as error:
            refused = error.subject
        else:
            refused = None
        if refused is not None:
            assert refused == "d.words"
            return
        kept = {name: pq.read_table(path)["id"].to_pylist() for name, path in outputs.items()}
        together = [text_id for some in kept.values() for text_id in some]
        assert len(together) == len(set(together))
        assert set(together) <= set(ids)
        card = read_json(tmp_path / "card.json")
        assert card["documents"] == {name: len(some) for name, some in kept.items()}
        assert sum(card["documents"].values()) + sum(card["rejected"].values()) + sum(
            card["duplicates"].values()
        ) == len(texts)
        assert kept["train"]

    text = st.lists(st.sampled_from(["a", "b", "c", "dd"]), min_size=1, max_size=16).map(" ".join)
    fuzz(
        "splitter",
        check,
        texts=st.lists(text, max_size=25),
        dev=st.integers(1, 40),
        test=st.integers(1, 40),
        train=st.one_of(st.none(), st.integers(1, 60)),
        seed=st.integers(0, 9),
        near=st.one_of(st.none(), st.floats(0, 1)),
    )


def test_damaged_manifests_and_shards(fuzz: Fuzz, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.parquet"
    pq.write_table(pa.table({"text": ["some words of text"] * 20}), corpus)
    train_tokenizer([corpus], 270, tmp_path / "tokenizer.json")
    output = tmp_path / "t.arrow"
    tokenize(tmp_path / "tokenizer.json", corpus, output)
    files = [output, output.with_suffix(".documents.arrow"), output.with_suffix(".json")]
    wholes = {path: path.read_bytes() for path in files}

    def check(which: int, place: float, bits: int, cut: bool) -> None:
        path = files[which]
        content = bytearray(wholes[path])
        at = int(place * (len(content) - 1))
        content[at] ^= bits
        path.write_bytes(content[:at] if cut else content)
        try:
            if path.suffix == ".json" and json_value(path.read_bytes()) == json_value(wholes[path]):
                TokenShard.open(output, verify=True)
                return
            # Verified before it is used, so that what is mapped is what was written.
            with pytest.raises(DemixError) as error:
                TokenShard.open(output, verify=True)
            assert "t." in str(error.value)
        finally:
            path.write_bytes(wholes[path])

    fuzz(
        "damaged token shards",
        check,
        which=st.integers(0, 2),
        place=st.floats(0, 1, exclude_max=True),
        bits=st.integers(1, 255),
        cut=st.booleans(),
    )


def test_sealed_json(fuzz: Fuzz, tmp_path: Path) -> None:
    values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=10,
    )

    def check(value: dict[str, Any]) -> None:
        path, lines = tmp_path / "a.json", tmp_path / "a.jsonl"
        write_json(path, value)
        assert read_json(path) == value
        whole = json.loads(path.read_bytes().decode("ascii"))
        assert whole == value | {"seal": digest(value)}
        path.write_text(json.dumps(whole, sort_keys=True, ensure_ascii=False), "utf-8", "surrogatepass")
        with suppress(UnicodeDecodeError):
            path.read_text()
            assert read_json(path) == value
        write_json_lines(lines, [value, value])
        assert read_json_lines(lines) == [value, value]

    keys = st.text().filter(lambda key: key not in ("seal", "place"))
    fuzz("sealed JSON", check, value=st.dictionaries(keys, values))
