"""Files that stages exchange. They are written completely or not at all, and checked when they are read."""

from demix.files.atomic import (
    REMAKE,
    cannot_be_written,
    fsync,
    is_alive,
    is_made,
    linked,
    refuse_used,
    remove_leftovers,
    replacing,
    scratch,
    write_text,
)
from demix.files.digests import check_inside, check_sha256, copy_checked, fingerprint, opened, seed_for, sha256_file
from demix.files.json_files import digest, read_json, read_json_lines, write_json, write_json_lines
from demix.files.locks import exclusive
from demix.files.parquet import check_sealed, parquet_reader, parquet_writer, read_parquet, write_parquet
