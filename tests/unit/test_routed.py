"""Feedforwards whose experts the tokens choose, against Hugging Face's routers and loops written here."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from transformers import MixtralConfig, SwitchTransformersConfig
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.switch_transformers.modeling_switch_transformers import (
    SwitchTransformersTop1Router,
    load_balancing_loss_func,
)

from demix.config.architecture import Architecture, Routed
from demix.config.counts import parameters
from demix.errors import DemixError
from demix.model.gpt import GPT
from demix.model.layers import Auxiliary, RoutedLayer, router_metrics
from demix.model.layers.routed import (
    _expert_linear,
    _expert_linear_backward,
    balance_losses,
    router_scores,
    within_capacity,
)
from support.models import SMALL, model_of, randomise

SWITCH = Routed(experts=4, top_k=1, every=1, capacity=1.25, balance=0.01)
TOP2 = Routed(experts=4, top_k=2, every=2, capacity=1.0, balance=0.01)
WIDTH, B, T = 12, 3, 18


def layer_of(routed: Routed, dtype: torch.dtype = torch.float64) -> RoutedLayer:
    layer = RoutedLayer(routed, WIDTH)
    randomise(layer)
    return layer.to(dtype)


def states(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(1, B, T, WIDTH, generator=torch.Generator().manual_seed(5)).to(dtype)


def by_token(layer: RoutedLayer, x: torch.Tensor, capacity: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The output [1, B, T, D] and the losses of balance [1, B] by a loop over tokens, choices and experts."""
    routed, outputs, losses = layer.routed, [], []
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
            total = sum(scores[t, e] for e in taken[t]) if routed.top_k > 1 else 1.0
            out = torch.zeros(WIDTH, dtype=x.dtype)
            for e in taken[t]:
                inner = F.gelu(layer.up[0, e] @ token + layer.up_bias[0, e])
                out = out + scores[t, e] / total * (layer.down[0, e] @ inner + layer.down_bias[0, e])
            outputs.append(out)
        shares = [sum(row[0] == e for row in order) / T for e in range(routed.experts)]
        losses.append(routed.experts * sum(share * scores[:, e].mean() for e, share in enumerate(shares)))
    return torch.stack(outputs).view(x.shape), torch.stack(losses)[None]


@pytest.mark.parametrize("capacity", [True, False])
@pytest.mark.parametrize(
    "routed",
    [dataclasses.replace(SWITCH, capacity=0.75), TOP2, dataclasses.replace(TOP2, top_k=3)],
    ids=lambda one: one.top_k,
)
def test_the_layer_is_the_obvious_one(routed: Routed, capacity: bool) -> None:
    found, layer = layer_of(routed), layer_of(routed)
    results = []
    for one in (found, layer):
        x, auxiliary = states().requires_grad_(), []
        if one is layer:
            out, losses = by_token(one, x, capacity)
        else:
            out = one(x, auxiliary if capacity else None)
            losses = auxiliary[0].losses / routed.balance if capacity else torch.zeros(1, B)
        weights = torch.arange(out.numel(), dtype=out.dtype).cos().view(out.shape)
        ((out * weights).sum() + capacity * losses.square().sum()).backward()
        results.append([out, x.grad, *(p.grad for p in one.parameters()), capacity * losses.double()])
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-10)
    dropped = (results[1][0] == 0).all(-1).sum()
    assert bool(dropped) == capacity, "a token that no expert takes keeps its residual"


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("routed", [SWITCH, TOP2], ids=lambda one: one.top_k)
def test_the_grouped_product_is_the_product_of_each_part(
    routed: Routed, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "demix.model.layers.routed._in_one_product", lambda x, weight: grouped and x.dtype == torch.float32
    )
    exact, layer = layer_of(routed), layer_of(routed, torch.float32)
    grads = []
    for one, dtype in ((exact, torch.float64), (layer, torch.float32)):
        x = states(dtype).requires_grad_()
        auxiliary: list[Auxiliary] = []
        out = one(x, auxiliary)
        (out * out.detach()).sum().backward()
        assert auxiliary[0].counts[3] > 0, "some choices are dropped"
        grads.append([out, x.grad, *(p.grad for p in one.parameters())])
    for mine, other in zip(*grads, strict=True):
        assert mine.dtype == torch.float64
        assert other.dtype == torch.float32
        torch.testing.assert_close(other.double(), mine, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("grouped", [True, False])
def test_dropped_rows_are_0_whatever_was_in_memory(grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("demix.model.layers.routed._in_one_product", lambda x, weight: grouped)
    ends = torch.tensor([2, 2, 5])
    x, incoming = torch.randn(2, 4, 1000, 8, generator=torch.Generator().manual_seed(3))[:, 0]
    layer = layer_of(SWITCH, torch.float32)
    weight, bias = layer.up[0, :3, :8, :8].detach(), layer.up_bias[0, :3, :8].detach()
    for first in (0, math.nan):
        # Freed memory with these values is what the next tensors of this size get.
        freed = [torch.full((1000, 8), first) for _ in range(4)]
        del freed
        out = _expert_linear(x, weight, bias, ends)
        for_x, _, for_bias = _expert_linear_backward(incoming, x, weight, ends)
        assert not out[5:].any()
        assert not for_x[5:].any()
        torch.testing.assert_close(out[:2], F.linear(x[:2], weight[0], bias[0]), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(for_bias, torch.stack([incoming[a:b].sum(0) for a, b in ((0, 2), (2, 2), (2, 5))]))


def test_rows_computed_too_much_change_nothing() -> None:
    generator = torch.Generator().manual_seed(3)
    x, incoming = (torch.randn(90, 16, generator=generator).to(torch.bfloat16) for _ in range(2))
    weight, bias = torch.randn(4, 16, 16, generator=generator), torch.randn(4, 16, generator=generator)
    ends = torch.tensor([7, 7, 50, 77])
    found = [_expert_linear(x, weight, bias, ends), *_expert_linear_backward(incoming, x, weight, ends)]
    exact = [one.double() for one in (x, weight.bfloat16(), bias.bfloat16())]
    expected = [_expert_linear(*exact, ends), *_expert_linear_backward(incoming.double(), *exact[:2], ends)]
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=0.02, atol=0.05)
    assert not found[0][77:].any()
    assert not found[1][77:].any()


def test_a_dropped_choice_is_not_computed() -> None:
    layer = layer_of(SWITCH)
    with torch.no_grad():
        layer.down_bias.fill_(math.inf)
    out = layer(states(), [])
    # A product with a gate of 0 would be NaN.
    assert not out.isnan().any()
    assert (out == 0).all(-1).any()


def test_the_activation_is_that_of_the_architecture() -> None:
    for activation, approximate in (("gelu", "none"), ("gelu_new", "tanh")):
        layer = RoutedLayer(dataclasses.replace(SWITCH, experts=1), WIDTH, activation)
        randomise(layer)
        x = states(torch.float32)
        inner = F.gelu(F.linear(x, layer.up[0, 0], layer.up_bias[0, 0]), approximate=approximate)
        expected = F.linear(inner, layer.down[0, 0], layer.down_bias[0, 0])
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


def test_an_expert_that_no_token_chooses_has_no_gradient() -> None:
    layer = layer_of(SWITCH, torch.float32)
    with torch.no_grad():
        layer.router[0] = torch.tensor([0.0, 0.0, 0.0, 50.0])[:, None]
    x = states(torch.float32).abs()
    layer(x, []).square().sum().backward()
    assert float(layer.up.grad[0, 3].abs().sum()) > 0
    assert not layer.up.grad[0, :3].any()
    assert not layer.down_bias.grad[0, :3].any()


def test_switch_is_hugging_faces_top1_router() -> None:
    x = states(torch.float32)[0]
    places = SWITCH.places(T)
    assert places == math.floor(1.25 * 5) == 6
    config = SwitchTransformersConfig(num_experts=4, hidden_size=WIDTH, expert_capacity=places, router_bias=False)
    router, layer = SwitchTransformersTop1Router(config).eval(), layer_of(SWITCH, torch.float32)
    router.classifier.weight.data = layer.router.data[0]
    dispatched, gate, _ = router(x)
    scores = router_scores(x, layer.router[0])
    chosen = scores.argmax(-1)
    kept = within_capacity(chosen[..., None], 4, places)[..., 0]
    assert 0 < int((~kept).sum()) < B * T
    assert torch.equal(F.one_hot(chosen, 4) * kept[..., None], dispatched)
    torch.testing.assert_close(scores.amax(-1, keepdim=True), gate, rtol=0, atol=1e-6)
    theirs = load_balancing_loss_func(scores, chosen)
    torch.testing.assert_close(balance_losses(scores, chosen).mean(), theirs, rtol=0, atol=1e-6)


def test_top2_gates_are_those_of_mixtral_where_nothing_is_dropped() -> None:
    x, layer = states(torch.float32), layer_of(TOP2, torch.float32)
    router = MixtralTopKRouter(MixtralConfig(num_experts_per_tok=2, num_local_experts=4, hidden_size=WIDTH))
    router.weight.data = layer.router.data[0]
    _, gates, chosen = router(x[0])
    expected = torch.zeros(B * T, WIDTH)
    for n, token in enumerate(x.reshape(-1, WIDTH)):
        for gate, e in zip(gates[n], chosen[n].tolist(), strict=True):
            inner = F.gelu(layer.up[0, e] @ token + layer.up_bias[0, e])
            expected[n] += gate * (layer.down[0, e] @ inner + layer.down_bias[0, e])
    with torch.no_grad():
        torch.testing.assert_close(layer(x).view(-1, WIDTH), expected.detach(), rtol=1e-6, atol=1e-6)


def test_the_router_computes_in_fp32() -> None:
    x, layer = states().to(torch.bfloat16), layer_of(TOP2, torch.float32)
    scores = router_scores(x[0], layer.router[0])
    assert scores.dtype == torch.float32
    expected = (x[0].double() @ layer.router[0].double().T).softmax(-1)
    torch.testing.assert_close(scores.double(), expected, rtol=0, atol=1e-6)
    assert layer(x).dtype == torch.bfloat16


def test_the_metrics_count_choices() -> None:
    layer, auxiliary = layer_of(TOP2), []
    layer(states(), auxiliary)
    found = router_metrics(auxiliary[0].counts.tolist())
    scores = (states()[0] @ layer.router[0].T).softmax(-1).detach().numpy()
    first, second = scores.argsort(-1)[..., -1], scores.argsort(-1)[..., -2]
    loads = [((first == e).sum() + (second == e).sum()) / (2 * B * T) for e in range(4)]
    assert [found[f"router_load/{e}"] for e in range(4)] == pytest.approx(loads)
    assert found["router_entropy"] == pytest.approx(-(scores * torch.tensor(scores).log().numpy()).sum(-1).mean())
    assert found["router_balance"] == pytest.approx(auxiliary[0].losses.mean().item() / 0.01)
    dropped = 0
    for sequence in range(B):
        for e in range(4):
            fell = (first[sequence] == e).sum() + (second[sequence] == e).sum()
            dropped += max(0, fell - TOP2.places(T))
    assert dropped > 0
    assert found["router_dropped"] == pytest.approx(dropped / (2 * B * T))


def test_blocks_are_routed_every_so_often_and_all_parameters_are_counted() -> None:
    for layers, every, blocks in ((4, 1, [0, 1, 2, 3]), (4, 2, [1, 3]), (5, 3, [2])):
        routed = dataclasses.replace(TOP2, every=every)
        architecture = Architecture(layers=layers, width=8, heads=2, context=16, routed=routed)
        model = GPT(architecture, 50, ("dense",))
        assert [n for n, block in enumerate(model.blocks) if isinstance(block.feedforward, RoutedLayer)] == blocks
        shared, own = parameters(architecture, 50)
        assert sum(p.numel() for p in model.shared_tensors().values()) == shared
        assert sum(p.numel() for p in model.expert_tensors().values()) == own
        _, files = model.parted(dict(model.named_parameters()))
        assert files["dense"][f"blocks.{blocks[0]}.feedforward.up"].shape == (4, 32, 8)
        assert files["dense"][f"blocks.{blocks[0]}.feedforward.router"].shape == (4, 8)


def test_experts_of_a_layer_begin_apart_and_routers_small() -> None:
    model = GPT(dataclasses.replace(SMALL, routed=SWITCH), 50, ("dense",)).initialise(1)
    layer = model.blocks[0].feedforward
    assert layer.router.std().item() == pytest.approx(0.02, rel=0.2)
    assert layer.up.std().item() == pytest.approx(0.02, rel=0.05)
    assert layer.down.std().item() == pytest.approx(0.02 / 2, rel=0.05)
    assert not torch.equal(layer.up[0, 0], layer.up[0, 1])
    other = model.blocks[1].feedforward
    assert not torch.equal(layer.router, other.router), "values depend on the name"
    assert not layer.up_bias.any()


@pytest.mark.parametrize("routed", [SWITCH, TOP2], ids=lambda one: one.top_k)
def test_a_later_token_changes_no_earlier_score_and_the_cache_gives_the_same(routed: Routed) -> None:
    tight = dataclasses.replace(SMALL, routed=dataclasses.replace(routed, capacity=0.5))
    model = model_of(architecture=tight)
    inputs = torch.randint(50, (1, 2, 16), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        before = model(inputs)
        for t in (3, 9, 15):
            changed = inputs.clone()
            changed[..., t] = (changed[..., t] + 1) % 50
            after = model(changed)
            torch.testing.assert_close(after[:, :, :t], before[:, :, :t], rtol=0, atol=1e-12)
            assert not torch.allclose(after[:, :, t:], before[:, :, t:])
        past = model.no_past()
        parts = [model(inputs[..., t : t + 4], past=past) for t in range(0, 16, 4)]
        torch.testing.assert_close(torch.cat(parts, 2), before, rtol=0, atol=1e-12)


def test_what_cannot_be_routed_is_refused() -> None:
    with pytest.raises(DemixError, match=r"top_k: is 5, and a layer has 4 experts; lower it"):
        Routed(experts=4, top_k=5, every=1, capacity=1.0, balance=0.01)
    with pytest.raises(DemixError, match=r"every: is 3, and the model has 2 layers; use 1 to 2"):
        dataclasses.replace(SMALL, routed=dataclasses.replace(SWITCH, every=3))
    with pytest.raises(DemixError, match=r"capacity: is 0.2, which leaves an expert no token of 16; raise it"):
        dataclasses.replace(SMALL, routed=dataclasses.replace(SWITCH, capacity=0.2))
    with pytest.raises(DemixError, match="choose among experts of their own; give one"):
        GPT(dataclasses.replace(SMALL, routed=SWITCH), 50, ("law", "news"))


def test_other_architectures_are_described_as_before() -> None:
    assert SMALL.described == {"layers": 2, "width": 32, "heads": 4, "context": 16}
    routed = dataclasses.replace(SMALL, routed=TOP2)
    assert Architecture(**routed.described) == routed
    assert routed.unrouted == SMALL
