"""Decoding with several experts: against whole forward passes, against `mix`, against Hugging Face."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from demix.config.mixing import DEFAULTS, FAMILIES, METHODS
from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError
from demix.files import read_json, write_json
from demix.mix.mixtures import mix
from demix.mix.rules import CLASSES
from demix.mix.stream import Posterior
from demix.model.checkpoint import load_model
from demix.model.decode import (
    ALONE,
    Decoder,
    choose,
    decoded,
    generate,
    log_prior_of,
    nucleus,
    posteriors_of,
    weights_of,
)
from demix.model.export import export_hf
from support.cli import demix
from support.decoding import LENGTH, in_blocks, whole, write_run
from support.models import THREE, model_of, write_model

# More than two blocks, the last one short.
TOKENS = torch.randint(0, 50, (2, 2 * LENGTH + 5), generator=torch.Generator().manual_seed(0))
BEFORE = torch.tensor([7, 49])


def decoder_of(model, log_prior: torch.Tensor | None = None, decay: float | None = None) -> Decoder:
    log_prior = torch.zeros(len(model.experts)) if log_prior is None else log_prior
    return Decoder([model], BEFORE, Posterior(log_prior, LENGTH, len(BEFORE), decay))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("pieces", [[37], [1] * 37, [3, 13, 1, 15, 5], [16, 16, 5], [10, 20, 7]], ids=str)
def test_cached_decoding_equals_whole_forward_passes(dtype, tolerance, pieces) -> None:
    model = model_of(THREE, dtype)
    decoder, found, predicted = decoder_of(model), [], []
    for piece in TOKENS.split(pieces, 1):
        log_p = decoder.next_log_probabilities()
        scores, log_weights = decoder.read(piece)
        found.append(scores)
        predicted.append((log_p.gather(1, piece[:, :1])[:, 0], (log_weights[:, 0].T + scores[:, :, 0]).logsumexp(0)))
    np.testing.assert_allclose(torch.cat(found, 2).numpy(), whole(model, TOKENS, BEFORE), atol=tolerance, rtol=0)
    for foretold, came in predicted:
        np.testing.assert_allclose(foretold.numpy(), came.numpy(), atol=tolerance, rtol=0)


PRIOR = log_prior_of(THREE, {"law": 0.2, "code": 0.8})


@pytest.mark.parametrize(
    ("method", "log_prior", "decay"),
    [("uniform", torch.zeros(3), None), ("updating", torch.zeros(3), 0.3), ("cached", PRIOR, None)],
)
def test_mixtures_of_generated_texts_equal_mix(method: str, log_prior: torch.Tensor, decay: float | None) -> None:
    model = model_of(THREE)
    decoder = decoder_of(model, log_prior, decay)
    drawn, scores, log_weights = zip(
        *generate(decoder, 2 * LENGTH + 5, generator=torch.Generator().manual_seed(3)), strict=True
    )
    tokens, scores, log_weights = torch.cat(drawn, 1), torch.cat(scores, 2), torch.cat(log_weights, 1)
    expected = whole(model, tokens, BEFORE)
    mixed = (log_weights + scores.permute(1, 2, 0)).logsumexp(-1).numpy()
    for text in range(len(BEFORE)):
        table, mask = in_blocks(expected[:, text])
        ours = mix(table, mask, method, "history", decay=decay or 0.3, log_prior=PRIOR)[mask]
        np.testing.assert_allclose(mixed[text], ours, atol=1e-10, rtol=0)


class Far:
    """What `clusters_of` gives, with squared distances that follow from all tokens of a text so far."""

    names, so_far = THREE, 0

    def contexts(self, tokenizer: object, length: int) -> "Far":
        return self

    def anew(self) -> "Far":
        return Far()

    def distances(self, tokens: np.ndarray) -> np.ndarray:
        sums = self.so_far + np.cumsum(tokens)
        self.so_far = sums[-1]
        return 1 + np.sin(sums[:, None] * (1, 2, 3))


def with_defaults(family: str) -> str:
    """A rule of the config with the parameters that generation takes by itself."""
    return f"{family}({','.join(map(str, DEFAULTS[family]))})" if FAMILIES[family].parameters else family


@pytest.mark.parametrize(
    ("weights", "method"),
    [
        ("tempered(0.3,0.9)", "fitted"),
        ("tempered(1,0)", "uniform"),
        ("switching(0)", "uniform"),
        ("switching(1)", "fitted"),
        *((with_defaults(name), method) for name, family in FAMILIES.items() for method in METHODS[1:]
          if method not in family.refused),
    ],
)  # fmt: skip
@pytest.mark.parametrize("pieces", [[37], [3, 13, 1, 15, 5]], ids=str)
def test_every_rule_gives_the_mixtures_of_whole_texts(weights: str, method: str, pieces, monkeypatch) -> None:
    """Whatever rules there are: the weights of each step of generation are those by which scoring mixes the text."""
    monkeypatch.setattr("demix.model.decode.clusters_of", lambda directory: Far())
    model, known = model_of(THREE, torch.float64), method in ("cached", "fitted")
    rule, prior = weights_of(weights, Path()), PRIOR if known else np.zeros(3)
    begin = posteriors_of(rule, prior, Path(), THREE, None, LENGTH, 0.3 if method == "updating" else None)
    decoder = Decoder([model], BEFORE, begin(BEFORE.numpy()))
    scores, log_weights = (torch.cat(parts, axis) for axis, parts in zip(
        (2, 1), zip(*(decoder.read(piece) for piece in TOKENS.split(pieces, 1)), strict=True), strict=True
    ))  # fmt: skip
    mixed = (log_weights + scores.permute(1, 2, 0)).logsumexp(-1).numpy()
    for text in range(len(BEFORE)):
        table, mask = in_blocks(scores[:, text].numpy())
        far, _ = in_blocks(Far().anew().distances(np.append(BEFORE[text], TOKENS[text, :-1])).T)
        ours = mix(table, mask, method, weights, decay=0.3, log_prior=PRIOR, distances=far)[mask]
        np.testing.assert_allclose(mixed[text], ours, atol=1e-10, rtol=0)


def test_rules_of_a_config_are_those_that_mix() -> None:
    assert FAMILIES.keys() == CLASSES.keys()


def test_an_expert_without_weight_stays_so() -> None:
    model = model_of(THREE)
    without, two = decoder_of(model, log_prior_of(THREE, {"law": 1, "code": 1}), 0.3), None
    state = {name: t[[0, 2]] if ".feedforward." in name else t for name, t in model.state_dict().items()}
    two = model_of(("law", "code"))
    two.load_state_dict(state)
    alone = decoder_of(two, decay=0.3)
    without.read(TOKENS)
    alone.read(TOKENS)
    assert (without.posterior.log_weights[:, 1] == -torch.inf).all()
    np.testing.assert_allclose(without.next_log_probabilities(), alone.next_log_probabilities(), atol=1e-10)


def test_greedy_decoding_with_one_expert_equals_hugging_face(tokens: Path, tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    tokenizer = tokens / "tokenizer.json"
    encoder = Tokenizer.load(tokenizer)
    write_model(tmp_path / "model", tokenizer=encoder.sha256, vocab_size=encoder.vocab_size)
    prompt = torch.from_numpy(encoder.encode("the Lord").astype(np.int64))[None]
    start = torch.tensor([encoder.end_of_text])
    continuations = set()
    for expert in THREE:
        export_hf(tmp_path / "model", expert, tokenizer, tmp_path / expert)
        theirs = GPT2LMHeadModel.from_pretrained(tmp_path / expert)
        theirs.generation_config.eos_token_id = None
        seen = torch.cat([start[:, None], prompt], 1)
        wanted = theirs.generate(seen, attention_mask=torch.ones_like(seen), do_sample=False, max_length=LENGTH)
        model = load_model(tmp_path / "model", (expert,))
        decoder = Decoder([model], start, Posterior(torch.zeros(1), LENGTH))
        decoder.read(prompt)
        ours = [int(token) for token, _, _ in generate(decoder, LENGTH - seen.shape[1], temperature=0)]
        assert ours == wanted[0, seen.shape[1] :].tolist()
        assert len(ours) > 4
        continuations.add(tuple(ours))
    assert len(continuations) == 3, "the experts say different things"


def drawn(seed: int, **options: float) -> list[int]:
    decoder = decoder_of(model_of(THREE), decay=0.3)
    given = generate(decoder, 20, generator=torch.Generator().manual_seed(seed), **options)
    return torch.cat([tokens for tokens, _, _ in given], 1).flatten().tolist()


def test_a_seed_reproduces_and_another_does_not() -> None:
    assert drawn(1) == drawn(1) != drawn(2)
    assert drawn(1, temperature=0) == drawn(2, temperature=0)


def test_draws_follow_the_mixture() -> None:
    log_p = torch.tensor([0.5, 0.3, 0.2]).log().expand(20000, -1)
    generator = torch.Generator().manual_seed(0)
    for temperature, expected in ((1.0, [0.5, 0.3, 0.2]), (0.5, [0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38])):
        counts = choose(log_p, temperature, 1.0, generator).bincount(minlength=3) / len(log_p)
        np.testing.assert_allclose(counts, expected, atol=0.02)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 60), st.floats(0.001, 0.999), st.floats(0.1, 8), st.integers(0, 2**32 - 1))
def test_top_p_keeps_the_fewest_likeliest_that_reach_it(size: int, top_p: float, spread: float, seed: int) -> None:
    logits = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * spread
    probabilities = logits.softmax(0)
    found = nucleus(probabilities, top_p)
    kept = found > 0
    assert float(found.sum()) == pytest.approx(1)
    assert float(probabilities[kept].sum()) >= top_p - 1e-12
    assert float(probabilities[kept].sum() - probabilities[kept].min()) < top_p + 1e-12
    assert not (~kept).any() or probabilities[kept].min() >= probabilities[~kept].max()
    np.testing.assert_allclose(found[kept], probabilities[kept] / probabilities[kept].sum(), rtol=1e-9)


def test_priors_of_experts() -> None:
    np.testing.assert_allclose(np.exp(PRIOR), [0.2, 0, 0.8])
    np.testing.assert_allclose(np.exp(log_prior_of(THREE, {"news": 5.0})), [0, 1, 0])
    for wrong, cause in (({"laws": 1.0}, "no expert"), ({"law": -1.0}, "is -1"), ({"law": 0.0}, "without weight")):
        with pytest.raises(DemixError, match=cause):
            log_prior_of(THREE, wrong)
    with pytest.raises(DemixError, match="domain-token"):
        decoder_of(model_of(("dense",), domain_tokens=("law", "news")))


def test_bytes_become_characters_with_the_token_that_ends_them(tokens: Path) -> None:
    tokenizer = Tokenizer.load(tokens / "tokenizer.json")
    text = "naïve 🙂 σ"
    ids = tokenizer.encode(text)
    pieces = list(decoded(tokenizer, ids))
    assert len(ids) > len(text), "characters of several tokens"
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text
    assert "\ufffd" in "".join(decoded(tokenizer, [*ids[:-1], *ids[:2]]))


@pytest.fixture(scope="module")
def run(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"), tokens)


def test_the_command_prints_a_continuation(run: Path, tmp_path: Path) -> None:
    model, options = run / "models" / "demix", ["--prompt", "the Lord", "--tokens", 30, "--seed", 4]
    first = demix("generate", model, *options)
    assert first.exit_code == 0, first.exception
    assert len(first.stdout) > 10
    assert "posterior" not in first.output, "no terminal, no table"
    assert demix("generate", model, *options).stdout == first.stdout
    assert demix("generate", model, *options[:-1], 5).stdout != first.stdout
    outputs = {
        name: demix("generate", model, *options, "--temperature", 0, *more).stdout
        for name, more in {
            "law": ["--experts", "law"],
            "given": ["--prior", "law=2,news=0"],
            "songs": ["--prior", "songs"],
            "file": ["--prior", run / "evaluations" / "wiki.priors.parquet"],
            "wiki": ["--prior", "wiki"],
        }.items()
    }
    assert outputs["law"] == outputs["given"] == outputs["songs"]
    assert outputs["file"] == outputs["wiki"] != outputs["law"]
    rules = {
        weights: demix("generate", model, *options, "--weights", weights).stdout
        for weights in ("tempered", "tempered(0.1,0.99)", "tempered(0.4,0.5)", "history", "switching(0.9)")
    }
    assert rules["tempered"] == rules["tempered(0.1,0.99)"] == first.stdout
    write_json(model / "mixing.json", {"beta": 0.4, "gamma": 0.5})
    assert demix("generate", model, *options).stdout == rules["tempered(0.4,0.5)"]
    (model / "mixing.json").unlink()
    shutil.copytree(model, tmp_path / "elsewhere")
    assert isinstance(demix("generate", tmp_path / "elsewhere", *options).exception, DemixError)
    told = demix("generate", tmp_path / "elsewhere", *options, "--tokenizer", run / "tokenizer.json")
    assert told.stdout == first.stdout


@pytest.mark.parametrize(("bound", "threads"), [(ALONE, 1), (10, 2)])
def test_small_models_are_read_by_one_thread(
    bound: int, threads: int, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        monkeypatch.setattr("demix.model.decode.ALONE", bound)
        assert demix("generate", run / "models" / "demix", "--prompt", "a", "--tokens", 1).exit_code == 0
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_what_generation_cannot_do_is_refused(run: Path, tmp_path: Path) -> None:
    model = run / "models" / "demix"
    other = tmp_path / "tokenizer.json"
    write_json(other, read_json(run / "tokenizer.json") | {"version": "2.0"}, sort_keys=False)
    for options, cause in (
        (["--experts", "law,laws"], "laws"),
        (["--experts", "law,law"], "twice"),
        (["--prior", "film"], "no prior"),
        (["--prior", "updating"], "counts the evidence of tempered twice"),
        (["--weights", "last"], "--weights last: is not known"),
        (["--prior", "law=1,film=1"], "no expert"),
        (["--prior", "law=1e308,news=1e308"], "prior: has weights whose sum is more than a number holds"),
        (["--prompt", "\udcff\udcfe"], "--prompt: is not UTF-8"),
        (["--tokenizer", other], "another tokenizer"),
    ):
        error = demix("generate", model, "--prompt", "a", *options).exception
        assert isinstance(error, DemixError), (options, error)
        assert cause in str(error)
