"""Generation with several experts, from Python and the command line: against whole forward passes, `mix` and draws."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import demix as package
from demix.config.mixing import DEFAULTS, FAMILIES, METHODS
from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError
from demix.files import read_json, write_json
from demix.mix.rules import CLASSES
from support.cli import demix, refusal, succeeds
from support.decoding import LENGTH, in_blocks, whole, write_run
from support.errors import refused
from support.mixing import mix
from support.models import SMALL, THREE, model_of, save_model

# The prior of the domain wiki in the run.
WIKI = {"law": 0.1, "news": 0.2, "code": 0.7}
PROMPT = "And the Lord said unto Noah: “naïve” words,\n  and two spaces. 🙂 "


@pytest.fixture(scope="module")
def run(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a model in float64."""
    run = write_run(tmp_path_factory.mktemp("run"), tokens)
    encoder, directory = Tokenizer.load(run / "tokenizer.json"), run / "models" / "demix"
    shutil.rmtree(directory)
    save_model(model_of(THREE, vocab_size=encoder.vocab_size), directory, encoder.sha256)
    return run


@pytest.fixture(scope="module")
def opened(run: Path) -> package.OpenedModel:
    return package.load(run / "models" / "demix")


LENGTHS = [({}, length) for length in (0, 1, LENGTH - 1, LENGTH, LENGTH + 1, 2 * LENGTH + 5)]
ALIBI, ROPE = {"position": "alibi"}, {"position": "rope", "key_heads": 2}


@pytest.mark.parametrize(("options", "length"), [*LENGTHS, (ALIBI, LENGTH + 1), (ROPE, LENGTH + 1)])
def test_cached_decoding_equals_whole_forward_passes(options: dict, length: int, run: Path, tmp_path: Path) -> None:
    """With prompts that end before, at and behind the end of a block, and generated texts of more than two."""
    encoder, architecture = Tokenizer.load(run / "tokenizer.json"), SMALL.replace(**options)
    model = model_of(tuple(sorted(THREE)), architecture=architecture, vocab_size=encoder.vocab_size)
    save_model(model, tmp_path / "m", encoder.sha256)
    opened, given = package.load(tmp_path / "m", tokenizer=run / "tokenizer.json"), encoder.encode(PROMPT)[:length]
    found = opened.generate(encoder.decode(given), tokens=2 * LENGTH + 5, seed=3)
    ids = torch.tensor([[*given.tolist(), *found.ids.tolist()]])
    wanted = whole(model, ids, torch.tensor([encoder.end_of_text]))[:, 0, length:].T
    np.testing.assert_allclose(found.log_probabilities, wanted, rtol=0, atol=1e-10)
    following = opened.next(encoder.decode(given))
    assert following.log_probabilities[found.ids[0]] == pytest.approx(found.mixture[0], abs=1e-10)


def with_defaults(family: str) -> str:
    """A rule of the config with the parameters that generation takes by itself."""
    return f"{family}({','.join(map(str, DEFAULTS[family]))})" if FAMILIES[family].parameters else family


RULES = [
    ("tempered(0.3,0.9)", "fitted"),
    ("tempered(1,0)", "uniform"),
    ("switching(0)", "uniform"),
    ("switching(1)", "fitted"),
    *(
        (with_defaults(name), method)
        for name, family in FAMILIES.items()
        for method in METHODS[1:]
        if method not in family.refused and not family.routed
    ),
]


@pytest.mark.parametrize(("weights", "method"), RULES)
def test_every_rule_gives_the_mixtures_of_whole_texts(weights: str, method: str, opened: package.OpenedModel) -> None:
    """Whatever rules there are: the weights of each step of generation are those by which scoring mixes the text."""
    prior = method if method in ("uniform", "updating") else "wiki"
    (found,) = opened.score(PROMPT, weights=weights, prior=prior)
    made = opened.generate(PROMPT, tokens=LENGTH + 3, weights=weights, prior=prior)
    scores = np.concatenate([found.log_probabilities, made.log_probabilities])
    table, mask = in_blocks(scores.T)
    log_prior = np.log([WIKI[name] for name in opened.experts])
    expected = mix(table, mask, method, weights, decay=0.3, log_prior=log_prior)[mask]
    np.testing.assert_allclose(np.concatenate([found.mixture, made.mixture]), expected, atol=1e-10, rtol=0)
    weighted = np.concatenate([found.weights, made.weights])
    mixed = np.log((weighted * np.exp(scores)).sum(1))
    np.testing.assert_allclose(mixed, expected, atol=1e-8, rtol=0)


def test_rules_of_a_config_are_those_that_mix() -> None:
    assert FAMILIES.keys() == CLASSES.keys()


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (1.5, 0.6), (2.0, 0.05)])
def test_draws_follow_the_nucleus_of_the_mixture(temperature: float, top_p: float, opened: package.OpenedModel) -> None:
    """The fewest likeliest tokens that reach `top_p`; the mean of their log p is that of the distribution."""
    log_p = opened.next(PROMPT).log_probabilities / temperature
    p = np.exp(log_p - np.logaddexp.reduce(log_p))
    order = np.argsort(-p)
    kept = order[: 1 + np.searchsorted(np.cumsum(p[order]), top_p)] if top_p < 1 else order
    nucleus = p[kept] / p[kept].sum()
    asked = {"tokens": 1, "temperature": temperature, "top_p": top_p}
    drawn = np.concatenate([opened.generate(PROMPT, **asked, seed=seed).ids for seed in range(100)])
    assert {*drawn.tolist()} <= {*kept.tolist()}
    mean = nucleus @ log_p[kept]
    deviation = (nucleus @ (log_p[kept] - mean) ** 2) ** 0.5
    assert abs(log_p[drawn].mean() - mean) < 4 * deviation / len(drawn) ** 0.5 + 1e-12


def test_bytes_become_characters_with_the_token_that_ends_them(opened: package.OpenedModel) -> None:
    (found,) = opened.score(text := "naïve 🙂 σ")
    assert len(found.tokens) == len(found.ids) > len(text), "characters of several tokens"
    assert found.text == text


def test_the_command_prints_a_continuation(run: Path, tmp_path: Path) -> None:
    model, options = run / "models" / "demix", ["--prompt", "the Lord", "--tokens", 30, "--seed", 4]
    first = succeeds("generate", model, *options)
    assert len(first.stdout) > 10
    assert demix("generate", model, *options).stdout == first.stdout
    assert demix("generate", model, *options[:-1], 5).stdout != first.stdout
    asked = {
        "law": ["--experts", "law"],
        "given": ["--prior", "law=2,news=0"],
        "songs": ["--prior", "songs"],
        "wiki": ["--prior", "wiki"],
    }
    outputs = {
        name: demix("generate", model, *options, "--temperature", 0, *more).stdout for name, more in asked.items()
    }
    assert outputs["law"] == outputs["given"] == outputs["songs"]
    assert outputs["wiki"] != outputs["law"]
    copied = shutil.copytree(model, tmp_path / "elsewhere")
    assert isinstance(demix("generate", copied, *options).exception, DemixError)
    options += ["--tokenizer", run / "tokenizer.json"]
    assert demix("generate", copied, *options).stdout == first.stdout
    write_json(copied / "mixing.json", {"beta": 0.4, "gamma": 0.5})
    given = ("--weights", "tempered(0.4,0.5)")
    assert demix("generate", copied, *options).stdout == demix("generate", model, *options, *given).stdout


def test_what_generation_cannot_do_is_refused(run: Path, tmp_path: Path) -> None:
    model, other = run / "models" / "demix", tmp_path / "tokenizer.json"
    write_json(other, read_json(run / "tokenizer.json") | {"version": "2.0"}, sort_keys=False)
    for options, of in (
        (["--experts", "law,laws"], "laws"),
        (["--experts", "law,law"], "--experts"),
        (["--prior", "film"], "priors.parquet"),
        (["--prior", "updating"], "--prior updating"),
        (["--weights", "last"], "--weights last"),
        (["--prior", "law=1,film=1"], "film"),
        (["--prior", "law=-1"], "law"),
        (["--prior", "law=0"], "prior"),
        (["--prior", "law=1e308,news=1e308"], "prior"),
        (["--prompt", "\udcff\udcfe"], "--prompt"),
        (["--tokenizer", other], other),
    ):
        refusal("generate", model, "--prompt", "a", *options, of=of)
    encoder = Tokenizer.load(run / "tokenizer.json")
    led = model_of(("dense",), vocab_size=encoder.vocab_size, domain_tokens=("law", "news"))
    save_model(led, tmp_path / "led", encoder.sha256, "domain_token")
    with refused(tmp_path / "led"):
        package.load(tmp_path / "led", tokenizer=run / "tokenizer.json")
