"""docs/outputs.md against the files of a run."""

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

REPOSITORY = Path(__file__).parents[2]


def patterns() -> dict[str, re.Pattern[str]]:
    """The paths of docs/outputs.md as patterns of paths below a run's folder."""
    text = (REPOSITORY / "docs" / "outputs.md").read_text()
    places = {"part": r"[0-9]{4}", "split": "(train|dev|test)", "rate": "[0-9.e+-]+", "model": "[a-z0-9_-]+"}
    places |= {"format": "(html|md|tex|svg|png|json)"}
    return {
        path: re.compile(
            "".join(
                places.get(part[1:-1], "[a-z0-9_]+")
                if part.startswith("<")
                else ".+"
                if part == "…"
                else re.escape(part)
                for part in re.split(r"(<[a-z]+>|…)", path)
            )
        )
        for path in re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)
    }


# Gone when all is done, or made only where a config or an option asks for it.
FLEETING = {"raw/<domain>/<part>.parquet", "checkpoints/<model>/…", "sbatch/…"}
FLEETING |= {"sources/<source>/<part>.json", "sources/<source>/card.json"}
FLEETING |= {"sweep/<model>.json", "metrics/sweep/<model>/<rate>.jsonl", "settings/<digest>.json"}
FLEETING |= {"routing/<clustering>/<context>/<domain>.<split>.parquet", "models/<model>/clusterer/…"}
FLEETING |= {"models/<model>/imported/…", "parents/<owner>--<name>-<commit>/"}
FLEETING |= {"loads/<model>.parquet", "examples/<task>.parquet", "tasks/<model>/<task>.parquet", "tasks.parquet"}
FLEETING |= {"task_weights.parquet", "harness/documents.parquet", "harness/models/<model>.parquet"}
FLEETING |= {"suites.parquet"}
FLEETING |= {"harness/contamination/<domain>.parquet"}
FLEETING |= {"scores/<model>@<context>/<domain>.test/…", "evaluations/<domain>.contexts.parquet"}
FLEETING |= {"seeds/<model>/step-<n>/manifest.json", "seeds/<model>/step-<n>/<part>.safetensors"}
FLEETING |= {"models/<model>/sums.safetensors", "scores/<model>@top-<k>/<domain>.test/…"}
FLEETING |= {"scores/<model>@minus-<domain>/<domain>.test/…", "scores/by_column"}


def assert_documented(run: Path) -> None:
    """Every file of a finished run has its line in docs/outputs.md, with its columns, and every line has its file."""
    found = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    # A tiny run keeps its MLflow store by itself.
    found = {path for path in found if not path.startswith(("mlflow.db", ".mlflow.db", "mlartifacts/"))}
    known = patterns()
    unknown = {path for path in found if not any(pattern.fullmatch(path) for pattern in known.values())}
    assert not unknown
    absent = {path for path, pattern in known.items() if not any(pattern.fullmatch(name) for name in found)}
    assert absent <= FLEETING, absent
    text = (REPOSITORY / "docs" / "outputs.md").read_text()
    lines = dict(re.findall(r"^\| `([^`]+)` \| (.*) \|$", text, re.MULTILINE))
    for path, told in lines.items():
        files = [run / name for name in sorted(found) if known[path].fullmatch(name)]
        if path.endswith(".parquet") and files and "see `" not in told and "else as" not in told:
            columns = {name.replace("perplexity_high", "_high") for name in pq.read_schema(files[0]).names}
            assert columns <= set(re.findall(r"\w+", told)), (path, columns - set(re.findall(r"\w+", told)))
        elif path.endswith(".arrow") and files:
            assert set(pa.ipc.open_file(str(files[0])).schema.names) <= set(re.findall(r"\w+", told)), path
