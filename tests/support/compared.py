"""Finished runs of random documents, small but real: score tables, evaluated by the stage itself."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from demix.evaluate.domain import Evaluation, Outputs, evaluate_domain
from demix.evaluate.join import join
from demix.files import write_json, write_json_lines
from demix.run.compared import compared
from demix.run.systems import bases, evaluated
from support.configs import domains, small
from support.scored import write_columns
from support.synthetic_run import with_keys

TRAINING, NOVEL = ("law", "news"), ("songs",)
BLOCK, VOCABULARY, BYTES = 8, 300, 3
PIECES, ORIGINS = 60, 25
MIXING = {
    "dev_blocks": 6, "decay": 0.3, "decays": [0.3], "prior_blocks": [4], "top_k": [],
    "weights": ["history", "released", "tempered", "switching"],
}  # fmt: skip


def make_run(
    folder: Path, run: str = "base", *, effect: int = 0, texts: dict[str, int] | None = None, origins: int = ORIGINS,
    pieces: int = PIECES, backwards: bool = False, tokenizer: str = "one", **changes: Any,
) -> Path:  # fmt: skip
    """The folder of a finished run. `effect` seeds what its models learned, `texts` the documents of a domain.

    Pieces of one document are alike under a model. `backwards` turns the order of the pieces round.
    """
    made = with_keys(folder, small(run=run, domains=domains(TRAINING, NOVEL), evaluation=MIXING) | changes)
    kinds = {name: kind for kind, names in made.config.domains.kinds.items() for name in names}
    results = []
    for domain, kind in kinds.items():
        tables = evaluated(made, domain)
        for table in tables:
            for split in table.splits:
                place = folder / "scores" / table.folder / f"{domain}.{split}"
                text = (texts or {}).get(domain, 0)
                about = [text, *domain.encode(), *split.encode()]
                _score(place, table.columns, about, effect, origins, pieces, backwards)
        outputs = Outputs(*(
            folder / "evaluations" / f"{domain}.{name}parquet"
            for name in ("", "priors.", "differences.", "posteriors.", "losses.")
        ))  # fmt: skip
        evaluation = Evaluation(
            **MIXING, kind=kind, tables=tables, compared=[one.key for one in compared(made, domain)],
            against=[(name, *base.key) for name, base in bases(made).items()], seed=made.seed,
        )  # fmt: skip
        evaluate_domain(folder / "scores", domain, evaluation, outputs, np.full(VOCABULARY, BYTES))
        results.append(outputs.results)
    join(results, folder / "results.parquet")
    write_json(folder / "tokenizer.json", {"made": tokenizer})
    for model in ("dense", "demix"):
        lines = [
            {"step": step, "tokens": 100 * step, "loss": 5 - step / 10 + effect, "tokens_per_second": 1000.0 * step**2}
            for step in (1, 2, 3)
        ]
        lines.insert(2, {"step": 2, "tokens": 200, "dev_loss": 4.5 + effect, "dev_loss/law": 4.0})
        write_json_lines(folder / "metrics" / f"{model}.jsonl", lines)
    return folder


def _score(
    place: Path, columns: Sequence[str], text: list[int], effect: int, origins: int, pieces: int, backwards: bool
) -> None:  # fmt: skip
    words = np.random.default_rng(text)
    lengths = words.integers(5, 30, pieces)
    ids = [words.integers(0, VOCABULARY, length) for length in lengths]
    hard = [words.exponential(3, length) for length in lengths]
    of = np.arange(pieces) * 7 % origins
    order = np.arange(pieces)[:: -1 if backwards else 1]
    flat = np.concatenate([ids[piece] for piece in order]).astype(np.uint16)
    scores = {}
    for column in columns:
        learned = np.random.default_rng([effect, *place.parent.name.encode(), *column.encode()])
        easier = learned.normal(0, 0.3, origins)
        scores[column] = -np.concatenate([hard[piece] * np.exp(easier[of[piece]]) + 0.1 for piece in order])
    write_columns(place, flat, np.cumsum([0, *lengths[order][:-1]]), scores, length=BLOCK, origins=of[order])
