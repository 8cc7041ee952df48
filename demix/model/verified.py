"""Whether an imported model gives the ids of tokenizers and the logits of transformers."""

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import models, pre_tokenizers

from demix.data.tokenizer import PROBE, Tokenizer
from demix.errors import DemixError
from demix.model.gpt import GPT

# Of the largest logit. In fp32 the families differ by less than 1e-6 for three layers, and rounding grows with depth;
# another epsilon, theta or name of a tensor moves logits by 1e-2 and more.
MAX_DIFFERENCE = 1e-3
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


def verify_import(folder: Path, configs: Path, model: GPT, encoder: Tokenizer) -> Verified:
    """Compare an imported model with the checkpoint in `folder`, in fp32, on TEXT.

    `configs` is a folder with the checkpoint's config.json in plain UTF-8. Raises DemixError if a text gets other ids
    than the library tokenizers gives it, if transformers does not load the checkpoint, and if logits differ by more
    than MAX_DIFFERENCE of the largest.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    _verify_encodings(folder, encoder)
    own = encoder.encode(TEXT)[: model.architecture.context - 1]
    ids = torch.tensor([[encoder.end_of_text, *own.tolist()]])
    here = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(configs, **here)
        theirs = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, use_safetensors=True, **here
        )
    # It raises nearly anything for a folder that it does not like.
    except Exception as error:
        cause = f"is not loaded by transformers ({type(error).__name__}: {error})"
        raise DemixError(folder, cause, "import it without --verify") from error
    theirs.train(False)
    with torch.no_grad():
        wanted = theirs(ids, use_cache=False).logits[0]
        found = model.logits(model(ids[None]))[0, 0]
    verified = Verified(float((found - wanted).abs().max()), float(wanted.abs().max()), ids.shape[1])
    if not verified.difference <= MAX_DIFFERENCE * verified.largest:
        cause = f"has logits that differ by up to {verified.difference:.2g} from those of transformers"
        cause += f", which reach {verified.largest:.2g}"
        raise DemixError(folder, cause, "report it, with its config.json")
    return verified


def _verify_encodings(folder: Path, encoder: Tokenizer) -> None:
    """Compare the ids of two texts with those of the tokenizer's files, as the library tokenizers reads them."""
    file, vocabulary = folder / "tokenizer.json", folder / "vocab.json"
    try:
        if file.is_file():
            theirs = HuggingFaceTokenizer.from_str(file.read_text("utf-8-sig"))
        else:
            theirs = HuggingFaceTokenizer(models.BPE.from_file(str(vocabulary), str(folder / "merges.txt")))
            theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # What the library raises.
    except Exception as error:
        cause = f"has a tokenizer that the library tokenizers does not read ({error})"
        raise DemixError(folder, cause, "import it without --verify") from None
    theirs.encode_special_tokens = True
    for text in (TEXT, PROBE):
        wanted, found = theirs.encode(text, add_special_tokens=False).ids, encoder.encode(text).tolist()
        if found != wanted:
            cause = f"encodes {text!r:.60} as {found[:8]} here, and as {wanted[:8]} by tokenizers"
            raise DemixError(folder, cause, "report it, with its tokenizer.json")
