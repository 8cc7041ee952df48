"""The evaluation of a user's own text under every expert and every mixture of a model."""

import glob
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from demix.config.sections import DECAY
from demix.data.anonymize import anonymize_documents
from demix.data.shards import TokenShard, blocks, tokenize
from demix.data.sources import Source, download
from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError
from demix.evaluate.mix.choice import mixing_of, switching_on_dev
from demix.evaluate.mix.mixtures import log_weights, mix
from demix.evaluate.mix.priors import cached_log_prior, fitted_log_prior, updating_log_priors
from demix.evaluate.mix.rules import Chunk, History
from demix.evaluate.score_tables import ScoreTable
from demix.model.checkpoint import load_experts, refuse_other_tokenizer
from demix.model.gpt import GPT
from demix.model.scoring import columns_of, trunk_log_probabilities
from demix.progress import progress

if TYPE_CHECKING:
    import rich.table

# The number of dev blocks that the paper uses for the cached prior.
DEV_BLOCKS = 100
# A file with any other suffix is one document of plain text.
STRUCTURED = {".parquet", ".jsonl", ".json", ".csv", ".txt", ".zip", ".tar", ".tgz", ".gz", ".zst"}


@dataclass(frozen=True)
class Line:
    """The perplexity of the text, and its bits per byte of UTF-8, under one expert or one mixing method (`name`)."""

    name: str
    perplexity: float
    bits_per_byte: float


@dataclass(frozen=True)
class ExpertLine(Line):
    """The figures of one expert alone, and its weights in mixtures.

    `weight` is the mean of the expert's `tempered` weight over all tokens. `posterior` is the expert's updating prior
    after the text (paper, Eq. 7).
    """

    weight: float
    posterior: float


@dataclass(frozen=True)
class OwnText:
    """The result of `evaluate_text`: sizes of the text, and figures of mixtures (none for one expert) and experts."""

    model: str
    documents: int
    tokens: int
    bytes: int
    blocks: int
    mixtures: tuple[Line, ...]
    experts: tuple[ExpertLine, ...]


def run_tokenizer(model: Path) -> Path:
    """The tokenizer.json in the folder `model`, or that of its run: `model` is results/<run>/models/<model>."""
    places = [model / "tokenizer.json", model.resolve().parent.parent / "tokenizer.json"]
    for place in places:
        if place.is_file():
            return place
    raise DemixError(model, "has no tokenizer.json, nor has its run", "name the run's tokenizer.json with --tokenizer")


def evaluate_text(model: Path, text: Path, tokenizer: Path, dev: Path | None = None) -> OwnText:
    """Perplexity and bits per byte of `text` under each expert of `model` and under each method that mixes them.

    The text is read, tokenized and cut into blocks like the text of a domain, but it is not anonymized. A file whose
    format is not among STRUCTURED is one document of plain text. All experts score the text in one pass. `tempered`,
    with the model's parameters, is the default rule; the paper's mixtures use `history` weights and the decay DECAY.
    With `dev`, a text from the same domain, the mixtures include the cached and fitted priors of its first DEV_BLOCKS
    blocks, and `switching`. Raises DemixError if a file is missing or holds no text, or if the tokenizer is not the
    model's.
    """
    for file in (tokenizer, text, *([dev] if dev else [])):
        if not file.is_file():
            raise DemixError(file, "is missing", "correct its name")
    encoder = Tokenizer.load(tokenizer)
    refuse_other_tokenizer(model, tokenizer, encoder.sha256, encoder.vocab_size)
    loaded = load_experts(model)
    names = columns_of(loaded)
    shard, scores, mask = _scored(loaded, text, tokenizer)
    size, tokens = int(shard.document_bytes.sum()), int(mask.sum())

    def figures(log_p: float) -> tuple[float, float]:
        with np.errstate(over="ignore"):
            return float(np.exp(-log_p / tokens)), float(-log_p / math.log(2) / size)

    mixtures, tempered = [], mixing_of(model)
    if len(names) > 1:
        best = scores.sum(axis=(0, 1)).argmax()
        mixtures.append(Line(f"best single ({names[best]}), an oracle", *figures(scores[..., best].sum())))
        mixed = {"tempered (uniform prior)": mix(scores, mask, "uniform", tempered)}
        mixed |= {method: mix(scores, mask, method, decay=DECAY) for method in ("average", "uniform", "updating")}
        if dev is not None:
            shard_dev, before, known = _scored(loaded, dev, tokenizer, DEV_BLOCKS * scores.shape[1])
            cached = cached_log_prior(before, known, "history", decay=DECAY, blocks=DEV_BLOCKS)
            fitted = fitted_log_prior(before, known)
            table = ScoreTable(before, known, names, len(shard_dev.offsets), "")
            switching = switching_on_dev(table, fitted)
            mixed["cached"] = mix(scores, mask, "cached", log_prior=cached)
            mixed["fitted"] = mix(scores, mask, "fitted", "", log_prior=fitted)
            mixed["switching (fitted prior)"] = mix(scores, mask, "fitted", switching, log_prior=fitted)
        mixtures += [Line(name, *figures(log_p.sum())) for name, log_p in mixed.items()]
    log_priors = updating_log_priors(History().block_evidence(scores, mask), DECAY)
    equal = np.full((len(mask), len(names)), -math.log(len(names)))
    evidence, _ = tempered.evidence(Chunk(scores, mask), tempered.begin(equal[0]))
    weights = np.exp(log_weights(equal, evidence))[mask].mean(axis=0)
    lines = tuple(
        ExpertLine(name, *figures(scores[..., number].sum()), float(weight), math.exp(log_posterior))
        for number, (name, weight, log_posterior) in enumerate(zip(names, weights, log_priors[-1], strict=True))
    )
    return OwnText(str(model), len(shard.offsets), tokens, size, len(mask), tuple(mixtures), lines)


def _scored(
    trunks: Sequence[GPT], text: Path, tokenizer: Path, limit: int | None = None
) -> tuple[TokenShard, np.ndarray, np.ndarray]:
    """The token shard of a text, its scores [B, T, E] in nats (0 at padding) and its mask [B, T]."""
    nothing = DemixError(text, "holds no text", "name a file that contains text")
    if not text.stat().st_size:
        raise nothing
    with TemporaryDirectory(prefix="demix.") as folder:
        raw, documents, shard_path = (Path(folder, name) for name in ("raw.parquet", "documents.parquet", "own.arrow"))
        source = text.resolve()
        if source.suffix.lower() not in STRUCTURED:
            source = Path(folder, f"{text.name}.txt")
            source.symlink_to(text.resolve())
        if not download(Source(kind="files", path=glob.escape(str(source))), "own", raw):
            raise nothing
        anonymize_documents(raw, documents, documents.with_suffix(".json"), enabled=False)
        tokenize(tokenizer, documents, shard_path)
        shard = TokenShard.open(shard_path)
    if not shard.document_bytes.sum():
        raise nothing
    inputs, targets, mask = blocks(shard, trunks[0].architecture.context, limit)
    with progress(f"{text.name}: tokens", len(trunks) * int(mask.sum())) as advance:
        log_p = trunk_log_probabilities(trunks, inputs, targets, mask, advance=advance)
    scores = np.zeros((*mask.shape, len(log_p)))
    scores[mask] = log_p.T
    return shard, scores, mask


def tables(result: OwnText) -> list["rich.table.Table"]:
    """Tables for the terminal: the mixtures, and the experts, best first. Each has its lowest perplexity in bold."""
    from rich.table import Column, Table

    def numbers(*heads: str) -> list[Column]:
        # A Column holds the cells of its table, so each table needs new columns.
        return [Column(head, justify="right") for head in ("perplexity", "bits per byte", *heads)]

    size = f"{result.tokens:,} tokens, {result.bytes:,} bytes, {result.documents:,} documents, {result.blocks:,} blocks"
    mixtures = Table("method", *numbers(), title=size, title_justify="left")
    least = min((line.perplexity for line in result.mixtures), default=None)
    for line in result.mixtures:
        mixtures.add_row(*_cells(line), style="bold" if line.perplexity == least else None)
    several = len(result.experts) > 1
    shown = numbers("weight", "posterior") if several else numbers()
    experts = Table("expert", *shown, title=None if several else size, title_justify="left")
    for line in sorted(result.experts, key=lambda line: line.perplexity):
        shares = [f"{line.weight:.3f}", f"{line.posterior:.3f}"] if several else []
        experts.add_row(*_cells(line), *shares, style="bold" if several and not experts.rows else None)
    if several:
        experts.caption = "weight: mean over all tokens by tempered; posterior: updating prior after the last block"
        experts.caption_justify = "left"
    return [mixtures, experts] if several else [experts]


def _cells(line: Line) -> tuple[str, str, str]:
    return line.name, f"{line.perplexity:.2f}", f"{line.bits_per_byte:.3f}"
