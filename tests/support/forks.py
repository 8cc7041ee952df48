"""Processes that begin with what takes seconds to import."""

import multiprocessing

# One server of forks for a process of tests: it imports once what all of its users begin with.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([
    "demix.train.stage", "demix.evaluate.score", "demix.commands.main", "snakemake.cli", "typer.testing", "pytest",
])  # fmt: skip
