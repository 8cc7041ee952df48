"""Whatever lies in the place of a run's file is refused by who reads it, before a report or MLflow changes."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from demix.errors import DemixError
from demix.files import read_json, write_json
from demix.report import report_files, write_report
from demix.report.card import model_card
from demix.run.run import Run
from demix.track.store import track
from support.errors import refused
from support.frozen import copied, with_models

INSTEAD: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "a folder": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
    "a dangling link": lambda path: path.symlink_to("nowhere"),
    "unsealed": lambda path: path.write_text("{}"),
    "without keys": lambda path: write_json(path, {"format": 3}),
}
PARQUET = ("results.parquet", "priors.parquet", "differences.parquet", "posteriors.parquet")
# What the report, a card and MLflow read of a run; the report's own files have no seal.
READ = {
    "report": (
        *("config.json", *PARQUET, "corpus/overlap.parquet", "corpus/licenses/card.json", "metrics/dense.jsonl"),
        *("metrics/demix-dapt-fantasy.jsonl", "models/demix/experts/fantasy.json"),
    ),
    "card": ("config.json", "results.parquet", "models/demix/model.json", "corpus/licenses/card.json"),
    "track": (
        *("config.json", *PARQUET, "metrics/dense.jsonl", "metrics/demix-dapt-fantasy.jsonl"),
        *("corpus/licenses/card.json", "models/demix/model.json"),
        *("models/demix/experts/fantasy.json", "models/dense-dapt-fantasy/model.json", "report/claims.md"),
        *("report/tables/table3.html", "report/figures/figure2.svg", "report/cards/demix.md"),
    ),
}
# The report's files may hold any text. MLflow gets descriptions of data and weights as they are.
TAKEN = {"report": ("unsealed", "without keys"), "corpus": ("without keys",), "models": ("without keys",)}


@pytest.fixture(scope="module")
def run(frozen: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = with_models(frozen, tmp_path_factory.mktemp("run") / "run", "demix", "dense", seeds=[])
    for name in (*report_files(run), "cards/demix.md"):
        path = run.folder / "report" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("made up")
    return run


def read(reader: str, folder: Path, output: Path) -> None:
    """Do what a command does with a run, the results and the store below `output`."""
    made = Run.read(folder)
    if reader == "report":
        write_report(made, output / "report")
    elif reader == "card":
        model_card(made, "demix")
    else:
        track(made, f"sqlite:///{output}/mlflow.db", "x")


@pytest.mark.parametrize(("reader", "name"), [(reader, name) for reader, names in READ.items() for name in names])
def test_what_is_no_whole_file_is_refused(reader: str, name: str, run: Run, tmp_path: Path) -> None:
    path, output = run.folder / name, tmp_path / "output"
    output.mkdir()
    path.rename(tmp_path / "kept")
    try:
        for how, instead in INSTEAD.items():
            if reader == "track" and how in TAKEN.get(name.split("/")[0], ()):
                continue
            instead(path)
            # The command line makes one line of both.
            with pytest.raises((DemixError, IsADirectoryError)) as error:
                read(reader, run.folder, output)
            subject = getattr(error.value, "subject", None) or error.value.filename
            assert str(subject).startswith(str(path.parent if reader == "card" else path)), how
            assert not [*output.iterdir()]
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    finally:
        (tmp_path / "kept").rename(path)


def test_a_report_that_lacks_a_file_is_not_tracked(run: Run, tmp_path: Path) -> None:
    own = copied(run, tmp_path / "run")
    (own.folder / "report" / "claims.html").unlink()
    with refused("report/claims.html"):
        track(own, f"sqlite:///{tmp_path}/mlflow.db", "x")


def test_a_key_that_a_file_lacks_is_named_with_the_file(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"inner": {}})
    found = read_json(tmp_path / "a.json")
    for value, key in ((found, "outer"), (found["inner"], "steps")):
        with pytest.raises(KeyError, match=rf"a\.json: .*{key}"):
            value[key]
    assert found == {"inner": {}}
