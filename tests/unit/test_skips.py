"""`--no-skips`, by which CI sees that a machine with all that the tests need skips none but those for a GPU."""

from pathlib import Path

from support.inner_pytest import pytest_on, with_conftest

SKIPPING = """
import pytest

@pytest.fixture
def absent():
    pytest.skip("needs a lion")

def test_by_its_fixture(absent): ...

@pytest.mark.skipif(True, reason="needs a tiger")
def test_by_its_mark(): ...

@pytest.mark.gpu
@pytest.mark.skipif(True, reason="needs a GPU")
def test_on_a_gpu(): ...

@pytest.mark.xfail
def test_expected_to_fail(): assert False

def test_that_runs(): ...
"""


def test_only_tests_for_a_gpu_are_skipped(tmp_path: Path) -> None:
    with_conftest(tmp_path, SKIPPING)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a GPU\n")

    def ran(*options: str) -> tuple[int, str]:
        done = pytest_on(tmp_path, "-rf", *options)
        return done.returncode, done.stdout

    code, said = ran()
    assert (code, said.splitlines()[-1].rpartition(" in ")[0]) == (0, "1 passed, 3 skipped, 1 xfailed")
    code, said = ran("--no-skips")
    assert (code, said.splitlines()[-1].rpartition(" in ")[0]) == (1, "1 passed, 1 skipped, 1 xfailed, 2 errors")
    assert "--no-skips: Skipped: needs a lion" in said
    (tmp_path / "test_some.py").write_text("import pytest\npytest.importorskip('lions_and_tigers')")
    assert ran()[0] == 5, "nothing is collected"
    code, said = ran("--no-skips")
    assert code == 2
    assert "could not import 'lions_and_tigers'" in said
