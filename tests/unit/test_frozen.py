"""The run that tests read: of this code's format, with every file as the workflow wrote it."""

from demix.files import check_sealed
from demix.run.run import Run
from support.frozen import rows_of


def test_every_file_is_whole_and_domains_have_many_documents_or_few(frozen: Run) -> None:
    for path in frozen.folder.rglob("*.parquet"):
        check_sealed(path)
    documents = rows_of(frozen).groupby("domain")["documents"].min()
    assert {name for name, count in documents.items() if count >= 20} == {"parliament", "licenses", "fortunes"}
    assert {*rows_of(frozen)["seed"]} == {1, 2}
