"""The audit of a removed domain: how much of its documents the model still continues verbatim.

Removing an expert does not remove the shared weights, which were also trained on the domain. A model has memorized
training documents if it continues them better than test documents of the same domain. If it does so without the expert,
the remaining weights have memorized them. Prompts come only from tokens that training has used, because a short
training does not use all tokens.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import torch

from demix.config.models import DENSE_EXPERT
from demix.config.training import Threads
from demix.data.order import seen_blocks
from demix.data.shards import TokenShard
from demix.errors import DemixError
from demix.evaluate.score_tables import tokens_sha256
from demix.files import read_json, write_parquet
from demix.mix.mixtures import Mixture
from demix.mix.rules import History
from demix.model.continuations import MixedModel
from demix.model.decode import generate, log_prior_of
from demix.model.device import own_device, set_threads
from demix.model.directory import describe, expert_lineage, load_experts, refuse_other_tokenizer
from demix.model.experts import load_without
from demix.model.gpt import GPT
from demix.model.merge import prior_weights
from demix.progress import progress
from demix.run.models import left_out, trained_without
from demix.settings import Items, Positive, Settings, Text

log = logging.getLogger(__name__)

PROMPT = CONTINUATION = 50
# The maximum number of logits, over all experts and texts, in memory at one time.
LOGITS_AT_ONCE = 1 << 26

COLUMNS = {
    "domain": pa.string(),
    "system": pa.string(),
    "model": pa.string(),
    "experts": pa.string(),
    "split": pa.string(),
    "document": pa.string(),
    "start": pa.int64(),
    "matched": pa.int32(),
    "share": pa.float64(),
    "nll": pa.float64(),
}


class Audit(Settings):
    """The models that an audit of a removed domain compares, by their folders below models/, and experts by name.

    `model` is the model with the experts `training`; the one that was trained without the domain has the experts
    `without`. `merged` are merged models, from which the domain's expert is also left out. `prompts` documents of
    train, and as many of test, are continued.
    """

    prompts: Positive = 20
    model: Text
    training: Items[Text]
    without: Items[Text]
    merged: Items[Text] = ()
    threads: Threads


def audit_domain(domain: str, models: Path, tokens: Path, priors: Path, audit: Audit, output: Path) -> None:
    """Write how much of a removed domain's documents is continued: one row per system, split and document.

    `tokens` is the domain's folder of shards, `priors` its cached priors. The splits are train, and test, which no
    system was trained on.

    Systems: `own`, only the domain's expert; `mixture`, all experts; `minus`, all experts except it; `without`, the
    model trained without the domain; `merged` and `merged_minus`, a merged model with and without the expert. Mixtures
    use the domain's cached prior. A prompt of 50 tokens is continued greedily by 50 tokens: `matched` counts the tokens
    before the first one that differs from the document, and `share` is the fraction of the 50 that are equal. `nll` is
    the negative log-likelihood of the document's own 50 tokens, in nats.
    """
    set_threads(audit.threads)
    merges = {"merged": "training", "merged_minus": left_out(domain)}
    rest = tuple(expert for expert in audit.training if expert != domain)
    every = [
        ("own", audit.model, "own", (domain,)),
        ("mixture", audit.model, "training", audit.training),
        ("minus", audit.model, left_out(domain), rest),
        ("without", trained_without(domain), "training", audit.without),
    ]
    for model in audit.merged:
        every += [(name, model, label, (DENSE_EXPERT,)) for name, label in merges.items()]
    systems = [parts for parts in every if parts[-1]]
    shards = {split: TokenShard.open(tokens / f"{split}.arrow", verify=True) for split in ("train", "test")}
    excerpts = {split: _excerpts(domain, models / audit.model, one, audit.prompts) for split, one in shards.items()}
    tables = []
    prompts = len(systems) * sum(len(about) for about, _ in excerpts.values())
    with progress(f"{domain}: prompts", prompts) as advance:
        for system, model, label, experts in systems:
            weights = {experts[0]: 1.0} if len(experts) == 1 else prior_weights(priors, model, domain, label)
            if system == "merged_minus":
                trunks: Sequence[GPT] = [load_without(models / model, domain).to(own_device())]
            else:
                trunks = load_experts(models / model, experts, own_device())
            log_prior = log_prior_of(experts, weights)
            for split, (about, pieces) in excerpts.items():
                same, nll = _continued(trunks, log_prior, pieces, advance)
                rows = about.assign(nll=nll, matched=same.cumprod(1).sum(1), share=same.mean(1))
                tables.append(rows.assign(domain=domain, system=system, model=model, experts=label, split=split))
            # Two systems never need memory at the same time.
            del trunks
    table = pa.Table.from_pandas(pd.concat(tables), pa.schema(COLUMNS), preserve_index=False)
    write_parquet(table, output)
    log.info("%s: %d rows", domain, len(table))


def _continued(
    trunks: Sequence[GPT], log_prior: np.ndarray, pieces: torch.Tensor, advance: Callable[[int], None]
) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens of the greedy continuations equal the documents' [N, C], and the nll of the documents' tokens [N].

    `pieces` are those of `_excerpts`.
    """
    mixture, same, nll = MixedModel(trunks, Mixture(History(), log_prior)), [], []
    batch = max(1, LOGITS_AT_ONCE // (trunks[0].vocab_size * len(log_prior)))
    for ids in torch.split(pieces, batch):
        before, prompts, wanted = ids[:, 0], ids[:, 1 : PROMPT + 1], ids[:, PROMPT + 1 :]
        drawing, reading = mixture.decoder(before), mixture.decoder(before)
        for decoder in (drawing, reading):
            decoder.read(prompts)
        same.append(torch.cat([token for token, _, _ in generate(drawing, CONTINUATION, temperature=0)], 1) == wanted)
        scores, log_weights = reading.read(wanted)
        nll.append(-(log_weights + scores.permute(1, 2, 0)).logsumexp(-1).sum(1))
        advance(len(before))
    return torch.cat(same).numpy(), torch.cat(nll).numpy()


def _excerpts(domain: str, directory: Path, shard: TokenShard, count: int) -> tuple[pd.DataFrame, torch.Tensor]:
    """An excerpt of each of `count` documents: those with the smallest sha256 among documents with a usable excerpt.

    Returns the sha256 of each document's tokens and the excerpt's position in it (`document`, `start`), and the token
    before each excerpt with its PROMPT + CONTINUATION tokens [N, 1 + P + C].
    In train, an excerpt is usable if it is in blocks on which the model in `directory` was trained. The sha256 also
    chooses the excerpt of a document. If there are fewer than `count`, logs a warning.
    """
    refuse_other_tokenizer(directory, shard.path, shard.tokenizer_sha256, shard.vocab_size)
    described = describe(directory, "training")
    length = described.architecture.context
    seen = np.ones(-(-len(shard) // length), bool)
    if shard.path.stem == "train":
        lineage = expert_lineage(directory, domain, "tokens")
        read, taught = read_json(shard.path.with_suffix(".json"))["sha256"], lineage.data_sha256.get(domain)
        if taught not in (None, read):
            cause = f"is not the text that the expert {domain} was trained on"
            raise DemixError(shard.path, cause, "tokenize the domain or train the model again")
        assert described.training is not None
        assert lineage.tokens is not None
        trained = seen_blocks(shard, domain, length, described.training.seed, lineage.tokens // length)
        seen[:] = False
        seen[: len(trained)] = trained
    size = PROMPT + CONTINUATION
    ends = np.append(shard.offsets[1:], len(shard))
    # The first id of a document is <|endoftext|>.
    places = zip((shard.offsets + 1).tolist(), ends.tolist(), strict=True)
    hashed = sorted((tokens_sha256(shard.read(start, end)), start, end) for start, end in places if end - start >= size)
    missed = np.append(0, np.cumsum(~seen))
    rows: list[tuple[str, int]] = []
    pieces = [np.zeros((0, size + 1), np.int64)]
    for sha256, start, end in hashed:
        if len(rows) == count:
            break
        firsts = np.arange(start, end - size + 1)
        firsts = firsts[missed[(firsts + size - 1) // length + 1] == missed[firsts // length]]
        if len(firsts):
            first = int(firsts[int(sha256[:15], 16) % len(firsts)])
            rows.append((sha256, first - start))
            pieces.append(shard.read(first - 1, first + size)[None].astype(np.int64))
    if len(rows) < count:
        log.warning("%s: only %d documents have the needed %d tokens", shard.path, len(rows), size)
    return pd.DataFrame(rows, columns=["document", "start"]), torch.from_numpy(np.concatenate(pieces))
