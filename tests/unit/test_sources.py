import gzip
import hashlib
import json
import os
import stat

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from demix.data import readers
from demix.data.anonymize import anonymize_documents
from demix.data.sources import Source, download
from demix.errors import DemixError
from demix.settings import settings_from
from support.cli import said

ROWS = [
    {"id": "one", "text": "first\u2028line\u0085 \x1c end", "by": "ann"},
    {"id": "two", "text": "", "by": None},
    {"id": "three", "text": "a\r\nb\tc 漢", "by": "bob"},
]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def _read(folder, source):
    output = folder / "raw" / "d" / "documents.parquet"
    count = download(source, "d", output)
    rows = pq.read_table(output).to_pylist()
    assert count == len(rows)
    return rows


def _refused(folder, path, **options):
    """The error's line; nothing may be left behind."""
    with pytest.raises(DemixError) as caught:
        _read(folder, Source("files", str(path), **options))
    assert [*(folder / "raw" / "d").iterdir()] == []
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _write_csv(path, compress):
    sink = pa.BufferOutputStream()
    pyarrow.csv.write_csv(pa.Table.from_pylist(ROWS), sink)
    path.write_bytes(compress(sink.getvalue().to_pybytes()))


COMPRESSIONS = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}


@pytest.mark.parametrize("suffix", COMPRESSIONS)
@pytest.mark.parametrize("form", [".jsonl", ".json", ".csv"])
def test_every_format_gives_the_same_documents(tmp_path, form, suffix):
    path = tmp_path / f"a{form}{suffix}"
    if form == ".csv":
        _write_csv(path, COMPRESSIONS[suffix])
    else:
        path.write_bytes(COMPRESSIONS[suffix](LINES))
    rows = _read(tmp_path, Source("files", str(path), id="id"))
    assert [(row["id"], row["text"]) for row in rows] == [(row["id"], row["text"]) for row in ROWS]
    assert {row["metadata"] for row in rows} == {"{}"}


def test_parquet(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet", row_group_size=2)
    rows = _read(tmp_path, Source("files", str(tmp_path / "a.parquet"), metadata=("id", "by")))
    assert [row["id"] for row in rows] == ["a.parquet#1", "a.parquet#2", "a.parquet#3"]
    assert [row["text"] for row in rows] == [row["text"] for row in ROWS]
    assert [row["metadata"] for row in rows] == [
        '{"by": "ann", "id": "one"}',
        '{"by": null, "id": "two"}',
        '{"by": "bob", "id": "three"}',
    ]


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_a_text_file_is_one_document(tmp_path, suffix):
    for name in ("b", "a"):
        (tmp_path / f"{name}.txt{suffix}").write_bytes(COMPRESSIONS[suffix](f"{name}\n\n{name}".encode()))
    rows = _read(tmp_path, Source("files", str(tmp_path / "*.txt*")))
    assert [(row["id"], row["text"]) for row in rows] == [
        (f"a.txt{suffix}#1", "a\n\na"),
        (f"b.txt{suffix}#1", "b\n\nb"),
    ]


def test_several_globs_take_each_file_once_in_order(tmp_path, monkeypatch):
    for name in "cab":
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}))
    monkeypatch.chdir(tmp_path)
    rows = _read(tmp_path, Source("files", ("b*.jsonl", "*.jsonl")))
    assert [row["text"] for row in rows] == ["a", "b", "c"]


def test_several_compressed_frames_are_one_file(tmp_path):
    for suffix, compress in list(COMPRESSIONS.items())[1:]:
        path = tmp_path / f"frames.jsonl{suffix}"
        path.write_bytes(compress(b'{"text": "a"}\n{"te') + compress(b'xt": "b"}\n'))
        assert [row["text"] for row in _read(tmp_path, Source("files", str(path)))] == ["a", "b"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(st.lists(st.text(st.characters(codec="utf-8") | st.sampled_from("\r\u2028\u0085\x0b\x1c")), min_size=1))
def test_any_text_survives(tmp_path, texts):
    path = tmp_path / "any.jsonl.zst"
    data = "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts).encode()
    path.write_bytes(zstandard.compress(data))
    assert [row["text"] for row in _read(tmp_path, Source("files", str(path)))] == texts


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
def test_a_byte_order_mark_is_no_text(tmp_path, name):
    data = {".jsonl": '{"text": "a"}\n', ".json": '[{"text": "a"}]', ".csv": "text\na\n", ".txt": "a"}
    (tmp_path / name).write_text("\ufeff" + data[name[1:]])
    json_of = {"json": "values"} if name == "a.json" else {}
    assert [row["text"] for row in _read(tmp_path, Source("files", str(tmp_path / name), **json_of))] == ["a"]


def test_a_line_feed_in_a_value_of_csv_ends_no_row_in_a_file_of_many_blocks(tmp_path):
    texts = [f"{number}\n" * (3 << 20) for number in range(3)]
    (tmp_path / "a.csv").write_text("text\n" + "".join(f'"{text}"\n' for text in texts))
    assert [row["text"] for row in _read(tmp_path, Source("files", str(tmp_path / "a.csv")))] == texts


def test_numbers_that_json_does_not_have_are_null_in_metadata(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "n": NaN, "m": {"x": [Infinity, 1.5]}}\n')
    (row,) = _read(tmp_path, Source("files", str(tmp_path / "a.jsonl"), metadata=("n", "m")))
    assert row["metadata"] == '{"m": {"x": [null, 1.5]}, "n": null}'


def test_lone_surrogates_are_replaced_and_counted(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b", "m": "\\udfff"}\n{"text": "\\ud83d\\ude00"}\n')
    rows = _read(tmp_path, Source("files", str(tmp_path / "a.jsonl"), metadata=("m",)))
    assert [row["text"] for row in rows] == ["a\ufffdb", "😀"]
    metadata = pq.read_metadata(tmp_path / "raw" / "d" / "documents.parquet").metadata
    assert metadata[b"surrogates"] == b"2"


def _invalid(kind: str, text: bytes) -> bytes:
    """A file of one document whose text are these bytes."""
    if kind == "parquet":
        column = pa.array([text]).cast(pa.binary()).view(pa.string())
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table({"text": column}), sink)
        return sink.getvalue().to_pybytes()
    return {"jsonl": b'{"text": "' + text + b'"}\n', "csv": b'text,n\n"' + text + b'",1\n', "txt": text}[kind]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.csv", "a.csv.gz", "a.txt", "a.txt.gz", "a.parquet"])
def test_bytes_that_are_not_utf8_are_replaced_and_counted(tmp_path, name, caplog):
    path, data = tmp_path / name, _invalid(name.split(".")[1], b"caf\xe9 and na\xc3\xafve, \xe2\x82 cut")
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    (row,) = _read(tmp_path, Source("files", str(path)))
    assert row["text"] == "caf\ufffd and na\u00efve, \ufffd\ufffd cut"
    metadata = pq.read_metadata(tmp_path / "raw" / "d" / "documents.parquet").metadata
    assert (metadata[b"invalid_bytes"], metadata[b"surrogates"], metadata[b"not_utf8"]) == (b"3", b"0", b"0")
    assert "d: 3 bytes that are not UTF-8 became U+FFFD, and 0 documents were left out" in caplog.text


@given(st.lists(st.lists(st.sampled_from([*b"az ", *range(128, 256)]), max_size=40).map(bytes)))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
def test_any_bytes_become_text(tmp_path, texts):
    path = tmp_path / "any.jsonl"
    path.write_bytes(b"".join(b'{"text": "' + text + b'"}\n' for text in [*texts, b"last"]))
    rows = _read(tmp_path, Source("files", str(path)))
    metadata = pq.read_metadata(tmp_path / "raw" / "d" / "documents.parquet").metadata
    assert len(rows) + int(metadata[b"not_utf8"]) == len(texts) + 1
    valid = [text.decode() for text in texts if _is_utf8(text)]
    assert [row["text"] for row in rows if "\ufffd" not in row["text"]] == [*valid, "last"]


def _is_utf8(data: bytes) -> bool:
    try:
        return "\ufffd" not in data.decode()
    except UnicodeDecodeError:
        return False


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv"])
@pytest.mark.parametrize("coding", ["utf-16", "utf-16-be"])
def test_utf16_is_refused_by_its_mark(tmp_path, name, coding):
    (tmp_path / name).write_bytes('\ufefftext\n"some words"\n'.encode(coding))
    assert _refused(tmp_path, tmp_path / name).endswith(
        f"{name}: is UTF-16, not UTF-8; convert it: iconv -f UTF-16 -t UTF-8 OLD > NEW"
    )


def test_what_was_never_utf8_is_left_out_and_counted(tmp_path):
    (tmp_path / "bad.txt").write_bytes(bytes(range(128, 256)) * 3)
    # Without its mark, UTF-16 is valid UTF-8 but for a letter here and there.
    (tmp_path / "also.txt").write_bytes(("plain words " * 40 + "é").encode("utf-16-le"))
    (tmp_path / "good.txt").write_bytes(b"plain words")
    (row,) = _read(tmp_path, Source("files", str(tmp_path / "*.txt")))
    assert row["text"] == "plain words"
    raw = tmp_path / "raw" / "d" / "documents.parquet"
    assert pq.read_metadata(raw).metadata[b"not_utf8"] == b"2"
    anonymize_documents(raw, tmp_path / "out.parquet", tmp_path / "counts.json")
    counts = json.loads((tmp_path / "counts.json").read_text())
    assert (counts["documents"], counts["rejected"]) == (3, {"empty": 0, "not_utf8": 2})


def test_what_is_written_is_private_and_the_same_every_time(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES)
    for run in ("x", "y"):
        download(Source("files", str(path)), "d", tmp_path / run / "d" / "documents.parquet")
    first, second = (tmp_path / run / "d" / "documents.parquet" for run in ("x", "y"))
    assert first.read_bytes() == second.read_bytes()
    assert stat.S_IMODE(first.stat().st_mode) == 0o600
    assert stat.S_IMODE(first.parent.stat().st_mode) == 0o700


def test_a_folder_with_other_files_keeps_its_mode(tmp_path):
    os.chmod(tmp_path, 0o755)
    (tmp_path / "a.jsonl").write_bytes(LINES)
    download(Source("files", str(tmp_path / "a.jsonl")), "d", tmp_path / "documents.parquet")
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_unknown_kind_and_missing_file(tmp_path):
    with pytest.raises(DemixError, match=r"--settings\.kind: is 'ftp'; allowed is one of files, url, store, hub"):
        settings_from(Source, {"kind": "ftp", "path": "x"})
    assert _refused(tmp_path, tmp_path / "*.jsonl").startswith("d.source.path: no file matches")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": "b"\n', "a.jsonl, line 2: is not valid JSON"),
        ("a.jsonl", b'{"text": "a"}\n\n["b"]\n', "a.jsonl, line 3: is not a JSON object"),
        ("a.jsonl", b'{"text": "a"}\n{"body": "b"}\n', "a.jsonl, row 2: has no field 'text'; fields are 'body': "),
        ("a.jsonl", b'{"text": 5}\n', "a.jsonl, row 1: field 'text' is int, not text"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl, line 1: is not valid JSON"),
        ("a.jsonl", b"", "a.jsonl: holds no documents"),
        ("a.jsonl", b"\n\n", "a.jsonl: holds no documents"),
        ("a.csv", b"", "a.csv: holds no documents"),
        ("a.csv", b"text,id\n", "a.csv: holds no documents"),
        ("a.csv", b"body,id\nx,y\n", "a.csv: Column 'text' in include_columns does not exist"),
        ("a.csv", b"text,id\nx,y\nz\n", "a.csv: is not valid CSV"),
        ("a.doc", b"x", "a.doc: is of an unknown format"),
        ("a.parquet.gz", b"x", "a.parquet.gz: is of an unknown format"),
        ("a.parquet", b"PAR1 and more", "a.parquet: is not Parquet"),
        ("a.jsonl.gz", gzip.compress(LINES)[:-9], "a.jsonl.gz: is damaged or cut short"),
        ("a.jsonl.zst", zstandard.compress(LINES)[:-5], "a.jsonl.zst: is damaged or cut short"),
        ("a.csv.zst", zstandard.compress(b"text\n" + b"xyz\n" * 9)[:-3], "a.csv.zst: is damaged or cut short"),
        ("a.jsonl.zst", b"not zstd at all", "a.jsonl.zst: is damaged or cut short"),
        ("a.jsonl.gz", b"\x1f\x8b\x08\x00 garbage garbage", "a.jsonl.gz: is damaged or cut short"),
    ],
)
def test_bad_files_are_refused_whole(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    assert message in _refused(tmp_path, tmp_path / name)


def test_a_flipped_byte_is_found_in_compressed_files(tmp_path):
    for name, data in (
        ("a.jsonl.gz", gzip.compress(LINES)),
        ("b.jsonl.zst", zstandard.ZstdCompressor(write_checksum=True).compress(LINES)),
    ):
        flipped = bytearray(data)
        flipped[len(data) // 2] ^= 1
        (tmp_path / name).write_bytes(flipped)
        assert name in _refused(tmp_path, tmp_path / name)


def test_damaged_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"text": [f"text {i}" for i in range(1000)], "n": range(1000)}), path, write_page_checksum=True
    )
    data = path.read_bytes()
    assert "has no column 'body'; it has text, n" in _refused(tmp_path, path, text="body")
    assert "field 'n' is int" in _refused(tmp_path, path, text="n")
    path.write_bytes(data[:-100])
    assert "is not Parquet, damaged or cut short" in _refused(tmp_path, path)
    path.write_bytes(data[:60] + bytes([data[60] ^ 1]) + data[61:])
    assert "is not Parquet, damaged or cut short" in _refused(tmp_path, path)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("form", [".txt", ".csv"])
def test_decompression_bombs_are_refused(tmp_path, form, suffix):
    path = tmp_path / f"bomb{form}{suffix}"
    path.write_bytes(COMPRESSIONS[suffix](b"text\n" + (b"x" * 9999 + b"\n") * 7000))
    assert "expands to over 200 times" in _refused(tmp_path, path)


def test_bombs_with_valid_lines(tmp_path):
    path = tmp_path / "bomb.jsonl.zst"
    path.write_bytes(zstandard.compress(b'{"text": "a"}\n' + (b" " * 9999 + b"\n") * 7000))
    assert "expands to over 200 times" in _refused(tmp_path, path)


def test_long_lines_and_documents_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_DOCUMENT_BYTES", 1000)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + " " * 1001)
    assert "a.jsonl, line 2: is over 128 MiB long" in _refused(tmp_path, tmp_path / "a.jsonl")
    (tmp_path / "a.txt").write_text("x" * 1001)
    assert "a.txt: is a document over 128 MiB" in _refused(tmp_path, tmp_path / "a.txt")
    pq.write_table(pa.table({"text": ["x" * 1001]}), tmp_path / "a.parquet")
    assert "a.parquet, row 1: is a document over 128 MiB" in _refused(tmp_path, tmp_path / "a.parquet")


def test_a_failed_run_leaves_the_earlier_output(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES)
    output = tmp_path / "raw" / "documents.parquet"
    download(Source("files", str(path)), "d", output)
    before = output.read_bytes()
    path.write_bytes(LINES + b"{")
    with pytest.raises(DemixError):
        download(Source("files", str(path)), "d", output)
    assert output.read_bytes() == before
    assert [*output.parent.iterdir()] == [output]


def _parts(folder, source):
    """The texts of each part; the parts of a run are made one by one, as the workflow's jobs are."""
    texts = []
    for part in range(source.parts):
        output = folder / "raw" / "d" / f"{part:04d}.parquet"
        download(source, "d", output, part)
        texts.append(pq.read_table(output)["text"].to_pylist())
    return texts


def test_many_files_are_shared_out_whole(tmp_path):
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text(str(number))
    assert _parts(tmp_path, Source("files", f"{tmp_path}/*.txt", parts=2)) == [["0", "2", "4"], ["1", "3"]]


@pytest.mark.parametrize("form", ["a.jsonl", "a.jsonl.zst", "a.csv", "a.parquet", "groups.parquet", "a.json"])
def test_rows_of_one_file_are_shared_out(tmp_path, form):
    rows = [{"id": str(i), "text": f"text {i}"} for i in range(10)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path = tmp_path / form
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2 if form == "groups.parquet" else 10)
    elif path.suffix == ".csv":
        path.write_text("id,text\n" + "".join(f"{row['id']},{row['text']}\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_bytes(COMPRESSIONS[path.suffix.replace(".jsonl", "")](lines))
    source = Source("files", str(path), parts=3, id="id", json="values" if path.suffix == ".json" else "lines")
    parts = _parts(tmp_path, source)
    assert sorted(text for part in parts for text in part) == [row["text"] for row in rows]
    expected = [0, 1, 6, 7] if form == "groups.parquet" else [0, 3, 6, 9]
    assert parts[0] == [f"text {i}" for i in expected]
    assert _parts(tmp_path, source) == parts, "the same rows every time"


def test_more_parts_than_rows_leave_parts_empty_but_no_row_out(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    assert [len(part) for part in _parts(tmp_path, Source("files", f"{tmp_path}/a.jsonl", parts=5))] == [1, 1, 1, 0, 0]
    with pytest.raises(DemixError, match=r"d\.source\.parts: is 5, there is no part 5"):
        download(Source("files", f"{tmp_path}/a.jsonl", parts=5), "d", tmp_path / "o.parquet", 5)


def test_a_filter_keeps_what_matches(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    path = tmp_path / "a.jsonl"
    rows = _read(tmp_path, Source("files", str(path), where={"by": ["bob", "eve"]}))
    assert [row["text"] for row in rows] == [ROWS[2]["text"]]
    (tmp_path / "raw" / "d" / "documents.parquet").unlink()
    assert "d.source.where: keeps none of 3 documents" in _refused(tmp_path, path, where={"by": "eve"})


def test_a_null_is_an_empty_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": null}\n{"text": ["a", "b"]}\n')
    assert [row["text"] for row in _read(tmp_path, Source("files", f"{tmp_path}/a.jsonl"))] == ["", "a\nb"]


def test_a_word_budget_stops_before_what_it_does_not_need(tmp_path, caplog):
    (tmp_path / "a.jsonl").write_text('{"text": "one two three"}\n' * 4 + "damaged, but never read")
    source = Source("files", f"{tmp_path}/a.jsonl", words=10)
    assert len(_read(tmp_path, source)) == 4
    assert caplog.text == ""
    assert len(_read(tmp_path, Source("files", f"{tmp_path}/a.jsonl", words=9))) == 3
    (tmp_path / "a.jsonl").write_text('{"text": "one two three"}\n' * 4)
    download(Source("files", f"{tmp_path}/a.jsonl", words=40, parts=2), "d", tmp_path / "o.parquet")
    assert "d: this part has only 6 words, its share of source.words is 20" in caplog.text


def test_instructions_say_what_to_do(tmp_path):
    message = _refused(tmp_path, tmp_path / "none.json", instructions="accept the terms and put it into data/")
    assert message.endswith("none.json'; accept the terms and put it into data/")


def test_sizes_and_digests_of_local_files(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES)
    good = {"sha256": {"a.jsonl": hashlib.sha256(LINES).hexdigest()}, "bytes": {"a.jsonl": len(LINES)}}
    assert len(_read(tmp_path, Source("files", str(path), **good))) == 3
    (tmp_path / "raw" / "d" / "documents.parquet").unlink()
    assert "a.jsonl: has sha256" in _refused(tmp_path, path, sha256={"a.jsonl": "0" * 64})
    assert "a.jsonl: has 9" in _refused(tmp_path, path, bytes={"a.jsonl": 9}).replace(str(len(LINES)), "9")
    assert "d.source.sha256.b.jsonl: names no file" in _refused(tmp_path, path, sha256={"b.jsonl": "0" * 64})


def test_read_makes_what_download_and_anonymize_make_and_leaves_no_raw_text(tmp_path):
    source = tmp_path / "a.jsonl"
    texts = [f"{name}@example.org wrote {name} words. " * 9 for name in "abc"]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings = ["--settings", json.dumps({"kind": "files", "path": str(source), "piece_words": 20})]
    raw, old, new = (tmp_path / name / "0000.parquet" for name in ("raw/d", "old", "new"))
    assert said(["download", "d", *settings, "--output", str(raw)]) is None
    apart = ["--output", str(old), "--counts", str(old.with_suffix(".json")), "--piece-words", "20"]
    assert said(["anonymize", str(raw), *apart]) is None
    raw.unlink()
    together = ["--raw", str(raw), "--output", str(new), "--counts", str(new.with_suffix(".json"))]
    assert said(["read", "d", *settings, *together]) is None
    assert [*raw.parent.iterdir()] == []
    assert new.read_bytes() == old.read_bytes()
    assert new.with_suffix(".json").read_bytes() == old.with_suffix(".json").read_bytes()
    assert said(["read", "d", *settings, "--no-enabled", *together]) is None
    assert new.read_bytes() != old.read_bytes()
