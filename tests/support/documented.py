"""docs/outputs.md against the files of a run."""

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

DOCS = Path(__file__).parents[2] / "docs"
# What stands in <…> in a path, where it is no word.
PLACES = {
    "part": r"[0-9]{4}",
    "split": "(train|dev|test)",
    "rate": "[0-9.e+-]+",
    "model": "[a-z0-9_-]+",
    "format": "(html|md|tex|svg|pdf|png|json)",
    "state": "(shared|expert-dense)",
}
# Gone when all is done, or made only where a config or an option asks for it.
FLEETING = {"raw/<domain>/<part>.parquet", "checkpoints/<model>/…", "sbatch/…", "settings/<digest>.json"}
FLEETING |= {"sources/<source>/<part>.json", "sources/<source>/card.json"}
FLEETING |= {"models/<model>/.lock", "models/<model>/imported/…", "parents/<owner>--<name>-<commit>/"}


def pattern(path: str) -> re.Pattern[str]:
    """A path of the pages as a pattern of paths below a run's folder; of a folder, of all that lies in it."""
    parts = re.split(r"(<[a-z]+>|…)", path)
    texts = (
        PLACES.get(part[1:-1], "[a-z0-9_]+") if part.startswith("<") else ".+" if part == "…" else re.escape(part)
        for part in parts
    )
    return re.compile("".join(texts) + (".+" if path.endswith("/") else ""))


def lines(page: str) -> dict[str, str]:
    """What the tables of a page say of each path."""
    return dict(re.findall(r"^\| `([^`]+)` \| (.*) \|$", (DOCS / page).read_text(), re.MULTILINE))


def assert_documented(run: Path) -> None:
    """Every file of a finished run has its line in the pages, with its columns, and every line has its file."""
    found = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    # A tiny run keeps its MLflow store by itself.
    found = {path for path in found if not path.startswith(("mlflow.db", ".mlflow.db", "mlartifacts/"))}
    told = lines("outputs.md")
    known = {path: pattern(path) for path in told}
    folders = [
        pattern(path) for path in lines("families.md") if path.startswith(("branches/", "clusters/", "metrics/"))
    ]
    unknown = [path for path in found if not any(one.fullmatch(path) for one in [*known.values(), *folders])]
    assert not unknown, unknown
    absent = {path for path, one in known.items() if not any(one.fullmatch(name) for name in found)}
    assert absent <= FLEETING, absent
    for path, about in told.items():
        files = [run / name for name in sorted(found) if known[path].fullmatch(name)]
        words = set(re.findall(r"\w+", about))
        if path.endswith(".parquet") and files and "see `" not in about and "else as" not in about:
            columns = {name.replace("perplexity_high", "_high") for name in pq.read_schema(files[0]).names}
            assert columns <= words, (path, columns - words)
        elif path.endswith(".arrow") and files:
            assert set(pa.ipc.open_file(str(files[0])).schema.names) <= words, path
