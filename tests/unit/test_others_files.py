"""Files that datatrove, Dolma and FineWeb write, read as they are, and folders of them."""

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from demix.data.divide import Division, divide
from demix.data.sources import Source, download
from demix.errors import DemixError
from demix.files import read_json
from demix.settings import settings_from

DATATROVE = Path(__file__).parent / "data" / "datatrove"


def rows_of(folder: Path, **source: Any) -> list[dict[str, Any]]:
    """The raw documents of all parts of a source."""
    found = []
    given = settings_from(Source, {"kind": "files", **source})
    for part in range(given.parts):
        download(given, "d", folder / "raw" / "d" / f"{part:04d}.parquet", part)
        found += pq.read_table(folder / "raw" / "d" / f"{part:04d}.parquet").to_pylist()
    return found


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("kind", ["jsonl_gz", "jsonl_zst", "parquet", "fineweb"])
def test_what_datatrove_writes_is_read_as_it_is(kind: str, parts: int, tmp_path: Path) -> None:
    nested = "" if kind == "fineweb" else "metadata."
    keys = [f"{nested}url", f"{nested}language_score"]
    rows = rows_of(tmp_path, path=str(DATATROVE / kind), id="id", metadata=keys, parts=parts)
    told = [row | {"metadata": json.loads(row["metadata"])} for row in rows]
    assert sorted(told, key=lambda row: row["id"]) == [
        {
            "id": f"<urn:uuid:{rank}-{n}>",
            "text": f"Text {n} of rank {rank}.\nSchöne Grüße, 東京.",
            "metadata": {keys[0]: f"https://example.org/{rank}/{n}", keys[1]: 0.5 + n / 8},
        }
        for rank in range(2)
        for n in range(3)
    ]
    where = {f"{nested}language": "de"}
    assert [row["id"] for row in rows_of(tmp_path, path=str(DATATROVE / kind), id="id", where=where)] == [
        "<urn:uuid:0-1>",
        "<urn:uuid:1-1>",
    ]


@pytest.mark.parametrize("kind", ["jsonl_zst", "parquet", "fineweb"])
def test_what_datatrove_writes_is_parted_into_domains(kind: str, tmp_path: Path) -> None:
    by = "language" if kind == "fineweb" else "metadata.language"
    source = {"kind": "files", "path": str(DATATROVE / kind)}
    division = settings_from(Division, {"source": source, "by": by, "domains": {"english": "en", "others": ["de"]}})
    divide("web", division, tmp_path / "raw", tmp_path / "counts.json")
    found = read_json(tmp_path / "counts.json")
    assert (found["taken"], found["untaken"]) == ({"english": {"en": 2}, "others": {"de": 2}}, {"fr": 2})


def test_documents_of_dolma_are_read_as_they_are(tmp_path: Path) -> None:
    """The fields and names of https://github.com/allenai/dolma/blob/main/docs/data-format.md."""
    for number in range(2):
        rows = [
            {
                "id": f"{number}-{row}",
                "text": f"text {number} {row}",
                "source": "c4",
                "added": "2023-04-11T15:55:16.000Z",
                "created": "2019-04-25T12:57:54.000Z",
                "metadata": {"url": f"https://example.org/{row}", "length": row},
            }
            for row in range(2)
        ]
        path = tmp_path / "documents" / "c4" / f"c4-{number:04d}.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    rows = rows_of(tmp_path, path=f"{tmp_path}/documents", id="id", metadata=["source", "metadata.length"])
    assert [row["id"] for row in rows] == ["0-0", "0-1", "1-0", "1-1"]
    assert rows[3]["text"] == "text 1 1"
    assert json.loads(rows[3]["metadata"]) == {"source": "c4", "metadata.length": 1}


def test_a_folder_is_all_files_below_it_that_can_be_read(tmp_path: Path) -> None:
    folder = tmp_path / "web"
    for place in ("b/2.jsonl", "a/deep/3.jsonl", "1.txt", "_temporary/x.jsonl", ".cache/y.jsonl", "_z.jsonl", ".w.txt"):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text('{"text": "one"}\n' if place.endswith("l") else "one")
    for other in ("_SUCCESS", "README.md", "a/stats.parquet.crc"):
        (folder / other).write_text("other")
    rows = rows_of(tmp_path, path=[str(folder), f"{folder}/b/*"])
    assert [row["id"] for row in rows] == ["1.txt#1", "3.jsonl#1", "2.jsonl#1"]
    for parts in (2, 3, 7):
        assert len(rows_of(tmp_path, path=f"{folder}/", parts=parts)) == 3
    shutil.rmtree(folder / "b")
    (folder / "a" / "deep" / "3.jsonl").unlink()
    (folder / "1.txt").unlink()
    with pytest.raises(DemixError, match=r"d\.source\.path: no file matches '.*web'"):
        rows_of(tmp_path, path=str(folder))


def test_a_folder_is_listed_once(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text("text")
    source = settings_from(Source, {"kind": "files", "path": str(tmp_path), "parts": 2})
    assert [source.files_of(part) for part in range(2)] == [
        [f"{tmp_path}/0.txt", f"{tmp_path}/2.txt"],
        [f"{tmp_path}/1.txt", f"{tmp_path}/3.txt"],
    ]
    (tmp_path / "4.txt").write_text("text")
    assert source.files_of(0) + source.files_of(1) == [f"{tmp_path}/{number}.txt" for number in (0, 2, 1, 3)]
    assert len(settings_from(Source, {"kind": "files", "path": str(tmp_path)}).files) == 5
