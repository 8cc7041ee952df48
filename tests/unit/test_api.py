"""The API from Python: the numbers are those of the commands, of transformers and of plain loops."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic_core import to_jsonable_python
from scipy.special import logsumexp

import demix
from demix.files import read_json
from demix.generate.completions import opened
from demix.generate.server import MixRequest, Page
from demix.model.export import export_hf
from demix.run.run import Run
from support.cli import succeeds
from support.errors import refused
from support.frozen import rows_of
from support.mixing import log_weights, tempered

SHORT = "the Lord said"
LONG = "And the Lord said unto Noah: “naïve” words,\n  and two spaces. " * 3


@pytest.fixture(scope="module")
def folder(frozen: Run) -> Path:
    return frozen.folder / "models" / "demix"


@pytest.fixture(scope="module")
def model(folder: Path) -> demix.OpenedModel:
    return demix.load(folder)


def test_a_model_has_what_the_folder_says(frozen: Run, folder: Path, model: demix.OpenedModel) -> None:
    assert model.experts == tuple(sorted(frozen.domains))
    assert demix.load(str(folder), experts=["licenses", "fantasy"]).experts == ("licenses", "fantasy")


def test_short_texts_have_the_probabilities_of_transformers(
    frozen: Run, folder: Path, model: demix.OpenedModel, tmp_path: Path
) -> None:
    from transformers import GPT2LMHeadModel

    ids = [int(number) for number in model.tokenizer.encode(SHORT)]
    assert 2 < len(ids) < frozen.context
    seen, every = torch.tensor([[model.tokenizer.end_of_text, *ids]]), []
    for expert in model.experts:
        export_hf(folder, expert, frozen.folder / "tokenizer.json", tmp_path / expert)
        with torch.no_grad():
            logits = GPT2LMHeadModel.from_pretrained(tmp_path / expert)(seen).logits[0]
        every.append(logits.double().log_softmax(-1).numpy())
    theirs = np.stack(every)  # [E, N + 1, V]
    scores = np.stack([theirs[:, place, token] for place, token in enumerate(ids)])
    chosen, experts = read_json(folder / "mixing.json"), len(model.experts)
    evidence = tempered(scores, chosen["beta"], chosen["gamma"])
    log_g = log_weights(np.full(experts, -np.log(experts)), evidence, None)

    _, found = model.score([LONG, SHORT])
    assert (found.ids.tolist(), found.text, str(found)) == (ids, SHORT, SHORT)
    np.testing.assert_allclose(found.log_probabilities, scores, atol=1e-4)
    np.testing.assert_allclose(found.weights, np.exp(log_g[:-1]), atol=1e-4)
    mixed = logsumexp(log_g[:-1] + scores, axis=-1)
    np.testing.assert_allclose(found.mixture, mixed, atol=1e-4)

    following = model.next(SHORT)
    expected = logsumexp(log_g[-1][:, None] + theirs[:, -1], axis=0)
    np.testing.assert_allclose(following.log_probabilities, expected, atol=1e-4)
    np.testing.assert_allclose(following.weights, np.exp(log_g[-1]), atol=1e-4)
    best = following.likeliest(5)
    assert best["id"].tolist() == np.argsort(-expected)[:5].tolist()
    assert best["token"].tolist() == [model.tokenizer.decode([number]) for number in best["id"]]
    assert str(best["id"][0]) in following._repr_html_()


@pytest.mark.parametrize(
    ("experts", "weights", "prior"),
    [
        (None, "tempered", ""),
        (["parliament", "fantasy"], "history", "fortunes"),
        (["licenses"], "switching(0.3)", ""),
        (None, "history", ""),
    ],
)
def test_a_text_of_several_blocks_has_the_numbers_of_the_playground(
    frozen: Run, folder: Path, model: demix.OpenedModel, experts: list[str] | None, weights: str, prior: str
) -> None:
    (found,) = model.score(LONG, experts=experts, weights=weights, prior=prior)
    assert len(found.ids) > 2 * frozen.context
    there = opened(folder)
    shown = Page(there).analysed(
        MixRequest(text=LONG, experts=tuple(experts or there.experts), weights=weights, prior=prior)
    )
    assert list(found.tokens) == shown["pieces"]
    np.testing.assert_allclose(-found.mixture, shown["nats"], atol=1e-3)
    np.testing.assert_allclose(-found.log_probabilities, shown["expert_nats"], atol=1e-3)
    np.testing.assert_allclose(found.weights, shown["weights"][:-1], atol=1e-4)
    after = model.next(LONG, experts=experts, weights=weights, prior=prior)
    np.testing.assert_allclose(after.weights, shown["weights"][-1], atol=1e-4)
    assert np.exp(after.log_probabilities).sum() == pytest.approx(1, abs=1e-5)
    table, number = found.table, model.experts.index("parliament")
    assert (table["", "mixture"] == found.mixture).all()
    assert (table["log p", "parliament"] == found.log_probabilities[:, number]).all()
    assert (table["weight", "parliament"] == found.weights[:, number]).all()


def test_experts_that_are_left_out_leave_their_prior_to_the_others(frozen: Run, model: demix.OpenedModel) -> None:
    """The cached prior of fantasy over all experts."""
    rows = rows_of(frozen, "priors").query("model == 'demix' and experts == 'all' and domain == 'fantasy'")
    prior = rows[rows["weights"] == "history"].set_index("expert")["prior"]
    found = model.next("", experts=["scripture", "licenses"], weights="history", prior="fantasy")
    expected = prior[["scripture", "licenses"]] / prior[["scripture", "licenses"]].sum()
    weights = dict(zip(found.experts, found.weights, strict=True))
    assert {name: weights.pop(name) for name in expected.index} == pytest.approx(expected.to_dict())
    assert not any(weights.values())


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"tokens": 40, "seed": 4, "weights": "history", "prior": "fantasy"},
        {"tokens": 25, "temperature": 0.0, "experts": ["parliament", "licenses"]},
        {"tokens": 25, "top_p": 0.2, "temperature": 2.0, "experts": ["fortunes"], "weights": "average"},
    ],
    ids=str,
)
def test_generation_is_that_of_the_command(folder: Path, model: demix.OpenedModel, asked: dict) -> None:
    options = {name: ",".join(value) if name == "experts" else value for name, value in asked.items()}
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    found = model.generate(SHORT, **asked)
    assert succeeds("generate", folder, "--prompt", SHORT, *words).stdout == f"{found}\n"
    assert len(found.ids) <= asked.get("tokens", 100)
    with np.errstate(divide="ignore"):
        mixed = logsumexp(np.log(found.weights) + found.log_probabilities, axis=1)
    np.testing.assert_allclose(found.mixture, mixed)
    left_out = [number for number, name in enumerate(model.experts) if name not in asked.get("experts", model.experts)]
    assert (found.weights[:, left_out] == 0).all()
    np.testing.assert_allclose(found.weights.sum(1), 1)


def test_figures_of_a_text_are_those_of_eval(folder: Path, model: demix.OpenedModel, tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text(LONG)
    printed = json.loads(succeeds("eval", folder, text, "--json").stdout)
    for given in (text, LONG):
        found = to_jsonable_python(model.eval(given))
        assert found == printed | {"text": str(text) if given is text else "text"}
    figures = model.eval(text)
    assert str(figures) == succeeds("eval", folder, text).stdout
    assert figures.table.loc["expert", "perplexity"].tolist() == [line.perplexity for line in figures.ranked]
    assert figures.table.loc[("mixture", "uniform"), "bits_per_byte"] == printed["mixtures"][3]["bits_per_byte"]
    assert "behind" in figures._repr_html_()


def test_a_file_is_read_as_it_is(model: demix.OpenedModel, tmp_path: Path) -> None:
    file = tmp_path / "a.md"
    file.write_bytes("naïve\r\n\n".encode())
    assert model.score(file)[0].text == "naïve\r\n\n"
    assert model.next(file).weights.tolist() == model.next("naïve\r\n\n").weights.tolist()
    assert model.score([file, "a"])[1].ids.tolist() == model.score("a")[0].ids.tolist()


REFUSED: list[tuple[Callable[[demix.OpenedModel, Path], object], str]] = [
    (lambda model, _: demix.load(model.folder.parent), "models/model.json"),
    (lambda model, _: demix.load(model.folder, experts=["law"]), "experts/law.json"),
    (lambda model, _: demix.load(model.folder, experts="fantasy"), "experts"),
    (lambda model, _: demix.load(model.folder, device="tpu"), "--device tpu"),
    (lambda model, _: model.score(["a", ""]), "text 2"),
    (lambda model, files: model.score(files / "no.txt"), "text 1"),
    (lambda model, _: model.eval(""), "text"),
    (lambda model, files: model.eval(files / "no.txt"), "no.txt"),
    (lambda model, _: model.eval(["a"]), "text"),
    (lambda model, _: model.next("\udcff"), "text"),
    (lambda model, _: model.eval("\udcff"), "text"),
    (lambda model, files: model.next(files / "nothing"), "nothing"),
    (lambda model, files: model.next(files / "latin.txt"), "latin.txt"),
    (lambda model, files: model.next(files / "records.jsonl"), "records.jsonl"),
    (lambda model, _: model.next("a", experts=["film"]), "experts"),
    (lambda model, _: model.next("a", experts=[]), "prior"),
    (lambda model, _: model.generate("a", tokens=0), "tokens"),
    (lambda model, _: model.generate("a", temperature=float("nan")), "temperature"),
    (lambda _, files: demix.open_run(files), "config.json"),
    (lambda model, _: demix.open_run(model.folder.parents[1]).sql("delete from results"), "query"),
]


@pytest.mark.parametrize(("asked", "subject"), REFUSED)
def test_what_cannot_be_done_is_refused(
    model: demix.OpenedModel, tmp_path: Path, asked: Callable[[demix.OpenedModel, Path], object], subject: str
) -> None:
    (tmp_path / "latin.txt").write_bytes("déjà".encode("latin-1"))
    (tmp_path / "records.jsonl").write_text('{"text": "a"}')
    (tmp_path / "no.txt").touch()
    with refused(subject):
        asked(model, tmp_path)


def test_a_run_answers_as_the_commands_do(frozen: Run, tmp_path: Path) -> None:
    run = demix.open_run(str(frozen.folder))
    assert run.results.equals(rows_of(frozen))
    query = "select domain, perplexity as p, perplexity as p, run from results where model = 'dense' order by all"
    printed = json.loads(succeeds("sql", frozen.folder, query, "--format", "json").stdout)
    assert printed
    assert run.sql(query).to_dict("records") == printed
    assert list(run.sql("select 1 as a, 2 as a")) == ["a", "a_1"]
