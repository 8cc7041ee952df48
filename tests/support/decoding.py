"""References for decoding with several experts, and a run to decode from."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from demix.data.tokenizer import Tokenizer
from demix.files import write_parquet
from demix.model.gpt import GPT
from demix.model.scoring import log_probabilities
from support.models import SMALL, THREE, write_model

LENGTH = SMALL.context


def next_tokens(model: GPT, tokens: torch.Tensor) -> np.ndarray:
    """log p [E, B, N, V] of what may follow each of the tokens [B, N], by one forward pass a block, without a cache."""
    with torch.no_grad():
        blocks = tokens.split(model.architecture.context, 1)
        hidden = torch.cat([model(block[None]) for block in blocks], 2)
        return (hidden @ model.token_embedding.T).double().log_softmax(-1).numpy()


def whole(model: GPT, tokens: torch.Tensor, before: torch.Tensor) -> np.ndarray:
    """log p [E, B, N] of the tokens [B, N], the first of which follows `before` [B]."""
    every = next_tokens(model, torch.cat([before[:, None], tokens[:, :-1]], 1))
    return np.take_along_axis(every, tokens.numpy()[None, ..., None], -1)[..., 0]


def scored_in_blocks(model: GPT, ids: list[int], domains: tuple[str, ...] | None = None) -> np.ndarray:
    """log p [E, N] of all `ids` but the first, by the code that scores a run."""
    tokens = len(ids) - 1
    padded = np.zeros(-(-tokens // LENGTH) * LENGTH + 1, np.int64)
    padded[: len(ids)] = ids
    mask = (np.arange(len(padded) - 1) < tokens).reshape(-1, LENGTH)
    blocks = padded[:-1].reshape(-1, LENGTH), padded[1:].reshape(-1, LENGTH)
    return log_probabilities(model, *blocks, mask, domain_tokens=domains)


def in_blocks(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One text's scores [E, N] as the blocks [B, T, E] and the mask that `mix` takes."""
    E, N = scores.shape
    blocks = -(-N // LENGTH)
    padded = np.zeros((blocks * LENGTH, E))
    padded[:N] = scores.T
    return padded.reshape(blocks, LENGTH, E), (np.arange(len(padded)) < N).reshape(blocks, LENGTH)


def write_run(folder: Path, tokens: Path) -> Path:
    """results/<run>/ with a tokenizer, a model and a prior of two domains, the same cached and fitted."""
    shutil.copy(tokens / "tokenizer.json", folder)
    encoder = Tokenizer.load(folder / "tokenizer.json")
    write_model(folder / "models" / "demix", tokenizer=encoder.sha256, vocab_size=encoder.vocab_size)
    about = {"model": "demix", "experts": "training", "kind": "novel"}
    rows = [
        about | {"weights": weights, "domain": domain, "expert": expert, "prior": prior}
        for domain, priors in {"wiki": (0.1, 0.2, 0.7), "songs": (1.0, 0.0, 0.0)}.items()
        for expert, prior in zip(THREE, priors, strict=True)
        for weights in ("history", "fitted")
    ]
    write_parquet(pa.Table.from_pylist(rows), folder / "priors.parquet")
    return folder
