"""Score tables read in pieces, and summed by document."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from demix.config.mixing import METHODS
from demix.evaluate.intervals import stretch_tokens
from demix.evaluate.losses import dev_priors, document_losses
from demix.evaluate.score_tables import read_scores, stream_scores, write_scores
from demix.files import write_parquet
from demix.mix.priors import fitted_log_prior
from support.errors import refused
from support.mixing import mix, planned
from support.scored import LENGTH, starts, write_columns, write_table


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(1, 150),
    groups=st.lists(st.integers(1, 60), min_size=3, max_size=3),
    at_once=st.integers(1, 200),
)
def test_tables_are_read_in_pieces_whatever_their_row_groups(tmp_path: Path, tokens, groups, at_once) -> None:
    generator = np.random.default_rng(tokens)
    ids = generator.integers(0, 300, tokens)
    documents = np.unique(np.sort(generator.integers(0, 9, tokens)), return_inverse=True)[1]
    scores = -generator.exponential(1, (tokens, 2)).astype(np.float32)
    write_columns(tmp_path, ids.astype(np.uint16), starts(documents), {"e0": scores[:, 0], "e1": scores[:, 1]})
    for name, rows in zip(("e0", "e1", "tokens"), groups, strict=True):
        path = tmp_path / f"{name}.parquet"
        write_parquet(pq.read_table(path), path, row_group_size=rows)
    pieces = list(stream_scores(tmp_path, ("e0", "e1"), at_once))
    assert all(len(piece.mask) % 2 == 0 for piece in pieces[:-1]), "pairs of blocks stay together"
    assert all(piece.mask.sum() <= max(at_once, 2 * LENGTH) for piece in pieces)
    assert np.concatenate([piece.tokens for piece in pieces]).tolist() == ids.tolist()
    assert np.concatenate([piece.documents for piece in pieces]).tolist() == documents.tolist()
    read = np.concatenate([piece.scores[piece.mask] for piece in pieces])
    assert (read == scores).all()
    whole = read_scores(tmp_path, ("e0", "e1"))
    assert (whole.scores[whole.mask] == scores).all()
    assert (whole.scores[~whole.mask] == 0).all()
    assert whole.tokens == tokens


def test_columns_of_other_tokens_or_weights_are_refused(tmp_path: Path) -> None:
    write_table(tmp_path, ("law", "news"))
    rows = pq.read_table(tmp_path / "news.parquet")
    sha256 = rows.schema.metadata[b"tokens_sha256"]
    for metadata, part in (
        ({"tokens_sha256": "0", "shared_sha256": "0"}, rows),
        ({"tokens_sha256": sha256, "shared_sha256": "1"}, rows),
        ({"tokens_sha256": sha256, "shared_sha256": "0", "precision": "bf16"}, rows),
        ({"tokens_sha256": sha256, "shared_sha256": "0"}, rows[1:]),
    ):
        write_scores(tmp_path / "news.parquet", [part["log_probability"].to_numpy()], metadata)
        with refused("news.parquet"):
            read_scores(tmp_path, ("law", "news"))
        with refused("news.parquet"):
            document_losses(tmp_path, ("law", "news"))


@pytest.mark.parametrize("about", [{"length": "x"}, {"length": "-8"}, {"length": b"\xff"}, {}])
def test_a_table_of_tokens_that_another_program_wrote_is_refused(about: dict[str, str], tmp_path: Path) -> None:
    write_table(tmp_path, ("law",))
    tokens = pq.read_table(tmp_path / "tokens.parquet")
    pq.write_table(tokens.replace_schema_metadata(about), tmp_path / "tokens.parquet")
    with refused("tokens.parquet"):
        read_scores(tmp_path, ("law",))


@pytest.mark.parametrize(
    ("method", "weights", "may_be"),
    [
        ("average", "", True),
        ("fitted", "", True),
        ("best_token", "", True),
        ("uniform", "history", False),
        ("fitted", "switching(0.2)", False),
    ],
)
def test_what_a_masked_model_read_weighs_no_experts(method: str, weights: str, may_be: bool, tmp_path: Path) -> None:
    ids = np.arange(20, dtype=np.uint16)
    columns = {"law": np.full(20, -1.0), "news": np.full(20, -2.0)}
    write_columns(tmp_path, ids, np.array([0, 9]), columns, folds="7")
    mixture = planned(method, ("law", "news"), weights)
    priors = {mixture: np.log([0.5, 0.5])}
    if may_be:
        assert document_losses(tmp_path, ("law", "news"), [mixture], priors).nll[mixture].shape == (2,)
    else:
        with refused(tmp_path):
            document_losses(tmp_path, ("law", "news"), [mixture], priors)


def test_a_missing_column_is_made_with_the_table_of_the_tokens(tmp_path: Path) -> None:
    """The workflow knows that table alone."""
    write_table(tmp_path, ("law", "news"))
    (tmp_path / "news.parquet").unlink()
    with refused("news.parquet"):
        read_scores(tmp_path, ("law", "news"))
    (tmp_path / "tokens.parquet").unlink()
    with refused("tokens.parquet"):
        read_scores(tmp_path, ("law", "news"))


@pytest.mark.parametrize("documents", [1, 12, 2500])
def test_sums_by_document_are_those_of_whole_tables(tmp_path: Path, documents: int) -> None:
    """All methods at once, streamed (2,500 documents are several pieces), against one mixture and token at a time."""
    experts = ("law", "news", "code", "songs")
    write_table(tmp_path / "x.test", experts, documents=documents)
    write_table(tmp_path / "x.dev", experts, documents=12, text=1)
    mixtures = [
        planned(method, some, weights, scorer, decay=decay, dev_blocks=5, top_k=top_k)
        for some in (experts, experts[1:])
        for method in ("average", "uniform", "updating", "cached", "fitted")
        for weights in ("history", "released")
        for decay in (0.3, 1.0)
        for top_k in ((None, 2) if method != "average" else (None,))
        for scorer in ("paper", "released")
    ]
    dev, test = (read_scores(tmp_path / name, experts) for name in ("x.dev", "x.test"))
    traced = planned("updating", experts[1:], decay=0.3)
    lengths = np.arange(300) % 7
    totals = document_losses(tmp_path / "x.test", experts, mixtures, dev_priors(dev, mixtures), lengths, traced)
    if documents == 2500:
        assert test.tokens > 2 * (1 << 14)
    numbers = pq.read_table(tmp_path / "x.test" / "tokens.parquet")["document"].to_numpy()
    assert totals.tokens.tolist() == np.bincount(numbers).tolist()
    ids = pq.read_table(tmp_path / "x.test" / "tokens.parquet")["token"].to_numpy()
    assert totals.byte_count == lengths[ids].sum()
    length = stretch_tokens(test.tokens)
    stretches = np.arange(test.tokens) // length
    assert totals.stretched.tolist() == np.bincount(stretches).tolist()
    for expert, nll in ((expert, totals.nll[expert]) for expert in experts):
        column = pq.read_table(tmp_path / "x.test" / f"{expert}.parquet")["log_probability"].to_numpy()
        np.testing.assert_allclose(nll, np.bincount(numbers, -column.astype(np.float64)), rtol=1e-12)
        by_stretch = np.bincount(stretches, -column.astype(np.float64))
        np.testing.assert_allclose(totals.stretches[expert], by_stretch, rtol=1e-12)
    for mixture in mixtures if documents < 2500 else mixtures[:: len(METHODS) + 1]:
        part, part_dev = test.select(mixture.experts), dev.select(mixture.experts)
        method, rule = mixture.method, mixture.rule
        if method == "fitted":
            prior = fitted_log_prior(part_dev.scores, part_dev.mask)
        elif method == "updating":
            method, prior = "cached", rule.log_priors(part.scores, part.mask, mixture.decay)[:-1]
        else:
            prior = rule.cached_log_prior(part_dev.scores, part_dev.mask, decay=mixture.decay, blocks=5)
        mixed = mix(part.scores, part.mask, method, rule, log_prior=prior, top_k=mixture.top_k)
        for found, of in ((totals.nll[mixture], numbers), (totals.stretches[mixture], stretches)):
            expected = np.bincount(of, -mixed[part.mask])
            np.testing.assert_allclose(found, expected, rtol=1e-10, err_msg=str(mixture))
    assert totals.posteriors.shape == (len(test.mask), 3)
