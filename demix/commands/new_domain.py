"""Train and measure an expert of a new domain for a model in any folder, from text files and without a run."""

import dataclasses
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from demix.config.adaptation import PARENT_BLOCKS, PASSES, AdaptationRecipe, RateFactors
from demix.config.domains import Budget
from demix.config.evaluation import DECAY
from demix.config.models import DENSE_EXPERT
from demix.config.training import OptimizerRecipe, selected
from demix.data.anonymize import anonymize_documents
from demix.data.corpus import Splitting, mark_duplicates, split
from demix.data.shards import tokenize
from demix.errors import DemixError, StoppedError
from demix.evaluate.choice import choose_parent
from demix.evaluate.own_text import OwnText, evaluate_text, raw_text
from demix.evaluate.score import Scoring, score_models
from demix.files import read_json, refuse_used, replacing, scratch, write_json
from demix.launch.job import Places
from demix.model.clusters import copy_clusters
from demix.model.directory import copy_tokenizer, describe, expert_lineage, expert_names, refuse_masked, tokenizer_of
from demix.model.experts import refuse_name, usual_of, write_usual
from demix.model.manifest import Usual
from demix.run.run import Run
from demix.run.scoring import ScoringPart
from demix.settings import settings_from
from demix.train.adapt import Adaptation, adapt

# A file is cut into documents of this many words, which are then divided into train, dev and test.
DOCUMENT_WORDS = 250
# Assumed training tokens of a model that does not record them. Their number per expert bounds the new expert's.
TOKENS = 10_000_000
# The peak learning rate for a model that does not record its own.
LEARNING_RATE = 1e-4
# Dev decides when training stops, test measures the result. Each gets this fraction of the words.
HELD_OUT = 0.1


@dataclasses.dataclass(frozen=True)
class Added:
    """The start of the expert, its peak learning rate, and the model's scores on held-out text before and after.

    The learning rate is None if the settings give it as a fraction of the model's.
    """

    begun: str
    learning_rate: float | None
    before: OwnText
    after: OwnText


def add_domain(
    model: Path,
    domain: str,
    texts: Sequence[Path],
    output: Path,
    field: str = "text",
    tokens: int | None = None,
    learning_rate: float | None = None,
) -> Added:
    """Write a copy of `model` to `output` that has one more expert: DEMix-DAPT on `texts` (paper, section 6).

    A dense model becomes the expert `dense`, and the new expert is its second one.

    The text is anonymized, cut into documents of 250 words and divided into train, dev and test. The new expert starts
    as a copy of the expert with the highest posterior on dev. If experts are whole models, it starts as their average,
    weighted by the posterior. `tokens` (maximum of training tokens) and `learning_rate` (the peak) override the
    settings of `adaptation_of`. Raises DemixError, without writing `output`, if the name is in use, the model is a
    domain-token model, or the text is too short.
    """
    refuse_used(output)
    refuse_name(model, domain)
    refuse_masked(model, "scores only masked text")
    described, experts = describe(model), expert_names(model)
    if described.domain_tokens:
        raise DemixError(model, "is a domain-token model, which cannot get an expert", "choose another model")
    tokenizer, _ = tokenizer_of(model)
    adaptation = adaptation_of(model, tokens, learning_rate)
    with scratch(output) as folder:
        shards, test = _tokens(domain, texts, tokenizer, field, folder)
        part, scores = ScoringPart(model.resolve().name, experts, (domain,), ("dev",)), folder / "scores"
        scoring = Scoring(models=(part,), dev_blocks=PARENT_BLOCKS, threads=adaptation.threads)
        score_models(model.resolve().parent, [shards[1]], scoring, scores, folder / "scores.json")
        chosen = choose_parent(scores / part.folder, domain, experts, blocks=PARENT_BLOCKS, decay=DECAY)
        before = evaluate_text(model, test, tokenizer)
        with replacing(output.resolve(), directory=True) as made:
            shutil.copytree(model, made, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*", "README.md"))
            copy_tokenizer(tokenizer, made, described.tokenizer_sha256)
            copy_clusters(model, made)
            if experts == (DENSE_EXPERT,):
                write_json(made / "model.json", described.content | {"kind": "demix"})
            try:
                places = Places(made, folder / "metrics.jsonl", folder / "states")
                adapt(model, shards, adaptation, places, chosen=chosen)
            except StoppedError:
                raise KeyboardInterrupt from None
            after = evaluate_text(made, test, tokenizer)
            own = next(line for line in after.experts if line.name == domain)
            usual = Usual(perplexity=own.perplexity, bits_per_byte=own.bits_per_byte)
            write_usual(made, usual_of(model) | {domain: usual})
            parent = expert_lineage(made, domain).parent
    begun = f"a copy of {parent}" if parent else "the average of the others, weighted by posterior"
    return Added(begun, adaptation.learning_rate, before, after)


def adaptation_of(model: Path, tokens: int | None = None, learning_rate: float | None = None) -> Adaptation:
    """The settings of an adaptation of `model`: from its run, else from an expert that was added before, else defaults.

    A sweep of learning rates is dropped. If `tokens` is given, the limit on passes over the text is dropped, too. The
    default learning rate of a model that demix has not trained is `LEARNING_RATE`.
    """
    trained = describe(model).content.get("training") or {}
    given: dict[str, Any] = {"learning_rate_factor": RateFactors().demix}
    for name in expert_names(model):
        given |= read_json(model / "experts" / f"{name}.json").get("adaptation") or {}
    if whole := Run.of_model(model):
        row = whole.row_of(model.resolve().name)[0]
        parent = next((one for one in whole.planned if one.name == row), None)
        given = selected(AdaptationRecipe, whole.config.adaptation)
        if parent is not None:
            given |= selected(OptimizerRecipe, parent.settings)
            given["learning_rate_factor"] = whole.learning_rate_factor(parent)
    if "tokens" not in given:
        share = max(1, trained.get("tokens", TOKENS) // len(expert_names(model)))
        given = {"tokens": share, "passes": PASSES} | given
    given |= {"seed": trained.get("seed", 1), "threads": trained.get("threads", 1), "sweep": None}
    given |= {"tokens": tokens, "passes": None} if tokens else {}
    if learning_rate or not trained:
        given |= {"learning_rate": learning_rate or given.get("learning_rate") or LEARNING_RATE}
    return settings_from(Adaptation, given)


def _tokens(
    domain: str, texts: Sequence[Path], tokenizer: Path, field: str, folder: Path
) -> tuple[tuple[Path, Path], Path]:
    """Write token shards of the train and dev split of `texts` below `folder`; return them and the test documents."""
    documents, owners, parts = (folder / f"{name}.parquet" for name in ("documents", "owners", "raw"))
    raw_text(texts, field, domain, parts)
    anonymize_documents(parts, documents, documents.with_suffix(".json"), document_words=DOCUMENT_WORDS)
    mark_duplicates({domain: [documents]}, owners)
    words = max(1, math.ceil(HELD_OUT * read_json(documents.with_suffix(".json"))["words"]))
    splitting = Splitting(words=Budget(dev=words, test=words), training=True, seed=1)
    split(domain, [documents], owners, splitting, folder / "corpus")
    shards = [folder / "tokens" / domain / f"{name}.arrow" for name in ("train", "dev")]
    for shard in shards:
        tokenize(tokenizer, folder / "corpus" / f"{shard.stem}.parquet", shard)
    return (shards[0], shards[1]), folder / "corpus" / "test.parquet"
