"""The order of the test files, and what holds for all tests."""

import signal
from collections.abc import Iterator

import pytest

# A background job of a shell ignores Ctrl-C, and so would what its tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What takes minutes begins first, so that all processes of xdist end together.
FIRST = (
    "test_slurm", "test_docs", "test_parallel", "test_rows_of_families", "test_workflow", "test_seed_phase", "test_ui",
    "test_tracking", "test_tables", "test_adapt", "test_tokenizer", "test_resume", "test_few_domains",
    "test_benchmarks", "test_sweep", "test_jobs", "test_compared_runs", "test_shards", "test_audit", "test_asking",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(FIRST)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a test that is skipped fails, but for those marked gpu")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if item.get_closest_marker("gpu") is None:
        refuse_skip(report, item.config)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report = yield
    refuse_skip(report, collector.config)
    return report


def refuse_skip(report: pytest.TestReport | pytest.CollectReport, config: pytest.Config) -> None:
    """With --no-skips, make a failure of a skipped test or file; a test that is expected to fail is none."""
    if report.skipped and not hasattr(report, "wasxfail") and config.getoption("--no-skips"):
        report.outcome, (*_, why) = "failed", report.longrepr
        report.longrepr = f"--no-skips: {why}"
