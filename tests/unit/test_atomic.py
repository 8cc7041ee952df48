"""Files and folders that appear whole or not at all, and what is said of those that cannot."""

import errno
import os
from pathlib import Path

import pytest

from demix.errors import DemixError
from demix.files import atomic
from support.errors import refused


@pytest.mark.parametrize("directory", [False, True])
def test_what_fails_leaves_the_old_and_nothing_else(directory: bool, tmp_path: Path) -> None:
    place = tmp_path / "new" / "folder" / "made"

    def make(text: str, error: Exception | None = None) -> None:
        with atomic.replacing(str(place), directory=directory) as temporary:
            (temporary / "inside" if directory else temporary).write_text(text, encoding="utf-8")
            if error is not None:
                raise error

    for text in ("first é", "second"):
        make(text)
    with refused("folder/made"):
        make("third", OSError(errno.ENOSPC, "No space left"))
    with refused("other"):
        make("third", DemixError("other", "is wrong", "mend it"))
    with pytest.raises(OSError, match="of the library"):
        make("third", OSError("of the library"))
    assert (place / "inside" if directory else place).read_text() == "second"
    assert [path.name for path in place.parent.iterdir()] == ["made"]


def test_a_scratch_folder_goes_and_its_errors_name_what_is_made(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left")
    with refused("made"), atomic.scratch(str(tmp_path / "made")) as folder:
        (folder / "spilled").mkdir()
        raise full
    other = OSError(errno.ENOENT, "missing", str(tmp_path / "else" / "where" / "x"))
    with pytest.raises(OSError, match="else/where"), atomic.scratch(tmp_path / "made"):
        raise other
    with pytest.raises(OSError, match="of the library"), atomic.scratch(tmp_path / "made"):
        raise OSError("of the library")
    with refused("made"), atomic.scratch(tmp_path / "made") as folder:
        raise OSError(errno.ENOSPC, "No space left", str(folder / "spilled"))
    assert not list(tmp_path.iterdir())


def test_a_new_directory_takes_no_place_that_is_used(tmp_path: Path) -> None:
    for unused in (tmp_path / "missing", tmp_path):
        atomic.refuse_used(unused)
    (tmp_path / "file").touch()
    for used in (tmp_path, tmp_path / "file"):
        with refused(used):
            atomic.refuse_used(used)


@pytest.mark.parametrize("links", [True, False])
def test_a_second_name_or_a_copy(links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one").write_text("text")
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(errno.EPERM, "no links")))
    atomic.linked(tmp_path / "one", tmp_path / "two")
    assert (tmp_path / "two").read_text() == "text"
    assert (tmp_path / "two").samefile(tmp_path / "one") == links


PLACES = {
    "made": (lambda path: path.write_text("x"), ""),
    "missing": (lambda _: None, ""),
    "empty": (lambda path: path.touch(), "folder/file"),
    "a folder": (lambda path: path.mkdir(), "folder/file"),
    "a link to nothing": (lambda path: path.symlink_to("nowhere"), "folder/file"),
    "below a file": (lambda path: (path.parent.rmdir(), path.parent.touch()), "folder"),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_file_is_made_or_missing_or_refused(name: str, tmp_path: Path) -> None:
    make, subject = PLACES[name]
    (tmp_path / "folder").mkdir()
    make(tmp_path / "folder" / "file")
    if subject:
        with refused(tmp_path / subject):
            atomic.is_made(tmp_path / "folder" / "file")
    else:
        assert atomic.is_made(tmp_path / "folder" / "file") == (name == "made")
