"""Whether an imported model gives the logits of transformers."""

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError
from demix.files import opened
from demix.model.gpt import GPT

# Of the largest logit. In fp32 the families differ by less than 1e-6 for three layers, and rounding grows with depth;
# another epsilon, theta or name of a tensor moves logits by 1e-2 and more.
MOST_DIFFERENCE = 1e-3
TEXT = """It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of
a wife. However little known the feelings or views of such a man may be on his first entering a neighbourhood, this
truth is so well fixed in the minds of the surrounding families, that he is considered as the rightful property of some
one or other of their daughters."""


@dataclass(frozen=True)
class Verified:
    """The largest difference of logits, the largest logit, and the tokens of the text compared."""

    difference: float
    largest: float
    tokens: int


def refuse_without_transformers() -> None:
    """Raise DemixError unless transformers is installed."""
    if importlib.util.find_spec("transformers") is None:
        raise DemixError("--verify", "needs transformers, which is not installed", "pip install 'demix[transformers]'")


def verify_logits(folder: Path, model: GPT, encoder: Tokenizer, text: Path | None) -> Verified:
    """Compare the logits of `model` with those of the checkpoint in `folder`, in fp32, on the first block of a text.

    The text is that of the file `text`, or TEXT. Raises DemixError if logits differ by more than MOST_DIFFERENCE of the
    largest.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoModelForCausalLM

    own = encoder.encode(TEXT if text is None else _read(text))[: model.architecture.context - 1]
    ids = torch.tensor([[encoder.end_of_text, *own.tolist()]])
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False, use_safetensors=True
    )
    theirs.train(False)
    with torch.no_grad():
        wanted = theirs(ids, use_cache=False).logits[0]
        found = model.logits(model(ids[None]))[0, 0]
    verified = Verified(float((found - wanted).abs().max()), float(wanted.abs().max()), ids.shape[1])
    if not verified.difference <= MOST_DIFFERENCE * verified.largest:
        cause = f"has logits that differ by up to {verified.difference:.2g} from those of transformers"
        cause += f", which reach {verified.largest:.2g}"
        raise DemixError(folder, cause, "report it, with its config.json")
    return verified


def _read(path: Path) -> str:
    try:
        # A token has at least one byte, and a block has at most 131,072.
        with opened(path) as stream:
            return stream.read(1 << 20).decode(errors="ignore")
    except FileNotFoundError:
        raise DemixError(path, "is missing", "name a text file with --text") from None
