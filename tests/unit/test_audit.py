"""The audit of a removed domain, against whole forward passes."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from demix.config.architecture import Architecture
from demix.data.shards import TokenShard
from demix.data.tokenizer import Tokenizer
from demix.evaluate.memorization import COLUMNS, CONTINUATION, PROMPT, Audit, audit_domain
from demix.evaluate.score_tables import tokens_sha256
from demix.files import read_parquet, write_parquet
from demix.model.directory import load_model
from demix.model.gpt import GPT
from demix.run.models import left_out, trained_without
from support.decoding import LENGTH, next_tokens
from support.mixing import log_weights
from support.models import SMALL, randomise, save_model
from support.tokens import TRAINING
from support.training import balanced_batches

DOMAIN = "licenses"
SEED = 5
WITHOUT = ("parliament", "scripture", "fantasy")
REST = ("parliament", "scripture")
UNTAUGHT = trained_without(DOMAIN)
EXPERTS = {"own": (DOMAIN,), "mixture": TRAINING, "minus": REST, "without": WITHOUT}
PRIORS = {
    ("demix", "training"): TRAINING,
    ("demix", left_out(DOMAIN)): REST,
    (UNTAUGHT, "training"): WITHOUT,
}


def prior_of(experts: tuple[str, ...]) -> np.ndarray:
    weights = np.array([0.2, 0.3, 0.5])[: len(experts)]
    return weights / weights.sum()


@pytest.fixture(scope="module")
def made(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes models/demix and models/without-licenses and the cached priors of the domain; returns their folder."""

    def make(
        architecture: Architecture = SMALL, change: Callable[[GPT], object] = lambda model: None, trained: int = 1 << 20
    ) -> Path:
        folder = tmp_path_factory.mktemp("run")
        encoder = Tokenizer.load(tokens / "tokenizer.json")
        for seed, (name, experts) in enumerate({"demix": TRAINING, UNTAUGHT: WITHOUT}.items()):
            model = GPT(architecture, encoder.vocab_size, experts)
            randomise(model, seed)
            if name == "demix":
                change(model)
            about = {"tokens": trained, "training": {"seed": SEED, "learning_rate": 1e-3}}
            save_model(model, folder / name, encoder.sha256, **about)
        rows = [
            {"model": model, "experts": label, "weights": "history", "domain": DOMAIN, "expert": expert, "prior": prior}
            for (model, label), experts in PRIORS.items()
            for expert, prior in zip(experts, prior_of(experts), strict=True)
        ]
        write_parquet(pa.Table.from_pylist(rows), folder / "priors.parquet")
        return folder

    return make


def rows_of(models: Path, tokens: Path, prompts: int = 3) -> list[dict]:
    audit = Audit(prompts=prompts, model="demix", training=TRAINING, without=WITHOUT, threads=1)
    output = models / "audit.parquet"
    audit_domain(DOMAIN, models, tokens / "tokens" / DOMAIN, models / "priors.parquet", audit, output)
    return read_parquet(output).to_pylist()


def piece(tokens: Path, row: dict) -> torch.Tensor:
    """The token before a row's excerpt and the excerpt, found by the hash of its document."""
    shard = TokenShard.open(tokens / "tokens" / DOMAIN / f"{row['split']}.arrow")
    for start, end in edges(shard):
        ids = shard.read(start + 1, end)
        if tokens_sha256(ids) == row["document"]:
            assert row["start"] + PROMPT + CONTINUATION <= len(ids)
            first = start + row["start"]
            return torch.from_numpy(shard.read(first, first + 1 + PROMPT + CONTINUATION).astype(np.int64))
    raise AssertionError(f"no document of {row['split']} has the sha256 {row['document']}")


def test_rows_are_what_whole_forward_passes_give(made: Callable[..., Path], tokens: Path) -> None:
    """Greedy continuations without a cache, with a mixture written as in docs/explanation/mixing.md."""
    models = made()
    rows = rows_of(models, tokens)
    assert list(dict.fromkeys(row["system"] for row in rows)) == list(EXPERTS)
    assert {row["split"] for row in rows} == {"train", "test"}
    assert all(row.keys() == COLUMNS.keys() for row in rows)
    for row in rows[::2]:
        model = load_model(models / row["model"], EXPERTS[row["system"]]).requires_grad_(False)
        ids = piece(tokens, row)
        prompt, wanted = ids[: PROMPT + 1], ids[PROMPT + 1 :]
        log_p = [predicted(model, ids[: PROMPT + 1 + n])[token] for n, token in enumerate(wanted.tolist())]
        assert row["nll"] == pytest.approx(-sum(log_p), abs=1e-2)
        drawn = prompt
        for _ in range(CONTINUATION):
            drawn = torch.cat([drawn, torch.tensor([predicted(model, drawn).argmax()])])
        same = (drawn[PROMPT + 1 :] == wanted).numpy()
        assert row["share"] == same.mean()
        assert row["matched"] == (CONTINUATION if same.all() else same.argmin())


def test_what_matches_after_the_first_miss_counts_in_the_share_alone(made: Callable[..., Path], tokens: Path) -> None:
    """A model whose every token is the text's most frequent one."""
    shard = TokenShard.open(tokens / "tokens" / DOMAIN / "train.arrow")
    token = int(np.bincount(shard.read(0, len(shard))).argmax())

    def monotonous(model: GPT) -> None:
        with torch.no_grad():
            model.final_norm.weight.zero_()
            model.final_norm.bias.copy_(1e3 * model.token_embedding[token])

    rows = [row for row in rows_of(made(change=monotonous), tokens, prompts=20) if row["system"] != "without"]
    for row in rows:
        same = (piece(tokens, row)[PROMPT + 1 :] == token).numpy()
        assert row["share"] == same.mean()
        assert row["matched"] == (CONTINUATION if same.all() else same.argmin())
    assert any(row["share"] * CONTINUATION > row["matched"] for row in rows)


def predicted(model: GPT, ids: torch.Tensor) -> np.ndarray:
    """log p [V] of what follows the token before an excerpt and its first ones, from one forward pass of the block."""
    block = ids[(len(ids) - 1) // LENGTH * LENGTH :]
    every = next_tokens(model, block[None])[:, 0]
    seen = every[:, np.arange(len(block) - 1), block[1:]].sum(1)
    return np.logaddexp.reduce(log_weights(np.log(prior_of(model.experts)), seen)[:, None] + every[:, -1], 0)


def test_only_what_training_has_drawn_is_asked_for(made: Callable[..., Path], tokens: Path) -> None:
    """Half an epoch of real batches; every excerpt of train lies in blocks of theirs."""
    wide = SMALL.replace(context=64)
    shard = TokenShard.open(tokens / "tokens" / DOMAIN / "train.arrow")
    steps = len(shard) // 64 // 2
    draw = balanced_batches([shard], [DOMAIN], 1, 64, SEED).draw
    drawn = {tuple(draw(step).targets.flatten().tolist()) for step in range(steps)}
    rows = rows_of(made(wide, trained=steps * 64), tokens, prompts=50)
    train = [row for row in rows if row["system"] == "own" and row["split"] == "train"]
    assert len(train) > 1
    begins = {tokens_sha256(shard.read(start + 1, end)): start + 1 for start, end in edges(shard)}
    for row in train:
        first = begins[row["document"]] + row["start"]
        for block in range(first // 64, (first + PROMPT + CONTINUATION - 1) // 64 + 1):
            assert tuple(shard.read(block * 64, block * 64 + 64).tolist()) in drawn


def edges(shard: TokenShard) -> list[tuple[int, int]]:
    return list(zip(shard.offsets.tolist(), [*shard.offsets[1:].tolist(), len(shard)], strict=True))


def test_documents_that_are_long_enough_are_chosen_by_their_hashes(made: Callable[..., Path], tokens: Path) -> None:
    rows = rows_of(made(), tokens, prompts=100_000)
    shard = TokenShard.open(tokens / "tokens" / DOMAIN / "train.arrow")
    sizes = np.diff([*shard.offsets, len(shard)]) - 1
    found = [row["document"] for row in rows if row["split"] == "train" and row["system"] == "minus"]
    assert found == sorted(found), "chosen by their hashes"
    assert len(found) == (sizes >= PROMPT + CONTINUATION).sum() > 1
