"""Weights by distance to clusters: Eq. 2 and 3 of Gururangan et al. 2023, and the rows that they give."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from sklearn.metrics.pairwise import euclidean_distances

from demix.config.mixing import parsed_weights
from demix.evaluate.domain import Evaluation
from demix.evaluate.score_tables import read_scores
from demix.files import digest, read_json, read_parquet, write_json, write_parquet
from demix.mix.rules import Chunk, Cluster, History, ReleasedCluster
from demix.report.read import read_results
from demix.run.check import load_run
from demix.run.evaluated import comparisons, evaluated
from demix.run.rules import RunRules
from support.configs import domains, small_run
from support.mixing import as_blocks, log_mixture, log_weights, mix, updating_priors, window
from support.scored import LENGTH, evaluate_domain, write_table

TINY = Path(__file__).parents[1] / "workflow" / "tiny.yaml"
BLOCKS, EXPERTS = 5, 4


def made_up(seed: int, experts: int = EXPERTS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores [B, T, E], a mask with a short last block, and squared distances of points to centres."""
    chance = np.random.default_rng(seed)
    scores = -chance.exponential(3, (BLOCKS, LENGTH, experts))
    mask = np.ones((BLOCKS, LENGTH), bool)
    mask[-1, 3:] = False
    points = chance.normal(size=(BLOCKS * LENGTH, 6))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    distances = euclidean_distances(points, points[:experts] * 0.5, squared=True).reshape(scores.shape)
    return np.where(mask[..., None], scores, 0), mask, distances


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("begins", [[], [0], [7, 8, 9, 20, 31]])
def test_the_published_rule_is_a_token_late_and_measures_no_text_after_a_first_token(size: int, begins: list) -> None:
    scores, mask, distances = made_up(4)
    documents = np.cumsum(np.isin(np.arange(mask.sum()), begins)) if begins != [] else None
    rows = distances[mask]
    firsts = {0, *begins}
    late = np.array([rows[max(t - 1, 0) if t - 1 not in firsts else t] for t in range(len(rows))])
    rule, state, found = ReleasedCluster(0.2), (), []
    for start in range(0, BLOCKS, size):
        part = slice(start, start + size)
        own = None if documents is None else documents[start * LENGTH : (start + size) * LENGTH]
        evidence, state = rule.evidence(Chunk(scores[part], mask[part], distances[part], own), state)
        found.append(evidence)
    np.testing.assert_allclose(np.concatenate(found)[mask], late**2 / -0.2)


@pytest.mark.parametrize("top_k", [None, 1, 2, 3])
@pytest.mark.parametrize("weights", ["cluster(0.1)", "cluster+history(0.3)"])
@pytest.mark.parametrize("method", ["uniform", "updating", "cached"])
def test_the_mixture_is_that_of_the_equations_in_a_loop(weights: str, top_k: int | None, method: str) -> None:
    """Updating priors follow the tokens' evidence alone."""
    scores, mask, distances = made_up(1)
    family, temperature = parsed_weights(weights).family, parsed_weights(weights).parameters[0]
    cached = np.log([0.5, 0.2, 0.2, 0.1])
    found = mix(scores, mask, method, weights, decay=0.3, log_prior=cached, top_k=top_k, distances=distances)
    priors = {"uniform": [np.log(np.full(EXPERTS, 1 / EXPERTS))] * BLOCKS, "cached": [cached] * BLOCKS}
    priors["updating"] = updating_priors(as_blocks(scores, mask), "history", 0.3)
    for block, prior in zip(range(BLOCKS), priors[method], strict=False):
        evidence = window(scores[block])[:-1] if family == "cluster+history" else 0
        log_g = log_weights(prior - distances[block] / temperature, evidence, top_k)
        expected = log_mixture(log_g, scores[block])
        np.testing.assert_allclose(found[block, mask[block]], expected[mask[block]], rtol=0, atol=1e-12)
    assert (found[~mask] == 0).all()


def released_log_p(
    scores: np.ndarray, far: np.ndarray, documents: np.ndarray, temperature: float, top_k: int | None
) -> np.ndarray:
    """As the code published with the paper: exp(-(d²)²/τ), d² of the token before, or of the empty text."""
    shown = [t if t < 2 or documents[t - 1] != documents[t - 2] else t - 1 for t in range(len(scores))]
    return log_mixture(log_weights(-(far[shown].astype(np.float64) ** 2) / temperature, 0, top_k), scores)


TRAINING, NOVEL, CLUSTERS = ("law", "news", "code"), ("songs",), ("c00", "c01", "c02", "c03")
RUN = small_run(
    seed=7,
    domains=domains(TRAINING, NOVEL),
    clusterings={"k4": {"clusters": 4}, "by_domain": {"method": "metadata"}},
    models={"cbtm": {"kind": "branched", "data": "k4", "sequences": 4}, "domain_token": None},
    training={"sequences": 4},
    evaluation={"weights": ["history", "cluster", "cluster+history"]},
)


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The score tables and routing tables of a run, on a training domain."""
    run = tmp_path_factory.mktemp("run")
    models = {"demix": TRAINING + NOVEL, "cbtm": CLUSTERS, "dense": ("dense",), "dense_unbalanced": ("dense",)}
    models["dense-dapt-songs"] = ("dense",)
    for number, (model, experts) in enumerate(models.items()):
        for text, split in enumerate(("dev", "test")):
            write_table(run / "scores" / model / f"law.{split}", experts, seed=number, text=text)
    for clustering, names in (("k4", CLUSTERS), ("by_domain", tuple(sorted(TRAINING)))):
        write_json(run / "clusters" / clustering / "clusterer.json", {"names": names})
        for number, context in enumerate(("document", "block")):
            for split in ("dev", "test"):
                write_routing(run, clustering, context, f"law.{split}", names, number)
    return run / "scores"


def documents_of(table: Path) -> np.ndarray:
    return read_parquet(table / "tokens.parquet")["document"].to_numpy()


def write_routing(run: Path, clustering: str, context: str, table: str, names: tuple[str, ...], seed: int) -> None:
    model = "cbtm" if clustering == "k4" else "demix"
    expert = CLUSTERS[0] if clustering == "k4" else "law"
    scored = read_scores(run / "scores" / model / table, (expert,))
    chance = np.random.default_rng([seed, len(table)])
    far = chance.uniform(0.1, 1.5, (scored.tokens, len(names))).astype(np.float32)
    clusterer = digest(read_json(run / "clusters" / clustering / "clusterer.json"))
    about = {"tokens_sha256": scored.sha256, "clusterer_sha256": clusterer, "context": context}
    columns = pa.table(dict(zip(names, far.T, strict=True))).replace_schema_metadata(about)
    write_parquet(columns, run / "routing" / clustering / context / f"{table}.parquet")


def evaluation(**changes: Any) -> Evaluation:
    more = {"decay": 0.3, "dev_blocks": 6, "weights": ("history", "cluster", "cluster+history"), "top_k": (2,)}
    return Evaluation(
        kind="training",
        tables=evaluated(RUN, "law"),
        pairs=tuple(comparisons(RUN, "law")),
        seed=7,
        **more | changes,
    )


def distances(scores: Path, clustering: str, context: str, experts: tuple[str, ...], split: str = "test") -> np.ndarray:
    """[B, T, E], 0 at padding."""
    table = pd.read_parquet(scores.parent / "routing" / clustering / context / f"law.{split}.parquet")[list(experts)]
    filled = np.zeros((-(-len(table) // LENGTH) * LENGTH, len(experts)))
    filled[: len(table)] = table.to_numpy(np.float64)
    return filled.reshape(-1, LENGTH, len(experts))


def test_rows_of_an_evaluation_are_those_of_the_formulas(scores: Path, tmp_path: Path) -> None:
    evaluate_domain(scores, "law", evaluation(), tmp_path / "results.parquet", None)
    found = read_results(tmp_path / "results.parquet").rows
    routed = found[found.routing != ""]
    assert {*zip(routed.model, routed.experts, strict=True)} == {
        ("demix", "training"),
        ("demix", "minus-law"),
        ("cbtm", "training"),
    }
    assert set(routed.variant) == {"", "dev_temperature", "released_scorer"}
    assert set(routed.context) == {"document"}
    assert set(routed[routed.variant != "dev_temperature"].temperature) == {0.1}
    for model, experts, label, clustering in (
        ("demix", TRAINING, "training", "by_domain"),
        ("cbtm", CLUSTERS, "training", "k4"),
        ("demix", ("news", "code"), "minus-law", "by_domain"),
    ):
        test, dev = (read_scores(scores / model / f"law.{split}", experts) for split in ("test", "dev"))
        far = distances(scores, clustering, "document", experts)
        prior = History().cached_log_prior(dev.scores, dev.mask, decay=0.3, blocks=6)
        own = routed[(routed.model == model) & (routed.experts == label) & (routed.variant == "")]
        assert set(own.routing) == {clustering}
        methods = {("uniform", "cluster"), ("uniform", "cluster+history"), ("cached", "cluster+history")}
        wanted = methods if label == "training" else {("cached", "cluster+history")}
        assert {*zip(own.method, own.weights, strict=True)} == wanted
        for row in own.itertuples():
            top_k = None if np.isnan(row.top_k) else int(row.top_k)
            log_p = mix(
                test.scores, test.mask, row.method, f"{row.weights}(0.1)", log_prior=prior, top_k=top_k, distances=far
            )
            assert row.nll == pytest.approx(-log_p.sum(), rel=1e-12)
        released = routed[
            (routed.model == model) & (routed.experts == label) & (routed.variant == "released_scorer")
        ].fillna({"top_k": 0})
        keys = ["method", "weights", "scorer", "top_k"]
        assert released[keys].to_numpy().tolist() == [
            ["uniform", "cluster", "released", top_k] for top_k in (0, 2) if label == "training"
        ]
        for row in released.itertuples():
            documents = documents_of(scores / model / "law.test")
            log_p = released_log_p(test.scores[test.mask], far[test.mask], documents, 0.1, int(row.top_k) or None)
            assert row.nll == pytest.approx(-log_p.sum(), rel=1e-12)
    # The grid is left out where it has one temperature and one context; the rest of the table does not change.
    plain = tmp_path / "plain"
    evaluate_domain(scores, "law", evaluation(weights=("history",)), plain / "results.parquet", None)
    without = read_results(plain / "results.parquet").rows
    kept = found[found.routing == ""].reset_index(drop=True)
    pd.testing.assert_frame_equal(kept, without)
    assert without.temperature.isna().all()


def test_the_grid_and_what_dev_chooses(scores: Path, tmp_path: Path) -> None:
    changes = {"temperatures": (0.01, 1.0), "routing_context": ("document", "block")}
    evaluate_domain(scores, "law", evaluation(**changes), tmp_path / "results.parquet", None)
    found = read_results(tmp_path / "results.parquet")
    assert not {"routing", "decay"} & {key[4] for key in found.evaluations.index}
    rows = found.rows[found.rows.model == "cbtm"].fillna({"top_k": 0})
    grid = rows[rows.variant == "routing"]
    assert len(grid) == 3 * 2 * 3 * 2
    key = ["method", "weights", "top_k", "context", "temperature"]
    main = rows[(rows.variant == "") & (rows.routing != "")]
    assert set(main.context) == {"document"}
    both = main.merge(grid, on=key)
    assert len(both) == len(main)
    np.testing.assert_array_equal(both.nll_x, both.nll_y)
    test, dev = (read_scores(scores / "cbtm" / f"law.{split}", CLUSTERS) for split in ("test", "dev"))
    far = distances(scores, "k4", "document", CLUSTERS, "dev")
    tried = {}
    for temperature, top_k in product((0.01, 0.1, 1.0), (None, 2)):
        how = {"weights": Cluster(temperature), "top_k": top_k}
        loss = -mix(dev.scores, dev.mask, "uniform", distances=far, **how).sum()
        nll = {}
        for context in ("document", "block"):
            log_p = mix(test.scores, test.mask, "uniform", distances=distances(scores, "k4", context, CLUSTERS), **how)
            of = (grid.temperature == temperature) & (grid.top_k == (top_k or 0)) & (grid.context == context)
            (nll[context],) = grid[of & (grid.weights == "cluster")].nll
            assert nll[context] == pytest.approx(-log_p.sum())
        tried[loss] = (temperature, top_k or 0, nll["document"])
    chosen = rows[(rows.variant == "dev_temperature") & (rows.weights == "cluster")]
    ((temperature, top_k, nll),) = zip(chosen.temperature, chosen.top_k, chosen.nll, strict=True)
    best = tried[min(tried)]
    assert (temperature, top_k, nll) == (*best[:2], pytest.approx(best[2]))


def test_an_evaluation_reads_the_distances_that_its_models_need() -> None:
    """With weights by distance alone, and only for clusterings of some model."""
    more = {"clusterings": {"k4": {"clusters": 4}, "k2": {"clusters": 2}, "by_domain": {"method": "metadata"}}}
    more["models"] = {"cbtm": {"kind": "branched", "data": "k4"}, "domain_token": None}
    mixing = load_run(TINY).config.values["evaluation"] | {"routing_context": ["document", "block"]}
    config = load_run(TINY, evaluation=mixing, **more)
    assert RunRules(config).evaluated_routing("fantasy") == []
    config = load_run(TINY, evaluation=mixing | {"weights": ["history", "cluster+history(0.2)"]}, **more)
    run = "results/tiny"
    assert RunRules(config).evaluated_routing("fantasy") == [
        f"{run}/routing/{name}/{context}/fantasy.{split}.parquet"
        for name in ("by_domain", "k4")
        for context in ("document", "block")
        for split in ("dev", "test")
    ] + [f"{run}/clusters/{name}/clusterer.json" for name in ("by_domain", "k4")]
