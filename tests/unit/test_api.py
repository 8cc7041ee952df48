"""The API from Python: the numbers are those of the commands, of transformers and of plain loops."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import logsumexp

import demix
from demix.files import read_parquet
from demix.generate.playground.answers import MixRequest, analyse, opened
from demix.model.checkpoint import load_model
from demix.model.export import export_hf
from demix.report.items import all_items
from support.cli import demix as command
from support.decoding import LENGTH, whole, write_run
from support.mixing import log_weights, tempered
from support.models import THREE
from support.synthetic_run import MadeUp

REPOSITORY = Path(__file__).parents[2]
SHORT = "the Lord said"
LONG = "And the Lord said unto Noah: “naïve” words,\n  and two spaces. " * 3


@pytest.fixture(scope="module")
def run(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"), tokens)


@pytest.fixture(scope="module")
def model(run: Path) -> demix.OpenedModel:
    return demix.load(run / "models" / "demix")


def printed(*arguments: object) -> str:
    done = command(*arguments)
    assert done.exit_code == 0, (arguments, done.exception)
    return done.stdout


def test_an_import_loads_neither_torch_nor_pandas_and_names_load_when_they_are_used() -> None:
    # Without `site`, which may itself import modules.
    heavy = "{*sys.modules} & {'torch', 'transformers', 'pandas', 'numpy', 'duckdb', 'altair', 'typing'}"
    code = f"import demix, sys; print({heavy}); print(demix.load.__module__, 'torch' in sys.modules, *dir(demix))"
    ran = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert ran.stdout.splitlines()[0] == "set()"
    ran = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    module, torch_loaded, *names = ran.stdout.splitlines()[1].split()
    assert (module, torch_loaded) == ("demix.api", "True")
    assert {*demix.__all__} <= {*names}
    assert all(getattr(demix, name).__doc__ for name in demix.__all__)
    with pytest.raises(AttributeError, match="'demix' has no attribute 'nothing'"):
        _ = demix.nothing


def test_a_model_has_what_the_folder_says(run: Path, model: demix.OpenedModel) -> None:
    assert (model.experts, model.context) == (tuple(sorted(THREE)), LENGTH)
    assert demix.load(str(run / "models" / "demix"), experts=["law", "code"]).experts == ("law", "code")


def test_short_texts_have_the_probabilities_of_transformers(
    run: Path, model: demix.OpenedModel, tmp_path: Path
) -> None:
    from transformers import GPT2LMHeadModel

    ids = [int(number) for number in model.tokenizer.encode(SHORT)]
    assert 2 < len(ids) < LENGTH
    seen, every = torch.tensor([[model.tokenizer.end_of_text, *ids]]), []
    for expert in model.experts:
        export_hf(run / "models" / "demix", expert, run / "tokenizer.json", tmp_path / expert)
        with torch.no_grad():
            logits = GPT2LMHeadModel.from_pretrained(tmp_path / expert)(seen).logits[0]
        every.append(logits.double().log_softmax(-1).numpy())
    theirs = np.stack(every)  # [E, N + 1, V]
    scores = np.stack([theirs[:, place, token] for place, token in enumerate(ids)])
    log_g = log_weights(np.full(3, -np.log(3)), tempered(scores, 0.1, 0.99), None)

    _, found = model.score([LONG, SHORT])
    assert (found.ids.tolist(), found.text, str(found)) == (ids, SHORT, SHORT)
    np.testing.assert_allclose(found.log_probabilities, scores, atol=1e-4)
    np.testing.assert_allclose(found.weights, np.exp(log_g[:-1]), atol=1e-5)
    mixed = logsumexp(log_g[:-1] + scores, axis=-1)
    np.testing.assert_allclose(found.mixture, mixed, atol=1e-4)
    assert found.perplexity == pytest.approx(np.exp(-mixed.mean()), rel=1e-4)

    following = model.next(SHORT)
    expected = logsumexp(log_g[-1][:, None] + theirs[:, -1], axis=0)
    np.testing.assert_allclose(following.log_probabilities, expected, atol=1e-4)
    np.testing.assert_allclose(following.weights, np.exp(log_g[-1]), atol=1e-5)
    best = following.likeliest(5)
    assert best["id"].tolist() == np.argsort(-expected)[:5].tolist()
    assert best["token"].tolist() == [model.tokenizer.decode([number]) for number in best["id"]]
    assert str(best["id"][0]) in following._repr_html_()


@pytest.mark.parametrize(
    ("experts", "weights", "prior"),
    [
        (None, "tempered", ""),
        (["law", "code"], "history", "wiki"),
        (["news"], "switching(0.3)", ""),
        (None, "history", ""),
    ],
)
def test_a_text_of_several_blocks_has_the_numbers_of_the_playground(
    run: Path, model: demix.OpenedModel, experts: list[str] | None, weights: str, prior: str
) -> None:
    (found,) = model.score(LONG, experts=experts, weights=weights, prior=prior)
    assert len(found.ids) > 2 * LENGTH
    there = opened(run / "models" / "demix", None)
    there.domains = ("wiki",)
    shown = analyse(there, MixRequest(LONG, tuple(experts or there.experts), weights, prior))
    assert list(found.tokens) == shown["pieces"]
    bits = np.array(shown["bits"]), np.array(shown["expert_bits"])
    np.testing.assert_allclose(-found.mixture / np.log(2), bits[0], atol=1e-3)
    np.testing.assert_allclose(-found.log_probabilities / np.log(2), bits[1], atol=1e-2)
    np.testing.assert_allclose(found.weights, shown["weights"][:-1], atol=1e-4)
    after = model.next(LONG, experts=experts, weights=weights, prior=prior)
    np.testing.assert_allclose(after.weights, shown["weights"][-1], atol=1e-4)
    assert np.exp(after.log_probabilities).sum() == pytest.approx(1, abs=1e-5)
    table = found.table
    assert (table["", "mixture"] == found.mixture).all()
    assert (table["log p", "news"] == found.log_probabilities[:, model.experts.index("news")]).all()
    assert (table["weight", "law"] == found.weights[:, model.experts.index("law")]).all()


def test_experts_that_are_left_out_leave_their_prior_to_the_others(model: demix.OpenedModel) -> None:
    """The prior of wiki is 0.1 for law, 0.2 for news, 0.7 for code."""
    found = model.next("", experts=["code", "law"], weights="history", prior="wiki")
    assert found.experts == ("code", "law", "news")
    np.testing.assert_allclose(found.weights, [0.7 / 0.8, 0.1 / 0.8, 0])


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"tokens": 40, "seed": 4, "weights": "history", "prior": "wiki"},
        {"tokens": 25, "temperature": 0.0, "experts": ["law", "code"]},
        {"tokens": 25, "top_p": 0.2, "temperature": 2.0, "experts": ["news"], "weights": "average"},
    ],
    ids=str,
)
def test_generation_is_that_of_the_command(run: Path, model: demix.OpenedModel, asked: dict) -> None:
    options = {name: ",".join(value) if name == "experts" else value for name, value in asked.items()}
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    found = model.generate(SHORT, **asked)
    assert printed("generate", run / "models" / "demix", "--prompt", SHORT, *words) == f"{found}\n"
    assert len(found.ids) <= asked.get("tokens", 100)
    ids = torch.tensor([[*model.tokenizer.encode(SHORT).tolist(), *found.ids.tolist()]])
    expected = whole(load_model(run / "models" / "demix"), ids, torch.tensor([model.tokenizer.end_of_text]))
    np.testing.assert_allclose(found.log_probabilities.T, expected[:, 0, -len(found.ids) :], atol=1e-4)
    with np.errstate(divide="ignore"):
        mixed = logsumexp(np.log(found.weights) + found.log_probabilities, axis=1)
    np.testing.assert_allclose(found.mixture, mixed)
    left_out = [number for number, name in enumerate(model.experts) if name not in asked.get("experts", THREE)]
    assert (found.weights[:, left_out] == 0).all()
    np.testing.assert_allclose(found.weights.sum(1), 1)


def test_figures_of_a_text_are_those_of_eval(run: Path, model: demix.OpenedModel, tokens: Path, tmp_path: Path) -> None:
    text, folder = tmp_path / "a.txt", run / "models" / "demix"
    text.write_text(LONG)
    told = json.loads(printed("eval", folder, text, "--json"))
    for given in (text, LONG):
        found = json.loads(json.dumps(dataclasses.asdict(model.eval(given))))
        assert found == told | {"text": str(text) if given is text else "text"}
    assert str(model.eval(text)) == printed("eval", folder, text)
    figures = model.eval(text)
    assert figures.table.loc["expert", "perplexity"].tolist() == [line.perplexity for line in figures.ranked]
    assert figures.table.loc[("mixture", "uniform"), "bits_per_byte"] == told["mixtures"][3]["bits_per_byte"]
    assert "behind" in figures._repr_html_()
    corpus = tokens / "corpus" / "fantasy"
    told = json.loads(printed("eval", folder, corpus / "test.parquet", "--dev", corpus / "dev.parquet", "--json"))
    again = model.eval(corpus / "test.parquet", dev=corpus / "dev.parquet")
    assert again.documents == told["documents"] > 1
    assert {"cached", "fitted"} < again.by_mixture.keys()
    assert again.by_mixture == {line["name"]: line["perplexity"] for line in told["mixtures"]}
    assert "cached" not in model.eval(text).by_mixture


def test_a_file_is_read_as_it_is(model: demix.OpenedModel, tmp_path: Path) -> None:
    file = tmp_path / "a.md"
    file.write_bytes("naïve\r\n\n".encode())
    assert model.score(file)[0].text == "naïve\r\n\n"
    assert model.next(file).weights.tolist() == model.next("naïve\r\n\n").weights.tolist()
    assert model.score([file, "a"])[1].ids.tolist() == model.score("a")[0].ids.tolist()


def test_what_cannot_be_done_is_refused_in_one_line(run: Path, model: demix.OpenedModel, tmp_path: Path) -> None:
    for name, content in {
        "latin.txt": "déjà".encode("latin-1"),
        "records.jsonl": b'{"text": "a"}',
        "no.txt": b"",
    }.items():
        (tmp_path / name).write_bytes(content)
    folder = run / "models" / "demix"
    for asked, line in (
        (lambda: demix.load(run), "is missing, so its folder is none of a model"),
        (lambda: demix.load(folder, experts=["laws"]), "so the model has no such expert; did you mean law?"),
        (lambda: demix.load(folder, experts=["law", "law"]), "names an expert twice"),
        (lambda: demix.load(folder, experts="law"), 'experts: is a string; give a list of names: ["law"]'),
        (lambda: demix.load(folder, device="tpu"), "tpu: is not on this machine"),
        (lambda: model.score(["a", ""]), "text 2: holds no text"),
        (lambda: model.score(tmp_path / "no.txt"), "text 1: holds no text"),
        (lambda: model.eval(""), "text: holds no text"),
        (lambda: model.eval(tmp_path / "no.txt"), "no.txt: holds no text"),
        (lambda: model.eval(["a"]), "text: is of the type list; give a string, or a Path for a file"),
        (lambda: model.score([1]), "text: is of the type int"),
        (lambda: model.next("\udcff"), "text: is not UTF-8"),
        (lambda: model.eval("\udcff"), "text: is not UTF-8"),
        (lambda: model.next(tmp_path / "nothing"), "nothing: is missing"),
        (lambda: model.next(tmp_path), "is a folder"),
        (lambda: model.next(tmp_path / "latin.txt"), "is not UTF-8; convert it"),
        (lambda: model.next(tmp_path / "records.jsonl"), "holds documents, not one text"),
        (lambda: model.next("a", experts=["film"]), "experts: 'film' is no expert of this model; known are code, law"),
        (lambda: model.next("a", experts=[]), "leaves every expert without weight"),
        (lambda: model.next("a", weights="last"), "--weights last: is not known"),
        (lambda: model.next("a", prior="updating"), "counts the evidence of tempered twice"),
        (lambda: model.generate("a", tokens=0), "tokens: is 0; give a value from 1"),
        (lambda: model.generate("a", temperature=float("nan")), "temperature: is nan"),
        (lambda: demix.open_run(tmp_path), "is missing, so its folder is none of a run"),
    ):  # fmt: skip
        with pytest.raises(demix.DemixError) as error:
            asked()
        assert line in str(error.value)
        assert "\n" not in str(error.value)


def test_a_run_answers_as_the_commands_do(made_up: MadeUp, tmp_path: Path) -> None:
    run = demix.open_run(str(made_up.path))
    rows = read_parquet(made_up.path / "results.parquet")
    assert run.results.equals(rows.to_pandas())
    query = "select domain, perplexity as p, perplexity as p, run from results where model = 'dense' order by all"
    told = json.loads(printed("sql", made_up.path, query, "--format", "json"))
    assert told
    assert run.sql(query).to_dict("records") == told
    assert list(run.sql("select 1 as a, 2 as a")) == ["a", "a_1"]
    all_items()["figure2"].write(made_up.material(), tmp_path)
    assert json.loads(run.figure("figure2").to_json()) == json.loads(
        (tmp_path / "figures" / "figure2.json").read_text()
    )
    for asked, line in (
        (lambda: run.figure("figure3"), "figure figure3: is none of this run; did you mean figure"),
        (lambda: run.figure("table3"), "figure table3: is none of this run"),
        (lambda: run.sql("delete from results"), "is no SELECT but DELETE"),
        (lambda: run.sql("select nothing from results"), "nothing"),
    ):
        with pytest.raises(demix.DemixError, match=line):
            asked()
