"""Runs to compare: what the workflow made, with two models alone, and as if these had learned otherwise."""

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from demix.config.evaluation import MixingRecipe
from demix.config.training import taken
from demix.data.tokenizer import byte_lengths
from demix.evaluate.domain import Evaluation, Outputs, evaluate_domain
from demix.evaluate.join import join
from demix.evaluate.score_tables import write_scores
from demix.files import read_parquet, write_parquet
from demix.run.kept import read_run_config
from demix.run.run import Run
from demix.run.systems import evaluated
from support.configs import with_keys
from support.frozen import copied

# What a score table says of the tokens and the weights that it was made with.
WEIGHTS = ("tokens_sha256", "shared_sha256", "expert_sha256")


def renamed(run: Run, folder: Path, name: str = "other", **sections: object) -> Run:
    """A copy of a run in `folder` of another name; `sections` replace sections of its config."""
    copied(run, folder)
    return with_keys(folder, read_run_config(folder).values | {"run": name} | sections)


def relearned(run: Run, folder: Path, effect: int, name: str = "other") -> Run:
    """A copy of a run whose experts predict some documents better and some worse, evaluated by the stage."""
    made = renamed(run, folder, name)
    for path in sorted(folder.glob("scores/*/*/*.parquet")):
        if path.stem == "tokens":
            tokens = read_parquet(path)
            # It tells of the columns of before.
            write_parquet(tokens.replace_schema_metadata({b"length": tokens.schema.metadata[b"length"]}), path)
        else:
            documents = pd.read_parquet(path.with_name("tokens.parquet"))["document"].to_numpy()
            file = pq.ParquetFile(path)
            own = np.random.default_rng([effect, *path.stem.encode(), *path.parent.name.encode()])
            factors = np.exp(own.normal(0.02 * effect, 0.05, documents.max() + 1))
            scores = file.read()["log_probability"].to_numpy() * factors[documents]
            told = file.metadata.metadata
            about = {name: told[name.encode()].decode() for name in WEIGHTS if name.encode() in told}
            write_scores(path, [scores.astype(np.float32)], about)
    results, recipe = [], taken(MixingRecipe, made.config.evaluation)
    for domain in made.domains:
        tables = tuple(table for table in evaluated(made, domain) if (folder / "scores" / table.folder).exists())
        evaluation = Evaluation(
            **recipe, kind=made.kind_of(domain), tables=tables, compared=(), against=(), seed=made.seed
        )
        results.append(folder / "evaluations" / f"{domain}.parquet")
        others = [folder / "others" / f"{domain}.{number}.parquet" for number in range(4)]
        lengths = byte_lengths(folder / "tokenizer.json")
        evaluate_domain(folder / "scores", domain, evaluation, Outputs(results[-1], *others), lengths)
    join(results, folder / "results.parquet")
    return made
