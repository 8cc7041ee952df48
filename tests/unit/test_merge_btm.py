"""Branches merged into a model whose tokens choose among their feedforwards, against plain loops over their files."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from demix.config.architecture import Architecture
from demix.config.counts import parameters
from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError
from demix.files import read_json, sha256_file, write_json
from demix.model.checkpoint import describe, load_model
from demix.model.experts import find_faults
from demix.model.merge_routed import merge_routed
from support.cli import demix
from support.models import SMALL, model_of, save_model
from support.tokens import TRAINING

# Another order than that of the names.
ORDER = TRAINING


@pytest.fixture(scope="module")
def run(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the tokens of three domains, a model of three whole models, and the model merged of these."""
    folder = tmp_path_factory.mktemp("runs") / "results" / "small"
    shutil.copytree(tokens / "tokens", folder / "tokens")
    shutil.copy(tokens / "tokenizer.json", folder)
    encoder = Tokenizer.load(folder / "tokenizer.json")
    whole = model_of(ORDER[:1], torch.float32, vocab_size=encoder.vocab_size, expert_scope="model")
    seen = {"tokens": 70, "steps": 7, "tokens_seed": 10, "tokens_branch": 60}
    save_model(whole, folder / "models" / "btm", encoder.sha256, "branched", **seen)
    own = read_json(folder / "models" / "btm" / "experts" / f"{ORDER[0]}.json") | {
        "tokens": 30,
        "seeds": {"5" * 64: 10},
    }
    for number, name in enumerate(ORDER):
        generator, path = torch.Generator().manual_seed(number), folder / f"models/btm/experts/{name}.safetensors"
        parts = {key: parameter.detach()[0] if ".feedforward." in key else parameter.detach()
                 for key, parameter in whole.named_parameters()}  # fmt: skip
        parts = {key: part + 0.1 * torch.randn(part.shape, generator=generator) for key, part in parts.items()}
        save_file(parts, path)
        about = own | {"name": name, "sha256": sha256_file(path), "data_sha256": {name: f"{number}" * 64}}
        path.with_suffix(".json").unlink(missing_ok=True)
        write_json(path.with_suffix(".json"), about)
    assert find_faults(folder / "models" / "btm") == []
    shards = {name: folder / "tokens" / name / "dev.arrow" for name in ORDER}
    merge_routed(folder / "models" / "btm", shards, folder / "models" / "btm-routed")
    return folder


def branches(run: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {name: load_file(run / "models" / "btm" / "experts" / f"{name}.safetensors") for name in ORDER}


def test_feedforwards_are_those_of_the_branches_and_all_else_is_their_mean(run: Path) -> None:
    merged, found = run / "models" / "btm-routed", branches(run)
    shared, own = load_file(merged / "shared.safetensors"), load_file(merged / "experts" / "dense.safetensors")
    routers = {f"blocks.{layer}.feedforward.router" for layer in range(SMALL.layers)}
    assert shared.keys() | own.keys() == found[ORDER[0]].keys() | routers
    for key in found[ORDER[0]]:
        if ".feedforward." in key:
            for number, name in enumerate(ORDER):
                assert torch.equal(own[key][number], found[name][key]), key
        else:
            mean = np.mean([found[name][key].double().numpy() for name in ORDER], 0)
            np.testing.assert_allclose(shared[key], mean, rtol=0, atol=1e-7)


def test_the_router_is_that_of_a_demix_model_with_the_averaged_weights(run: Path, tmp_path: Path) -> None:
    """The same weights in the files of a DEMix model, which shares the mean, are merged to the same routers."""
    encoder = Tokenizer.load(run / "tokenizer.json")
    stand_in = model_of(ORDER, torch.float32, vocab_size=encoder.vocab_size)
    shared = load_file(run / "models" / "btm-routed" / "shared.safetensors")
    with torch.no_grad():
        for key, parameter in stand_in.named_parameters():
            given = torch.stack([branches(run)[name][key] for name in ORDER]) if ".feedforward." in key else shared[key]
            parameter.copy_(given)
    save_model(stand_in, tmp_path / "demix", encoder.sha256)
    shards = {name: run / "tokens" / name / "dev.arrow" for name in ORDER}
    merge_routed(tmp_path / "demix", shards, tmp_path / "merged")
    for name in ("shared.safetensors", "experts/dense.safetensors"):
        assert (tmp_path / "merged" / name).read_bytes() == (run / "models" / "btm-routed" / name).read_bytes(), name


def test_the_files_say_what_was_merged(run: Path) -> None:
    merged = run / "models" / "btm-routed"
    assert find_faults(merged) == []
    about, lineage = describe(merged), read_json(merged / "experts" / "dense.json")
    architecture = Architecture(**about["architecture"])
    assert (about["kind"], about["expert_scope"], architecture) == ("merged", "feedforward", SMALL.merged_routed(3))
    assert (about["shared_parameters"], about["expert_parameters"]) == parameters(architecture, about["vocab_size"])
    assert load_model(merged).expert_scope == "feedforward"
    # A seed that all began with counts once.
    assert {key: about[key] for key in ("tokens", "tokens_seed", "tokens_branch")} == {
        "tokens": 70, "tokens_seed": 10, "tokens_branch": 60,
    }  # fmt: skip
    assert (lineage["tokens"], lineage["seeds"]) == (70, {"5" * 64: 10})
    assert [choice["expert"] for choice in lineage["choices"]] == list(ORDER)


def test_the_command_merges_branches_in_the_order_of_their_names(run: Path, tmp_path: Path) -> None:
    done = demix("merge", run / "models" / "btm", "--routed", "--output", tmp_path / "merged")
    assert done.exit_code == 0, done.exception
    choices = read_json(tmp_path / "merged" / "experts" / "dense.json")["choices"]
    assert [choice["expert"] for choice in choices] == sorted(ORDER)
    assert "the average of all their other weights" in (tmp_path / "merged" / "README.md").read_text()


def test_damaged_branches_are_refused_in_one_line(run: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(run / "models" / "btm", tmp_path / "btm")
    (broken / "experts" / f"{ORDER[1]}.safetensors").write_bytes(b"no tensors")
    done = demix("merge", broken, "--routed", "--tokens", run / "tokens", "--output", tmp_path / "merged")
    with pytest.raises(DemixError, match=rf"{ORDER[1]}\.safetensors: differs from its recorded sha256"):
        raise done.exception
    assert not (tmp_path / "merged").exists()
