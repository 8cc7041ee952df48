"""A row with a seed phase, in a run that has ended and in one that trains its parent."""

import shutil
from pathlib import Path

import pytest
import yaml

from demix.files import read_json, sha256_file
from support.dry_run import jobs_by_rule, ran
from support.once import once, run_with_progress

TINY = yaml.safe_load((Path(__file__).parent / "tiny.yaml").read_text())

pytestmark = pytest.mark.workflow


def test_it_joins_a_finished_run_and_leaves_its_parent_as_it_is(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    folder = tmp_path / "seeded"
    shutil.copytree(once(tmp_path_factory, "tiny", run_with_progress), folder, symlinks=True)
    rows = {"seeded": {"kind": "demix", "parent": "dense", "seed_tokens": 6000}}
    (folder / "config.yaml").write_text(yaml.safe_dump(TINY | {"models": rows}, sort_keys=False))

    def snakemake(*arguments: str) -> str:
        return ran(folder, "config.yaml", *arguments)

    assert jobs_by_rule(snakemake("-n", "--quiet", "rules")) == {
        "seed": 1, "train_seeded": 1, "score_others": 2, "score_known_others": 1, "choose_mixing": 1, "evaluate": 5,
        "results": 1, "audit_licenses": 1, "audit": 1, "report": 1, "card": 1, "track": 1, "run_config": 1,
    }  # fmt: skip
    run, model = folder / "results" / "tiny", "results/tiny/models/seeded/model.json"
    shown = snakemake(model)
    assert "dense: training it again to step 15, after which it kept no state" in shown
    assert read_json(folder / model)["parent"]["step"] == 6000 // (3 * 4 * 32)
    manifest = run / "seeds" / "dense" / "step-00000015" / "manifest.json"
    assert read_json(manifest)["tokens"] == read_json(folder / model)["tokens_seed"] == 5760
    assert "Nothing to be done" in snakemake("-n", model)
    # Trained anew beside such a row, a dense model keeps its state, of the same bytes: nothing is trained twice.
    before = sha256_file(manifest)
    shutil.rmtree(run / "seeds")
    shown = snakemake(model, "--forcerun", "train_dense")
    assert "training it again" not in shown
    assert sha256_file(manifest) == before
    assert not list((run / "checkpoints").rglob("*.safetensors"))
