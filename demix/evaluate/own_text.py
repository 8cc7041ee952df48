"""The evaluation of a user's own text under every expert and every mixture of a model."""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from demix.config.addresses import refuse_not_utf8
from demix.config.evaluation import DECAY
from demix.config.files import hidden, readable, suffixes
from demix.config.models import KINDS
from demix.data.anonymize import anonymize_documents
from demix.data.readers import MAX_DOCUMENT_BYTES, SURROGATE, TO_UTF8
from demix.data.shards import TokenShard, blocks, tokenize
from demix.data.sources import Source, download
from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError
from demix.evaluate.choice import mixing_of
from demix.evaluate.score_tables import ScoreTable
from demix.files import read_parquet
from demix.files.kinds import TEXT, check_file_kind
from demix.mix.mixtures import Mixture
from demix.mix.rules import Cluster, History, PriorAlone
from demix.model.clusters import clusters_of, has_clusters
from demix.model.directory import CPU, load_experts, refuse_masked, tokenizer_of
from demix.model.experts import usual_of
from demix.model.gpt import GPT
from demix.model.manifest import Usual
from demix.model.scoring import columns_of, trunk_log_probabilities
from demix.progress import progress
from demix.run.run import Run

# In the sample, the best expert needs more than this multiple of its usual bits per byte on 2% of the test documents of
# the model's training domains, and on 57% of those of other domains.
UNLIKE = 1.25
DENSE_OF_RUN, TEMPERED = "dense model of the run", "tempered (uniform prior)"
# For 84 texts outside the domains of the sample's experts, the best expert of the first 200 tokens is that of the whole
# text in 89% of cases, that of the first 50 in 60%. (For texts of their domains, 25 tokens give the domain in 96%.)
FEW_TOKENS = 200
NO_TEXT = ("holds no text", "name a file that contains text")


@dataclass(frozen=True)
class Line:
    """The perplexity of the text, and its bits per byte of UTF-8, under one expert or one mixing method (`name`)."""

    name: str
    perplexity: float
    bits_per_byte: float


@dataclass(frozen=True)
class ExpertLine(Line):
    """The results of a single expert, and its weights in mixtures.

    `behind` is the expert's loss minus the best expert's loss, in nats per token (0 for the best). `usual` are the
    expert's results on its own domain (`demix.model.experts.usual_of`), None if they are unknown. `weight` is the mean
    of the expert's `tempered` weight over all tokens. `posterior` is the expert's updating prior after the text (paper,
    Eq. 7): the probability, among these experts, that the text is from the expert's domain.
    """

    behind: float
    usual: Usual | None
    weight: float
    posterior: float


@dataclass(frozen=True)
class OwnText:
    """The result of `evaluate_text`: sizes of the text, and results of mixtures (none for one expert) and experts.

    The mixtures include the dense model of the model's run, if there is one. `unlike` says whether the best expert
    needs more than `UNLIKE` times its usual bits per byte; None if its usual bits per byte are unknown. `text` names
    the text.
    """

    model: str
    text: str
    documents: int
    tokens: int
    bytes: int
    blocks: int
    mixtures: tuple[Line, ...]
    experts: tuple[ExpertLine, ...]
    unlike: bool | None

    @property
    def by_mixture(self) -> dict[str, float]:
        """The perplexity of each mixture, by name."""
        return {line.name: line.perplexity for line in self.mixtures}

    @property
    def ranked(self) -> list[ExpertLine]:
        """The experts by increasing perplexity."""
        return sorted(self.experts, key=lambda line: line.perplexity)


def evaluate_text(model: Path, text: Path, tokenizer: Path | None = None) -> OwnText:
    """The results for one text; see `evaluate_texts`."""
    (found,) = evaluate_texts(model, [text], tokenizer)
    if isinstance(found, DemixError):
        raise found
    return found


def evaluate_texts(
    model: Path, texts: Sequence[Path], tokenizer: Path | None = None, field: str = "text"
) -> Iterator[OwnText | DemixError]:
    """Perplexity and bits per byte of each of `texts` under each expert of `model` and each mixing method.

    The model is loaded once. A text is read, tokenized and cut into blocks like the text of a domain, but it is not
    anonymized. A file whose name gives no format is one document of plain text. All experts score a text in one pass;
    experts that are whole models do so one after the other. `tempered`, with the model's parameters, is the default
    rule; `cluster` is added if the model's run has a clustering; the paper's mixtures use the rule `history` and the
    decay DECAY. `field` is the field with the text in a file of records.

    In a folder all files are read. A stream (a pipe, or `-`, standard input) is read like a file of plain text, up to
    the size limit of one document. Raises DemixError if the tokenizer is not the model's, or if the only text is
    missing or cannot be read. If there are several texts, such an error is yielded instead; its subject is the file.
    """
    refuse_masked(model, "scores only masked text")
    place, _ = tokenizer_of(model, tokenizer)
    files = files_of(texts)
    for file in files:
        refuse_not_utf8(file)
    judge = Judge(model, load_experts(model), place)
    for text in files:
        try:
            shard = judge.read(text, field)
        except DemixError as error:
            if files == [*texts] and len(files) == 1:
                raise
            yield error.but(text)
            continue
        yield judge.result(text, shard)


class Judge:
    """The `trunks` of the model in the folder `model`, and the dense model with which their results are compared.

    That is the dense model of the run, loaded to `device`. A text is a file, a stream, or a string (one document).
    """

    def __init__(self, model: Path, trunks: list[GPT], tokenizer: Path, device: torch.device = CPU) -> None:
        self.model, self.trunks, self.tokenizer = model, trunks, tokenizer
        place = _dense_of(model) if len(columns_of(trunks)) > 1 else None
        self.dense = load_experts(place, device=device) if place else None
        self.usual, self.tempered = usual_of(model), mixing_of(model)

    def read(self, text: Path | str, field: str = "text") -> TokenShard:
        """The tokens of a text. Raises DemixError if it cannot be read or is empty."""
        named = _named(text)
        once = isinstance(text, str) or is_stream(named)
        with TemporaryDirectory(prefix="demix.") as folder:
            raw, documents = Path(folder, "raw.parquet"), Path(folder, "documents.parquet")
            shard_path = Path(folder, "own.arrow")
            try:
                raw_text([_kept(text, Path(folder)) if once else named], field, "own", raw)
            except DemixError as error:
                # The error must have the stream's name that the user gave, not the name of the temporary file.
                raise (error.but(named) if once else error) from None
            anonymize_documents(raw, documents, documents.with_suffix(".json"), enabled=False)
            tokenize(self.tokenizer, documents, shard_path)
            shard = TokenShard.open(shard_path)
        if not shard.document_bytes.sum():
            raise DemixError(named, *NO_TEXT)
        return shard

    def mixed(self, shard: TokenShard, table: ScoreTable) -> dict[str, np.ndarray]:
        """log p [B, T] of a text under each mixture, by name."""
        scores, mask, names = table.scores, table.mask, table.experts
        uniform = np.full(len(names), -np.log(len(names)))
        mixtures = {TEMPERED: Mixture(self.tempered, uniform), "average": Mixture(PriorAlone(), uniform)}
        mixtures |= {"uniform": Mixture(History(), uniform), "updating": Mixture(History(), uniform, DECAY)}
        mixed = {name: one.table(scores, mask) for name, one in mixtures.items()}
        if has_clusters(self.model) and {*names} <= {*(clusters := clusters_of(self.model)).open().names}:
            rule, far = Cluster(clusters.temperature), np.zeros_like(scores)
            far[mask] = clusters.distances(names, Tokenizer.load(self.tokenizer), shard, scores.shape[1])
            mixed["cluster (uniform prior)"] = Mixture(rule, uniform).table(scores, mask, far)
        return mixed

    def result(self, text: Path | str, shard: TokenShard) -> OwnText:
        """The results for a text, whose tokens are in `shard`."""
        text = _named(text)
        table = _scored(self.trunks, shard, text.name)
        scores, mask, names = table.scores, table.mask, table.experts
        mixed = self.mixed(shard, table) if len(names) > 1 else {}
        totals = scores.sum(axis=(0, 1))
        best = int(totals.argmax())
        if self.dense is not None:
            mixed[DENSE_OF_RUN] = _scored(self.dense, shard, text.name).scores
        size, tokens = int(shard.document_bytes.sum()), table.tokens

        def figures(log_p: float) -> tuple[float, float]:
            with np.errstate(over="ignore"):
                return float(np.exp(-log_p / tokens)), float(-log_p / math.log(2) / size)

        mixtures = [Line(f"best single ({names[best]}), an oracle", *figures(totals[best]))] if mixed else []
        mixtures += [Line(name, *figures(log_p.sum())) for name, log_p in mixed.items()]
        equal = np.full(len(names), -math.log(len(names)))
        weights = np.exp(Mixture(self.tempered, equal).weights(scores, mask))[mask].mean(axis=0).tolist()
        posterior = np.exp(History().log_priors(scores, mask, DECAY)[-1]).tolist()
        behind = ((totals.max() - totals) / tokens).tolist()
        lines = tuple(
            ExpertLine(name, *figures(totals[number]), *shares)
            for number, (name, *shares) in enumerate(
                zip(names, behind, map(self.usual.get, names), weights, posterior, strict=True)
            )
        )
        first = lines[best]
        unlike = None if first.usual is None else first.bits_per_byte > UNLIKE * first.usual.bits_per_byte
        sizes = (len(shard.offsets), tokens, size, len(mask))
        return OwnText(str(self.model), str(text), *sizes, tuple(mixtures), lines, unlike)


def _dense_of(model: Path) -> Path | None:
    """The dense model with the same run and random seed as `model`, which differs from it only in the experts.

    It is the first one with the same architecture, optimizer and start. None if the run has no such dense model, if the
    model is not in a run, and for the dense model itself.
    """
    place, whole = model.resolve(), Run.of_model(model)
    if whole is None:
        return None
    own = next((one.base for one in whole.planned if one.name == place.name), whole.rows["dense"])
    recipe = attrgetter("architecture.unrouted", "settings.optimizer", "initial")
    rows = (row for row in whole.rows.values() if row.kind == KINDS["dense"] and recipe(row) == recipe(own))
    if (alike := next(rows, None)) is None:
        return None
    dense = place.with_name(whole.folder_of(alike.name, whole.row_of(place.name)[1]))
    # Training writes the description of an expert last.
    return dense if dense != place and (dense / "experts" / "dense.json").is_file() else None


def raw_text(texts: Sequence[Path], field: str, domain: str, output: Path) -> None:
    """Write the documents of the files `texts` to the Parquet file `output`, as `demix.data.sources.download` does.

    Raises DemixError for a file that is missing, a folder or not text, and if no file has a document.
    """
    for text in texts:
        _check_file(text)
    if not download(Source(path=tuple(map(str, texts)), text=field), domain, output):
        left_out = read_parquet(output, columns=[]).schema.metadata[b"not_utf8"]
        fault = NO_TEXT if left_out == b"0" else ("is not UTF-8", f"convert it, from Latin-1 by {TO_UTF8}")
        raise DemixError(", ".join(map(str, texts)), *fault)


def files_of(texts: Sequence[Path]) -> list[Path]:
    """`texts`, each folder replaced by its files that are not `hidden`.

    Raises DemixError for a folder without such files.
    """
    found = []
    for text in texts:
        below = sorted(text.rglob("*")) if text.is_dir() else []
        inside = [path for path in below if path.is_file() and not hidden(str(path.relative_to(text)))]
        if text.is_dir() and not inside:
            raise DemixError(text, "holds no file", "name a folder with text files")
        found += inside or [text]
    return found


def whole_text(text: str | Path) -> str:
    """The text of a string, or of a file of plain text. Raises DemixError for a file of anything else."""
    file = _named(text)
    if isinstance(text, str):
        if SURROGATE.search(text):
            raise DemixError("text", "is not UTF-8", "give it in UTF-8")
        return text
    _check_file(file)
    if readable(file.name) and suffixes(file.name) != [".txt"]:
        raise DemixError(file, "holds several documents, not one text", "give one of them as a string")
    check_file_kind(file, TEXT)
    try:
        return file.read_bytes().decode()
    except UnicodeDecodeError:
        raise DemixError(file, "is not UTF-8", f"convert it, from Latin-1 by {TO_UTF8}") from None


def _named(text: Path | str) -> Path:
    """The name of a text as a path. Raises DemixError if it is neither a string nor a path."""
    if not isinstance(text, str | Path):
        raise DemixError("text", f"is of the type {type(text).__name__}", "give a string, or a Path for a file")
    return Path("text") if isinstance(text, str) else text


def is_stream(text: Path) -> bool:
    """Whether a text can be read only once, from beginning to end: standard input, a pipe or a device."""
    return str(text) == "-" or (text.exists() and not text.is_file() and not text.is_dir())


def _kept(stream: Path | str, folder: Path) -> Path:
    """A file in `folder` with the bytes of a stream, or of a string.

    Raises DemixError if it exceeds the size limit of a document.
    """
    if isinstance(stream, str):
        content = whole_text(stream).encode()
    else:
        with sys.stdin.buffer if str(stream) == "-" else stream.open("rb") as source:
            content = source.read(MAX_DOCUMENT_BYTES + 1)
    if len(content) > MAX_DOCUMENT_BYTES:
        raise DemixError(_named(stream), "is over 128 MiB long", "give a part of it")
    kept = folder / "stream"
    kept.write_bytes(content)
    return kept


def _check_file(file: Path) -> None:
    """Raise DemixError unless `file` is a file."""
    if not file.is_file():
        raise DemixError(file, "is not a file" if file.exists() else "is missing", "name a text file")


def _scored(trunks: Sequence[GPT], shard: TokenShard, name: str) -> ScoreTable:
    """The scores of a text. `name` is for the progress bar."""
    inputs, targets, mask = blocks(shard, trunks[0].architecture.context)
    with progress(f"{name}: tokens", len(trunks) * int(mask.sum())) as advance:
        log_p = trunk_log_probabilities(trunks, inputs, targets, mask, advance=advance)
    scores = np.zeros((*mask.shape, len(log_p)))
    scores[mask] = log_p.T
    return ScoreTable(scores, mask, columns_of(trunks))
