"""All families of config/families.yaml with the decoder of Llama, from text to report, far too small."""

import re
from pathlib import Path

import pandas as pd
import pytest
import yaml

from demix.files import read_json
from demix.model.experts import find_faults
from support.disturbed import REPOSITORY
from support.dry_run import ran

FAMILIES = yaml.safe_load((REPOSITORY / "config" / "families.yaml").read_text())
TRAINING, NOVEL = ("parliament", "scripture", "licenses", "novels"), ("fantasy", "fortunes")
DECODER = {
    "preset": "llama", "layers": 2, "width": 32, "heads": 4, "context": 32, "key_heads": 2, "inner": 48,
    "query_norm": "head", "rope_scaling": {"kind": "llama3", "factor": 2.0, "context": 16},
}  # fmt: skip
SEED = 4096

pytestmark = pytest.mark.workflow


def domain(name: str, words: int) -> dict:
    source = {"kind": "files", "path": f"resources/sample/{name}.jsonl.zst"}
    return {"source": source, "words": {"train": words, "dev": 1000, "test": 1000}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("decoders")
    (folder / "resources").symlink_to(REPOSITORY / "resources")
    models = {
        name: row and row | dict.fromkeys({"seed_tokens", "tokens"} & row.keys(), SEED)
        for name, row in FAMILIES["models"].items()
    }
    own = {
        "run": "llama",
        "domains": {
            "training": {name: domain(name, 6000) for name in TRAINING},
            "novel": {name: domain(name, 3000) for name in NOVEL},
        },
        "tokenizer": {"kind": "bpe", "vocab_size": 400},
        "architecture": DECODER,
        "training": {
            "tokens": 2 * SEED,
            "sequences": 4,
            "dev_blocks": 0,
            "learning_rate": 3e-3,
            "clip": 1.0,
            "weight_decay": 0.0,
        },
        "clusterings": {name: one | {"dimensions": 8} for name, one in FAMILIES["clusterings"].items()},
        "models": models,
        "evaluation": FAMILIES["evaluation"] | {"dev_blocks": 5, "test_tokens": 640, "contexts": [32, 64]},
        "adaptation": {"tokens": 1024, "sequences": 4, "evaluate_every": 4, "dev_blocks": 4, "forgetting_blocks": 2},
        "removal": FAMILIES["removal"],
        "tracking": {"uri": "sqlite:///results/llama/mlflow.db"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(own, sort_keys=False))
    ran(folder, "config.yaml")
    assert "Nothing to be done" in ran(folder, "config.yaml", "-n")
    return folder / "results" / "llama"


def test_every_family_trains_mixes_adapts_and_merges_this_decoder(run: Path) -> None:
    rows = {"demix", "dense", *(name for name, row in FAMILIES["models"].items() if row)}
    assert {path.parent.name for path in run.glob("models/*/model.json")} >= rows
    for path in run.glob("models/*/model.json"):
        architecture = read_json(path)["architecture"]
        assert {architecture[key] for key in ("norm", "position", "head")} == {"rms", "rope", "untied"}
        assert not find_faults(path.parent)
    results = pd.read_parquet(run / "results.parquet")
    scored = results[results["split"] == "test"]
    assert set(scored["domain"]) == {*TRAINING, *NOVEL}
    assert rows <= set(scored["model"])
    # Of 400 types, each as likely as the others, no model knows anything.
    learned = scored[scored["domain"].isin(TRAINING)].groupby("model")["perplexity"].median()
    assert (learned < 350).all(), learned


def test_no_page_names_another_decoder(run: Path) -> None:
    for path in run.glob("report/**/*"):
        if path.suffix in (".html", ".md", ".tex"):
            assert not re.search(r"GPT-2|gpt2", path.read_text()), path
