"""The expert of a release joins a token-routed model: transformers' FlexOlmo is the oracle, through files."""

from pathlib import Path
from typing import Any

import pytest
import torch

from demix.data.tokenizer import Tokenizer
from demix.model.checkpoint import load_model
from demix.model.experts import find_faults
from demix.model.import_hf import import_hf
from support.checkpoints import all_tensors, farthest, random_model
from support.cli import demix, said


def checkpoint(folder: Path, tokens: Path, whole: Any, numbers: list[int], top_k: int, **changed: float) -> Any:
    """FlexOlmo with the experts `numbers` of the model `whole`; numbers are added to the tensors `changed`."""
    model = random_model("flex_olmo", num_experts=len(numbers), num_experts_per_tok=top_k)
    state = {}
    for name, tensor in whole.state_dict().items():
        state[name] = tensor[numbers] if ".experts." in name or name.endswith("mlp.gate.weight") else tensor.clone()
        for part, number in changed.items():
            if part in name.replace(".", "_"):
                state[name][0] += number
    model.load_state_dict(state)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(Tokenizer.load(tokens / "tokenizer.json").definition)
    import_hf(folder, folder.with_suffix(".model"))
    return model


def test_a_release_joins_as_transformers_concatenates_it(tokens: Path, tmp_path: Path) -> None:
    whole = random_model("flex_olmo", num_experts=5)
    checkpoint(tmp_path / "merged", tokens, whole, [0, 1, 2, 3], 3)
    checkpoint(tmp_path / "release", tokens, whole, [0, 4], 2)
    wanted = checkpoint(tmp_path / "all", tokens, whole, [0, 1, 2, 3, 4], 3)
    merged, release, out = tmp_path / "merged.model", tmp_path / "release.model", tmp_path / "out"
    done = demix("experts", "add", merged, release, "--output", out)
    assert done.exit_code == 0, done.exception
    assert "one of 5" in done.output
    assert not find_faults(out)
    model, ids = load_model(out), torch.randint(2, 400, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert farthest(model.logits(model(ids[None]))[0], wanted(ids).logits) < 1e-5
    demix("export", out, "--expert", "dense", "--output", tmp_path / "again")
    before, after = all_tensors(tmp_path / "all"), all_tensors(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    line = said(["experts", "add", str(out), str(release), "--output", str(tmp_path / "twice")])
    assert line is not None
    assert "holds an expert that" in line


@pytest.mark.parametrize(
    ("numbers", "changed", "told"),
    [
        ([0, 4], {"self_attn_q_proj": 1e-6}, "belongs to a model of other shared weights than"),
        ([0, 4], {"mlp_gate_weight": 1e-6}, "of the public expert, the first, than"),
        ([0, 4], {"experts_down_proj": 1e-6}, "of the public expert, the first, than"),
        ([1, 4], {}, "of the public expert, the first, than"),
        ([0, 3, 4], {}, "has not two experts in a layer"),
    ],
)
def test_what_differs_elsewhere_is_refused(
    numbers: list[int], changed: dict[str, float], told: str, tokens: Path, tmp_path: Path
) -> None:
    whole = random_model("flex_olmo", num_experts=5)
    checkpoint(tmp_path / "merged", tokens, whole, [0, 1, 2], 2)
    checkpoint(tmp_path / "release", tokens, whole, numbers, 2, **changed)
    merged, release, out = (str(tmp_path / name) for name in ("merged.model", "release.model", "out"))
    line = said(["experts", "add", merged, release, "--output", out])
    assert line is not None
    assert told in line
    assert not (tmp_path / "out").exists()
    for wrong in ([release], [release, "--output", out, "--name", "x"], [f"{release}/experts/dense.safetensors",
                  "--output", out]):  # fmt: skip
        line = said(["experts", "add", merged, *wrong])
        assert line is not None
        assert "is for a release alone" in line
    line = said(["experts", "add", merged, str(tmp_path / "release"), "--output", out])
    assert line is not None
    assert "demix import" in line
