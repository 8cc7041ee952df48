"""Archives, good ones and hostile ones; nothing of them ever touches the disk."""

import gzip
import io
import json
import stat
import struct
import tarfile
import tracemalloc
import zipfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import zstandard

from demix.data.sources import Source, download
from demix.errors import DemixError

LINES = b'{"text": "a"}\n{"text": "b"}\n'
MEMBERS = {
    "top/one.jsonl": LINES,
    "top/two.jsonl.gz": gzip.compress(b'{"text": "c"}\n'),
    "top/three.csv": b"text\nd\n",
    "top/readme.doc": b"not text",
    "other/four.txt": b"e",
}


def _tar(path: Path, members: dict[str, bytes], compress: str = "") -> Path:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    path.write_bytes({"": bytes, "gz": gzip.compress, "zst": zstandard.compress}[compress](data.getvalue()))
    return path


def _zip(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def _read(path: Path, **options: object) -> list[str]:
    output = path.parent / "raw" / "0.parquet"
    download(Source("files", str(path), **options), "d", output)
    return pq.read_table(output)["text"].to_pylist()


def _refused(path: Path, **options: object) -> str:
    """The error's line; nothing may be left behind."""
    before = {file for file in path.parent.rglob("*") if file.is_file()}
    with pytest.raises(DemixError) as caught:
        _read(path, **options)
    assert {file for file in path.parent.rglob("*") if file.is_file()} == before
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(path))
    return str(caught.value)


ARCHIVES = {
    "a.zip": _zip,
    "a.tar": _tar,
    "a.tar.gz": lambda path, members: _tar(path, members, "gz"),
    "a.tgz": lambda path, members: _tar(path, members, "gz"),
    "a.tar.zst": lambda path, members: _tar(path, members, "zst"),
}
every_archive = pytest.mark.parametrize("name", ARCHIVES)


@every_archive
def test_members_are_chosen_by_glob(tmp_path, name):
    path = ARCHIVES[name](tmp_path / name, MEMBERS)
    assert _read(path, members=("top/*.jsonl*", "*.csv")) == ["a", "b", "c", "d"]
    assert _read(path, members=("*/four.txt",)) == ["e"]
    assert "has no member that matches *.parquet" in _refused(path, members=("*.parquet",))
    assert "top/readme.doc: is of an unknown format" in _refused(path)


@every_archive
def test_members_are_shared_out_to_parts(tmp_path, name):
    path = ARCHIVES[name](tmp_path / name, MEMBERS)
    source = Source("files", str(path), members=("*.jsonl*", "*.txt"), parts=2)
    texts = []
    for part in range(2):
        download(source, "d", tmp_path / f"{part}.parquet", part)
        texts.append(pq.read_table(tmp_path / f"{part}.parquet")["text"].to_pylist())
    assert texts == [["a", "b", "e"], ["c"]]


@every_archive
@pytest.mark.parametrize(
    "member", ["../up.jsonl", "a/../../up.jsonl", "/etc/cron.jsonl", "..\\up.jsonl", "C:\\x.jsonl"]
)
def test_members_that_point_outside(tmp_path, name, member):
    path = ARCHIVES[name](tmp_path / name, {"good.jsonl": LINES, member: LINES})
    assert "points outside; do not trust it" in _refused(path)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_in_tar(tmp_path, kind):
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        info = tarfile.TarInfo("good.jsonl")
        info.type, info.linkname = kind, "/etc/passwd"
        archive.addfile(info)
    assert "member 'good.jsonl' is a link or special file" in _refused(path)


def test_links_and_encryption_in_zip(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        info = zipfile.ZipInfo("good.txt")
        info.create_system, info.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
        archive.writestr(info, "/etc/passwd")
    assert "member 'good.txt' is a link" in _refused(path)
    _zip(path, {"good.txt": b"text"})
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(data)
    assert "member 'good.txt' is encrypted" in _refused(path)


def test_sparse_members_in_tar(tmp_path):
    """A GNU sparse file of 1 TB in a kilobyte."""
    header = bytearray(512)
    header[:10] = b"hole.jsonl"
    header[100:108], header[108:116], header[116:124] = b"0000644\0", b"0000000\0", b"0000000\0"
    header[124:136], header[136:148] = b"00000000000\0", b"00000000000\0"
    header[148:156], header[156:157], header[257:265] = b" " * 8, b"S", b"ustar  \0"
    header[483:495] = b"\x80" + (1 << 40).to_bytes(11, "big")
    header[148:156] = b"%06o\0 " % sum(header)
    (tmp_path / "a.tar").write_bytes(bytes(header) + bytes(1024))
    assert "member 'hole.jsonl' is a link or special file" in _refused(tmp_path / "a.tar")


BLANKS = b'{"text": "a"}\n' + (b" " * 9999 + b"\n") * 20_000


@pytest.mark.parametrize("name", [name for name in ARCHIVES if name != "a.tar"])
def test_decompression_bombs_in_one_layer(tmp_path, name):
    path = ARCHIVES[name](tmp_path / name, {"good.jsonl": LINES, "bomb.jsonl": BLANKS})
    assert path.stat().st_size * 200 < len(BLANKS)
    tracemalloc.start()
    assert "expands to over 200 times" in _refused(path)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


@every_archive
def test_decompression_bombs_in_two_layers(tmp_path, name):
    """A member that is small, in an archive that is small, and expands once more."""
    path = ARCHIVES[name](tmp_path / name, {f"{i}.jsonl.zst": zstandard.compress(BLANKS) for i in range(3)})
    assert "expands to over 200 times" in _refused(path)


def test_a_zip_that_lies_about_its_sizes(tmp_path):
    path = _zip(tmp_path / "a.zip", {"good.jsonl": LINES * 100})
    data = bytearray(path.read_bytes())
    entry = data.index(b"PK\x01\x02")
    for place in (22, entry + 24):
        struct.pack_into("<I", data, place, 28)
    path.write_bytes(data)
    assert "damaged or cut short" in _refused(path)


@every_archive
@pytest.mark.parametrize("keep", [0.4, 0.9])
def test_archives_cut_short(tmp_path, name, keep):
    noise = zstandard.compress(json.dumps({"text": [str(i**7) for i in range(9999)]}).encode())
    path = ARCHIVES[name](tmp_path / name, {f"{i}.jsonl.zst": noise for i in range(3)})
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    message = _refused(path)
    assert "damaged or cut short" in message


@every_archive
def test_what_is_no_archive(tmp_path, name):
    (tmp_path / name).write_bytes(b"<html>Please accept our terms</html>" * 40)
    assert "damaged or cut short" in _refused(tmp_path / name)
    (tmp_path / name).write_bytes(b"")
    assert str(tmp_path / name) in _refused(tmp_path / name)


def test_a_bad_line_in_a_member_is_named(tmp_path):
    path = _zip(tmp_path / "a.zip", {"x/bad.jsonl": LINES + b"{"})
    assert "a.zip/x/bad.jsonl, line 3: is not valid JSON" in _refused(path)


def test_json_values_of_a_tgz_as_qasper_has_them(tmp_path):
    papers = {
        f"1909.0000{i}": {
            "title": f"t{i}",
            "full_text": [
                {"section_name": "One", "paragraphs": [f"a{i}", f"b{i}"]},
                {"section_name": None, "paragraphs": []},
                {"section_name": "Two", "paragraphs": [f"c{i}"]},
            ],
        }
        for i in range(3)
    }
    path = _tar(tmp_path / "q.tgz", {"q-train.json": json.dumps(papers).encode(), "x.py": b"pass"}, "gz")
    texts = _read(path, members=("q-*.json",), json="values", text="full_text[].paragraphs[]", metadata=("title",))
    assert texts == ["a0\nb0\nc0", "a1\nb1\nc1", "a2\nb2\nc2"]
