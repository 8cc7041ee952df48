"""Rows of `models` that begin with a model of the hub: what the config says, and the job that imports it."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from demix.config.config import Config
from demix.errors import DemixError
from demix.files import write_json
from demix.plan.jobs import plan_jobs
from demix.run.check import completed_run
from demix.run.rules import RunRules
from demix.run.run import Run
from support.dry_run import dry_run

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PARENT = {"hub": "owner/name", "revision": COMMIT}
FOLDER = f"results/tiny/parents/owner--name-{COMMIT[:12]}"
TINY = yaml.safe_load((Path(__file__).parents[1] / "workflow" / "tiny.yaml").read_text()) | {"run": "tiny"}
TYPES = {"types": 512, "end_of_text": 0}


def values(parent: object = PARENT, **sections: Any) -> dict[str, Any]:
    rows = {"demix": {"parent": parent}, "btm": {"kind": "branched", "parent": parent}}
    return copy.deepcopy(TINY) | {"models": rows} | sections


def test_rows_begin_with_the_folder_that_a_job_makes(tmp_path: Path) -> None:
    config = values(tokenizer={"kind": "parent", **TYPES})
    run = completed_run(config)
    assert {row.name: row.initial for row in run.rows.values() if row.initial} == {"demix": FOLDER, "btm": FOLDER}
    assert run.config.tokenizer.path == f"{FOLDER}/tokenizer.json"
    assert {f"{FOLDER}/model.json", f"{FOLDER}/experts/dense.safetensors"} < {*RunRules(run).seed_of(run.own[0])}
    assert {name: one.address for name, one in run.parents.items()} == {Path(FOLDER).name: f"hub:owner/name@{COMMIT}"}
    assert [job.rules for job in plan_jobs(run, "cpu") if "import_parent" in job.rules] == [{"import_parent": 1}]
    # The run's own file says the same.
    assert Run(Config.complete(run.config.values), run.folder).parents == run.parents
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    printed = dry_run(tmp_path, tmp_path / "config.yaml", "--printshellcmds")
    import_ = f"demix import hub:owner/name@{COMMIT} --output {FOLDER} --context {run.context} 2> "
    assert printed.count(import_) == 1
    assert "import_parent" not in dry_run(tmp_path, tmp_path / "config.yaml", "results/tiny/corpus/owners.parquet")


@pytest.mark.parametrize(
    ("sections", "missing"),
    [
        ({"tokenizer": {"kind": "parent"}}, "tokenizer.json"),
        ({"architecture": {"preset": "parent"}, "tokenizer": {"kind": "parent", **TYPES}}, "model.json"),
    ],
)
def test_what_files_say_needs_the_import_first(sections: dict[str, Any], missing: str) -> None:
    with pytest.raises(DemixError) as caught:
        completed_run(values(**sections))
    command = f"run `demix import hub:owner/name@{COMMIT} --output {FOLDER}` first"
    assert str(caught.value) == (
        f"{FOLDER}/{missing}: is missing; {command}, or give its architecture, types and end_of_text here"
    )


def test_an_imported_parent_gives_its_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(FOLDER).mkdir(parents=True)
    sizes = {"layers": 3, "width": 24, "heads": 2, "context": 16}
    write_json(Path(FOLDER) / "model.json", {"architecture": sizes})
    config = Config.complete(values(architecture={"preset": "parent"}))
    assert {key: config.values["architecture"][key] for key in sizes} == sizes


@pytest.mark.parametrize(
    ("parent", "told"),
    [
        (
            PARENT | {"revision": "main"},
            r"models\.btm\.parent\.revision: is 'main'; allowed is string that is a commit",
        ),
        ({"hub": "owner/name"}, r"models\.btm\.parent\.revision: is missing"),
        (
            PARENT | {"hub": "a/b/c"},
            r"models\.btm\.parent\.hub: is 'a/b/c'; allowed is string of the form owner/name",
        ),
        (PARENT | {"path": "x"}, r"models\.btm\.parent\.path: is not known; known are hub, revision"),
        (5, r"models\.btm\.parent: is 5; allowed is object or string"),
    ],
)
def test_a_parent_that_names_no_commit_is_refused(parent: object, told: str) -> None:
    with pytest.raises(DemixError, match=told):
        completed_run(values(parent))


@pytest.mark.parametrize("parent", [PARENT, "imported/one"], ids=["hub", "folder"])
def test_token_routed_rows_begin_with_such_a_model_too(parent: object) -> None:
    run = completed_run(copy.deepcopy(TINY) | {"models": {"up": {"kind": "routed", "top_k": 2, "parent": parent}}})
    row = run.rows["up"]
    assert row.initial == (FOLDER if parent == PARENT else parent)
    assert row.settings.schedule is None, "there is no schedule of a parent to restart"
