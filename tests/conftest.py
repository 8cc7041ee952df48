"""The order of the test files."""

import pytest

# What takes minutes begins first, so that all processes of xdist end together.
FIRST = (
    "test_slurm", "test_docs", "test_parallel", "test_rows_of_families", "test_workflow", "test_seed_phase", "test_ui",
    "test_tracking", "test_tables", "test_lm_eval", "test_adapt", "test_tokenizer", "test_resume", "test_few_domains",
    "test_benchmarks", "test_sweep", "test_jobs", "test_compared_runs", "test_shards", "test_audit", "test_asking",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(FIRST)))
