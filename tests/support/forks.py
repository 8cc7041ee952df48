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


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The environment of a rank of a training that a launcher has started, with the store at a port."""
    numbers = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    return {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1", "DEMIX_LAUNCHER": "1"}
