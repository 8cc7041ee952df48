"""The last stages of a run with every small number of domains: from score tables to the report, cards and MLflow."""

import re
from pathlib import Path

import numpy as np
import pytest

from demix.config.evaluation import MixingRecipe
from demix.config.training import taken
from demix.evaluate.domain import Evaluation, Outputs, evaluate_domain
from demix.evaluate.join import join
from demix.report import report_files
from demix.run.compared import compared
from demix.run.run import Run
from demix.run.systems import bases, evaluated
from demix.settings import settings_from
from support.breaking import Note
from support.cli import demix
from support.configs import domains, small
from support.scored import write_columns
from support.synthetic_run import build_run, with_keys

TRAINING, NOVEL = ("code", "law", "news", "talks"), ("wiki", "songs", "plays")
TABLES = ("results", "priors", "differences", "posteriors")
# The replacement of a removed domain is a novel one.
CELLS = [(t, n, removal) for t in range(1, 5) for n in range(4) for removal in ((False, True) if n else (False,))]
# Both ends, and the one novel domain that no order of domains can be drawn for.
ALWAYS = ((1, 0, False), (3, 1, True))


# The digests in the descriptions of `build_run`.
WEIGHTS = {"shared_sha256": "2" * 64, "expert_sha256": "0" * 64}


def write_table(folder: Path, columns: tuple[str, ...], seed: int) -> None:
    """A score table of 30 documents, the same ones for every model."""
    tokens = np.arange(600, dtype=np.uint16) % 300
    scores = {
        column: -np.random.default_rng([seed, number]).exponential(3, len(tokens))
        for number, column in enumerate(columns)
    }
    write_columns(folder, tokens, np.arange(0, 600, 20), scores, length=16, **WEIGHTS)


def evaluate(run: Run, domain: str, kind: str) -> Outputs:
    """Evaluate made-up score tables of a domain as the rule `evaluate` does."""
    tables = evaluated(run, domain)
    for number, table in enumerate(tables):
        for split in ("dev", "test") if table.sets else ("test",):
            write_table(run.folder / "scores" / table.folder / f"{domain}.{split}", table.columns, number)
    evaluation = settings_from(
        Evaluation,
        taken(MixingRecipe, run.config.evaluation)
        | {
            "kind": kind,
            "tables": tables,
            "compared": [system.key for system in compared(run, domain)],
            "against": [(name, *system.key) for name, system in bases(run).items()],
            "seed": run.seed,
        },
    )
    outputs = Outputs(*(run.folder / "evaluations" / f"{domain}.{name}.parquet" for name in (*TABLES, "losses")))
    evaluate_domain(run.folder / "scores", domain, evaluation, outputs)
    return outputs


@pytest.mark.parametrize(
    ("training", "novel", "removal"),
    [pytest.param(*cell, marks=() if cell in ALWAYS else pytest.mark.faults) for cell in CELLS],
)
def test_every_small_number_of_domains_has_a_report(
    training: int, novel: int, removal: bool, tmp_path: Path, note: Note
) -> None:
    run, old, new = tmp_path / "run", TRAINING[:training], NOVEL[:novel]
    build_run(run, training=old, novel=new, retrained=old[:1] if removal else (), steps=2)
    made = with_keys(
        run,
        small(
            run="made-up",
            domains=domains(old, new),
            tokenizer={"kind": "bpe", "vocab_size": 512},
            architecture={"layers": 2, "width": 32, "heads": 2, "context": 16},
            training={"tokens": 4096, "sequences": 4},
            removal={"retrain_without": [old[0]], "replacement": new[0]} if removal else {},
        ),
    )
    with note.timed("1 to 4 training and 0 to 3 novel domains, with and without removal", "report, cards, tracked"):
        kinds = dict.fromkeys(old, "training") | dict.fromkeys(new, "novel")
        found = [evaluate(made, domain, kind) for domain, kind in kinds.items()]
        for name in TABLES:
            join([getattr(one, name) for one in found], run / f"{name}.parquet")
        models = [model.name for model in made.planned]
        for arguments in (
            ("report", run, "--output", run / "report"),
            ("card", run, *models, "--output", run / "report" / "cards"),
            ("track", run, "--uri", f"sqlite:///{tmp_path}/mlflow.db", "--output", run / "tracked.json"),
            ("summary", run),
        ):
            done = demix(*arguments)
            assert done.exit_code == 0, (arguments, done.output, done.exception)
    assert f"{training} training domain{'s' * (training > 1)} " in done.output
    pages = [run / "report" / name for name in (*report_files(made), *(f"cards/{model}.md" for model in models))]
    for path in pages:
        content = path.read_bytes()
        assert content, path
        if path.suffix in (".md", ".html", ".tex") and "figures" not in path.parts:
            assert b"nan" not in re.sub(rb"<script.*?</script>", b"", content.lower(), flags=re.DOTALL), path
