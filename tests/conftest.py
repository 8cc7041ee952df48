"""The order of the test files."""

import pytest

# What takes minutes begins first, so that all processes of xdist end together.
FIRST = (
    "test_slurm", "test_docs", "test_parallel", "test_workflow", "test_resume", "test_seed_phase", "test_adapt",
    "test_compared_runs", "test_lm_eval", "test_few_domains", "test_benchmarks", "test_jobs", "test_scheduling",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(FIRST)))
