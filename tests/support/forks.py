"""Processes that begin with what takes seconds to import."""

import multiprocessing

# One server of forks for a process of tests: it imports once what all of its users begin with.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        *("demix.train.adapt", "demix.evaluate.score", "demix.data.anonymize", "demix.commands.main"),
        # What modules of tests import, which a process imports to find its function.
        *("typer.testing", "pytest", "hypothesis", "duckdb"),
        # torch imports it at the first step of an optimizer.
        "torch._dynamo",
        # What snakemake imports as it plans.
        *("snakemake.cli", "snakemake.workflow", "snakemake.report", "requests", "pandas"),
    ]
)
