"""Text out of files of every format, archive and size, good ones against plain loops, and hostile ones."""

import bz2
import csv
import datetime
import gzip
import hashlib
import io
import json
import lzma
import math
import os
import re
import stat
import struct
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from demix.data import expand, readers
from demix.data.anonymize import anonymize_documents
from demix.data.readers import matches, select
from demix.data.sources import Omitted, Source, download, records
from demix.errors import DemixError
from demix.settings import settings_from
from support.cli import said
from support.errors import refused

DATATROVE = Path(__file__).parent / "data" / "datatrove"
ROWS = [
    {"id": "one", "text": "first\u2028line\u0085 \x1c end", "by": "ann"},
    {"id": "two", "text": "", "by": None},
    {"id": "three", "text": "a\r\nb\tc 漢", "by": "bob"},
]
NAMES = ("id", "text", "by")
COMPRESS: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}


def read(folder: Path, *paths: object, part: int = 0, **options: Any) -> list[dict[str, Any]]:
    """The raw documents of a part of a source of local files."""
    source = settings_from(Source, {"path": [*map(str, paths)]} | options)
    output = folder / "raw" / "d" / f"{part:04d}.parquet"
    count = download(source, "d", output, part)
    rows = pq.read_table(output).to_pylist()
    assert count == len(rows)
    return rows


def texts(folder: Path, *paths: object, **options: Any) -> list[str]:
    return [row["text"] for row in read(folder, *paths, **options)]


def counts(folder: Path) -> dict[str, int]:
    """What the file of raw text says of bytes that are no text."""
    metadata = pq.read_metadata(folder / "raw" / "d" / "0000.parquet").metadata
    return {name: int(metadata[name.encode()]) for name in ("invalid_bytes", "surrogates", "not_utf8")}


def lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def parquet(table: pa.Table, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, **options)
    return sink.getvalue().to_pybytes()


def encoded(form: str, rows: list[dict[str, Any]]) -> bytes:
    """A file of rows: of JSON lines, of one JSON array, CSV or Parquet, with row groups of two rows."""
    if form == "values":
        return json.dumps(rows).encode()
    if form == "csv":
        written = io.StringIO(newline="")
        csv.writer(written, quoting=csv.QUOTE_ALL).writerows([NAMES, *([row[name] for name in NAMES] for row in rows)])
        return written.getvalue().encode()
    if form == "parquet":
        table = pa.Table.from_pylist(rows, pa.schema([(name, pa.string()) for name in NAMES]))
        return parquet(table, row_group_size=2)
    return lines(rows)


def tarred(members: dict[str, bytes]) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return data.getvalue()


def zipped(members: dict[str, bytes]) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return data.getvalue()


ARCHIVES: dict[str, Callable[[dict[str, bytes]], bytes]] = {
    "a.zip": zipped,
    "a.tar": tarred,
    "a.tar.gz": lambda members: gzip.compress(tarred(members)),
    "a.tgz": lambda members: gzip.compress(tarred(members)),
    "a.tar.zst": lambda members: zstandard.compress(tarred(members)),
}
every_archive = pytest.mark.parametrize("name", ARCHIVES)
# The content of a file and the end of its name.
FORMS = [
    *((form, f".{form}{suffix}") for form in ("jsonl", "csv") for suffix in COMPRESS),
    *(("jsonl", f".json{suffix}") for suffix in COMPRESS),
    *(("values", f".json{suffix}") for suffix in COMPRESS),
    ("parquet", ".parquet"),
]
TEXT = st.text(st.characters(codec="utf-8") | st.sampled_from(" \r\n\t\u2028\u0085\x0b\x1c\0'\","), max_size=12)
TABLE = st.lists(
    st.fixed_dictionaries({"id": TEXT, "text": TEXT, "by": st.sampled_from([None, "ann", "bob"])}),
    min_size=1,
    max_size=7,
)


def shares(files: dict[str, list[Any]], form: str, archive: bool, parts: int) -> list[list[Any]]:
    """The rows of each part: whole files where there are enough of them, else rows."""
    found: list[list[Any]] = [[] for _ in range(parts)]
    for place, rows in enumerate(files.values()):
        for number, row in enumerate(rows):
            of_group = form == "parquet" and math.ceil(len(rows) / 2) >= parts
            by = place if archive or len(files) >= parts else number // 2 if of_group else number
            found[by % parts].append(row)
    return found


@given(
    st.sampled_from(FORMS),
    st.sampled_from([None, *ARCHIVES]),
    st.lists(TABLE, min_size=1, max_size=3),
    st.integers(1, 3),
    st.sampled_from([{}, {"by": ["ann"]}, {"by": ["bob", "eve"]}]),
    st.none() | st.integers(1, 12),
)
@example(("parquet", ".parquet"), None, [ROWS * 3], 1, {}, None)
@example(("parquet", ".parquet"), None, [ROWS * 3], 3, {}, None)
@settings(deadline=None, max_examples=60)
def test_any_files_give_the_documents_of_a_plain_loop(tmp_path_factory, of, archive, tables, parts, where, words):
    folder, (form, suffix) = tmp_path_factory.mktemp("files"), of
    if form == "parquet":
        archive = None
    files = {f"{number}{suffix}": rows for number, rows in enumerate(tables)}
    data = {
        name: COMPRESS[next((one for one in (".gz", ".zst") if name.endswith(one)), "")](encoded(form, rows))
        for name, rows in files.items()
    }
    for name, content in ({archive: ARCHIVES[archive](data)} if archive else data).items():
        (folder / name).write_bytes(content)
    path = folder / archive if archive else f"{folder}/?{suffix}"
    options = {"parts": parts, "where": where, "words": words}
    options |= {"json": "values"} if form == "values" else {}
    for part, share in enumerate(shares(files, form, archive is not None, parts)):
        wanted, total = [], 0
        for row in share:
            if where and row["by"] not in where["by"]:
                continue
            wanted.append(row["text"])
            total += len(row["text"].split())
            if words is not None and total >= math.ceil(words / parts):
                break
        if where and not wanted and parts == 1:
            with refused("d.source.where"):
                read(folder, path, part=part, **options)
            continue
        assert texts(folder, path, part=part, **options) == wanted


def test_fields_become_texts(tmp_path):
    values = [
        {"text": None, "n": math.nan, "m": {"x": [math.inf, 1.5]}},
        {"text": ["a", "b"], "n": "\udfff"},
        {"text": "a\ud800b"},
        {"text": "\ud83d\ude00"},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(value) + "\n" for value in values))
    assert texts(tmp_path, tmp_path / "a.jsonl") == ["", "a\nb", "a\ufffdb", "😀"]
    assert counts(tmp_path) == {"invalid_bytes": 0, "surrogates": 1, "not_utf8": 0}
    # As the examples of tasks are read.
    source, omitted = Source(path=f"{tmp_path}/a.jsonl", fields=("n", "m")), Omitted()
    assert [*records(source, "d", tmp_path, omitted)] == [
        ("a.jsonl#1", "", '{"n": null, "m": {"x": [null, 1.5]}}'),
        ("a.jsonl#2", "a\nb", '{"n": "\ufffd", "m": null}'),
        ("a.jsonl#3", "a\ufffdb", '{"n": null, "m": null}'),
        ("a.jsonl#4", "😀", '{"n": null, "m": null}'),
    ]
    assert omitted.surrogates == 2
    # As Qasper has its papers.
    sections = [{"paragraphs": ["a", "b"]}, {"paragraphs": []}, {"paragraphs": ["c"]}]
    (tmp_path / "q.json").write_text(json.dumps({"1909.1": {"title": "t", "full_text": sections}}))
    assert texts(tmp_path, tmp_path / "q.json", json="values", text="full_text[].paragraphs[]") == ["a\nb\nc"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_several_compressed_frames_are_one_file(tmp_path, suffix):
    path = tmp_path / f"frames.jsonl{suffix}"
    path.write_bytes(COMPRESS[suffix](b'{"text": "a"}\n{"te') + COMPRESS[suffix](b'xt": "b"}\n'))
    assert texts(tmp_path, path) == ["a", "b"]


def test_what_is_not_needed_is_never_read(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one two three"}\n' * 4 + "damaged")
    assert len(read(tmp_path, tmp_path / "a.jsonl", words=10)) == 4


NOISE = b"caf\xe9 and na\xc3\xafve, \xe2\x82 cut"


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", b'{"text": "' + NOISE + b'"}\n'),
        ("a.csv", b'text,n\n"' + NOISE + b'",1\n'),
        ("a.txt", NOISE),
        ("a.parquet", parquet(pa.table({"text": pa.array([NOISE]).cast(pa.binary()).view(pa.string())}))),
    ],
    ids=["jsonl", "csv", "txt", "parquet"],
)
def test_bytes_that_are_not_utf8_are_replaced_and_counted(tmp_path, name, data, suffix, caplog):
    path = tmp_path / (name if name == "a.parquet" else name + suffix)
    path.write_bytes(data if path.name == name else gzip.compress(data))
    assert texts(tmp_path, path) == ["caf\ufffd and na\u00efve, \ufffd\ufffd cut"]
    assert counts(tmp_path) == {"invalid_bytes": 3, "surrogates": 0, "not_utf8": 0}
    assert [record.levelname for record in caplog.records].count("WARNING") == 1


@given(st.lists(st.lists(st.sampled_from([*b"az ", *range(128, 256)]), max_size=40).map(bytes)))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
def test_any_bytes_become_text(tmp_path, some):
    path = tmp_path / "any.jsonl"
    path.write_bytes(b"".join(b'{"text": "' + text + b'"}\n' for text in [*some, b"last"]))
    found = texts(tmp_path, path)
    assert len(found) + counts(tmp_path)["not_utf8"] == len(some) + 1
    valid = [text for raw in [*some, b"last"] if "\ufffd" not in (text := raw.decode(errors="replace"))]
    assert [text for text in found if "\ufffd" not in text] == valid


def test_what_was_never_utf8_is_left_out_and_counted(tmp_path):
    (tmp_path / "bad.txt").write_bytes(bytes(range(128, 256)) * 3)
    # Without its mark, UTF-16 is valid UTF-8 but for a letter here and there.
    (tmp_path / "also.txt").write_bytes(("plain words " * 40 + "é").encode("utf-16-le"))
    (tmp_path / "good.txt").write_bytes(b"plain words")
    assert texts(tmp_path, tmp_path / "*.txt") == ["plain words"]
    assert counts(tmp_path)["not_utf8"] == 2
    anonymize_documents(tmp_path / "raw" / "d" / "0000.parquet", tmp_path / "out.parquet", tmp_path / "counts.json")
    found = json.loads((tmp_path / "counts.json").read_text())
    assert (found["documents"], found["rejected"]) == (3, {"empty": 0, "not_utf8": 2})


@pytest.mark.parametrize(
    ("name", "data"),
    [("a.jsonl", '{"text": "a"}\n'), ("a.json", '[{"text": "a"}]'), ("a.csv", "text\na\n"), ("a.txt", "a")],
)
def test_a_byte_order_mark_is_no_text_and_that_of_utf16_is_refused(tmp_path, name, data):
    (tmp_path / name).write_text("\ufeff" + data)
    assert texts(tmp_path, tmp_path / name, json="values" if name == "a.json" else "lines") == ["a"]
    for coding in ("utf-16-le", "utf-16-be"):
        (tmp_path / name).write_bytes(("\ufeff" + data).encode(coding))
        with refused(name):
            read(tmp_path, tmp_path / name)


def test_what_is_written_is_private_the_same_every_time_and_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(ROWS))
    for run in ("x", "y"):
        read(tmp_path / run, path)
    first, second = (tmp_path / run / "raw" / "d" / "0000.parquet" for run in ("x", "y"))
    before = first.read_bytes()
    assert before == second.read_bytes()
    assert stat.S_IMODE(first.stat().st_mode) == 0o600
    assert stat.S_IMODE(first.parent.stat().st_mode) == 0o700
    path.write_bytes(lines(ROWS) + b"{")
    with refused("a.jsonl, line 4"):
        read(tmp_path / "x", path)
    assert first.read_bytes() == before
    assert [*first.parent.iterdir()] == [first]
    # A folder that others have files in keeps its mode.
    path.write_bytes(lines(ROWS))
    os.chmod(tmp_path, 0o755)
    download(Source(path=str(path)), "d", tmp_path / "documents.parquet")
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_read_makes_what_download_and_anonymize_make_and_leaves_no_raw_text(tmp_path):
    source = tmp_path / "a.jsonl"
    source.write_bytes(lines([{"text": f"{name}@example.org wrote {name} words. " * 9} for name in "abc"]))
    settings = ["--settings", json.dumps({"path": str(source), "piece_words": 20})]
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


def test_digests_of_local_files(tmp_path):
    path, data = tmp_path / "a.jsonl", lines(ROWS)
    path.write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    assert len(read(tmp_path, path, sha256={"a.jsonl": digest})) == 3
    for wrong, subject in (
        ({"sha256": {"a.jsonl": "0" * 64}}, "a.jsonl"),
        ({"sha256": {"b.jsonl": digest}}, "d.source.sha256.b.jsonl"),
        ({"part": 5, "parts": 5}, "d.source.parts"),
    ):
        with refused(subject):
            read(tmp_path, path, **wrong)
    with refused("d.source.path") as caught:
        read(tmp_path, tmp_path / "none.json", instructions="ask its owner")
    assert caught.value.cure == "ask its owner"


def linked_zip(member: str) -> bytes:
    data, info = io.BytesIO(), zipfile.ZipInfo(member)
    info.create_system, info.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr(info, "/etc/passwd")
    return data.getvalue()


def encrypted_zip() -> bytes:
    data = bytearray(zipped({"good.txt": b"text"}))
    data[data.index(b"PK\x01\x02") + 8] |= 1
    return bytes(data)


def lying_zip() -> bytes:
    """A member of other sizes than the archive says."""
    data = bytearray(zipped({"good.jsonl": lines(ROWS) * 100}))
    for place in (22, data.index(b"PK\x01\x02") + 24):
        struct.pack_into("<I", data, place, 28)
    return bytes(data)


def special_tar(kind: bytes) -> bytes:
    data, info = io.BytesIO(), tarfile.TarInfo("good.jsonl")
    info.type, info.linkname = kind, "/etc/passwd"
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        archive.addfile(info)
    return data.getvalue()


def sparse_tar() -> bytes:
    """A GNU sparse file of 1 TB in a kilobyte."""
    header = bytearray(512)
    header[:10] = b"hole.jsonl"
    header[100:108], header[108:116], header[116:124] = b"0000644\0", b"0000000\0", b"0000000\0"
    header[124:136], header[136:148] = b"00000000000\0", b"00000000000\0"
    header[148:156], header[156:157], header[257:265] = b" " * 8, b"S", b"ustar  \0"
    header[483:495] = b"\x80" + (1 << 40).to_bytes(11, "big")
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + bytes(1024)


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


TABLE_OF_TEXTS = pa.table({"text": [f"text {number}" for number in range(1000)], "n": range(1000)})
# A frame whose header asks for a window of 2 GiB.
LONG_WINDOW = b"\x28\xb5\x2f\xfd\x00\xa8" + bytes(9)
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 5000000\n"
LINES, DEEP, PARQUET = lines(ROWS), 101, parquet(TABLE_OF_TEXTS, write_page_checksum=True)
CHECKED = zstandard.ZstdCompressor(write_checksum=True).compress(LINES)
HOLDS = zstandard.compress(json.dumps({"text": [str(number**7) for number in range(999)]}).encode())
NUMBERS = io.BytesIO()
np.save(NUMBERS, np.arange(3))
# What other software writes, whatever its name.
OTHERS = [
    POINTER,
    NUMBERS.getvalue(),
    PARQUET,
    zipped({"a": b"a"}),
    *(one.compress(LINES) for one in (bz2, lzma, gzip)),
]
OUTSIDE = ["../up.jsonl", "a/../../up.jsonl", "/etc/cron.jsonl", "..\\up.jsonl", "C:\\x.jsonl"]
BAD: list[tuple[str, bytes, str]] = [
    ("a.jsonl", b'{"text": "a"}\n{"text": "b"\n', ", line 2"),
    ("a.jsonl", b'{"text": "a"}\n\n["b"]\n', ", line 3"),
    ("a.jsonl", b'{"text": "a"}\n{"body": "b"}\n', ", row 2"),
    ("a.jsonl", b'{"text": 5}\n', ", row 1"),
    ("a.jsonl", b'{"text": "a", "text": "b"}\n', ", line 1"),
    ("a.jsonl", b"[" * 100_000, ", line 1"),
    ("a.jsonl", b'{"text": "a", "m": ' + b"[" * DEEP + b"]" * DEEP + b"}", ", row 1"),
    *((name, data, "") for name in ("a.jsonl", "a.csv") for data in (b"", b"\n\n")),
    ("a.csv", b"body,id\nx,y\n", ""),
    ("a.csv", b"text,id\nx,y\nz\n", ", row 2"),
    ("a.csv", b'text,id\nx,y\n"z,2\nu,3\n', ", row 2"),
    ("a.csv", b'text,id\n"x" z,2\n', ", row 1"),
    ("a.csv", b'"text"s,id\nx,2\n', ", header"),
    ("a.csv", b"text,text\nx,y\n", ""),
    ("a.tsv", b"text\tid\nx\ty\n", ""),
    ("part-00000", LINES, ""),
    ("a.jsonl.gz", LINES, ""),
    *((name, data, "") for name in ("a.jsonl", "a.csv", "a.txt", "a.md", "a") for data in OTHERS),
    *((name, ARCHIVES[name]({"a.txt": POINTER}), "/a.txt") for name in ARCHIVES),
    ("a.parquet", POINTER, ""),
    ("a.parquet.gz", gzip.compress(PARQUET), ""),
    ("a.jsonl.zst", LONG_WINDOW, ""),
    ("a.parquet", PARQUET[:-100], ""),
    ("a.parquet", parquet(pa.Table.from_arrays([["a"], ["b"]], ["text", "text"])), ""),
    ("a.parquet", flipped(PARQUET, 60), ""),
    ("a.jsonl.gz", gzip.compress(LINES)[:-9], ""),
    ("a.jsonl.gz", flipped(gzip.compress(LINES), len(gzip.compress(LINES)) // 2), ""),
    ("a.jsonl.gz", b"\x1f\x8b\x08\x00 garbage garbage", ""),
    ("a.jsonl.zst", zstandard.compress(LINES)[:-5], ""),
    ("a.jsonl.zst", flipped(CHECKED, len(CHECKED) // 2), ""),
    ("a.csv.zst", zstandard.compress(b"text\n" + b"xyz\n" * 9)[:-3], ""),
    *((name, data, "") for name in ARCHIVES for data in (b"<html>Please accept our terms</html>" * 40, b"")),
    *((name, ARCHIVES[name]({"a.jsonl": LINES, one: LINES}), "") for name in ("a.zip", "a.tar") for one in OUTSIDE),
    *(("a.tar.gz", special_tar(one), "") for one in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE)),
    ("a.tar", sparse_tar(), ""),
    ("a.zip", linked_zip("good.txt"), ""),
    ("a.zip", encrypted_zip(), ""),
    ("a.zip", lying_zip(), "/good.jsonl"),
    ("a.zip", zipped({"x/bad.jsonl": b'{"text": "a"}\n{'}), "/x/bad.jsonl, line 2"),
    *((name, ARCHIVES[name]({"top/a.doc": b"not text"}), "") for name in ARCHIVES),
]


def fails(path: Path, place: str = "", **options: Any) -> DemixError:
    """The error about what is at `place` in a file; nothing of the file is written."""
    before = {one for one in path.parent.rglob("*") if one.is_file()}
    with refused(f"{path}{place}") as caught:
        read(path.parent, path, **options)
    assert {one for one in path.parent.rglob("*") if one.is_file()} == before
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(("name", "data", "place"), BAD, ids=[f"{n} {name}" for n, (name, *_) in enumerate(BAD)])
def test_bad_files_are_refused_whole(tmp_path, name, data, place):
    (tmp_path / name).write_bytes(data)
    fails(tmp_path / name, place)


def test_a_header_of_csv_is_read_whole(tmp_path):
    """The first bytes of 4 KiB times a power of two end in `text`, which is the beginning of another column's name."""
    page = b"n" * 4091 + b",text"
    header = b"text," + page[5:] + page * 128 + b"n"
    (tmp_path / "a.csv").write_bytes(header + b"\na" + b"," * header.count(b",") + b"\n")
    assert texts(tmp_path, tmp_path / "a.csv") == ["a"]


@every_archive
@pytest.mark.parametrize("keep", [0.4, 0.9])
def test_archives_cut_short_are_refused(tmp_path, name, keep):
    data = ARCHIVES[name]({f"{number}.jsonl.zst": HOLDS for number in range(3)})
    (tmp_path / name).write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(DemixError) as caught:
        read(tmp_path, tmp_path / name)
    assert caught.value.subject.startswith(str(tmp_path / name))


def test_columns_that_are_not_there_or_no_text_are_refused(tmp_path):
    (tmp_path / "a.parquet").write_bytes(PARQUET)
    fails(tmp_path / "a.parquet", text="body")
    fails(tmp_path / "a.parquet", ", row 1", text="n")
    with refused("--settings.kind"):
        settings_from(Source, {"kind": "ftp", "path": "x"})


@every_archive
def test_members_are_chosen_by_glob(tmp_path, name):
    members = {"top/one.jsonl": lines([{"text": "a"}]), "top/two.csv": b"text\nb\n", "top/readme.doc": b"no text"}
    (tmp_path / name).write_bytes(ARCHIVES[name](members | {"other/four.txt": b"e"}))
    assert texts(tmp_path, tmp_path / name, members=["top/*.jsonl*", "*.csv"]) == ["a", "b"]
    assert texts(tmp_path, tmp_path / name, members=["*/four.txt"]) == ["e"]
    for parts in (1, 2):
        fails(tmp_path / name, members=["*.parquet"], parts=parts)


BLANKS = b'{"text": "a"}\n' + (b" " * 9999 + b"\n") * 600
BOMBS = {
    **{f"a.{form}{end}": COMPRESS[end](BLANKS) for form in ("txt", "jsonl") for end in (".gz", ".zst")},
    **{f"a.csv{end}": COMPRESS[end](b"text\n" + BLANKS) for end in (".gz", ".zst")},
    **{name: make({"a.jsonl": LINES, "b.jsonl": BLANKS}) for name, make in ARCHIVES.items() if name != "a.tar"},
    # A value that stands in a dictionary once.
    "a.parquet": parquet(pa.table({"text": ["x" * 1000] * 6000})),
    # A small member of a small archive, which expands once more.
    **{name.replace("a.", "b."): make({"a.jsonl.zst": zstandard.compress(BLANKS)}) for name, make in ARCHIVES.items()},
}


@pytest.mark.parametrize("name", BOMBS)
def test_decompression_bombs_are_refused_in_little_memory(tmp_path, name, monkeypatch):
    monkeypatch.setattr(expand, "RATIO_FREE_BYTES", 2 << 20)
    (tmp_path / name).write_bytes(BOMBS[name])
    tracemalloc.start()
    try:
        fails(tmp_path / name)
        # A text file is one document, of at most 128 MiB.
        assert tracemalloc.get_traced_memory()[1] < 5 << 20 or name[2:5] == "txt"
    finally:
        tracemalloc.stop()
    monkeypatch.setattr(expand, "RATIO_FREE_BYTES", 16 << 20)
    assert read(tmp_path, tmp_path / name)


def test_long_lines_and_documents_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_DOCUMENT_BYTES", 1000)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + " " * 1001)
    (tmp_path / "a.txt").write_text("x" * 1001)
    pq.write_table(pa.table({"text": ["x" * 1001]}), tmp_path / "a.parquet")
    for name, place in (("a.jsonl", ", line 2"), ("a.txt", ""), ("a.parquet", ", row 1")):
        fails(tmp_path / name, place)


@pytest.mark.parametrize("kind", ["jsonl_gz", "jsonl_zst", "parquet", "fineweb"])
def test_what_datatrove_writes_is_read_as_it_is(kind, tmp_path):
    nested = "" if kind == "fineweb" else "metadata."
    wanted = [f"Text {n} of rank {rank}.\nSchöne Grüße, 東京." for rank in range(2) for n in range(3)]
    assert sorted(texts(tmp_path, DATATROVE / kind)) == sorted(wanted)
    german = texts(tmp_path, DATATROVE / kind, where={f"{nested}language": "de"})
    assert sorted(german) == [wanted[1], wanted[4]]
    assert texts(tmp_path, DATATROVE / kind, text=f"{nested}url")[0].startswith("https://example.org/")


def test_a_folder_is_all_files_below_it_that_can_be_read(tmp_path):
    """Such as one of Dolma, https://github.com/allenai/dolma/blob/main/docs/data-format.md."""
    folder = tmp_path / "documents"
    for place in (
        "c4/c4-1.json.gz",
        "c4/deep/c4-0.json.gz",
        "1.txt",
        "_t/x.json.gz",
        ".c/y.json.gz",
        "_z.txt",
        ".w.txt",
    ):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        row = {"id": place, "text": place, "source": "c4", "metadata": {"length": len(place)}}
        (folder / place).write_bytes(gzip.compress(lines([row])) if place.endswith("gz") else place.encode())
    for other in ("_SUCCESS", "README.md", "c4/stats.parquet.crc"):
        (folder / other).write_text("other")
    wanted = ["1.txt", "c4/c4-1.json.gz", "c4/deep/c4-0.json.gz"]
    assert texts(tmp_path, folder, f"{folder}/c4/*.gz") == wanted
    assert texts(tmp_path, folder / "c4" / "deep", where={"metadata.length": len(wanted[2])}) == wanted[2:]
    for parts in (2, 7):
        found = [text for part in range(parts) for text in texts(tmp_path, f"{folder}/", part=part, parts=parts)]
        assert sorted(found) == wanted
    # What a run reads is listed once, also where files come later.
    source = settings_from(Source, {"path": str(folder), "parts": 2})
    assert [Path(file).name for file in source.share(0)] == ["1.txt", "c4-0.json.gz"]
    (folder / "0.txt").write_text("later")
    assert [Path(file).name for file in source.share(1)] == ["c4-1.json.gz"]
    for name in ("0.txt", *wanted):
        (folder / name).unlink()
    with refused("d.source.path"):
        read(tmp_path, folder)


HIDDEN = dict.fromkeys(("__MACOSX/t/._a.jsonl", "t/._a.jsonl", "t/_SUCCESS"), b"\0\5\x16\7")
NO_DATA = dict.fromkeys(("a.md", "LICENSE", "e.jsonl.bz2", "dataset_infos.json", "logs/executor.json"), b'{"a": 3}')


@pytest.mark.parametrize("name", ["a.folder", *ARCHIVES])
def test_a_folder_and_an_archive_give_the_same_documents_and_one_line_counts_the_rest(tmp_path, name, caplog):
    data = {"t/a.jsonl": lines([{"text": "a"}]), "lang=en/b.ndjson.gz": gzip.compress(lines([{"text": "b"}]))}
    data |= {"u/logs/c.txt": b"c", "d.csv": b"text\nd\n"} | HIDDEN | NO_DATA
    for member, content in data.items() if name == "a.folder" else [("", ARCHIVES[name](data))]:
        (tmp_path / name / member).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name / member).write_bytes(content)
    assert sorted(texts(tmp_path, tmp_path / name)) == ["a", "b", "c", "d"]
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert sum(map(int, re.findall(r"\b\d+\b", warning))) == len(NO_DATA)


def test_a_path_that_is_there_is_no_glob(tmp_path):
    for name in ("notes[1].txt", "notes1.txt"):
        (tmp_path / name).write_text(name)
    assert texts(tmp_path, tmp_path / "notes[1].txt") == ["notes[1].txt"]
    (tmp_path / "notes[1].txt").unlink()
    assert texts(tmp_path, tmp_path / "notes[1].txt") == ["notes1.txt"]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.csv", b"id,text\r1,a\r2,b\r"),
        ("a.csv", b'\xef\xbb\xbfid,text\n\n1,"a"\r\n2,b'),
        ("a.jsonl.gz", gzip.compress(lines([{"text": "a"}, {"text": "b"}])) + bytes(600)),
        ("a.ndjson", lines([{"text": "a"}, {"text": "b"}])),
    ],
)
def test_what_other_tools_write_is_read(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    assert texts(tmp_path, tmp_path / name) == ["a", "b"]


@pytest.fixture
def data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set of the Hugging Face hub in a folder, which the real `datasets` reads.

    Three Parquet files of five rows, three JSON-lines files, and a loader script that must not run.
    """
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    folder = tmp_path / "set"
    (folder / "data").mkdir(parents=True)
    for file in range(3):
        rows = [
            {"text": f"text {file} {row}", "language": "en" if row else "de", "more": {"parts": [f"{file}", f"{row}"]}}
            for row in range(5)
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / "data" / f"{file}.parquet")
        (folder / "data" / f"{file}.jsonl.gz").write_bytes(gzip.compress(lines(rows)))
    (folder / "set.py").write_text("raise SystemExit('ran')")
    return folder


def of_hub(folder: Path, files: str = "data/*.parquet", **options: Any) -> list[str]:
    return texts(folder.parent, f"hf://{folder}", data_files=[files], **options)


@pytest.mark.parametrize("files", ["data/*.parquet", "data/*.jsonl.gz"])
def test_a_data_set_of_the_hub_is_read_in_order_and_in_parts(data_set, files):
    wanted = [f"text {file} {row}" for file in range(3) for row in range(5)]
    assert of_hub(data_set, files) == wanted
    nested = of_hub(data_set, files, text="more.parts[]", where={"language": "de"})
    assert nested == ["0\n0", "1\n0", "2\n0"]
    assert [of_hub(data_set, files, part=part, parts=2) for part in range(2)] == [
        wanted[:5] + wanted[10:],
        wanted[5:10],
    ]
    one = [of_hub(data_set, files.replace("*", "1"), part=part, parts=2) for part in range(2)]
    assert one == [wanted[5:10:2], wanted[6:10:2]]


def test_files_of_a_data_set_may_differ_in_fields_that_nobody_asked_for(data_set):
    """A change of a nested field's shape, and what only some readers take for the end of a line."""
    odd = [
        b'{"text": "a\xe2\x80\xa8b", "meta": {"x": 1}}',
        b'{"text": "b", "meta": "none"}',
        b'{"text": "c", "meta": [{"y": {}}], "more": null}',
    ]
    for number, line in enumerate(odd):
        (data_set / "data" / f"odd{number}.jsonl.gz").write_bytes(gzip.compress(line + b"\n\n"))
    assert of_hub(data_set, "data/odd*.jsonl.gz") == ["a\u2028b", "b", "c"]
    (data_set / "data" / "odd1.jsonl.gz").write_bytes(gzip.compress(b'{"text": \n'))
    with refused(f"data set {data_set}, line 3"):
        of_hub(data_set, "data/odd*.jsonl.gz")


def test_what_a_data_set_lacks_is_refused(data_set):
    for options, subject in (
        ({"files": "none/*.parquet", "instructions": "ask X"}, f"data set {data_set}"),
        ({"files": "data/0.doc"}, "source.data_files"),
        ({"text": "body"}, "set, row 1"),
        ({"where": {"language": "fr"}}, "d.source.where"),
    ):
        with refused(subject) as caught:
            of_hub(data_set, **options)
        assert caught.value.cure == options.get("instructions", caught.value.cure)
        assert not [*(data_set.parent / "raw" / "d").iterdir()]
    for path, data in ((data_set / "data" / "2.parquet", b""), (data_set / "data" / "1.parquet", b"cut")):
        path.write_bytes(data)
        assert len(of_hub(data_set, words=10)) == 4, "what is not needed is not read"
        with refused(f"data set {data_set}"):
            of_hub(data_set)
    with refused("data set demix/none"):
        texts(data_set, "hf://demix/none", revision="main", data_files=["*.parquet"])


PAPER = {
    "title": "T",
    "a.b": "dotted",
    "full_text": [{"name": "One", "paragraphs": ["p", None, "q"]}, None, {"name": None, "paragraphs": ["r"]}],
    "nested": {"deep": {"text": "d"}, "none": None},
    "grid": [["a"], ["b", "c"]],
}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("title", "T"),
        ("a.b", "dotted"),
        ("nested.deep.text", "d"),
        ("nested.none", None),
        ("full_text[].paragraphs[]", ["p", "q", "r"]),
        ("full_text[].name", ["One"]),
        ("grid[][]", ["a", "b", "c"]),
        *((path, None) for path in ("body", "nested.shallow", "title.text", "title[]", "full_text[].text", "nested[]")),
    ],
)
def test_a_path_selects_a_value(path, value):
    with nullcontext() if value or path == "nested.none" else pytest.raises(LookupError):
        assert select(PAPER, path) == value


RECORD = {
    "language": "en",
    "stars": 4,
    "score": "3.5",
    "day": datetime.date(2019, 5, 1),
    "ok": True,
    "none": None,
    "at": {"x": 1},
}


@pytest.mark.parametrize(
    ("where", "kept"),
    [
        ({}, True),
        ({"language": "en"}, True),
        ({"language": "de"}, False),
        ({"language": ["de", "en"], "stars": 4}, True),
        ({"language": ["de", "en"], "stars": 5}, False),
        ({"stars": {"min": 4}}, True),
        ({"stars": {"min": 4.5}}, False),
        ({"stars": {"max": 3}}, False),
        ({"stars": {"max": 4}}, True),
        ({"stars": "4"}, True),
        ({"score": {"min": 3, "max": 4}}, True),
        ({"score": {"min": 10}}, False),
        ({"language": {"min": 1}}, False),
        ({"day": {"min": "2019-01-01", "max": "2019-12-31"}}, True),
        ({"day": {"max": "2019-04-30"}}, False),
        ({"ok": True}, True),
        ({"none": "x"}, False),
        ({"missing": "x"}, False),
        ({"at.x": 1}, True),
    ],
)
def test_a_record_matches_a_filter(where, kept):
    assert matches(RECORD, where) is kept
