"""How files are written and read between stages: whole or not at all, and checked when read."""

from demix.files.atomic import (
    REMAKE,
    cannot_be_written,
    fsync,
    is_alive,
    refuse_used,
    replacing,
    scratch,
    write_text,
)
from demix.files.digests import fingerprint, seed_for, sha256_file
from demix.files.json_files import read_json, read_sealed, write_json, write_sealed
from demix.files.locks import exclusive, holder
from demix.files.parquet import check_sealed, parquet_reader, parquet_writer, read_parquet, write_parquet

__all__ = [
    "REMAKE",
    "cannot_be_written",
    "check_sealed",
    "exclusive",
    "fingerprint",
    "fsync",
    "holder",
    "is_alive",
    "parquet_reader",
    "parquet_writer",
    "read_json",
    "read_parquet",
    "read_sealed",
    "refuse_used",
    "replacing",
    "scratch",
    "seed_for",
    "sha256_file",
    "write_json",
    "write_parquet",
    "write_sealed",
    "write_text",
]
