"""References for decoding with several experts, and a run to decode from."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from demix.data.tokenizer import Tokenizer
from demix.files import write_parquet
from support.models import SMALL, THREE, write_model

LENGTH = SMALL.context


def whole(model, tokens: torch.Tensor, before: torch.Tensor) -> np.ndarray:
    """log p [E, B, N] of tokens by one forward pass a block, without any cache."""
    seen = torch.cat([before[:, None], tokens], 1)
    parts = []
    for start in range(0, tokens.shape[1], LENGTH):
        targets = tokens[:, start : start + LENGTH]
        with torch.no_grad():
            hidden = model(seen[None, :, start : start + targets.shape[1]])
            logits = (hidden @ model.token_embedding.T).double().log_softmax(-1)
        parts.append(logits.gather(-1, targets[None, ..., None].expand(len(logits), -1, -1, 1))[..., 0])
    return torch.cat(parts, -1).numpy()


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
    rows = [
        {"model": "demix", "experts": "training", "weights": weights, "domain": domain, "kind": "novel",
         "expert": expert, "prior": prior}
        for domain, priors in {"wiki": (0.1, 0.2, 0.7), "songs": (1.0, 0.0, 0.0)}.items()
        for expert, prior in zip(THREE, priors, strict=True)
        for weights in ("history", "fitted")
    ]  # fmt: skip
    write_parquet(pa.Table.from_pylist(rows), folder / "priors.parquet")
    wiki = [row for row in rows if row["domain"] == "wiki"]
    write_parquet(pa.Table.from_pylist(wiki), folder / "evaluations" / "wiki.priors.parquet")
    return folder
