"""Tasks of the standard harness that somebody else wrote: their names and data are text, and no more than that."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from demix.errors import DemixError
from demix.evaluate import harness
from demix.evaluate.harness import Tasks, evaluate_tasks
from support.attacks import write_attacked
from support.cli import demix

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: [law, history]
doc_to_target: label
"""
MARKUP = "<script>alert(1)<script>"
# Names of tasks, and what of a path each would be.
PATHS = ("../../outside", "/tmp/outside", f"{MARKUP}/a", "n" * 151)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and tasks in tasks/."""
    made = tmp_path_factory.mktemp("hostile")
    write_attacked(made)
    (made / "tasks").mkdir()
    texts = {"plain": "The house divided", "huge": "word " * 200_000, "markup": f"{MARKUP} \x1b[2J {{{{text}}}}"}
    for name, text in texts.items():
        data = made / "tasks" / f"{name}.jsonl"
        data.write_text(json.dumps({"text": text, "label": 0}) + "\n")
        (made / "tasks" / f"{name}.yaml").write_text(TASK.format(name=name, data=data))
    for number, name in enumerate((*PATHS, MARKUP, "\x1b[2Jclear")):
        task = TASK.format(name=json.dumps(name), data=made / "tasks" / "plain.jsonl")
        (made / "tasks" / f"named{number}.yaml").write_text(task)
    return made


@pytest.fixture(autouse=True)
def offline(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            patch.setenv(name, "1")
        patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


def evaluated(folder: Path, name: str, output: Path | None = None) -> dict:
    asked = Tasks((name,), folder / "tasks")
    return evaluate_tasks({"pretrained": str(folder / "model")}, asked, output, output is not None)


def test_documents_of_any_length_and_with_markup_are_text(folder: Path, tmp_path: Path) -> None:
    for name in ("huge", "markup"):
        found = evaluated(folder, name, tmp_path / f"{name}.json")
        assert found["results"][name]["acc,none"] in (0.0, 1.0)
        (answer,) = map(json.loads, (tmp_path / f"{name}.{name}.jsonl").read_text().splitlines())
        assert answer["doc"] == json.loads((folder / "tasks" / f"{name}.jsonl").read_text())


def test_a_name_that_is_a_path_writes_nothing(folder: Path, tmp_path: Path) -> None:
    for name in PATHS:
        with pytest.raises(DemixError):
            evaluated(folder, name, tmp_path / "out.json")
    # By its file, its name is known when it has been evaluated.
    with pytest.raises(DemixError):
        evaluated(folder, str(folder / "tasks" / "named0.yaml"), tmp_path / "out.json")
    assert [*tmp_path.iterdir()] == []
    assert not Path("/tmp/outside").exists()
    assert PATHS[1] in evaluated(folder, PATHS[1])["results"]


def test_names_are_printed_without_codes_for_the_terminal(folder: Path, tmp_path: Path) -> None:
    named = ("--include-path", folder / "tasks", "--output", tmp_path / "out.json", "--log-samples")
    shown = demix("lm-eval", folder / "model", "--tasks", f"\x1b[2Jclear,{MARKUP}", *named)
    assert shown.exit_code == 0, shown.exception
    assert "\x1b" not in shown.stdout
    assert "\\x1b[2Jclear" in shown.stdout
    assert MARKUP in shown.stdout
    assert len([*tmp_path.iterdir()]) == 3


def test_all_tasks_of_the_folder_are_found_without_the_harness_own(folder: Path) -> None:
    manager, names = harness.named_tasks(Tasks((*PATHS, MARKUP), folder / "tasks"))
    assert names == [*PATHS, MARKUP]
    assert "arc_easy" not in manager.all_tasks
