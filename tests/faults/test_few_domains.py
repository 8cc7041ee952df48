"""The last stages of a run with every small number of domains: from score tables to the report, cards and MLflow."""

import re
from pathlib import Path

import pytest

from demix.evaluate.columns import join
from demix.report import report_files
from demix.run.run import Run
from support.cli import succeeds
from support.frozen import evaluate_again, with_models

TABLES = ("priors", "differences", "posteriors")
# The replacement of a removed domain is a novel one.
CELLS = [(t, n, removal) for t in range(1, 4) for n in range(3) for removal in ((False, True) if n else (False,))]
# Both ends, and the one novel domain that no order of domains can be drawn for.
ALWAYS = ((1, 0, False), (3, 1, True))


@pytest.mark.parametrize(
    ("training", "novel", "removal"),
    [pytest.param(*cell, marks=() if cell in ALWAYS else pytest.mark.faults) for cell in CELLS],
)
def test_every_small_number_of_domains_has_a_report(
    training: int, novel: int, removal: bool, frozen: Run, tmp_path: Path
) -> None:
    # The frozen run was trained again without scripture, with fantasy in its place.
    old, new = ("scripture", "parliament", "licenses")[:training], ("fantasy", "fortunes")[:novel]
    domains = {
        kind: {name: given for name, given in some.items() if name in (*old, *new)}
        for kind, some in frozen.config.values["domains"].items()
    }
    removed = {"retrain_without": [old[0]], "replacement": new[0]} if removal else {}
    run = with_models(frozen, tmp_path / "run", "demix", "dense", domains=domains, removal=removed, seeds=[1])
    found = evaluate_again(run)
    join(found, run.folder / "results.parquet")
    for name in TABLES:
        join([one.with_suffix(f".{name}.parquet") for one in found], run.folder / f"{name}.parquet")
    models = [model.name for model in run.planned]
    for arguments in (
        ("report", run.folder, "--output", run.folder / "report"),
        ("card", run.folder, *models, "--output", run.folder / "report" / "cards"),
        ("track", run.folder, "--uri", f"sqlite:///{tmp_path}/mlflow.db", "--output", run.folder / "tracked.json"),
        ("summary", run.folder),
    ):
        succeeds(*arguments)
    pages = [run.folder / "report" / name for name in (*report_files(run), *(f"cards/{one}.md" for one in models))]
    for path in pages:
        content = path.read_bytes()
        assert content, path
        if path.suffix in (".md", ".html", ".tex") and "figures" not in path.parts:
            assert b"nan" not in re.sub(rb"<script.*?</script>", b"", content.lower(), flags=re.DOTALL), path
