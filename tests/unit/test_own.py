"""A text of one's own, against the same numbers by way of the pipeline's score tables."""

import json
import math
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from demix.data.tokenizer import Tokenizer
from demix.evaluate.own_text import DECAY, evaluate_texts
from demix.evaluate.score import Scoring
from demix.evaluate.score_tables import read_scores
from demix.files import read_parquet
from demix.mix.rules import Tempered
from demix.model.experts import write_usual
from demix.model.manifest import Usual
from demix.run.run import Run
from support.cli import demix, refusal, succeeds
from support.configs import with_keys
from support.errors import refused
from support.frozen import rows_of
from support.mixing import mix
from support.models import write_model
from support.scored import score
from support.tokens import TRAINING


@pytest.fixture(scope="module")
def model(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of three experts in a run's folder, of the tokenizer that `tokens` has."""
    run = tmp_path_factory.mktemp("run")
    (run / "tokenizer.json").write_bytes((tokens / "tokenizer.json").read_bytes())
    tokenizer = Tokenizer.load(run / "tokenizer.json")
    write_model(run / "models" / "demix", TRAINING, tokenizer.sha256, tokenizer.vocab_size)
    return run / "models" / "demix"


def asked(model: Path, text: Path, *more: object) -> dict:
    return json.loads(succeeds("eval", model, text, "--json", *more).stdout)


def test_the_numbers_are_those_of_the_pipeline(model: Path, tokens: Path, tmp_path: Path) -> None:
    corpus = tokens / "corpus" / "fantasy"
    found = asked(model, corpus / "test.parquet")
    experts = tuple(sorted(TRAINING))
    score(model, experts, [tokens / "tokens" / "fantasy" / "test.arrow"], Scoring(threads=1), tmp_path)
    test = read_scores(tmp_path / "fantasy.test", experts)
    documents = len(read_parquet(corpus / "test.parquet"))
    assert (found["tokens"], found["documents"], found["blocks"]) == (test.tokens, documents, len(test.mask))

    def perplexity(log_p: np.ndarray) -> float:
        return math.exp(-log_p.sum() / test.tokens)

    for number, line in enumerate(found["experts"]):
        assert line["name"] == experts[number]
        assert line["perplexity"] == pytest.approx(perplexity(test.scores[..., number]), rel=1e-6)
        nats = math.log(line["perplexity"]) * test.tokens
        assert line["bits_per_byte"] == pytest.approx(nats / math.log(2) / found["bytes"])
    by_name = {line["name"]: line["perplexity"] for line in found["mixtures"]}
    mixtures = {name: mix(test.scores, test.mask, name, decay=DECAY) for name in ("average", "uniform", "updating")}
    mixtures["tempered (uniform prior)"] = mix(test.scores, test.mask, "uniform", Tempered(0.1, 0.99))
    for name, mixed in mixtures.items():
        assert by_name[name] == pytest.approx(perplexity(mixed), rel=1e-6), name
    best = min(found["experts"], key=lambda line: line["perplexity"])
    assert by_name[f"best single ({best['name']}), an oracle"] == best["perplexity"]
    for share in ("weight", "posterior"):
        assert sum(line[share] for line in found["experts"]) == pytest.approx(1)


def test_any_file_of_text_is_one_document(model: Path, tmp_path: Path) -> None:
    text = "Zwölf Boxkämpfer jagen Viktor.\n" * 30
    for name in ("notes.md", "notes", "notes.[v1].txt"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        found = asked(model, path)
        assert (found["documents"], found["bytes"]) == (1, len(text.encode()))


def test_the_terminal_shows_the_same_numbers(model: Path, tokens: Path) -> None:
    text = tokens / "corpus" / "fantasy" / "test.parquet"
    found = asked(model, text)
    shown = demix("eval", model, text).output
    rows = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in shown.splitlines() if "│" in line]
    experts = sorted(found["experts"], key=lambda line: line["perplexity"])
    shared = ("perplexity", "{:.2f}"), ("bits_per_byte", "{:.3f}")
    wanted = [
        [line["name"], *(form.format(line[key]) for key, form in shared)] for line in [*found["mixtures"], *experts]
    ]
    assert [row[:3] for row in rows] == wanted
    own = [[f"{line[key]:.3f}" for key in ("behind", "weight", "posterior")] for line in experts]
    assert [row[4:] for row in rows[-len(experts) :]] == own
    first, second, _ = experts
    lead = math.log(second["perplexity"] / first["perplexity"])
    assert (first["behind"], second["behind"]) == (0, pytest.approx(lead))


def test_a_text_is_held_against_the_experts_own_domains_and_the_dense_model(frozen: Run, tmp_path: Path) -> None:
    """The run says what is usual; a copied model takes it along, and its dense model stays behind."""
    model, text = frozen.folder / "models" / "demix", frozen.folder / "corpus" / "fantasy" / "test.parquet"
    rows = rows_of(frozen).query("model == 'demix' and method == 'expert' and seed == 1 and expert == domain")
    found = asked(model, text)
    usual = {line["name"]: line["usual"]["perplexity"] for line in found["experts"]}
    assert usual == pytest.approx(rows.set_index("domain")["perplexity"].to_dict())
    dense = asked(frozen.folder / "models" / "dense", text)["experts"][0]["perplexity"]
    assert {line["name"]: line["perplexity"] for line in found["mixtures"]}["dense model of the run"] == dense
    assert "No dense model" not in demix("eval", model, text).output

    best = min(found["experts"], key=lambda line: line["perplexity"])
    copy = shutil.copytree(model, tmp_path / "copy")
    assert asked(copy, text)["unlike"] is None
    for factor, unlike in ((1.24, False), (1.26, True)):
        figures = Usual(perplexity=7, bits_per_byte=best["bits_per_byte"] / factor)
        write_usual(copy, {best["name"]: figures})
        alone = asked(copy, text)
        assert alone["unlike"] is unlike
        assert ("WARNING" in demix("eval", copy, text).output) is unlike
    assert "dense model of the run" not in {line["name"] for line in alone["mixtures"]}
    for texts in ((text,), (text, text)):
        assert "No dense model" in demix("eval", copy, *texts).output
    assert {line["name"]: line["usual"] for line in alone["experts"]}[best["name"]]["perplexity"] == 7


@pytest.mark.parametrize(
    ("options", "beside"), [({}, "dense"), ({"position": "alibi"}, "dense_alibi"), ({"position": "rope"}, "")]
)
def test_the_dense_model_beside_experts_differs_in_the_experts_alone(
    frozen_copy: Run, options: dict[str, str], beside: str
) -> None:
    """The run's own dense model has learned positions; here each has the parameters of that one, or none."""
    models, text = frozen_copy.folder / "models", frozen_copy.folder / "corpus" / "fantasy" / "test.parquet"
    keys = frozen_copy.config.values
    with_keys(frozen_copy.folder, keys | {"models": keys["models"] | {"demix": {"architecture": options}}})
    if beside == "dense_alibi":
        shutil.rmtree(models / "dense_alibi")
        (frozen_copy.folder / "metrics" / "dense_alibi.jsonl").unlink()
        (models / "dense").rename(models / "dense_alibi")
    named = {line["name"] for line in asked(models / "demix", text)["mixtures"]}
    assert ("dense model of the run" in named) == bool(beside)


def test_several_texts_are_a_table_of_the_answers_to_each(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "below").mkdir(parents=True)
    texts = {folder / "a.txt": "the sea was calm " * 60, folder / "below" / "b": "the law of the sea"}
    for path, text in texts.items():
        path.write_text(text)
    (folder / ".hidden").write_text("no")
    alone = [asked(model, path) for path in texts]
    assert asked(model, folder) == asked(model, *texts) == alone
    assert [one["text"] for one in alone] == list(map(str, texts))
    assert {one["tokens"] < 200 for one in alone} == {True, False}


def test_a_file_in_a_folder_that_is_no_text_has_a_line_with_the_cause(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the sea was calm " * 60)
    (tmp_path / "b.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    (tmp_path / "c.txt").write_text("")
    (tmp_path / "d.jsonl").write_text('{"body": "the sea"}\n')
    first, *others = asked(model, tmp_path)
    assert first == asked(model, tmp_path / "a.txt")
    assert [Path(other["text"]).name for other in others] == ["b.png", "c.txt", "d.jsonl"]
    assert all(other["cause"] for other in others)
    for name in ("b.png", "c.txt", "none.txt"):
        refusal("eval", model, tmp_path / name, of=name)
        several = demix("eval", model, tmp_path / name, tmp_path / "a.txt", "--json")
        assert several.exit_code == 1
        assert json.loads(several.stdout)[1] == first


def test_a_pipe_is_read_like_a_file(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "the sea was calm " * 20
    (tmp_path / "a.txt").write_text(text)
    expected = asked(model, tmp_path / "a.txt")
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_text(text))
    writer.start()
    piped = asked(model, tmp_path / "pipe")
    writer.join()
    assert piped == expected | {"text": str(tmp_path / "pipe")}
    monkeypatch.setattr("sys.stdin", (tmp_path / "a.txt").open())
    (found,) = evaluate_texts(model, [Path("-")])
    assert found.text == "-"
    assert found.ranked[0].perplexity == min(line["perplexity"] for line in expected["experts"])
    monkeypatch.setattr("demix.evaluate.own_text.MAX_DOCUMENT_BYTES", 100)
    with refused("/dev/zero"):
        list(evaluate_texts(model, [Path("/dev/zero")]))


def test_what_cannot_be_read_is_refused(model: Path, tokens: Path, tmp_path: Path) -> None:
    text, other, encoder = tmp_path / "a.txt", tmp_path / "other", tokens / "tokenizer.json"
    text.write_text("the sea")
    write_model(other, TRAINING)
    refusal("eval", model, tmp_path / "no.txt", of="no.txt")
    refusal("eval", other, text, of=other)
    refusal("eval", other, text, "--tokenizer", encoder, of=encoder)
    refusal("eval", model, text, "--tokenizer", tmp_path / "none.json", of="none.json")
