"""The evaluation of a user's own text under every expert and every mixture of a model."""

import codecs
import glob
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from demix.config.evaluation import DECAY
from demix.config.run import read_run_config
from demix.config.systems import folder_of, row_of
from demix.data.anonymize import anonymize_documents
from demix.data.shards import TokenShard, blocks, tokenize
from demix.data.sources import Source, download
from demix.errors import DemixError
from demix.evaluate.mix.choice import mixing_of, switching_on_dev
from demix.evaluate.mix.mixtures import log_weights, mix
from demix.evaluate.mix.priors import cached_log_prior, fitted_log_prior, updating_log_priors
from demix.evaluate.mix.rules import Chunk, Cluster, History
from demix.evaluate.score_tables import ScoreTable
from demix.model.checkpoint import load_experts, refuse_masked
from demix.model.clusters import clusters_of, has_clusters
from demix.model.description import Usual, run_of
from demix.model.gpt import GPT
from demix.model.scoring import columns_of, trunk_log_probabilities
from demix.model.tokenizer import tokenizer_of
from demix.model.usual import usual_of
from demix.progress import progress

if TYPE_CHECKING:
    import rich.table

# The number of dev blocks that the paper uses for the cached prior.
DEV_BLOCKS = 100
# In the sample, the best expert needs more than this many times its usual bits per byte on 2% of the test documents of
# the domains that its model has learned, and on 57% of those of other domains.
UNLIKE = 1.25
DENSE_OF_RUN = "dense model of the run"
NO_TEXT = ("holds no text", "name a file that contains text")
# A file with any other suffix is one document of plain text.
PLAIN = {".jsonl", ".json", ".csv", ".txt"}
STRUCTURED = PLAIN | {".parquet", ".zip", ".tar", ".tgz", ".gz", ".zst"}


@dataclass(frozen=True)
class Line:
    """The perplexity of the text, and its bits per byte of UTF-8, under one expert or one mixing method (`name`)."""

    name: str
    perplexity: float
    bits_per_byte: float


@dataclass(frozen=True)
class ExpertLine(Line):
    """The figures of one expert alone, and its weights in mixtures.

    `behind` are the nats per token that the expert needs beyond those of the best expert (0 for the best). `usual` are
    the expert's figures on its own domain (`demix.model.usual`), None where they are unknown. `weight` is the mean of
    the expert's `tempered` weight over all tokens. `posterior` is the expert's updating prior after the text (paper,
    Eq. 7): the probability, among these experts, that the text is of the expert's domain.
    """

    behind: float
    usual: Usual | None
    weight: float
    posterior: float


@dataclass(frozen=True)
class OwnText:
    """The result of `evaluate_text`: sizes of the text, and figures of mixtures (none for one expert) and experts.

    The mixtures include the dense model of the model's run, where there is one. `unlike` says whether the best expert
    needs more than `UNLIKE` times its usual bits per byte, None where those are unknown.
    """

    model: str
    documents: int
    tokens: int
    bytes: int
    blocks: int
    mixtures: tuple[Line, ...]
    experts: tuple[ExpertLine, ...]
    unlike: bool | None

    @property
    def ranked(self) -> list[ExpertLine]:
        """The experts, the one of the lowest perplexity first."""
        return sorted(self.experts, key=lambda line: line.perplexity)


def evaluate_text(
    model: Path, text: Path, tokenizer: Path | None = None, dev: Path | None = None, field: str = "text"
) -> OwnText:
    """Perplexity and bits per byte of `text` under each expert of `model` and under each method that mixes them.

    The text is read, tokenized and cut into blocks like the text of a domain, but it is not anonymized. A file whose
    format is not among STRUCTURED is one document of plain text. All experts score the text in one pass; experts that
    are whole models do so one after the other. `tempered`, with the model's parameters, is the default rule; `cluster`
    is there where the model's run has a clustering; the paper's mixtures use `history` weights and the decay DECAY.
    `field` holds the text in a file of records.

    With `dev`, a text from the same domain, the mixtures include the cached and fitted priors of its first DEV_BLOCKS
    blocks, and `switching`. Raises DemixError if a file is missing or holds no text, or if the tokenizer is not the
    model's.
    """
    refuse_masked(model, "says nothing of a text that is not masked")
    tokenizer, encoder = tokenizer_of(model, tokenizer)
    for file in (text, *([dev] if dev else [])):
        _refuse_unreadable(file)
    loaded = load_experts(model, hold=False)
    names = columns_of(loaded)
    shard = _tokenized(text, tokenizer, field)
    scores, mask = _scored(loaded, shard, text.name)
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
        if has_clusters(model) and {*names} <= {*(clusters := clusters_of(model)).open().names}:
            rule, far = Cluster(clusters.temperature), np.zeros_like(scores)
            far[mask] = clusters.distances(names, encoder, shard, scores.shape[1])
            mixed["cluster (uniform prior)"] = mix(scores, mask, "uniform", rule, distances=far)
        if dev is not None:
            shard_dev = _tokenized(dev, tokenizer, field)
            before, known = _scored(loaded, shard_dev, dev.name, DEV_BLOCKS * scores.shape[1])
            cached = cached_log_prior(before, known, "history", decay=DECAY, blocks=DEV_BLOCKS)
            fitted = fitted_log_prior(before, known)
            table = ScoreTable(before, known, names, len(shard_dev.offsets), "")
            switching = switching_on_dev(table, fitted)
            mixed["cached"] = mix(scores, mask, "cached", log_prior=cached)
            mixed["fitted"] = mix(scores, mask, "fitted", "", log_prior=fitted)
            mixed["switching (fitted prior)"] = mix(scores, mask, "fitted", switching, log_prior=fitted)
        if (dense := _dense_of(model)) is not None:
            mixed[DENSE_OF_RUN], _ = _scored(load_experts(dense), shard, text.name)
        mixtures += [Line(name, *figures(log_p.sum())) for name, log_p in mixed.items()]
    log_priors = updating_log_priors(History().block_evidence(scores, mask), DECAY)
    equal = np.full((len(mask), len(names)), -math.log(len(names)))
    evidence, _ = tempered.evidence(Chunk(scores, mask), tempered.begin(equal[0]))
    weights = np.exp(log_weights(equal, evidence))[mask].mean(axis=0)
    totals, usual = scores.sum(axis=(0, 1)), usual_of(model)
    lines = tuple(
        ExpertLine(
            name, *figures(total), float(totals.max() - total) / tokens, usual.get(name), float(weight),
            math.exp(log_posterior),
        )
        for name, total, weight, log_posterior in zip(names, totals, weights, log_priors[-1], strict=True)
    )  # fmt: skip
    first = lines[int(totals.argmax())]
    return OwnText(
        str(model),
        len(shard.offsets),
        tokens,
        size,
        len(mask),
        tuple(mixtures),
        lines,
        None if first.usual is None else first.bits_per_byte > UNLIKE * first.usual.bits_per_byte,
    )


def _dense_of(model: Path) -> Path | None:
    """The dense model of the same run and seed as `model`; None for a model in no run, and for that model itself."""
    place, run = model.resolve(), run_of(model)
    if place.parent.name != "models" or not (run / "config.json").is_file():
        return None
    config = read_run_config(run)
    dense = place.with_name(folder_of("dense", row_of(place.name, config)[1], config["seed"]))
    # The description of an expert is what training writes last.
    return dense if dense != place and (dense / "experts" / "dense.json").is_file() else None


def raw_text(texts: Sequence[Path], field: str, domain: str, output: Path) -> None:
    """Write the documents of the files `texts` to the Parquet file `output`, as `demix.data.sources.download` does.

    A file whose format is not among STRUCTURED is one document of plain text. Raises DemixError for a file that is
    missing, a folder or no text, and where no file holds a document.
    """
    links = output.with_suffix(".texts")
    links.mkdir()
    paths = []
    for number, text in enumerate(texts):
        _refuse_unreadable(text)
        paths.append(text.resolve())
        if paths[-1].suffix.lower() not in STRUCTURED:
            paths[-1] = links / f"{number}.{text.name}.txt"
            paths[-1].symlink_to(text.resolve())
    filled = tuple(glob.escape(str(path)) for path in paths if path.stat().st_size)
    if not filled or not download(Source(kind="files", path=filled, text=field), domain, output):
        raise DemixError(", ".join(map(str, texts)), *NO_TEXT)


def _tokenized(text: Path, tokenizer: Path, field: str) -> TokenShard:
    """The token shard of a text."""
    with TemporaryDirectory(prefix="demix.") as folder:
        raw, documents, shard_path = (Path(folder, name) for name in ("raw.parquet", "documents.parquet", "own.arrow"))
        raw_text([text], field, "own", raw)
        anonymize_documents(raw, documents, documents.with_suffix(".json"), enabled=False)
        tokenize(tokenizer, documents, shard_path)
        shard = TokenShard.open(shard_path)
    if not shard.document_bytes.sum():
        raise DemixError(text, *NO_TEXT)
    return shard


def _refuse_unreadable(file: Path) -> None:
    """Raise DemixError unless `file` is a file, and, where it is plain text, UTF-8."""
    if file.is_dir():
        raise DemixError(file, "is a folder", "name one file of text in it")
    if not file.is_file():
        raise DemixError(file, "is missing", "correct its name")
    with file.open("rb") as stream:
        head = stream.read(1000)
    # Files of other formats have zeros of their own.
    plain = file.suffix.lower() in PLAIN or file.suffix.lower() not in STRUCTURED
    if head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) or (plain and b"\0" in head):
        raise DemixError(file, "is UTF-16 or no text, not UTF-8", "convert it: iconv -f UTF-16 -t UTF-8 OLD > NEW")


def _scored(
    trunks: Sequence[GPT], shard: TokenShard, name: str, limit: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The scores [B, T, E] of a text in nats (0 at padding) and its mask [B, T]. `name` is for the progress bar."""
    inputs, targets, mask = blocks(shard, trunks[0].architecture.context, limit)
    with progress(f"{name}: tokens", len(trunks) * int(mask.sum())) as advance:
        log_p = trunk_log_probabilities(trunks, inputs, targets, mask, advance=advance)
    scores = np.zeros((*mask.shape, len(log_p)))
    scores[mask] = log_p.T
    return scores, mask


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
    shown = numbers("usual", "behind", "weight", "posterior") if several else numbers()
    experts = Table("expert", *shown, title=None if several else size, title_justify="left")
    for line in result.ranked:
        usual = "unknown" if line.usual is None else f"{line.usual.perplexity:.2f}"
        more = [usual, f"{line.behind:.3f}", f"{line.weight:.3f}", f"{line.posterior:.3f}"] if several else []
        experts.add_row(*_cells(line), *more, style="bold" if several and not experts.rows else None)
    return [mixtures, experts] if several else [experts]


def remarks(result: OwnText) -> list[str]:
    """What the columns of the experts' table mean, who is ahead, and a warning where the text is unlike all domains."""
    if len(result.experts) < 2:
        return []
    first, second, *_ = result.ranked
    said = [
        "usual: the expert's perplexity on test text of its own domain; behind: nats per token more than the best "
        "expert needs; weight: mean over all tokens by tempered; posterior: probability, among these experts, that the "
        "text is of the expert's domain (updating prior after the last block).",
        f"{first.name} is {second.behind:.3f} nats per token ahead of {second.name}.",
    ]
    if result.unlike is None:
        said.append(f"Whether the text is like that of {first.name} is unknown: it has no figures on its own domain.")
    elif result.unlike and first.usual:
        said.append(
            f"WARNING: the text is unlike the text of all these experts. {first.name}, the best of them, needs "
            f"{first.bits_per_byte:.2f} bits per byte, and {first.usual.bits_per_byte:.2f} on its own domain: more "
            f"than {UNLIKE} times as many."
        )
    return said


def _cells(line: Line) -> tuple[str, str, str]:
    return line.name, f"{line.perplexity:.2f}", f"{line.bits_per_byte:.3f}"
