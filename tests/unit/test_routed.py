"""Models whose tokens choose their experts: layers, training, upcycling, merged and released experts.

The oracles are routers of transformers, and plain loops.
"""

import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file
from torch import Tensor

from demix.config.architecture import Architecture, Routed
from demix.config.counts import parameters
from demix.data.shards import TokenShard, blocks
from demix.data.tokenizer import Tokenizer
from demix.evaluate.memorization import Audit, audit_domain
from demix.evaluate.score import Scoring, score_models
from demix.files import read_json, read_json_lines, read_parquet, sha256_file, write_json, write_parquet
from demix.launch.job import Places
from demix.model.directory import describe, load_model
from demix.model.experts import add_expert, find_faults, load_without, read_experts, remove_expert
from demix.model.export import export_hf
from demix.model.gpt import GPT
from demix.model.merge import merge_experts, merge_routed
from demix.model.moe import router_metrics
from demix.model.scoring import log_probabilities
from demix.run.models import left_out, trained_without
from demix.run.scoring import ScoringPart
from demix.train.adapt import adapt
from demix.train.batches import batches_of
from demix.train.loop import train
from demix.train.stage import optimization
from support.cli import refusal, succeeds
from support.contents import contents
from support.errors import refused
from support.models import SMALL, alone, model_of, own_tensors, randomise, save_model, shared_tensors, write_model
from support.plain_training import adamw, plain_steps, rates
from support.tokens import TRAINING
from support.training import ADAPT, SIZES, TRAIN, opened, shard_paths, train_model

SWITCH = Routed(experts=4, top_k=1, every=1, capacity=0.75, balance=0.01)
TOP2 = Routed(experts=4, top_k=2, every=2, capacity=1.0, balance=0.01)
WIDTH, B, T = 16, 3, 18


def layer_of(routed: Routed, dtype: torch.dtype = torch.float64, activation: str = "gelu") -> Any:
    """The feedforward of a block in which tokens choose, with weights of one size."""
    sizes = Architecture(
        layers=2, width=WIDTH, heads=2, context=T, activation=activation, routed=routed.replace(every=1)
    )
    layer = GPT(sizes, 9, ("dense",)).get_submodule("blocks.0.feedforward")
    randomise(layer)
    return layer.to(dtype)


def states(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(1, B, T, WIDTH, generator=torch.Generator().manual_seed(5)).to(dtype)


def by_token(layer: Any, routed: Routed, x: Tensor, capacity: bool, activation: Callable) -> tuple[Tensor, Tensor]:
    """The output [1, B, T, D] and the losses of balance [1, B] by a loop over tokens, choices and experts."""
    outputs, losses = [], []
    places = math.floor(routed.capacity * math.ceil(T / routed.experts))
    for sequence in x[0]:
        scores = torch.stack([(layer.router[0] @ token).softmax(0) for token in sequence])
        order = [row.argsort(descending=True).tolist() for row in scores]
        taken: list[list[int]] = [[] for _ in sequence]
        room = [places] * routed.experts
        for choice in range(routed.top_k):
            for t in range(T):
                expert = order[t][choice]
                if not capacity or room[expert] > 0:
                    room[expert] -= 1
                    taken[t].append(expert)
        for t, token in enumerate(sequence):
            total = sum(scores[t, e] for e in taken[t]) if routed.top_k > 1 and routed.renormalise else 1.0
            out = torch.zeros(WIDTH, dtype=x.dtype)
            for e in taken[t]:
                inner = activation(layer.up[0, e] @ token + layer.up_bias[0, e])
                out = out + scores[t, e] / total * (layer.down[0, e] @ inner + layer.down_bias[0, e])
            outputs.append(out)
        shares = [sum(row[0] == e for row in order) / T for e in range(routed.experts)]
        losses.append(routed.experts * sum(share * scores[:, e].mean() for e, share in enumerate(shares)))
    return torch.stack(outputs).view(x.shape), torch.stack(losses)[None]


LAYERS = {
    "top-1": (SWITCH, F.gelu),
    "top-2": (TOP2, F.gelu),
    "top-3": (TOP2.replace(top_k=3), lambda x: F.gelu(x, approximate="tanh")),
    "gates of OLMoE": (TOP2.replace(renormalise=False), F.gelu),
}


@pytest.mark.parametrize(
    ("dtype", "near"), [(torch.float64, 1e-10), (torch.float32, 1e-4), (torch.bfloat16, 0.03)], ids=str
)
@pytest.mark.parametrize("capacity", [True, False])
@pytest.mark.parametrize("case", LAYERS)
def test_the_layer_is_the_obvious_one(case: str, capacity: bool, dtype: torch.dtype, near: float) -> None:
    """Routers compute in fp32, so that choices and losses are exact in half precision, too."""
    (routed, activation), found = LAYERS[case], []
    name = "gelu" if activation is F.gelu else "gelu_new"
    plain = layer_of(routed, torch.float64, name)
    layer = layer_of(routed, torch.float64 if dtype == torch.float64 else torch.float32, name)
    for one in (layer, plain):
        x = states(dtype).to(torch.float64 if one is plain else dtype).requires_grad_()
        auxiliary: list[Any] = []
        # Freed memory with these values is what the next tensors get.
        freed = [torch.full((B * T * routed.top_k, WIDTH * scale), math.nan, dtype=dtype) for scale in (1, 1, 4, 4)]
        del freed
        if one is plain:
            out, losses = by_token(one, routed, x, capacity, activation)
        else:
            out = one(x, auxiliary if capacity else None)
            losses = auxiliary[0].losses / routed.balance if capacity else torch.zeros(1, B)
        weights = torch.arange(out.numel(), dtype=torch.float64).cos().view(out.shape)
        ((out * weights).sum() + capacity * losses.square().sum()).backward()
        found.append((losses.double() * capacity, [out, x.grad, *(p.grad for p in one.parameters())]))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=1e-5)
    assert found[0][1][0].dtype == dtype
    for ours, wanted in zip(found[0][1], found[1][1], strict=True):
        assert (ours.double() - wanted).norm() <= near * wanted.norm()
    dropped = (found[1][1][0] == 0).all(-1).sum()
    assert bool(dropped) == capacity, "a token that no expert takes keeps its residual"


@pytest.mark.parametrize("trained", [TOP2, SWITCH, LAYERS["gates of OLMoE"][0]], ids=["top-2", "top-1", "OLMoE"])
@pytest.mark.parametrize("top_k", [1, 3, 4])
def test_tokens_may_choose_more_or_fewer_experts_with_gates_as_in_training(trained: Routed, top_k: int) -> None:
    layer = layer_of(trained)
    layer.choose(top_k)
    with torch.no_grad():
        asked = trained.replace(top_k=top_k, renormalise=trained.top_k > 1 and trained.renormalise)
        # By a loop whose gates have the sum 1 for one choice, too.
        wanted, _ = by_token(layer, asked.replace(top_k=top_k), states(), False, F.gelu)
        if top_k == 1 and asked.renormalise:
            wanted = wanted / (states()[0] @ layer.router[0].T).softmax(-1).amax(-1)[None, ..., None]
        torch.testing.assert_close(layer(states()), wanted, rtol=0, atol=1e-10)


def test_a_dropped_choice_is_not_computed_and_an_expert_without_tokens_has_no_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = layer_of(SWITCH, torch.float32)
    with torch.no_grad():
        layer.down_bias.fill_(math.inf)
    out = layer(states(torch.float32), [])
    # A product with a gate of 0 would be NaN.
    assert not out.isnan().any()
    assert (out == 0).all(-1).any()
    unmasked = F.grouped_mm

    def as_on_blackwell(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        """What it leaves for experts without rows where they get a matrix each (pytorch issue 172439)."""
        out, empty = unmasked(a, b, offs=offs), offs.diff(prepend=offs[:1] * 0) == 0
        return out.masked_fill(empty[:, None, None], math.nan) if out.ndim > 2 else out

    monkeypatch.setattr(F, "grouped_mm", as_on_blackwell)
    for dtype, on_gpu in ((torch.float32, False), (torch.bfloat16, True)):
        monkeypatch.setattr("demix.model.moe._in_one_product", lambda *_, on_gpu=on_gpu: on_gpu)
        layer = layer_of(SWITCH, torch.float32)
        with torch.no_grad():
            layer.router[0] = torch.tensor([0.0, 0.0, 0.0, 50.0])[:, None]
        layer(states(dtype).abs(), []).float().square().sum().backward()
        assert layer.up.grad[0, 3].any()
        assert not layer.up.grad[0, :3].any()
        assert not layer.down_bias.grad[0, :3].any()


def test_the_metrics_count_choices() -> None:
    layer, auxiliary = layer_of(TOP2), []
    layer(states(), auxiliary)
    found = router_metrics(auxiliary[0].counts.tolist())
    scores = (states()[0] @ layer.router[0].T).softmax(-1).detach().numpy()
    first, second = scores.argsort(-1)[..., -1], scores.argsort(-1)[..., -2]
    fell = np.array([((first == e).sum(1) + (second == e).sum(1)) for e in range(4)])
    assert [found[f"router_load/{e}"] for e in range(4)] == pytest.approx((fell.sum(1) / (2 * B * T)).tolist())
    assert found["router_entropy"] == pytest.approx(-(scores * np.log(scores)).sum(-1).mean())
    assert found["router_balance"] == pytest.approx(auxiliary[0].losses.mean().item() / 0.01)
    dropped = np.maximum(0, fell - math.floor(math.ceil(T / 4))).sum()
    assert dropped > 0
    assert found["router_dropped"] == pytest.approx(dropped / (2 * B * T))


def test_blocks_are_routed_every_so_often_and_their_experts_begin_apart() -> None:
    for layers, every, routers in ((4, 1, [0, 1, 2, 3]), (4, 2, [1, 3]), (5, 3, [2])):
        routed = TOP2.replace(every=every)
        model = GPT(Architecture(layers=layers, width=8, heads=2, context=16, routed=routed), 50, ("dense",))
        found = [name for name in own_tensors(model) if name.endswith("router")]
        assert found == [f"blocks.{number}.feedforward.router" for number in routers]
        parts = shared_tensors(model), own_tensors(model)
        assert [sum(p.numel() for p in part.values()) for part in parts] == [*parameters(model.architecture, 50)]
    model = GPT(SMALL.replace(routed=SWITCH), 50, ("dense",)).initialise(1)
    layer, other = model.blocks[0].feedforward, model.blocks[1].feedforward
    for tensor, deviation in ((layer.router, 0.02), (layer.up, 0.02), (layer.down, 0.02 / 2)):
        assert tensor.std().item() == pytest.approx(deviation, rel=0.2)
    assert not torch.equal(layer.up[0, 0], layer.up[0, 1])
    assert not torch.equal(layer.router, other.router), "values depend on the name"
    assert not layer.up_bias.any()


ROUTED = {"experts": 4, "top_k": 2, "every": 2, "capacity": 4.0, "balance": 0.1}
ARCHITECTURE = Architecture(**SIZES, routed=ROUTED)
RECIPE = TRAIN.replace(architecture=SIZES | {"routed": ROUTED})


@pytest.mark.full
@pytest.mark.skipif(
    not shutil.which(os.environ.get("CXX", "g++")), reason="no C++ compiler: apt-get install g++, or conda install gxx"
)
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_compiled_training_has_the_same_losses(tokens: Path, tmp_path: Path) -> None:
    drawn = batches_of("mixed", opened(tokens), TRAINING, 2, 32, seed=1)
    both = Architecture(**SIZES, routed=ROUTED | {"capacity": 1.0, "every": 1})
    found = []
    for compiled in (False, True):
        about = optimization(RECIPE, 4, 3e-3).replace(compile=compiled, dropout=0.1)
        model = GPT(both, 400, ("dense",)).initialise(1)
        # Other tests of this process have compiled blocks of other sizes.
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        # Both layers, and steps whose experts take other numbers of tokens, share one compiled block.
        with torch._dynamo.config.patch(error_on_recompile=True):
            rows = train(model, drawn, TRAINING, about, tmp_path / str(compiled))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled
        assert len({row["router_dropped"] for row in rows}) > 1
        keys = ("loss", "gradient_norm", "router_balance", "router_dropped", "router_load/1")
        found.append([[row[key] for key in keys] for row in rows])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


@pytest.fixture(scope="module")
def run(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model, its state after ten steps, and the routed model that begins with it."""
    folder = tmp_path_factory.mktemp("run")
    paths, kept = shard_paths(tokens), folder / "checkpoints" / "dense"
    train_model("dense", TRAIN, paths, folder / "models/dense", folder / "metrics/dense.jsonl", kept)
    train_model("dense", TRAIN, paths, seed_of(folder), None, folder / "checkpoints" / "seed", until=10)
    places = folder / "models/up", folder / "metrics/up.jsonl", folder / "checkpoints/up"
    recipe = RECIPE.replace(warmup=0.0)
    train_model("routed", recipe, paths, *places, branch=seed_of(folder))
    return folder


def seed_of(run: Path) -> Path:
    return run / "seeds" / "dense" / "step-00000010"


def test_upcycling_begins_with_the_next_loss_of_its_parent(run: Path) -> None:
    dense, up = (read_json_lines(run / "metrics" / f"{name}.jsonl") for name in ("dense", "up"))
    rows = [row for row in up if "loss" in row]
    assert up[0] == {"step": 10, "tokens": 1920, "branched_from": "dense"}
    assert [row["step"] for row in rows] == list(range(11, 25))
    assert rows[0]["loss"] == pytest.approx(dense[10]["loss"], rel=1e-5)
    assert rows[0]["learning_rate"] == TRAIN.learning_rate
    assert rows[0]["router_dropped"] == 0, "a capacity of all tokens"
    assert sum(rows[-1][f"router_load/{expert}"] for expert in range(4)) == pytest.approx(1)
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_a_routed_model_is_one_expert_in_its_files(run: Path, tokens: Path, tmp_path: Path) -> None:
    directory = run / "models" / "up"
    about = describe(directory).content
    assert about["kind"] == "routed"
    assert about["architecture"] == SIZES | {"routed": ROUTED}
    assert about["parent"]["schedule"] == "restart"
    assert (about["shared_parameters"], about["expert_parameters"]) == parameters(ARCHITECTURE, 400)
    assert "routed" not in describe(run / "models" / "dense").content["architecture"]
    assert [*read_experts(directory)] == ["dense"]
    # A folder of a dense model is a parent, too.
    places, short = (tmp_path / "model", None, tmp_path / "checkpoints"), RECIPE.replace(tokens=192)
    train_model("routed", short, shard_paths(tokens), *places, branch=run / "models" / "dense")
    assert describe(tmp_path / "model").content["parent"]["model"] == "dense"


def test_what_needs_experts_of_domains_refuses_a_routed_model(run: Path, tokens: Path, tmp_path: Path) -> None:
    up, paths = run / "models" / "up", shard_paths(tokens)
    with refused(up):
        export_hf(up, "dense", None, tmp_path / "exported")
    with refused(up):
        merge_experts(up, {"dense": 1.0}, tmp_path / "merged")
    with refused(up):
        add_expert(up, up / "experts" / "dense.safetensors", "law")
    with refused(up):
        adapt(up, (paths[0], paths[0]), ADAPT, Places(up, tmp_path / "m", tmp_path / "c"), chosen={})
    places = tmp_path / "model", None, tmp_path / "checkpoints"
    for kind, recipe in (("routed", TRAIN), ("dense", RECIPE)):
        with refused("--settings.architecture"):
            train_model(kind, recipe, paths, *places)
    assert not (tmp_path / "model").exists()


# The order of the experts that the command merges: that of the names in the folder.
ORDER = tuple(sorted(TRAINING))
assert list(TRAINING) != sorted(TRAINING)


def router_name(layer: int) -> str:
    return f"blocks.{layer}.feedforward.router"


BTX = TRAIN.replace(architecture=SIZES | {"routed": ROUTED | {"experts": 3, "every": 1}}, tokens=192 * 4)


@pytest.fixture(scope="module")
def models(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """models/ of a run: DEMix, the merged model of its experts, and the latter trained: all of it, or routers alone."""
    run = tmp_path_factory.mktemp("runs") / "results" / "small"
    shutil.copytree(tokens / "tokens", run / "tokens")
    shutil.copy(tokens / "tokenizer.json", run)
    models = run / "models"
    train_model("demix", TRAIN, shard_paths(tokens), models / "demix", None, run / "checkpoints")
    succeeds("merge-routed", models / "demix", "--output", models / "merged")
    for name, trained in (("whole", None), ("routers", "routers")):
        places = models / name, run / f"{name}.jsonl", run / "checkpoints" / name
        settings = BTX.replace(trained=trained)
        train_model("routed", settings, shard_paths(tokens), *places, branch=models / "merged")
    return models


def test_the_files_say_what_was_merged(models: Path) -> None:
    merged, model = models / "merged", models / "demix"
    assert find_faults(merged) == []
    about, lineage = describe(merged).content, read_json(merged / "experts" / "dense.json")
    routed = {"experts": 3, "top_k": 2, "every": 1, "capacity": 3.0, "balance": 0.0}
    assert (about["kind"], about["architecture"]["routed"]) == ("merged", routed)
    counted = parameters(Architecture(**about["architecture"]), about["vocab_size"])
    assert (about["shared_parameters"], about["expert_parameters"]) == counted
    of_experts = [read_json(model / "experts" / f"{name}.json") for name in ORDER]
    assert lineage["choices"] == [
        {"expert": name, "sha256": sha256_file(model / "experts" / f"{name}.safetensors")} for name in ORDER
    ]
    assert lineage["tokens"] == sum(of_expert["tokens"] for of_expert in of_experts)
    assert (merged / "shared.safetensors").read_bytes() == (model / "shared.safetensors").read_bytes()
    assert (merged / "tokenizer.json").read_bytes() == (models.parent / "tokenizer.json").read_bytes()
    tensors = load_file(merged / "experts" / "dense.safetensors")
    for number, name in enumerate(ORDER):
        for key, tensor in load_file(model / "experts" / f"{name}.safetensors").items():
            assert np.array_equal(tensors[key][number], tensor)


def test_merged_routers_begin_at_random_by_the_experts(models: Path, tmp_path: Path) -> None:
    """As other weights do: from N(0, 0.02²)."""
    routers = [load_model(models / "merged").get_parameter(router_name(layer))[0].detach() for layer in range(2)]
    drawn = torch.stack(routers)
    assert drawn.shape == (2, 3, SIZES["width"])
    assert drawn.std().item() == pytest.approx(0.02, rel=0.3)
    assert not torch.equal(*routers)
    merge_routed(models / "demix", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(models / "merged")


def test_a_merge_has_the_experts_that_are_named(models: Path, tmp_path: Path) -> None:
    """Whatever adaptations have added to the folder."""
    succeeds("merge-routed", models / "demix", "--experts", ",".join(ORDER[:2]), "--output", tmp_path / "two")
    named = shutil.copytree(models / "demix", tmp_path / "named")
    remove_expert(named, ORDER[2])
    merge_routed(named, tmp_path / "left")
    assert contents(tmp_path / "two") == contents(tmp_path / "left")


def test_what_cannot_be_merged_is_refused(models: Path, tokens: Path, tmp_path: Path) -> None:
    model, merged = models / "demix", models / "merged"
    encoder, out, folder = Tokenizer.load(tokens / "tokenizer.json"), tmp_path / "out", tmp_path / "models"
    write_model(folder / "dense", ("dense",), encoder.sha256, encoder.vocab_size)
    write_model(folder / "one", TRAINING[:1], encoder.sha256, encoder.vocab_size)
    broken = shutil.copytree(model, folder / "broken")
    (broken / "experts" / "licenses.safetensors").write_bytes(b"no tensors")
    for directory, of in (
        (merged, merged),
        (folder / "dense", folder / "dense"),
        (folder / "one", folder / "one"),
        (broken, "licenses.safetensors"),
    ):
        refusal("merge-routed", directory, "--output", out, of=of)
        assert not out.exists()
    # Routers at random are to be trained.
    refusal("merge", model, "--routed", "--output", out, of=model)
    refusal("merge", model, "--weights", "licenses=1", "--routed", "--output", out, of="--weights")


def test_whole_models_share_their_mean_beside_their_feedforwards(models: Path, tmp_path: Path) -> None:
    """Branch-Train-MiX (Sukhbaatar et al. 2024)."""
    encoder, btm = Tokenizer.load(models.parent / "tokenizer.json"), tmp_path / "btm"
    stacked, branches = model_of(TRAINING, torch.float32, vocab_size=encoder.vocab_size), {}
    for number, name in enumerate(TRAINING):
        whole = alone(stacked, name, "model")
        randomise(whole, number)
        save_model(whole, btm, encoder.sha256, "branched", tokens=30, seeds={"5" * 64: 10})
        branches[name] = load_file(btm / "experts" / f"{name}.safetensors")
    merged = tmp_path / "merged"
    merge_routed(btm, merged)
    assert find_faults(btm) == find_faults(merged) == []
    shared, own = load_file(merged / "shared.safetensors"), load_file(merged / "experts" / "dense.safetensors")
    assert shared.keys() | own.keys() == branches[TRAINING[0]].keys() | {router_name(0), router_name(1)}
    for key in branches[TRAINING[0]]:
        each = np.stack([branches[name][key] for name in ORDER])
        if ".feedforward." in key:
            assert np.array_equal(own[key], each), key
        else:
            np.testing.assert_allclose(shared[key], each.astype(np.float64).mean(0), rtol=0, atol=1e-7)
    about, lineage = describe(merged).content, read_json(merged / "experts" / "dense.json")
    assert (about["kind"], about["expert_scope"]) == ("merged", "feedforward")
    # A seed that all began with counts once.
    assert (lineage["tokens"], lineage["seeds"]) == (70, {"5" * 64: 10})


@pytest.mark.parametrize("name", ["whole", "routers"])
def test_training_merged_experts_is_the_obvious_loop(models: Path, name: str, tokens: Path) -> None:
    model, merged = load_model(models / "merged"), load_model(models / "merged")
    for block in model.blocks:
        block.feedforward.routed = block.feedforward.routed.replace(capacity=4.0, balance=0.1)
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(name == "whole" or "router" in key)
    drawn = batches_of("mixed", opened(tokens), TRAINING, 2, 32, seed=1)
    of_steps = dict(enumerate(rates(4, TRAIN.learning_rate, TRAIN.warmup)))
    rows = [row for row in read_json_lines(models.parent / f"{name}.jsonl") if "loss" in row]
    for row, step in zip(rows, plain_steps(model, adamw(model), drawn, of_steps), strict=True):
        assert row["loss"] == pytest.approx(step.loss, rel=1e-5)
    trained = load_model(models / name)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(trained.get_parameter(key), parameter.detach(), rtol=0, atol=2e-5)
        changed = not torch.equal(trained.get_parameter(key), merged.get_parameter(key))
        assert changed == (name == "whole" or "router" in key), key
    parent = describe(models / name).content["parent"]
    assert (parent["model"], parent["tokens"]) == ("merged", describe(models / "merged").tokens)


def test_other_experts_than_those_of_the_parent_are_refused(models: Path, tokens: Path, tmp_path: Path) -> None:
    four = BTX.replace(architecture=SIZES | {"routed": ROUTED | {"every": 1}})
    places = None, None, tmp_path / "checkpoints"
    with refused(models / "merged"):
        train_model("routed", four, shard_paths(tokens), *places, branch=models / "merged")
    with refused("--settings.trained"):
        train_model("routed", BTX.replace(trained="routers"), shard_paths(tokens), *places)


@pytest.mark.parametrize("model", ["merged", "whole", "routers"])
def test_a_model_loses_the_rows_of_the_expert_alone(models: Path, model: str) -> None:
    left, whole = load_without(models / model, ORDER[1]), load_model(models / model)
    assert left.architecture == whole.architecture.replace(routed=left.architecture.routed)
    assert (left.architecture.routed.experts, left.architecture.routed.top_k) == (2, whole.architecture.routed.top_k)
    for key, parameter in whole.named_parameters():
        rows = parameter[:, [0, 2]] if ".feedforward." in key else parameter
        assert torch.equal(left.get_parameter(key), rows), key


def column(scores: Path, folder: str) -> list[float]:
    return pq.read_table(scores / folder / f"{TRAINING[0]}.test" / "dense.parquet").column(0).to_pylist()


@pytest.mark.parametrize("model", ["merged", "whole"])
def test_scores_of_fewer_experts_are_those_of_models_that_have_or_choose_so_many(
    models: Path, tokens: Path, model: str, tmp_path: Path
) -> None:
    name, folder = TRAINING[1], tmp_path / "models"
    for copied in ("mine", "always"):
        shutil.copytree(models / model, folder / copied)
    about = read_json(folder / "always" / "model.json")
    about["architecture"]["routed"]["top_k"] = 3
    write_json(folder / "always" / "model.json", about)
    before = contents(folder / "mine")
    asked = {"experts": ("dense",), "domains": TRAINING[:1], "splits": ("test",)}
    several = tuple(
        ScoringPart(model=copied, without=without, top_k=top_k, **asked)
        for copied, without, top_k in (
            ("mine", "", 0),
            ("mine", name, 0),
            ("mine", "", 1),
            ("mine", "", 3),
            ("always", "", 0),
        )
    )
    scoring = Scoring(models=several, dev_blocks=4, test_tokens=200, precision="fp32", threads=1)
    shards, scores = [tokens / "tokens" / TRAINING[0] / "test.arrow"], tmp_path / "scores"
    score_models(folder, shards, scoring, scores, tmp_path / "scores.json")
    cut = blocks(TokenShard.open(shards[0]), SIZES["context"], 200)
    left = log_probabilities(load_without(models / model, name), *cut)[0]
    np.testing.assert_array_equal(column(scores, f"mine@minus-{name}"), left.astype(np.float32))
    assert column(scores, "mine@top-3") == column(scores, "always")
    found = {label: column(scores, f"mine{label}") for label in ("", f"@minus-{name}", "@top-1", "@top-3")}
    assert len({tuple(values) for values in found.values()}) == 4
    assert contents(folder / "mine") == before
    with refused("top_k 4"):
        more = scoring.replace(models=(ScoringPart(model="mine", top_k=4, **asked),))
        score_models(folder, shards, more, tmp_path / "none", tmp_path / "none.json")
    assert not (tmp_path / "none").exists()


def test_the_audit_has_a_merged_model_with_and_without_the_expert(models: Path, tokens: Path, tmp_path: Path) -> None:
    name, label, without = TRAINING[0], left_out(TRAINING[0]), trained_without(TRAINING[0])
    for folder, of in {"demix": "demix", without: "demix", "mine": "merged"}.items():
        shutil.copytree(models / of, tmp_path / folder)
    sets = [("demix", "training", TRAINING), ("demix", label, TRAINING[1:]), (without, "training", TRAINING)]
    rows = [
        {"model": model, "experts": of, "weights": "history", "domain": name, "expert": one, "prior": 1 / len(experts)}
        for model, of, experts in sets
        for one in experts
    ]
    write_parquet(pa.Table.from_pylist(rows), tmp_path / "priors.parquet")

    audit = Audit(prompts=3, model="demix", training=TRAINING, without=TRAINING, merged=("mine",), threads=1)
    output = tmp_path / "audit.parquet"
    audit_domain(name, tmp_path, tokens / "tokens" / name, tmp_path / "priors.parquet", audit, output)
    found = read_parquet(output).to_pylist()
    assert {row["experts"] for row in found if row["system"] == "merged_minus"} == {label}
    whole, minus = ([row["nll"] for row in found if row["system"] == one] for one in ("merged", "merged_minus"))
    assert len(whole) == len(minus) > 2
    assert whole != minus


def test_what_cannot_leave_or_join_is_refused_and_changes_nothing(models: Path, tmp_path: Path) -> None:
    mine, nameless = (shutil.copytree(models / "merged", tmp_path / name) for name in ("mine", "nameless"))
    lineage = nameless / "experts" / "dense.json"
    write_json(lineage, read_json(lineage) | {"choices": []})
    write_json(nameless / "model.json", read_json(nameless / "model.json") | {"experts": {}})
    about = read_json(mine / "model.json")
    first = ORDER[0]
    for words, of in (
        (("remove", mine, first), mine),
        (("remove", mine, "dense"), mine),
        (("add", mine, models / "merged" / "experts" / f"{first}.safetensors"), mine),
        (("add", mine, models / "demix" / "experts" / f"{first}.safetensors"), mine),
        (("add", models / "demix", models / "merged" / "experts" / f"{first}.safetensors"), first),
    ):
        before = contents(words[1])
        refusal("experts", *words, of=of)
        assert contents(words[1]) == before
    for directory, name, of in (
        (mine, "nobody", "expert nobody"),
        (nameless, first, nameless),
        (models / "demix", first, models / "demix"),
    ):
        with refused(of):
            load_without(directory, name)
    # A token chooses as many as would be left.
    about["architecture"]["routed"]["top_k"] = 3
    write_json(mine / "model.json", about)
    with refused(f"expert {first}"):
        load_without(mine, first)
