"""How well each expert predicts the test split of its own domain: the scale for its perplexity on any other text.

A finished run has these figures in `results.parquet`. `demix card` writes them to `usual.json` in the model's folder,
which keeps them where the folder is copied.
"""

from collections.abc import Mapping
from pathlib import Path

from demix.files import read_parquet, write_json
from demix.model.manifest import Usual, read_usual, run_of
from demix.run.run import Run


def usual_of(directory: Path) -> dict[str, Usual]:
    """The figures of the experts of the model in `directory`: those in its run's results, else those in its folder.

    An expert without figures is left out. Raises DemixError if a file with figures is damaged.
    """
    path, run, place = directory / "usual.json", run_of(directory), directory.resolve()
    found = read_usual(path) if path.exists() else {}
    if place.parent.name != "models" or not (run / "results.parquet").exists():
        return found
    row, seed = Run.read(run).row_of(place.name)
    wanted = {"model": row, "seed": seed, "method": "expert", "split": "test", "variant": ""}
    columns = [*wanted, "expert", "domain", "perplexity", "bits_per_byte"]
    return found | {
        one["expert"]: Usual(perplexity=one["perplexity"], bits_per_byte=one["bits_per_byte"])
        for one in read_parquet(run / "results.parquet").select(columns).to_pylist()
        if wanted.items() <= one.items() and one["expert"] == one["domain"] and one["bits_per_byte"] is not None
    }


def write_usual(directory: Path, figures: Mapping[str, Usual]) -> None:
    """Write the figures of experts to `usual.json` of the model in `directory`; without figures there is no file."""
    if figures:
        content = {"experts": {name: one.as_dict() for name, one in figures.items()}}
        write_json(directory / "usual.json", content)
    else:
        (directory / "usual.json").unlink(missing_ok=True)
