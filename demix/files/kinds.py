"""The type of a file by its first bytes, not by its name. A Git LFS pointer, for example, must not be read as data."""

from pathlib import Path

from demix.errors import DemixError
from demix.files.digests import opened

# The first bytes that `check_kind` looks at.
HEAD = 64
GZIP, ZSTD, ZIP, PARQUET, TEXT = "gzip", "zstd", "zip", "Parquet", "text"
# Kinds of files that do not begin with a mark.
RECORDS, TAR, SAFETENSORS = "records", "tar", "safetensors"
LFS, ANNEX, UTF16, PAGE = "a Git LFS pointer", "a git-annex pointer", "UTF-16", "a web page"
_MARKS: dict[str, tuple[bytes, ...]] = {
    LFS: (b"version https://git-lfs.github.com/spec/",),
    ANNEX: (b"/annex/objects/",),
    UTF16: (b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff"),
    PAGE: (b"<!doctype html", b"<html"),
    GZIP: (b"\x1f\x8b\x08",),
    # A frame, or one of the 16 kinds of frames that readers skip (RFC 8878, section 3.1).
    ZSTD: (b"\x28\xb5\x2f\xfd", *(bytes([low]) + b"\x2a\x4d\x18" for low in range(0x50, 0x60))),
    ZIP: (b"PK\x03\x04", b"PK\x05\x06"),
    PARQUET: (b"PAR1",),
    "bzip2": tuple(b"BZh%d1AY&SY" % level for level in range(1, 10)),
    "xz": (b"\xfd7zXZ\0",),
    "lz4": (b"\x04\x22\x4d\x18",),
    "7-Zip": (b"7z\xbc\xaf\x27\x1c",),
    "RAR": (b"Rar!\x1a\x07",),
    "PDF": (b"%PDF-",),
    "RTF": (b"{\\rtf",),
    "a document of Microsoft Office": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1",),
    "Arrow": (b"ARROW1\0\0",),
    "Avro": (b"Obj\x01",),
    "SQLite": (b"SQLite format 3\0",),
    "HDF5": (b"\x89HDF\r\n\x1a\n",),
    "NumPy": (b"\x93NUMPY",),
}
_CURES = {
    LFS: "run git lfs pull in its repository",
    ANNEX: "run git annex get in its repository",
    UTF16: "convert it: iconv -f UTF-16 -t UTF-8 OLD > NEW",
    PAGE: "fetch it again: you may have to accept terms of use",
}


def kind_of(head: bytes) -> str:
    """The kind of a file that begins with the bytes `head`; TEXT if no other known kind begins with them."""
    lowered = head.lstrip().lower()
    return next((kind for kind, marks in _MARKS.items() if (lowered if kind is PAGE else head).startswith(marks)), TEXT)


def check_kind(path: object, head: bytes, wanted: str) -> None:
    """Raise DemixError that names `path` if `head`, its first bytes, belong to another kind than `wanted`.

    `wanted` is TEXT, RECORDS, TAR or SAFETENSORS, which do not begin with a mark, or a kind that has one. A web page is
    text, but not records. An empty file is never an error.
    """
    found = kind_of(head)
    if not head or found == wanted or (found is TEXT and wanted not in _MARKS) or (found is PAGE and wanted is TEXT):
        return
    if found is TEXT and wanted in (GZIP, ZSTD):
        raise DemixError(path, "is not compressed", "rename it: its ending is that of a compressed file")
    cure = "fetch it again" if found is TEXT else f"convert or decompress it, or give its name the ending of {found}"
    raise DemixError(path, f"is {found}, not {wanted}", _CURES.get(found, cure))


def check_file_kind(path: str | Path, wanted: str) -> None:
    """Apply `check_kind` to a regular file. Also raises DemixError for a folder, a pipe or a device."""
    with opened(path) as stream:
        check_kind(path, stream.read(HEAD), wanted)
