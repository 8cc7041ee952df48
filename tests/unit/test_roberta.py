"""Masked models with RoBERTa's head and norms, and their way out, against transformers: logits, gradients, fillings."""

import dataclasses
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    RobertaConfig,
    RobertaForMaskedLM,
    Trainer,
    TrainingArguments,
    pipeline,
)
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

from demix.config.architecture import Architecture, architecture_from
from demix.config.counts import masked_places, parameters, training_flops_per_token
from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError
from demix.model.export import export_hf
from demix.model.filling import fillings, masked_inputs
from demix.model.formats import FORMATS
from demix.model.gpt import GPT, MASKED
from demix.model.layers import sinusoids
from demix.plan.cost import plan_training
from demix.plan.flops import HARDWARE
from demix.run.check import load_run
from support.cli import demix
from support.models import THREE, alone, model_of, save_model
from support.tokens import SAMPLE

SIZES = {"layers": 2, "width": 32, "heads": 4, "context": 64}
ROBERTA = architecture_from(SIZES | {"preset": "roberta"})
TEXT = "It is a truth universally <mask>, that a single man in possession of a good <mask>, must be in want of a wife."


def written(model: GPT, tokens: Path, folder: Path, expert: str = "dense") -> tuple[Tokenizer, Path]:
    """The model's tokenizer, and the folder of its export."""
    encoder = Tokenizer.load(tokens / "tokenizer.json")
    save_model(model, folder / "m", encoder.sha256)
    export_hf(folder / "m", expert, tokens / "tokenizer.json", folder / "out")
    return encoder, folder / "out"


def model_for(tokens: Path, experts: tuple[str, ...] = ("dense",), **options: object) -> GPT:
    types = Tokenizer.load(tokens / "tokenizer.json").vocab_size
    sizes = dataclasses.replace(ROBERTA, **options)
    return model_of(experts, torch.float32, architecture=sizes, vocab_size=types)


@pytest.mark.parametrize("options", [{}, {"mask": "zeros", "inner": 48, "activation": "relu", "epsilon": 1e-3}])
def test_logits_and_gradients_are_those_of_transformers(options: dict, tokens: Path, tmp_path: Path) -> None:
    model = model_for(tokens, **options)
    encoder, folder = written(model, tokens, tmp_path)
    theirs, model = RobertaForMaskedLM.from_pretrained(folder, dtype=torch.float64), model.double()
    V = encoder.vocab_size
    assert (theirs.config.vocab_size, theirs.config.pad_token_id, theirs.config.bos_token_id) == (V + 2, 0, V)
    ids = torch.randint(V, (3, 20), generator=torch.Generator().manual_seed(0))
    # The last of demix's types stands before documents; RoBERTa must not take it for padding.
    ids[0, 3], ids[1, 5], ids[2, 0] = MASKED, MASKED, V - 1
    shifted = torch.where(ids == MASKED, V + 1, ids + 1)
    logits = theirs(shifted).logits
    torch.testing.assert_close(model.logits(model(ids[None]))[0], logits[..., 1:-1], rtol=0, atol=2e-6)
    targets = ids.clamp(min=0)
    log_p = model.log_probabilities(model(ids[None]), targets[None])[0]
    # No probability is left to the tokens that pad and mask.
    wanted = logits.log_softmax(-1).gather(-1, targets[..., None] + 1).squeeze(-1)
    torch.testing.assert_close(log_p, wanted, rtol=0, atol=2e-6)
    log_p.mean().backward()
    wanted.mean().backward()
    form = FORMATS["roberta"]
    grads = {n: (p.grad[0] if ".feedforward." in n else p.grad) for n, p in model.named_parameters()}
    for row in form.tensors(
        model.architecture, grads.keys() - {"token_embedding", "position_embedding", "output_bias"}
    ):
        parts = (
            torch.split(grads[row.ours], row.parts(model.architecture)) if len(row.theirs) > 1 else [grads[row.ours]]
        )
        for name, part in zip(row.theirs, parts, strict=True):
            torch.testing.assert_close(part, theirs.get_parameter(name).grad, rtol=1e-4, atol=1e-7, msg=name)
    types = theirs.roberta.embeddings.word_embeddings.weight.grad
    torch.testing.assert_close(grads["token_embedding"], types[1:-1], rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(grads["output_bias"], theirs.lm_head.bias.grad[1:-1], rtol=1e-4, atol=1e-7)
    if model.architecture.mask == "learned":
        torch.testing.assert_close(grads["mask_embedding"], types[-1], rtol=1e-4, atol=1e-7)
    positions = theirs.roberta.embeddings.position_embeddings.weight.grad
    torch.testing.assert_close(grads["position_embedding"], positions[1:], rtol=1e-4, atol=1e-7)


def test_fillings_are_those_of_the_pipeline_of_transformers(tokens: Path, tmp_path: Path) -> None:
    model = model_for(tokens)
    encoder, folder = written(model, tokens, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    given = [encoder.vocab_size if one == MASKED else int(one) for one in masked_inputs(encoder, TEXT)]
    assert tokenizer(TEXT)["input_ids"] == [one + 1 for one in given]
    theirs = pipeline("fill-mask", model=str(folder), tokenizer=tokenizer, top_k=4)(TEXT)
    ours = fillings([model], encoder, TEXT, np.zeros(1), top=4)
    assert len(theirs) == len(ours) == 2
    # In a document the same letters are text.
    assert encoder.decode(encoder.encode(TEXT)) == TEXT
    for found, wanted in zip(ours, theirs, strict=True):
        assert [one.probability for one in found] == pytest.approx([one["score"] for one in wanted], rel=1e-4)
        assert [one.text for one in found] == [encoder.decode([one["token"] - 1]) for one in wanted]
        assert all(one.by_expert == pytest.approx((one.probability,)) for one in found)


def test_fillings_of_a_mixture_add_up_the_probabilities_of_its_experts(tokens: Path) -> None:
    model = model_for(tokens, THREE).double()
    encoder, prior = Tokenizer.load(tokens / "tokenizer.json"), np.array([0.5, 0.2, 0.3])
    inputs = torch.from_numpy(masked_inputs(encoder, TEXT))
    (first, _) = np.flatnonzero(inputs == MASKED)
    each = [alone(model, name) for name in THREE]
    p = torch.stack([one.logits(one(inputs[None, None]))[0, 0, first].softmax(-1) for one in each]).detach().numpy()
    mixed = prior @ p
    found = fillings([model], encoder, TEXT, np.log(prior), top=3)
    assert [one.probability for one in found[0]] == pytest.approx(sorted(mixed, reverse=True)[:3])
    assert list(found[0][0].by_expert) == pytest.approx(p[:, mixed.argmax()].tolist())
    # Experts that are whole models stand in trunks of their own.
    apart = fillings(each, encoder, TEXT, np.log(prior), top=3)
    assert [[one.text for one in place] for place in apart] == [[one.text for one in place] for place in found]
    for one, other in zip(apart[0], found[0], strict=True):
        assert (one.probability, *one.by_expert) == pytest.approx((other.probability, *other.by_expert))


def test_fill_prints_each_mask_and_refuses_in_one_line(tokens: Path, tmp_path: Path) -> None:
    encoder = Tokenizer.load(tokens / "tokenizer.json")
    save_model(model_for(tokens, THREE), tmp_path / "m", encoder.sha256)
    save_model(model_of(THREE, torch.float32, vocab_size=encoder.vocab_size), tmp_path / "causal", encoder.sha256)
    file = ("--tokenizer", tokens / "tokenizer.json")
    done = demix("fill", tmp_path / "m", TEXT, "--prior", "law=2,news=1", "--experts", "law,news", "--top", "2", *file)
    assert done.exit_code == 0, done.exception
    assert "Mask 2" in done.stdout
    assert "news" in done.stdout
    assert "code" not in done.stdout
    for model, text, told in (
        ("m", "no mask", "text: has no <mask>; write <mask> where"),
        ("m", "<mask>" * 64, "text: has 65 tokens, and blocks of the model 64; shorten it"),
        ("causal", TEXT, "model: predicts next tokens, and has learned no masks; use `demix generate`"),
    ):
        refused = demix("fill", tmp_path / model, text, *file)
        assert isinstance(refused.exception, DemixError)
        assert told in str(refused.exception)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"position": "alibi"}, "has position alibi, which RoBERTa's format cannot hold"),
        ({"head": "clap"}, "has head clap, which RoBERTa's format cannot hold"),
        ({"norm_place": "before"}, "has norm_place before, which RoBERTa's format cannot hold"),
    ],
)
def test_masked_models_of_other_options_do_not_go_out(options: dict, told: str, tokens: Path, tmp_path: Path) -> None:
    with pytest.raises(DemixError, match=told):
        written(model_for(tokens, **options), tokens, tmp_path)


def test_sines_are_those_of_transformers_in_the_order_of_the_paper() -> None:
    theirs = MarianSinusoidalPositionalEmbedding(30, 12)
    theirs.weight.data = theirs.create_weight()
    # Theirs has the sines in the first half and the cosines in the second.
    wanted = theirs.weight.detach().view(30, 2, 6).mT.reshape(30, 12)
    torch.testing.assert_close(sinusoids(0, 30, 12).float(), wanted, rtol=0, atol=1e-6)
    torch.testing.assert_close(sinusoids(7, 3, 12), sinusoids(0, 30, 12)[7:10])


@torch.no_grad()
def test_what_a_model_reads_is_embeddings_with_the_options_of_its_architecture() -> None:
    """Each option against a model of learned positions whose tables have what the option computes."""
    ids = torch.randint(50, (1, 2, 9), generator=torch.Generator().manual_seed(0))
    sizes = Architecture(2, 32, 4, 16)
    for options in ({"position": "sinusoidal"}, {"embedding_scale": True}, {"head": "clap", "clap_inputs": "plain"}):
        model, plain = model_of(architecture=dataclasses.replace(sizes, **options)), model_of(architecture=sizes)
        plain.load_state_dict(model.state_dict(), strict=False)
        if "position" in options:
            plain.position_embedding.copy_(sinusoids(0, 16, 32))
        if "embedding_scale" in options:
            plain.token_embedding.mul_(32**0.5)
        torch.testing.assert_close(model(ids), plain(ids), rtol=0, atol=1e-12)
    # A text goes on after what was seen.
    model = model_of(architecture=dataclasses.replace(sizes, position="sinusoidal"))
    past = model.no_past()
    pieces = [model(ids[..., start:end], past=past) for start, end in pairwise((0, 4, 9))]
    torch.testing.assert_close(torch.cat(pieces, 2), model(ids), rtol=0, atol=1e-12)
    longer = torch.randint(50, (1, 2, 30), generator=torch.Generator().manual_seed(0))
    assert model(longer).shape == (1, 2, 30, 32)


@pytest.mark.parametrize(
    "options", [{}, {"norm": "rms", "mask": "zeros"}, {"position": "sinusoidal", "norm_place": "after"}]
)
def test_parameters_and_flops_are_those_of_the_model(options: dict) -> None:
    sizes, types, T = dataclasses.replace(ROBERTA, **options), 48, 40
    model = model_of(("one",), torch.float32, architecture=sizes, vocab_size=types)
    counted = [sum(p.numel() for p in part().values()) for part in (model.shared_tensors, model.expert_tensors)]
    assert [*parameters(sizes, types)] == counted
    places = masked_places(T)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        states = model(torch.zeros(1, 1, T, dtype=torch.long))
        blocks = counter.get_total_flops()
        model.logits(states[..., :places, :])
    # The counter sees the further unit that gives each logit its bias, which the formula leaves out.
    head = counter.get_total_flops() - blocks - 2 * places * types
    assert training_flops_per_token(sizes, types, T) * T == pytest.approx(4 * blocks + 3 * head, rel=1e-12)


def test_the_size_of_the_config_is_that_of_robertas_base() -> None:
    run = load_run(Path(__file__).parents[2] / "config" / "roberta.yaml")
    config = RobertaConfig(max_position_embeddings=2049, type_vocab_size=1, vocab_size=50_259)
    with torch.device("meta"):
        theirs = sum(parameter.numel() for parameter in RobertaForMaskedLM(config).parameters())
    # Theirs has a token that pads, a position that is never read, and a segment; the two further tokens have a bias.
    lines = plan_training(run, None, HARDWARE["a100"])
    (base,) = [line for line in lines if line.name == "roberta"]
    assert base.weights == 4 * (theirs - 3 * 768 - 2)
    assert {"roberta", "roberta_clap", "roberta_alibi", "roberta_alibi_clap"} <= {line.name for line in lines}


def test_transformers_fine_tunes_an_exported_model(tokens: Path, tmp_path: Path) -> None:
    """Which domain is a text of: two domains of the sample, told apart better than by chance after 150 updates."""
    _, folder = written(model_for(tokens).initialise(1), tokens, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = []
    for label, domain in enumerate(("licenses", "scripture")):
        with zstandard.open(SAMPLE / f"{domain}.jsonl.zst", "rt", encoding="utf-8") as file:
            text = "\n".join(json.loads(line)["text"] for line in file)
        rows += [{"text": text[start : start + 150], "label": label} for start in range(0, 60_000, 150)]
    encoded = [
        {"input_ids": ids[:64], "attention_mask": [1] * len(ids[:64]), "labels": row["label"]}
        for row, ids in ((row, tokenizer(row["text"])["input_ids"]) for row in rows)
    ]
    np.random.default_rng(0).shuffle(encoded)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "tuned"), max_steps=150, per_device_train_batch_size=16, learning_rate=5e-3,
        report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, seed=1, use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=encoded[:600], processing_class=tokenizer)
    trainer.train()
    predicted = trainer.predict(encoded[600:])
    right = (predicted.predictions.argmax(-1) == predicted.label_ids).mean()
    assert right > 0.8, right
