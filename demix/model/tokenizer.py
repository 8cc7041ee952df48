"""The tokenizer of a model directory: it lies in the folder, or in the run of the model."""

import shutil
from pathlib import Path

from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError
from demix.files import digest, read_json, replacing
from demix.model.directory import describe, refuse_other_tokenizer
from demix.model.manifest import run_of

NAME = "tokenizer.json"


def tokenizer_of(directory: Path, given: Path | None = None) -> tuple[Path, Tokenizer]:
    """The tokenizer of the model in `directory`, and its file: `given`, or the one in the folder, or that of the run.

    Raises DemixError if there is none, and for another tokenizer than the one that `model.json` records.
    """
    describe(directory)
    path = given or tokenizer_path(directory)
    if path is None or not path.is_file():
        at_fault = path or Path(directory) / NAME
        raise DemixError(at_fault, "is missing", "name the tokenizer.json of the model's run with --tokenizer")
    encoder = Tokenizer.load(path)
    refuse_other_tokenizer(directory, path, encoder.sha256, encoder.vocab_size)
    return path, encoder


def copy_tokenizer(source: Path | None, directory: Path) -> None:
    """Copy the file `source` into the model directory `directory`, which can then be used alone.

    Raises DemixError for another tokenizer than the one that `model.json` records. Without such a file nothing is
    copied.
    """
    if source is not None and source.is_file():
        refuse_other_tokenizer(directory, source, digest(read_json(source)))
        with replacing(directory / NAME) as temporary:
            shutil.copyfile(source, temporary)


def tokenizer_path(directory: Path) -> Path | None:
    """The tokenizer.json in the folder of a model, or that of its run; None without either."""
    places = (Path(directory) / NAME, run_of(directory) / NAME)
    return next((place for place in places if place.is_file()), None)
