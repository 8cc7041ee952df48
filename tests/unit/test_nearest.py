"""Weights by distance outside of the workflow: generated text, the playground and a user's own text."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import softmax
from sklearn.metrics.pairwise import euclidean_distances

from demix.data.cluster import Clusterer, Clustering, context_distances, fit_clusters
from demix.data.shards import TokenShard
from demix.data.tokenizer import Tokenizer
from demix.evaluate.own_text import evaluate_text
from demix.files import read_json, write_json, write_json_lines
from demix.generate.completions import opened
from demix.generate.server import Page
from demix.model.clusters import copy_clusters
from demix.model.continuations import Continuation, continuation_log_probabilities, mixture_of
from demix.model.decode import generate, log_prior_of, weights_of
from demix.model.directory import load_experts
from demix.model.experts import add_expert, find_faults, remove_expert
from demix.model.scoring import columns_of
from demix.run.run import write_run_config
from support.configs import domains, small_run
from support.errors import refused
from support.mixing import mix
from support.models import write_model
from support.tokens import TRAINING

EXPERTS = (*TRAINING, "extra")


@pytest.fixture(scope="module")
def run(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a model with an expert for each training domain and one more, with the clustering by domain."""
    folder = tmp_path_factory.mktemp("nearest")
    (folder / "tokenizer.json").symlink_to(tokens / "tokenizer.json")
    encoder = Tokenizer.load(tokens / "tokenizer.json")
    for name, experts in (("demix", TRAINING), ("demix-seed2", EXPERTS)):
        write_model(folder / "models" / name, experts, encoder.sha256, encoder.vocab_size)
    mixing = {"routing_context": ["document"], "temperature": 0.1, "weights": ["history", "cluster"]}
    by_domain = {"by_domain": {"method": "metadata"}}
    small = small_run(seeds=[2], domains=domains(TRAINING), clusterings=by_domain, evaluation=mixing)
    write_run_config(folder / "config.json", small.config)
    documents = [tokens / "corpus" / domain / "train.parquet" for domain in TRAINING]
    fit_clusters(documents, Clustering(method="metadata", dimensions=6), folder / "clusters" / "by_domain")
    return folder


def with_context(run: Path, context: str) -> None:
    config = read_json(run / "config.json")
    config["evaluation"]["routing_context"] = [context]
    write_json(run / "config.json", config, sort_keys=False)


@pytest.mark.parametrize("context", ["document", "block", "document_half"])
@pytest.mark.parametrize(
    ("weights", "method", "decay"),
    [("cluster", "uniform", None), ("cluster+history(0.3)", "updating", 0.3), ("cluster+history", "fitted", None)],
)
def test_generation_gives_the_probabilities_of_an_evaluation(
    run: Path, tokens: Path, weights: str, method: str, decay: float | None, context: str
) -> None:
    with_context(run, context)
    model, encoder = run / "models" / "demix", Tokenizer.load(run / "tokenizer.json")
    trunks = [trunk.double() for trunk in load_experts(model, None)]
    experts, length = columns_of(trunks), trunks[0].architecture.context
    shares = dict(zip(experts, (3, 1, 2) if method == "fitted" else (1, 1, 1), strict=True))
    prior, named = log_prior_of(experts, shares), ",".join(f"{name}={share}" for name, share in shares.items())
    mixture = mixture_of(model, trunks, encoder, weights, named if decay is None else "updating")
    decoder = mixture.decoder(torch.tensor([encoder.end_of_text]))
    # Three documents, the last one goes on with what is drawn.
    shard = TokenShard.open(tokens / "tokens" / "scripture" / "test.arrow")
    given = np.concatenate([shard.read(0, 2 * length + 5), [shard.end_of_text], shard.read(40, 60)]).astype(np.int64)
    scores, log_weights = decoder.read(torch.from_numpy(given)[None, :50])
    parts = [(torch.from_numpy(given)[None, :50], scores, log_weights)]
    parts.append((torch.from_numpy(given)[None, 50:], *decoder.read(torch.from_numpy(given)[None, 50:])))
    parts += generate(decoder, length + 3, generator=torch.Generator().manual_seed(1))
    ids = torch.cat([part[0] for part in parts], 1)[0].numpy()
    scored = torch.cat([part[1] for part in parts], 2)[:, 0].T.numpy()
    mixed = (torch.cat([part[2] for part in parts], 1)[0] + torch.from_numpy(scored)).logsumexp(-1).numpy()

    class Drawn(TokenShard):
        def read(self, start: int, stop: int) -> np.ndarray:
            return ids[start:stop]

        def __len__(self) -> int:
            return len(ids)

    blocks = -(-len(ids) // length)
    table, far = np.zeros((blocks * length, len(experts))), np.zeros((blocks * length, len(experts)))
    clusterer = Clusterer.open(run / "clusters" / "by_domain")
    # What is drawn has no middle before it has ended.
    seen = "document" if context == "document_half" else context
    found = context_distances(clusterer, encoder, Drawn(**vars(shard)), seen, length, None)
    columns = [clusterer.names.index(name) for name in experts]
    far[: len(ids)], table[: len(ids)] = np.concatenate(list(found))[:, columns], scored
    mask = (np.arange(blocks * length) < len(ids)).reshape(blocks, length)
    ours = mix(
        table.reshape(blocks, length, -1),
        mask,
        method,
        weights if "(" in weights else f"{weights}(0.1)",
        decay=decay or 0.3,
        log_prior=prior,
        distances=far.reshape(blocks, length, -1),
    )[mask]
    np.testing.assert_allclose(mixed, ours, atol=1e-10, rtol=0)


@pytest.mark.parametrize("context", ["document", "block"])
@pytest.mark.parametrize("weights", ["cluster", "cluster+history(0.3)"])
def test_continuations_have_the_weights_of_their_texts(run: Path, weights: str, context: str) -> None:
    """Several texts together, after `<|endoftext|>` or another token, as one decoder of each reads them."""
    with_context(run, context)
    model, encoder = run / "models" / "demix", Tokenizer.load(run / "tokenizer.json")
    trunks = [trunk.double() for trunk in load_experts(model, None)]
    mixture = mixture_of(model, trunks, encoder, weights, top_k=2)
    text = encoder.encode("And God said unto Moses, shall the committee examine the warranty?").tolist()
    contexts = ((encoder.end_of_text, *text[:8]), (encoder.end_of_text,), tuple(text[3:9]))
    wanted = [Continuation(before, tuple(text[k : k + 4])) for before in contexts for k in (9, 14)]
    found = continuation_log_probabilities(mixture, wanted)
    for one, (log_p, _) in zip(wanted, found, strict=True):
        decoder = mixture.decoder(torch.tensor(one.context[:1]))
        scores, log_g = decoder.read(torch.tensor([[*one.context[1:], *one.tokens]]))
        mixed = (log_g[0].T + scores[:, 0]).logsumexp(0)[len(one.context) - 1 :]
        assert log_p == pytest.approx(float(mixed.sum()), abs=1e-9)
    # The token before a text is part of it, where it is a word.
    terms = Clusterer.open(run / "clusters" / "by_domain").embedding.terms
    word = next(token for token in range(encoder.end_of_text) if encoder.decode([token]).strip() in terms)
    near, far = (mixture.begin(np.array([token])).log_weights for token in (word, encoder.end_of_text))
    assert not np.allclose(near, far)


def test_an_expert_without_a_cluster_takes_no_weights_by_distance(run: Path) -> None:
    model, encoder = run / "models" / "demix-seed2", Tokenizer.load(run / "tokenizer.json")
    trunks = load_experts(model, None)
    with refused("--weights cluster"):
        mixture_of(model, trunks, encoder, "cluster")
    mixture = mixture_of(model, trunks, encoder, "cluster", experts=TRAINING)
    assert mixture.mixture.decay is None, "the default prior is uniform"
    weights = np.exp(mixture.begin(np.array([encoder.end_of_text])).log_weights[0])
    assert weights.sum() == pytest.approx(1)
    assert weights[mixture.experts.index("extra")] == 0


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    """A copy of the run's model by itself, with its tokenizer; its run measured blocks, at a temperature of 0.3."""
    config = read_json(run / "config.json")
    mixing = config["evaluation"] | {"routing_context": ["block"], "temperature": 0.3}
    write_json(tmp_path / "run" / "config.json", config | {"evaluation": mixing}, sort_keys=False)
    (tmp_path / "run" / "clusters").symlink_to(run / "clusters")
    model = tmp_path / "run" / "models" / "demix"
    shutil.copytree(run / "models" / "demix", model)
    write_json_lines(tmp_path / "run" / "metrics" / "demix.jsonl", [])
    for _ in range(2):
        copy_clusters(model, model)
    place = shutil.copytree(model, tmp_path / "copied")
    copy_clusters(place, place)
    shutil.copyfile(run / "tokenizer.json", place / "tokenizer.json")
    assert {path.name for path in (model / "clusterer").iterdir()} == {
        "clusterer.json",
        "clusterer.safetensors",
        "routing.json",
        "terms.parquet",
    }
    return place


def weights_on(model: Path, experts: tuple[str, ...], text: str) -> np.ndarray:
    """The weights [N, E] by distance after each token of a text."""
    encoder = Tokenizer.load(model / "tokenizer.json")
    mixture = mixture_of(model, load_experts(model, experts), encoder, "cluster")
    posterior = mixture.begin(np.array([encoder.end_of_text]))
    ids = encoder.encode(text)[None]
    return np.exp(posterior.observe(np.zeros((len(experts), 1, ids.shape[1])), ids)[0])


def test_a_copied_model_keeps_its_clusters(run: Path, copied: Path, tmp_path: Path) -> None:
    with_context(run, "document")
    text = "And it came to pass, that the minister shall answer in those days."
    clusterer, encoder = Clusterer.open(run / "clusters" / "by_domain"), Tokenizer.load(run / "tokenizer.json")
    assert Clusterer.open(copied / "clusterer").sha256 == clusterer.sha256
    ids = [encoder.end_of_text, *encoder.encode(text).tolist()]
    for experts in (TRAINING, TRAINING[1:]):
        for place, found in enumerate(weights_on(copied, experts, text)):
            # As the model sees it: the token before its block, and the block so far.
            start = place // 16 * 16
            seen = encoder.decode(ids[start : place + 1]).replace("<|endoftext|>", "\n")
            far = euclidean_distances(clusterer.embedding.points([seen]), clusterer.centres, squared=True)[0]
            expected = softmax(-far[[clusterer.names.index(name) for name in experts]] / 0.3)
            np.testing.assert_allclose(found, expected, atol=1e-5)
    assert "cluster" in Page(opened(copied)).facts()["weights"]
    (tmp_path / "text.txt").write_text(text * 5)
    # A text of one's own is mixed by distance, too, where all experts have clusters.
    lines, others = (
        {line.name: line.perplexity for line in evaluate_text(model, tmp_path / "text.txt").mixtures}
        for model in (copied, run / "models" / "demix-seed2")
    )
    assert lines["cluster (uniform prior)"] not in (lines["average"], lines["uniform"])
    assert "cluster (uniform prior)" not in others
    assert find_faults(copied) == []


def test_a_copied_model_whose_experts_change(copied: Path) -> None:
    text = "And it came to pass."
    left = TRAINING[1:]
    before = weights_on(copied, left, text)
    remove_expert(copied, TRAINING[0])
    np.testing.assert_array_equal(weights_on(copied, left, text), before)
    add_expert(copied, copied / "experts" / f"{left[0]}.safetensors", "new")
    with refused("--weights cluster"):
        weights_on(copied, (*left, "new"), text)


def test_damage_to_a_copied_clusterer_is_one_line(copied: Path, run: Path) -> None:
    terms, routing = copied / "clusterer" / "terms.parquet", copied / "clusterer" / "routing.json"
    whole = terms.read_bytes()
    terms.write_bytes(whole[:-1])
    assert [fault.subject for fault in find_faults(copied)] == [str(terms)]
    with refused("clusterer/terms.parquet"):
        weights_on(copied, TRAINING, "And")
    terms.write_bytes(whole)
    kept = read_json(routing)
    write_json(routing, kept | {"temperature": 0})
    with refused("clusterer/routing.json"):
        weights_of("cluster", copied)
    shutil.rmtree(copied / "clusterer")
    with refused("copied"):
        weights_of("cluster", copied)
