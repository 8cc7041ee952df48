"""What `demix init` chooses by the amount of text."""

from pathlib import Path

import pytest

from demix.data.outline import outline
from demix.run.check import completed_run
from support.cli import demix


@pytest.mark.parametrize(
    ("domains", "words", "layers", "updates", "rate"),
    [(3, 2_000, 2, 520, 4e-3), (10, 2_000, 2, 156, 8e-3), (2, 120_000, 3, 3906, 8e-3), (10, 21_000, 3, 781, 8e-3)],
)
def test_the_rate_follows_from_size_and_updates(
    domains: int, words: int, layers: int, updates: int, rate: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = [f"{chr(97 + number)}.txt" for number in range(domains)]
    for name in names:
        lines = (f"The mill number {number} of {name} stood by a river." for number in range(words // 10))
        Path(name).write_text("\n".join(lines))
    Path("mine.yaml").write_text(written := outline("mine", names, []))
    done = demix("config", "mine.yaml", "--values")
    assert done.exit_code == 0, done.output
    run = completed_run({"base": "mine.yaml"}, tmp_path)
    assert run.architecture.layers == layers
    assert {model.updates for model in run.own} == {updates}
    assert run.config.training.learning_rate == rate
    assert "docs/own-data.md says how" in written
