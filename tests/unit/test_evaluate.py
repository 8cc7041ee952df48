"""Evaluating a domain: tables read in pieces, sums by document, intervals, bytes, and the rows made of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from scipy.special import logsumexp

from demix.evaluate.choice import choose_mixing, switching_on_dev, tempered_on_dev
from demix.evaluate.columns import COLUMNS, join
from demix.evaluate.domain import Evaluation
from demix.evaluate.intervals import bounds, resampled_blocks, resampled_sums, stretch_tokens
from demix.evaluate.score_tables import read_scores
from demix.files import read_json, seed_for, write_json
from demix.mix.priors import fitted_log_prior
from demix.mix.rules import Switching, Tempered
from demix.run.evaluated import comparisons
from demix.run.evaluated import evaluated as evaluated_tables
from demix.run.systems import bases
from support.configs import changed, domains, small_run
from support.errors import refused
from support.mixing import mix
from support.models import write_model
from support.scored import evaluate_domain, write_table

TABLES = ("", ".priors", ".differences", ".posteriors", ".losses", ".systems")
TRAINING, NOVEL = ("law", "news", "code"), ("songs", "wiki")
RUN = small_run(
    seed=7,
    domains=domains(TRAINING, NOVEL),
    removal={"retrain_without": ["law"], "replacement": "songs"},
    evaluation={"weights": ["history"]},
)
WEIGHTS = ("history", "released", "tempered", "tempered(0.5,0.9)", "switching", "switching(0.2)")


def evaluation(domain: str, **changes: Any) -> Evaluation:
    """What the workflow has evaluated on `domain` of `RUN`, with changes to its config."""
    run = changed(RUN, **changes)
    return Evaluation(
        kind="training" if domain in TRAINING else "novel",
        tables=evaluated_tables(run, domain),
        pairs=tuple(comparisons(run, domain)),
        decay=0.3,
        dev_blocks=6,
        weights=WEIGHTS,
        top_k=(2,),
        decays=(0.1, 0.3),
        prior_blocks=(1, 4, 50),
        seed=7,
    )


def write_run(scores: Path, domain: str, **how: int) -> None:
    """All score tables that `evaluation` of `domain` reads."""
    kept = ("songs", "news", "code") if domain == "law" else None
    models = {"domain_token": TRAINING, "demix": TRAINING + NOVEL} | ({f"without-{domain}": kept} if kept else {})
    for number, (model, experts) in enumerate(models.items()):
        write_table(scores / model / f"{domain}.dev", experts, seed=number, text=1, **how)
        write_table(scores / model / f"{domain}.test", experts, seed=number, text=2, **how)
    for number, model in enumerate(("dense", "dense_unbalanced", *(f"dense-dapt-{name}" for name in NOVEL))):
        write_table(scores / model / f"{domain}.test", ("dense",), seed=10 + number, text=2, **how)


def output(folder: Path, name: str = "") -> Path:
    """The results of an evaluation in `folder`, or another of its `TABLES`."""
    return folder / f"rows{name}.parquet"


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """evaluations/<domain>.*.parquet of a training domain and a novel one, and the tables they come from."""
    folder = tmp_path_factory.mktemp("evaluated")
    for domain in ("law", "songs"):
        write_run(folder / "scores", domain)
        lengths = np.full(300, 3)
        evaluate_domain(folder / "scores", domain, evaluation(domain), output(folder / domain), lengths)
    return folder


def rows(folder: Path, domain: str, name: str = "") -> pd.DataFrame:
    return pd.read_parquet(output(folder / domain, name))


def test_rows_have_all_columns_and_agree_with_themselves(evaluated: Path) -> None:
    for domain in ("law", "songs"):
        table = pq.read_table(output(evaluated / domain))
        assert table.column_names == list(COLUMNS)
        assert not table.schema.field("seed").nullable
        found = table.to_pandas()
        assert set(found.seed) == {7}
        assert set(found.documents) == {30}
        np.testing.assert_allclose(found.perplexity, np.exp(found.nll / found.tokens))
        np.testing.assert_allclose(found.bits_per_byte, found.nll / np.log(2) / (3 * found.tokens))
        assert (found.perplexity_low < found.perplexity).all()
        assert (found.perplexity < found.perplexity_high).all()
        published = found[(found.scorer == "released") & found.method.isin(["updating", "cached"])]
        assert set(published.decay) == {0.7}
        main = found[found.variant == ""]
        key = ["model", "experts", "method", "weights", "top_k", "expert"]
        named = main.assign(expert=main.expert.where(main.method == "expert", ""))
        assert not named.duplicated(key).any(), "one row a system"
        grid = found[found.variant == "decay"].merge(main[main.top_k.isna()], on=[*key[:4], "decay"])
        assert len(grid) == 4, "the grid holds the config's own value, equal to the table's"
        np.testing.assert_array_equal(grid.nll_x, grid.nll_y)
        blocks = found[found.variant == "dev_blocks"].groupby("weights").dev_blocks.agg(list)
        scored = len(read_scores(evaluated / "scores" / "demix" / f"{domain}.dev", ("law",)).mask)
        assert all(value == [1, 4, 6, min(50, scored)] for value in blocks)
    removed = rows(evaluated, "law").query("variant == '' and method == 'cached' and top_k.isna()")
    assert {*zip(removed.model, removed.experts, strict=True)} == {
        ("demix", "training"),
        ("demix", "all"),
        ("demix", "minus-law"),
        ("demix", "plus-songs"),
        ("demix", "plus-wiki"),
        ("without-law", "training"),
    }
    (own,) = rows(evaluated, "law").query("model == 'domain_token'").itertuples()
    assert (own.method, own.experts, own.expert) == ("naive", "training", "law")


@pytest.mark.parametrize("domain", ["law", "songs"])
def test_rows_beyond_the_paper_are_those_of_the_formulas(tmp_path: Path, domain: str) -> None:
    """With parameters from the model's mixing.json, from the domain's dev split and from the config."""
    scores = tmp_path / "scores"
    write_run(scores, domain)
    for name in {"law", "news"} - {domain}:
        write_table(scores / "demix" / f"{name}.dev", TRAINING + NOVEL, seed=1, text=1)
    chosen = {name: read_scores(scores / "demix" / f"{name}.dev", TRAINING) for name in ("law", "news")}
    choose_mixing(scores / "demix", [*chosen], TRAINING, tmp_path / "models" / "demix" / "mixing.json")
    evaluate_domain(scores, domain, evaluation(domain), output(tmp_path / domain), np.full(300, 3))
    found = rows(tmp_path, domain).query("model == 'demix' and experts == 'training' and top_k.isna()")
    test, dev = (read_scores(scores / "demix" / f"{domain}.{split}", TRAINING) for split in ("test", "dev"))
    known = {"log_prior": fitted_log_prior(dev.scores, dev.mask)}
    best, alpha = next(iter(tempered_on_dev(chosen))), switching_on_dev(dev, known["log_prior"])
    best_of_blocks = np.take_along_axis(
        test.scores, test.scores.sum(axis=1, keepdims=True).argmax(axis=2)[..., None], 2
    )
    mixed = {
        ("uniform", "tempered"): best,
        ("uniform", "tempered(0.5,0.9)"): Tempered(0.5, 0.9),
        ("fitted", "switching"): alpha,
        ("fitted", "switching(0.2)"): Switching(0.2),
    }
    expected = {
        (method, weights): (mix(test.scores, test.mask, method, rule, **known), vars(rule))
        for (method, weights), rule in mixed.items()
    }
    expected["fitted", ""] = mix(test.scores, test.mask, "fitted", "", **known), {}
    expected |= {("best_token", ""): (test.scores.max(axis=2), {}), ("best_block", ""): (best_of_blocks, {})}
    for (method, weights), (log_p, parameters) in expected.items():
        (row,) = found[(found.method == method) & (found.weights == weights)].to_dict("records")
        assert row["nll"] == pytest.approx(-log_p.sum(), rel=1e-9), (method, weights)
        for name in ("beta", "gamma", "alpha"):
            assert row[name] == pytest.approx(parameters.get(name, float("nan")), nan_ok=True)
    (floor,) = found[found.method == "best_block"].nll
    assert found[found.method == "best_token"].nll.item() < floor
    assert floor <= found[found.weights == "history"].nll.min()
    # The parameters of all experts are those of the training experts.
    every = rows(tmp_path, domain).query("experts == 'all' and weights == 'tempered' and top_k.isna()")
    assert every.beta.tolist() == [best.beta]


@pytest.mark.parametrize("domain", ["law", "songs"])
def test_further_seeds_add_rows_of_their_own_models(evaluated: Path, tmp_path: Path, domain: str) -> None:
    """Those of the run's own seed stay as they are, and so does the prior that whoever asks for one gets."""
    scores = tmp_path / "scores"
    write_run(scores, domain)
    for number, model in enumerate(("demix", "domain_token")):
        for text, split in enumerate(("dev", "test"), start=1):
            write_table(scores / f"{model}-seed9" / f"{domain}.{split}", TRAINING, seed=20 + number, text=text)
    for number, model in enumerate(("dense", "dense_unbalanced")):
        write_table(scores / f"{model}-seed9" / f"{domain}.test", ("dense",), seed=30 + number, text=2)
    evaluate_domain(scores, domain, evaluation(domain, seeds=[9]), output(tmp_path / domain), np.full(300, 3))
    for name in TABLES:
        found = rows(tmp_path, domain, name)
        own = found[found.seed == 7].reset_index(drop=True)
        pd.testing.assert_frame_equal(own, rows(evaluated, domain, name))
        assert set(found.seed) == ({7, 9} if name in ("", ".losses") else {7})
    further = rows(tmp_path, domain).query("seed == 9")
    for row in further[further.method == "dense"].itertuples():
        table = read_scores(scores / f"{row.model}-seed9" / f"{domain}.test", ("dense",))
        assert row.nll == pytest.approx(-table.scores.sum())
    table = read_scores(scores / "demix-seed9" / f"{domain}.test", TRAINING)
    (average,) = further.query("model == 'demix' and method == 'average'").itertuples()
    assert average.nll == pytest.approx(-logsumexp(table.scores - np.log(3), axis=-1)[table.mask].sum())


def test_the_naive_expert_of_a_novel_domain_is_chosen_on_dev_too(evaluated: Path) -> None:
    own = rows(evaluated, "law").query("method == 'naive'")
    assert set(own.expert) == {"law"}
    assert not own.oracle.any()
    naive = rows(evaluated, "songs").query("method == 'naive' and experts == 'training'")
    for model in ("demix", "domain_token"):
        by_split = {}
        for split in ("dev", "test"):
            table = read_scores(evaluated / "scores" / model / f"songs.{split}", TRAINING)
            by_split[split] = TRAINING[int(table.scores.sum(axis=(0, 1)).argmax())]
        found = naive[naive.model == model].set_index("chosen_on")
        assert found.expert.to_dict() == by_split
        assert found.oracle.to_dict() == {"test": True, "dev": False}
        assert found.variant.to_dict() == {"test": "", "dev": "dev_choice"}
        assert found.nll["test"] <= found.nll["dev"]


def test_differences_are_paired(evaluated: Path) -> None:
    against = bases(RUN)
    for domain in ("law", "songs"):
        results, differences = rows(evaluated, domain), rows(evaluated, domain, ".differences")
        main = results[(results.variant == "") & results.top_k.isna() & (results.method != "expert")]
        names = ["model", "experts", "method", "weights"]
        found = main.set_index(names)
        systems = {tuple(system) for system in differences[names].to_numpy()}
        removals = {("demix", "minus-law", "cached", "history"), ("without-law", "training", "cached", "history")}
        assert removals <= systems if domain == "law" else not removals & systems
        for row in differences.itertuples():
            one, two = (
                found.loc[row.model, row.experts, row.method, row.weights],
                found.loc[against[row.against].key],
            )
            assert row.nats_per_token == pytest.approx((one.nll - two.nll) / one.tokens)
            assert row.perplexity == pytest.approx(one.perplexity - two.perplexity)
            assert row.nats_per_token_low < row.nats_per_token < row.nats_per_token_high
            assert row.perplexity_low < row.perplexity < row.perplexity_high
            # Narrower than the difference of unpaired samples.
            ends = [(each.perplexity_low, each.perplexity_high) for each in (one, two)]
            assert row.perplexity_high - row.perplexity_low < np.hypot(*np.diff(ends)[:, 0])
            assert row.nats_per_token_high - row.nats_per_token_low < np.hypot(*np.diff(np.log(ends))[:, 0])
        both = differences.set_index([*names, "against"])
        there = both.loc["dense", "dense", "dense", "", "demix_cached"]
        back = both.loc["demix", "training", "cached", "history", "dense"]
        assert there.nats_per_token_low == pytest.approx(-back.nats_per_token_high)


def test_posteriors_follow_the_text(evaluated: Path) -> None:
    found = rows(evaluated, "songs", ".posteriors")
    assert set(found.expert) == set(TRAINING)
    for split in ("dev", "test"):
        table = read_scores(evaluated / "scores" / "demix" / f"songs.{split}", TRAINING)
        trace = found[found.split == split].pivot(index="block", columns="expert", values="posterior")[list(TRAINING)]
        assert trace.index.tolist() == list(range(len(table.mask)))
        first = table.scores[0].sum(axis=0)
        np.testing.assert_allclose(trace.iloc[0], np.exp(first - logsumexp(first)), rtol=1e-9)


def test_losses_by_document_are_the_sums_of_the_score_tables(evaluated: Path) -> None:
    for domain in ("law", "songs"):
        found = rows(evaluated, domain, ".losses")
        assert set(found.domain) == {domain}
        tables = [table for table in evaluated_tables(RUN, domain) if not table.joined]
        assert not found.duplicated(["model", "seed", "expert", "document"]).any()
        assert len(found) == 30 * sum(len(table.columns) for table in tables)
        for table in tables:
            folder = evaluated / "scores" / table.folder / f"{domain}.test"
            document = pd.read_parquet(folder / "tokens.parquet").document
            own = found[(found.model == table.model) & (found.seed == table.seed)]
            assert set(own.expert) == set(table.columns)
            for expert, part in own.groupby("expert"):
                log_p = pd.read_parquet(folder / f"{expert}.parquet").log_probability.astype("float64")
                expected = (-log_p).groupby(document).agg(["sum", "size"])
                assert part.document.tolist() == expected.index.tolist()
                assert part.tokens.tolist() == expected["size"].tolist()
                np.testing.assert_allclose(part.nll, expected["sum"], rtol=1e-12)


def test_losses_of_systems_are_those_of_their_rows(evaluated: Path) -> None:
    """By document in the order of losses.parquet; stretches stand in for documents where these are few."""
    for domain in ("law", "songs"):
        found, results = rows(evaluated, domain, ".systems"), rows(evaluated, domain)
        main = results[(results.variant == "") & results.top_k.isna() & (results.method != "expert")]
        key = ["model", "experts", "method", "weights"]
        summed = found.set_index(key).nll.map(np.sum)
        pd.testing.assert_series_equal(summed, main.set_index(key).nll, rtol=1e-12)
        documents = rows(evaluated, domain, ".losses").query("model == 'dense'")
        dense = found[found.model == "dense"].iloc[0]
        for name, column in (("tokens", "tokens"), ("origins", "origin"), ("nll", "nll")):
            assert dense[name].tolist() == documents[column].tolist()
        assert not found.stretched.map(len).any()


def test_a_short_text_of_few_documents_has_no_interval(tmp_path: Path) -> None:
    write_run(tmp_path / "scores", "law", documents=3)
    evaluate_domain(tmp_path / "scores", "law", evaluation("law"), output(tmp_path))
    found = pd.read_parquet(output(tmp_path))
    assert set(found.documents) == set(found.pieces) == {3}
    assert found.tokens.max() < 400
    # Of the 14 blocks that the published code's prior of 6 takes, dev has fewer.
    blocks = len(read_scores(tmp_path / "scores" / "demix" / "law.dev", TRAINING).mask)
    assert blocks < 14
    assert set(found.query("method == 'cached' and scorer == 'released'").dev_blocks) == {blocks}
    assert found[["perplexity_low", "perplexity_high", "bytes", "bits_per_byte"]].isna().all(axis=None)
    assert pd.read_parquet(output(tmp_path, ".differences")).nats_per_token_low.isna().all()


@pytest.mark.parametrize("whole", [19, 20])
def test_pieces_of_a_document_are_drawn_together_and_blocks_of_few_documents(tmp_path: Path, whole: int) -> None:
    write_run(tmp_path / "scores", "songs", documents=200, whole=whole)
    evaluate_domain(tmp_path / "scores", "songs", evaluation("songs"), output(tmp_path))
    results = pq.read_table(output(tmp_path)).to_pylist()
    assert {(row["documents"], row["pieces"]) for row in results} == {(whole, 200)}
    (row,) = (row for row in results if row["model"] == "dense")
    losses = pd.read_parquet(output(tmp_path, ".losses")).query("model == 'dense'")
    assert len(losses) == 200
    seed = seed_for(0, "songs", row["tokens_sha256"])
    if whole < 20:
        scores = pd.read_parquet(tmp_path / "scores" / "dense" / "songs.test" / "dense.parquet").log_probability
        starts = np.arange(0, len(scores), stretch_tokens(len(scores)))
        sums = np.add.reduceat(np.stack([np.ones(len(scores)), -scores.astype("float64")]), starts, axis=1)
        tokens, nll = resampled_blocks(sums, seed)
        differences, systems = (pd.read_parquet(output(tmp_path, name)) for name in (".differences", ".systems"))
        stored = systems[systems.model == "dense"].iloc[0]
        np.testing.assert_allclose(np.stack([stored.stretched, stored.stretches]), sums, rtol=1e-12)
        assert differences[["nats_per_token_low", "perplexity_high"]].notna().all(axis=None)
    else:
        by_origin = losses.groupby("origin", sort=False)[["tokens", "nll"]].sum()
        tokens, nll = resampled_sums(by_origin.to_numpy().T, seed)
    found = [row["perplexity_low"], row["perplexity_high"]]
    assert found == pytest.approx(bounds(np.exp(nll / tokens)), rel=1e-12)


@pytest.mark.parametrize(("domain", "adapted"), [("law", "songs"), ("law", "wiki"), ("songs", "songs")])
def test_a_dense_model_is_mixed_with_its_adaptation(evaluated: Path, domain: str, adapted: str) -> None:
    found = rows(evaluated, domain)
    (row,) = found[found.model == f"dense-and-dapt-{adapted}"].to_dict("records")
    tables = [
        read_scores(evaluated / "scores" / model / f"{domain}.test", ("dense",))
        for model in ("dense", f"dense-dapt-{adapted}")
    ]
    scores = np.concatenate([table.scores for table in tables], axis=-1)
    expected = -mix(scores, tables[0].mask, "uniform", "tempered(0.1,0.99)").sum()
    np.testing.assert_allclose(row["nll"], expected, rtol=1e-12)


def test_evaluating_again_gives_the_same_bytes(evaluated: Path, tmp_path: Path) -> None:
    evaluate_domain(evaluated / "scores", "law", evaluation("law"), output(tmp_path), np.full(300, 3))
    for name in TABLES:
        assert output(tmp_path, name).read_bytes() == output(evaluated / "law", name).read_bytes()


@pytest.mark.parametrize(
    ("model", "subject"),
    [("dense_unbalanced", "domain songs"), ("dense-dapt-songs", "scores/dense-dapt-songs/songs.test/dense.parquet")],
)
def test_models_scored_on_different_tokens_are_not_compared(tmp_path: Path, model: str, subject: str) -> None:
    write_run(tmp_path / "scores", "songs")
    write_table(tmp_path / "scores" / model / "songs.test", ("dense",), text=3)
    with refused(subject):
        evaluate_domain(tmp_path / "scores", "songs", evaluation("songs"), output(tmp_path))
    assert not list(tmp_path.glob("*.parquet"))


@pytest.mark.parametrize(("model", "column"), [("dense", "songs.test/dense"), ("demix", "songs.dev/law")])
def test_scores_of_other_weights_than_the_models_are_refused(tmp_path: Path, model: str, column: str) -> None:
    write_run(tmp_path / "scores", "songs")
    write_model(tmp_path / "models" / model, ("dense",) if model == "dense" else TRAINING + NOVEL)
    description = tmp_path / "models" / model / "model.json"
    for shared in (read_json(description)["shared_sha256"], "0"):
        # The second is that of the tables, whose experts are others.
        write_json(description, read_json(description) | {"shared_sha256": shared})
        with refused(f"scores/{model}/{column}.parquet"):
            evaluate_domain(tmp_path / "scores", "songs", evaluation("songs"), output(tmp_path))
    assert not list(tmp_path.glob("*.parquet"))


def test_ids_that_the_tokenizer_lacks_are_refused(evaluated: Path, tmp_path: Path) -> None:
    with refused("law.test"):
        evaluate_domain(evaluated / "scores", "law", evaluation("law"), output(tmp_path), np.full(200, 3))


def test_tables_of_domains_are_joined(evaluated: Path, tmp_path: Path) -> None:
    for name in TABLES:
        parts = [output(evaluated / domain, name) for domain in ("law", "songs")]
        join(parts, tmp_path / "joined.parquet")
        assert pq.read_table(tmp_path / "joined.parquet").num_rows == sum(
            pq.read_table(part).num_rows for part in parts
        )
