"""Whatever lies in the place of a run's file is refused by who reads it, before a report or MLflow changes."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from demix.errors import DemixError
from demix.files import is_made, read_json, write_json, write_parquet
from demix.report import report_files, write_report
from demix.report.card import model_card
from demix.report.read import read_differences, read_overlap, read_posteriors, read_priors
from demix.run.run import Run
from demix.track.store import track
from support.synthetic_run import MadeUp, build_run

INSTEAD: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "a folder": lambda path: path.mkdir(),
    "a dangling link": lambda path: path.symlink_to("nowhere"),
    "unsealed": lambda path: path.write_text("{}"),
    "without keys": lambda path: write_json(path, {"format": 3}),
}
# What the report, a card and MLflow read of a run; the report's own files have no seal.
READ = {
    "report": (
        *("config.json", "results.parquet", "priors.parquet", "differences.parquet", "posteriors.parquet"),
        *("corpus/overlap.parquet", "corpus/law/card.json", "metrics/dense.jsonl", "metrics/demix-dapt-wiki.jsonl"),
        "models/demix/experts/wiki.json",
    ),
    "card": ("config.json", "results.parquet", "models/demix/model.json", "corpus/law/card.json"),
    "track": (
        *("config.json", "results.parquet", "priors.parquet", "differences.parquet", "posteriors.parquet"),
        *("metrics/dense.jsonl", "metrics/demix-dapt-wiki.jsonl", "corpus/law/card.json", "models/demix/model.json"),
        *("models/demix/experts/law.json", "models/demix/experts/wiki.json", "models/dense-dapt-wiki/model.json"),
        *("report/claims.md", "report/tables/table3.html", "report/figures/figure2.png", "report/cards/demix.md"),
    ),
}
# The report's files may hold any text. MLflow gets descriptions of data and weights as they are.
TAKEN = {"report": ("unsealed", "without keys"), "corpus": ("without keys",), "models": ("without keys",)}
CASES = [
    (reader, name, instead)
    for reader, names in READ.items()
    for name in names
    for instead in INSTEAD
    if reader != "track" or instead not in TAKEN.get(name.split("/")[0], ())
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> MadeUp:
    run = build_run(tmp_path_factory.mktemp("run"), steps=1)
    for name in (*report_files(run.run), "cards/demix.md"):
        path = run.path / "report" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("made up")
    return run


def read(reader: str, run: Path, output: Path) -> None:
    """Do what a command does with a run, the results and the store below `output`."""
    made = Run.read(run)
    if reader == "report":
        write_report(made, output / "report")
    elif reader == "card":
        model_card(made, "demix")
    else:
        track(made, f"sqlite:///{output}/mlflow.db", "x")


@pytest.mark.parametrize(("reader", "name", "instead"), CASES)
def test_what_is_no_whole_file_is_refused(reader: str, name: str, instead: str, run: MadeUp, tmp_path: Path) -> None:
    path = run.path / name
    path.rename(tmp_path / "kept")
    try:
        INSTEAD[instead](path)
        # The command line makes one line of both.
        with pytest.raises((DemixError, IsADirectoryError)) as refused:
            read(reader, run.path, tmp_path)
        told = str(refused.value)
        assert str(path) in told or (reader == "card" and f"{path.parent}: is not a model" in told)
        assert "\n" not in told
        assert [place.name for place in tmp_path.iterdir()] == ["kept"]
    finally:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        (tmp_path / "kept").rename(path)


def test_a_report_that_lacks_a_file_is_not_tracked(run: MadeUp, tmp_path: Path) -> None:
    path = run.path / "report" / "claims.html"
    path.rename(tmp_path / "kept")
    with pytest.raises(DemixError, match=r"claims\.html: is missing; run `demix report` again"):
        track(run.run, f"sqlite:///{tmp_path}/mlflow.db", "x")
    (tmp_path / "kept").rename(path)


def test_files_below_no_folder_are_not_missing(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "file").write_text("a")
    assert is_made(tmp_path / "file")
    assert not is_made(tmp_path / "other" / "file")
    for name in ("link", "file"):
        with pytest.raises(DemixError, match=f"{name}: is no folder"):
            is_made(tmp_path / name / "a" / "b")


def test_a_key_that_a_file_lacks_is_named_with_the_file(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"inner": {}})
    found = read_json(tmp_path / "a.json")
    with pytest.raises(DemixError, match=r"a\.json: .*it has no outer"):
        found["outer"]
    with pytest.raises(KeyError, match=r"a\.json: .*it has no steps"):
        found["inner"]["steps"]
    assert found == {"inner": {}}


def test_one_domains_evaluation_in_anothers_place_is_named(run: MadeUp, tmp_path: Path) -> None:
    for name, reads in (
        ("priors.parquet", read_priors),
        ("differences.parquet", read_differences),
        ("posteriors.parquet", read_posteriors),
        ("corpus/overlap.parquet", read_overlap),
    ):
        assert len(reads(run.path / name))
        rows = pq.read_table(run.path / name).to_pylist()
        law = [row for row in rows if row["domain"] == "law"]
        path = tmp_path / Path(name).name
        write_parquet(pq.read_table(run.path / name).schema.empty_table().from_pylist(rows + law), path)
        with pytest.raises(DemixError, match=rf"{path.name}: holds rows of law twice"):
            reads(path)
