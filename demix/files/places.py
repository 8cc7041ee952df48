"""What a file of a run is: its place below the run's folder, which the file itself names and its readers compare.

A digest says that a file is whole, not whose it is. The place says domain, split, part, model, expert or training, and
the last part of its name says the kind. The name of the run is no part of it: a run may be renamed, moved and copied.
"""

import os
from pathlib import Path, PurePath

from demix.errors import DemixError
from demix.files.atomic import REMAKE

PLACE = "place"
_PATTERNS = (
    *("raw/*/*.parquet", "documents/*/*.parquet", "documents/*/*.json", "sources/*/*.json"),
    *("corpus/*/*.parquet", "corpus/*/card.json", "corpus/owners.parquet", "corpus/overlap.parquet"),
    *("corpus/shared.json", "tokens/*/*.json", "sweep/*.json", "metrics/*.jsonl", "metrics/sweep/*/*.jsonl"),
    *("models/*/model.json", "models/*/mixing.json", "models/*/usual.json", "models/*/experts/*.json"),
    "models/*/clusterer/*.json",
    *("clusters/*/clusterer.json", "clusters/*/terms.parquet", "clusters/*/assigned/*.parquet"),
    *("clusters/*/shards/*.json", "clusters/*/shards/*/*.json", "routing/*/*/*.parquet"),
    *("metrics/*/*.jsonl", "branches/*/*/model.json", "branches/*/*/experts/*.json"),
    *("scores/*.json", "scores/*/*.json", "scores/*/*.dev/*.parquet", "scores/*/*.test/*.parquet"),
    *("evaluations/*.parquet", "results.parquet", "priors.parquet", "differences.parquet", "posteriors.parquet"),
    *("examples/*.parquet", "tasks/*/*.parquet", "tasks.parquet", "task_weights.parquet"),
    *("suites.parquet", "harness/*.parquet", "harness/*/*.parquet"),
    *("audit.parquet", "seeds/*/step-*/manifest.json", "*/step-*/manifest.json", "finished-*/done.json"),
)
# The longest first: a domain, too, may be called sweep or metrics.
_LONGEST = sorted(((len(PurePath(pattern).parts), pattern) for pattern in _PATTERNS), reverse=True)


class MisplacedError(DemixError):
    """A whole file lies where another file of the run belongs."""


def place_of(path: str | Path) -> str | None:
    """The place in a run that `path` is, such as `tokens/law/dev.json`; None for a path that is none of a run's.

    A folder in which something is being made (`replacing`) is where that is going to be.
    """
    whole = PurePath(*(part for part in PurePath(os.path.abspath(path)).parts if not part.startswith(".")))
    return next(("/".join(whole.parts[-n:]) for n, pattern in _LONGEST if whole.match(pattern)), None)


def refuse_misplaced(path: str | Path, said: str | None) -> None:
    """Raise MisplacedError if the file at `path` says that it belongs to another place of the run than that.

    A file that was written outside of a run says nothing, and outside of a run a file may be anything. Models are
    copied and renamed: in a folder without metrics of its name, a model is none of the run's own.
    """
    place = place_of(path)
    if said is None or place is None or said == place:
        return
    parts = place.split("/")
    run = Path(os.path.abspath(path)).parents[len(parts) - 1]
    if parts[0] == "models" and not (run / "metrics" / f"{parts[1]}.jsonl").exists():
        return
    cure = f"put the file back that belongs there, or {REMAKE}"
    raise MisplacedError(path, f"is another file of the run: it was written as {said}", cure)
