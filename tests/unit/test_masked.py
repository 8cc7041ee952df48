"""Masked language models: what they read and predict, their scores in folds, training, mixtures, and RoBERTa."""

import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize
from scipy.special import logsumexp, softmax
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoTokenizer, RobertaForMaskedLM, pipeline
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

from demix.commands.new_domain import add_domain
from demix.config.architecture import Architecture, architecture_from
from demix.config.counts import masked_places, training_flops_per_token
from demix.config.counts import sizes as sizes_of
from demix.data.shards import blocks
from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError
from demix.evaluate.choice import choose_parent, own_dev_losses, tempered_on_dev
from demix.evaluate.domain import Evaluation
from demix.evaluate.own_text import evaluate_text
from demix.evaluate.score import Scoring
from demix.evaluate.score_tables import read_scores
from demix.files import read_json_lines, seed_for
from demix.launch.job import Places
from demix.model.decode import open_model
from demix.model.directory import describe
from demix.model.export import export_hf
from demix.model.gpt import GPT, MASKED
from demix.model.scoring import FOLDS, log_probabilities, masked_log_probabilities
from demix.plan.flops import scoring_flops
from demix.run.evaluated import evaluated
from demix.train.adapt import adapt
from demix.train.optimizers import group_of
from support.checkpoints import all_tensors
from support.contents import contents
from support.entries import tiny
from support.errors import refused
from support.models import SMALL, THREE, alone, model_of, own_tensors, save_model, shared_tensors, torch_encoder
from support.scored import evaluate_domain, score
from support.tokens import NOVEL, TRAINING
from support.training import ADAPT, SIZES, TRAIN, opened, shard_paths, train_model

MASKED_LM = {"objective": "mlm"}
ENCODER = SMALL.replace(**MASKED_LM)
ROBERTA = architecture_from({"preset": "roberta", "layers": 2, "width": 32, "heads": 4, "context": 64})
TEXT = "It is a truth universally <mask>, that a single man in possession of a good <mask>, must be in want of a wife."
# Rows are positions i and columns positions j; to be multiplied by the slope of a head.
DISTANCES = [[-abs(i - j) + 0.5 * (j > i) for j in range(16)] for i in range(16)]
OPTIONS = {
    "learned positions": {},
    "clap": {"head": "clap"},
    "alibi": {"position": "alibi"},
    "learned mask": {"mask": "learned"},
}


@torch.no_grad()
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_states_are_those_of_an_encoder_of_torch_for_short_blocks_too(options: dict[str, str]) -> None:
    model = model_of(architecture=ENCODER.replace(**options))
    ids = torch.randint(0, 50, (3, 16), generator=torch.Generator().manual_seed(0))
    ids[:, 4] = ids[1, 7] = MASKED
    embeddings = F.normalize(model.token_embedding, dim=-1) if "head" in options else model.token_embedding
    hidden = model.mask_embedding if "mask" in options else torch.zeros(32)
    embedded = torch.where((ids == MASKED)[..., None], hidden, embeddings[ids.clamp(min=0)])
    bias = torch.zeros(4, 16, 16, dtype=torch.float64)
    if "position" in options:
        slopes = torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256], dtype=torch.float64)
        bias = slopes[:, None, None] * torch.tensor(DISTANCES, dtype=torch.float64)
    else:
        embedded = embedded + model.position_embedding
    encoder, bias = torch_encoder(model), bias.repeat(3, 1, 1)
    whole = model.final_norm(encoder(embedded, mask=bias))
    torch.testing.assert_close(model(ids[None])[0], whole, rtol=0, atol=1e-12)
    with pytest.raises(DemixError):
        model(ids[None], past=model.no_past())
    # Padding is masked away there. Here it is cut off.
    padding = torch.zeros(3, 16, dtype=torch.float64)
    padding[:, 11:] = -torch.inf
    padded = model.final_norm(encoder(embedded, mask=bias, src_key_padding_mask=padding))[:, :11]
    found = model(ids[None, :, :11])[0]
    torch.testing.assert_close(found, padded, rtol=0, atol=1e-12)
    assert (found - whole[:, :11]).abs().max() > 1e-3


@torch.no_grad()
def by_folds(model: GPT, ids: np.ndarray, mask: np.ndarray, folds: int, first: int) -> np.ndarray:
    """A plain loop over experts, blocks, folds and tokens."""
    rows = []
    for expert in model.experts:
        single, row = alone(model, expert), []
        for block in range(len(ids)):
            n = int(mask[block].sum())
            order = np.random.Generator(np.random.PCG64(seed_for(0, "folds", first + block))).permutation(n).tolist()
            found = {}
            for fold in range(folds):
                hidden = order[fold::folds]
                inputs = [MASKED if place in hidden else int(ids[block, place]) for place in range(n)]
                states = single(torch.tensor(inputs)[None, None])[0, 0]
                for place in hidden:
                    logits = states[place] @ single.token_embedding.T
                    found[place] = F.log_softmax(logits, -1)[ids[block, place]].item()
            row += [found[place] for place in range(n)]
        rows.append(row)
    return np.array(rows)


@pytest.mark.parametrize("folds", [FOLDS, SMALL.context])
@pytest.mark.parametrize("tokens", [3 * 16, 2 * 16 + 5, 2 * 16 + 1])
def test_scores_are_those_of_a_plain_loop_in_folds_and_one_position_a_pass(folds: int, tokens: int) -> None:
    model, ids = model_of(THREE, architecture=ENCODER), np.random.default_rng(2).integers(50, size=(3, 16))
    mask = np.arange(48).reshape(3, 16) < tokens
    advanced: list[int] = []
    scored = masked_log_probabilities(model, ids, mask, None, advanced.append, 8, folds)
    assert sum(advanced) == scored.shape[1] == tokens
    np.testing.assert_allclose(scored, by_folds(model, ids, mask, folds, 8), rtol=0, atol=1e-12)


def test_a_text_is_scored_alike_in_pieces_and_needs_no_token_before_its_blocks(tokens: Path) -> None:
    model, shard = model_of(THREE, architecture=ENCODER, vocab_size=400), opened(tokens)[0]
    T, limit = SMALL.context, 5 * SMALL.context + 3
    inputs, targets, mask = blocks(shard, T, limit)
    whole = log_probabilities(model, inputs, targets, mask)
    assert whole.shape == (3, limit)
    cuts = (0, 2 * T, limit)
    parts = [
        log_probabilities(model, *blocks(shard, T, end, begin), first=begin // T)
        for begin, end in itertools.pairwise(cuts)
    ]
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(log_probabilities(model, inputs * 0, targets, mask), whole)


RECIPE = TRAIN.replace(architecture=SIZES | MASKED_LM, tokens=6 * TRAIN.tokens)


@pytest.fixture(scope="module")
def run(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """models/ and scores/ of a masked DEMix model and a masked dense one."""
    folder, paths = tmp_path_factory.mktemp("run"), shard_paths(tokens)
    scoring = Scoring(dev_blocks=10, test_tokens=500, precision="fp32", threads=1)
    for name, kind, dev_blocks in (("masked", "demix", 0), ("masked_dense", "dense", 2)):
        dev = shard_paths(tokens, split="dev") if dev_blocks else []
        places = folder / "models" / name, folder / "metrics" / f"{name}.jsonl", folder / "checkpoints" / name
        train_model(kind, RECIPE.replace(dev_blocks=dev_blocks), [*paths, *dev], *places)
        shards = [path for split in ("dev", "test") for path in shard_paths(tokens, (*TRAINING, NOVEL[0]), split)]
        columns = TRAINING if kind == "demix" else ("dense",)
        score(folder / "models" / name, columns, shards, scoring, folder / "scores" / name)
    return folder


def test_a_masked_model_learns_and_its_loss_on_dev_is_in_folds(run: Path) -> None:
    rows = read_json_lines(run / "metrics" / "masked_dense.jsonl")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < losses[0] - 0.3
    assert describe(run / "models" / "masked").content["architecture"] == SIZES | MASKED_LM
    last = [row for row in rows if "dev_loss" in row][-1]
    for domain in TRAINING:
        table = read_scores(run / "scores" / "masked_dense" / f"{domain}.dev", ("dense",))
        assert last[f"dev_loss/{domain}"] == pytest.approx(-table.scores[:2].mean(), rel=1e-5)


def fitted(scores: np.ndarray) -> np.ndarray:
    """The static weights of the lowest loss on `scores` [tokens, E], by scipy."""
    found = minimize(lambda logits: -logsumexp(scores, axis=1, b=softmax(logits)).sum(), np.zeros(3), tol=1e-10)
    return softmax(found.x)


def test_an_evaluation_holds_static_mixtures_alone_as_plain_arithmetic_has_them(run: Path, tmp_path: Path) -> None:
    masked = {
        name: {"kind": kind, "architecture": MASKED_LM}
        for name, kind in {"masked_dense": "dense", "masked": "demix"}.items()
    }
    config = tiny(masked)
    assert config.training == TRAINING
    for domain, kind in ((TRAINING[0], "training"), (NOVEL[0], "novel")):
        tables = tuple(one for one in evaluated(config, domain) if one.model in masked)
        evaluation = Evaluation(
            kind=kind,
            tables=tables,
            seed=1,
            dev_blocks=10,
            weights=("history", "released", "tempered", "switching"),
        )
        evaluate_domain(run / "scores", domain, evaluation, tmp_path / f"{domain}.parquet")
        rows = pd.read_parquet(tmp_path / f"{domain}.parquet")
        assert set(rows.scorer) == {"masked, 7 folds"}
        assert set(rows.method) == {"dense", "naive", "expert", "average", "fitted", "best_block", "best_token"}
        assert not rows.query("method in ('average', 'fitted')").weights.any()
        splits = (read_scores(run / "scores" / "masked" / f"{domain}.{split}", TRAINING) for split in ("dev", "test"))
        known, scored = (table.scores[table.mask] for table in splits)
        nll = rows.query("model == 'masked' and variant == ''").set_index(["method", "expert"]).nll
        assert nll["average", ""] == pytest.approx(-logsumexp(scored - np.log(3), axis=1).sum())
        assert nll["fitted", ""] == pytest.approx(-logsumexp(scored, axis=1, b=fitted(known)).sum(), rel=1e-4)
        own = TRAINING[0] if kind == "training" else rows.query("method == 'naive' and oracle").expert.iloc[0]
        assert nll["naive", own] == pytest.approx(-scored[:, TRAINING.index(own)].sum())


def test_no_parameters_of_tempered_are_chosen_on_a_masked_table(run: Path) -> None:
    dev = run / "scores" / "masked" / f"{TRAINING[0]}.dev"
    with pytest.raises(DemixError):
        tempered_on_dev({TRAINING[0]: read_scores(dev, TRAINING)})


def test_what_continues_or_weighs_a_text_refuses_a_masked_model(run: Path, tmp_path: Path) -> None:
    model, text = run / "models" / "masked", tmp_path / "own.txt"
    text.write_text("some text of our own")
    with refused("model", model):
        open_model(model)
    with refused(model):
        evaluate_text(model, text)
    with refused(model):
        add_domain(model, "own", [text], tmp_path / "more")
    with refused(model):
        export_hf(model, TRAINING[0], None, tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["own.txt"]


def test_demix_dapt_begins_with_the_expert_of_the_highest_fitted_prior(run: Path, tokens: Path, tmp_path: Path) -> None:
    domain, scores, model = NOVEL[0], run / "scores" / "masked", run / "models" / "masked"
    chosen = choose_parent(scores, domain, TRAINING, blocks=5, decay=0.3)
    dev = read_scores(scores / f"{domain}.dev", TRAINING)
    weights = fitted(dev.scores[:5][dev.mask[:5]])
    assert list(chosen["priors"].values()) == pytest.approx(weights.tolist(), abs=0.02)
    assert chosen["parent"] == TRAINING[int(weights.argmax())]
    before = contents(model)
    shards = tuple(tokens / "tokens" / domain / f"{split}.arrow" for split in ("train", "dev"))
    unchanged = own_dev_losses(scores, TRAINING, 2)
    places = Places(tmp_path, tmp_path / "metrics.jsonl", tmp_path / "states")
    adapt(model, shards, ADAPT, places, chosen=chosen, unchanged=unchanged)
    assert contents(model) == before
    rows = [row for row in read_json_lines(tmp_path / "metrics.jsonl") if "early_stopping_loss" in row]
    table = read_scores(scores / f"{domain}.dev", (chosen["parent"],))
    assert rows[0]["early_stopping_loss"] == pytest.approx(-table.scores[: ADAPT.dev_blocks].mean(), rel=1e-5)
    assert min(row["early_stopping_loss"] for row in rows) < rows[0]["early_stopping_loss"]


def test_the_plan_counts_seven_passes_of_all_but_the_vocabulary() -> None:
    causal, masked = (Architecture(**SIZES, **more) for more in ({}, MASKED_LM))
    layers, width, context, types = 2, 32, 32, 400
    a_layer = 24 * width**2 + 4 * context * width
    assert scoring_flops(masked, types, 1) == 7 * layers * a_layer + 2 * width * types
    assert scoring_flops(causal, types, 1) == layers * (a_layer - 2 * context * width) + 2 * width * types


def roberta(tokens: Path, experts: tuple[str, ...] = ("dense",), **options: object) -> tuple[GPT, Tokenizer]:
    encoder = Tokenizer.load(tokens / "tokenizer.json")
    sizes = ROBERTA.replace(**options)
    return model_of(experts, torch.float32, architecture=sizes, vocab_size=encoder.vocab_size), encoder


def written(model: GPT, encoder: Tokenizer, tokens: Path, folder: Path) -> Path:
    """The folder of the model's export."""
    save_model(model, folder / "m", encoder.sha256)
    export_hf(folder / "m", "dense", tokens / "tokenizer.json", folder / "out")
    return folder / "out"


@pytest.mark.parametrize("options", [{}, {"mask": "zeros", "inner": 48, "activation": "relu", "epsilon": 1e-3}])
def test_logits_and_gradients_are_those_of_roberta_of_transformers(options: dict, tokens: Path, tmp_path: Path) -> None:
    model, encoder = roberta(tokens, **options)
    folder, model = written(model, encoder, tokens, tmp_path), model.double()
    theirs, V = RobertaForMaskedLM.from_pretrained(folder, dtype=torch.float64), encoder.vocab_size
    assert (theirs.config.vocab_size, theirs.config.pad_token_id, theirs.config.bos_token_id) == (V + 2, 0, V)
    ids = torch.randint(V, (3, 20), generator=torch.Generator().manual_seed(0))
    # The last of demix's types stands before documents; RoBERTa must not take it for padding.
    ids[0, 3], ids[1, 5], ids[2, 0] = MASKED, MASKED, V - 1
    logits = theirs(torch.where(ids == MASKED, V + 1, ids + 1)).logits
    torch.testing.assert_close(model.logits(model(ids[None]))[0], logits[..., 1:-1], rtol=0, atol=2e-6)
    targets = ids.clamp(min=0)
    log_p = model.log_probabilities(model(ids[None]), targets[None])[0]
    # No probability is left to the tokens that pad and mask.
    wanted = logits.log_softmax(-1).gather(-1, targets[..., None] + 1).squeeze(-1)
    torch.testing.assert_close(log_p, wanted, rtol=0, atol=2e-6)
    log_p.mean().backward()
    wanted.mean().backward()
    # Exported as a checkpoint, gradients have the names of tensors.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    found = all_tensors(written(model, encoder, tokens, tmp_path / "gradients"))
    own = slice(1, None if model.architecture.mask == "learned" else -1)
    rows = {"word_embeddings.weight": own, "position_embeddings.weight": slice(1, None), "lm_head.bias": slice(1, -1)}
    for name, parameter in theirs.named_parameters():
        if "token_type" not in name and name in found:
            some = next((some for end, some in rows.items() if name.endswith(end)), slice(None))
            gradient = parameter.grad[some].float()
            torch.testing.assert_close(found[name][some].float(), gradient, rtol=1e-4, atol=1e-7, msg=name)


@torch.no_grad()
def test_an_exported_model_fills_masks_with_demixs_probabilities(tokens: Path, tmp_path: Path) -> None:
    """As in fairseq, the white space before a mask belongs to the token that is filled in."""
    model, encoder = roberta(tokens)
    folder = written(model, encoder, tokens, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    first, second, rest = (encoder.encode(part.rstrip()).tolist() for part in TEXT.split("<mask>"))
    given = [encoder.end_of_text, *first, MASKED, *second, MASKED, *rest]
    assert tokenizer(TEXT)["input_ids"] == [1 + (encoder.vocab_size if one == MASKED else one) for one in given]
    theirs = pipeline("fill-mask", model=str(folder), tokenizer=tokenizer, top_k=4)(TEXT)
    ours = model.logits(model(torch.tensor(given)[None, None]))[0, 0].softmax(-1)[torch.tensor(given) == MASKED]
    for found, wanted in zip(ours, theirs, strict=True):
        best = found.topk(4)
        assert best.values.tolist() == pytest.approx([one["score"] for one in wanted], rel=1e-4)
        assert best.indices.tolist() == [one["token"] - 1 for one in wanted]
    # In a document the same letters are text.
    assert encoder.decode(encoder.encode(TEXT)) == TEXT


@torch.no_grad()
def test_sines_are_those_of_transformers_in_the_order_of_the_paper() -> None:
    """A model that has them is one of learned positions with this table, and may read longer texts."""
    theirs = MarianSinusoidalPositionalEmbedding(30, 32)
    theirs.weight.data = theirs.create_weight()
    sines, learned = (
        model_of(architecture=Architecture(layers=2, width=32, heads=4, context=context, position=position))
        for position, context in (("sinusoidal", 16), ("learned", 30))
    )
    learned.load_state_dict(sines.state_dict(), strict=False)
    # Theirs has the sines in the first half and the cosines in the second.
    learned.position_embedding.copy_(theirs.weight.view(30, 2, 16).mT.reshape(30, 32))
    ids = torch.randint(50, (1, 2, 30), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(sines(ids), learned(ids), rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"norm": "rms", "mask": "zeros"}, {"position": "sinusoidal"}])
def test_parameters_and_flops_are_those_of_the_model(options: dict) -> None:
    sizes, types, T = ROBERTA.replace(**options), 48, 40
    model = model_of(("one",), torch.float32, architecture=sizes, vocab_size=types)
    for mine, theirs in zip(sizes_of(sizes, types), (shared_tensors(model), own_tensors(model)), strict=True):
        assert sorted(mine) == sorted((p.numel(), group_of(name) == "matrices") for name, p in theirs.items())
    places = masked_places(T)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        states = model(torch.zeros(1, 1, T, dtype=torch.long))
        of_blocks = counter.get_total_flops()
        model.logits(states[..., :places, :])
    # The counter sees the further unit that gives each logit its bias, which the formula leaves out.
    head = counter.get_total_flops() - of_blocks - 2 * places * types
    assert training_flops_per_token(sizes, types, T) * T == pytest.approx(4 * of_blocks + 3 * head, rel=1e-12)
