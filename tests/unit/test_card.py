"""Model cards: every number from the run's files, nothing of what others wrote taken for markup."""

import re
import shutil
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest
import yaml

from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError
from demix.files import read_json, write_json, write_parquet
from demix.model.usual import usual_of
from demix.report.card import exported_card, model_card
from demix.run.kept import read_run_config
from demix.run.run import Run
from support.cli import demix
from support.models import write_model
from support.synthetic_run import build_run, with_keys

EVIL = "<script>alert(1)</script> | [x](javascript:1)\n---\nCC0 https://example.org *all*"


def trained(directory: Path, *tokenizer: object, experts: tuple[str, ...] = ("code", "law", "news")) -> None:
    """A model of the made-up run's training domains, with the counts that training records beside it."""
    write_model(directory, experts, *tokenizer)
    sizes = {"shared_parameters": 1000, "expert_parameters": 2000}
    write_json(directory / "model.json", read_json(directory / "model.json") | sizes)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The made-up run, with its model `demix` written as weights, and a licence that is none."""
    run = build_run(tmp_path / "made-up")
    # The others of the made-up run are no whole models.
    shutil.rmtree(run.path / "models", ignore_errors=True)
    trained(run.path / "models" / "demix")
    training = run.keys["domains"]["training"]
    training["law"] |= {"licence": EVIL, "anonymize": True}
    counts = {"words": {"train": 12345, "dev": 678, "test": 901}, "replacements": {"EMAIL": 4321, "USER": 0}}
    counts["leakage"] = {"ngrams": {"length": 13, "test": 0.125}}
    training["news"]["anonymize"] = False
    for domain, known in {"code": 3, "law": 0, "news": 6}.items():
        counts["origins"] = {"test": 7, "test_in_train": known}
        write_json(run.path / "corpus" / domain / "card.json", counts)
    with_keys(run.path, run.keys)
    return run.path


def front_and_body(card: str) -> tuple[dict, str]:
    front, body = card.removeprefix("---\n").split("\n---\n", 1)
    return yaml.safe_load(front), body


def row(body: str, heading: str, domain: str) -> dict[str, str]:
    """The cells of a domain's line in the first table below a heading, by the names of their columns."""
    lines = body[body.index(heading) :].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|"))
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[start:] if line.startswith("|")]
    return next(dict(zip(cells[0], line, strict=True)) for line in cells[2:] if line[0] == domain)


def test_the_card_says_what_the_files_hold(run: Path) -> None:
    front, body = front_and_body(model_card(Run.read(run), "demix"))
    data = row(body, "## Data", "code")
    assert (data["words: train"], data["dev"], data["test"]) == ("12,345", "678", "901")
    assert data["test 13-grams seen in train"] == "12.5%"
    assert data["test documents with pieces in train"] == "3 of 7"
    expert = read_json(run / "models" / "demix" / "experts" / "code.json")
    assert data["tokens' sha256"] == expert["data_sha256"]["code"][:12]
    assert row(body, "Replaced in", "law") == {"domain": "law", "EMAIL": "4,321", "USER": "0"}
    assert row(body, "Replaced in", "news") == {"domain": "news", "EMAIL": "–", "USER": "–"}
    assert "90 tokens in 9 steps" in body
    assert "7,000 parameters: 1,000 that all share, and 3 experts of 2,000" in body
    lineage, file = row(body, "## Lineage", "law"), read_json(run / "models" / "demix" / "experts" / "law.json")
    assert (lineage["parent"], lineage["tokens"], lineage["sha256"]) == ("–", "31", file["sha256"][:12])

    assert (
        "21 test documents of the 3 training domains, 9 have other pieces in train (news 6 of 7, code 3 of 7)" in body
    )

    # The made-up law has perplexity 110 by its own expert, 1.05 · 0.97 times that by tempered, 1.3 times by Dense.
    index = {part["dataset"]["name"]: part["metrics"] for part in front["model-index"][0]["results"]}
    assert [(one["name"], one["value"]) for one in index["law"]] == [("perplexity, tempered", 112.035)]
    law = row(body, "### All experts", "law")
    assert list(law)[1:4] == ["Dense (Balanced)", "tempered", "95% interval"], "what is compared is side by side"
    assert (law["naive"], law["cached"], law["95% interval"]) == ("110.00", "111.10", "100.83 to 134.44")
    assert (law["tempered"], law["Dense (Balanced)"]) == ("112.03", "143.00")
    assert law["tokens"] == "1,003"
    assert row(body, "### All experts", "code")["95% interval"] == "–", "too few documents"
    assert row(body, "### The training", "wiki")["naive"] == "162.50\\*", "an oracle"
    means = row(body, "### The training", "mean of the 3 training domains")
    assert (means["naive"], means["Dense (Balanced)"]) == ("110.00", "143.00")
    assert row(body, "### The domain's own", "law")["cached"] == "198.00"
    assert row(body, "### The training domains' experts and that of wiki", "wiki")["cached"] == "131.30"


def test_another_seed_has_a_card_of_its_own(run: Path) -> None:
    both_seeds = with_keys(run, read_run_config(run).values | {"seeds": [2]})
    results = pd.read_parquet(run / "results.parquet")
    other = results[results["model"] == "demix"].assign(seed=2, perplexity=lambda rows: rows["perplexity"] * 2)
    both = pa.Table.from_pandas(pd.concat([results, other]), preserve_index=False)
    write_parquet(both, run / "results.parquet")
    shutil.copytree(run / "models" / "demix", run / "models" / "demix-seed2")
    bodies = [front_and_body(model_card(both_seeds, name))[1] for name in ("demix", "demix-seed2")]
    assert [row(body, "### All experts", "law")["naive"] for body in bodies] == ["110.00", "220.00"]
    assert row(bodies[0], "### All experts", "law").keys() - row(bodies[1], "### All experts", "law").keys() == {
        "Dense (Balanced)"
    }
    assert "seed 2" in bodies[1]


def test_what_others_wrote_stays_text(run: Path) -> None:
    _, body = front_and_body(model_card(Run.read(run), "demix"))
    assert "<script>" not in body
    assert "[x](" not in body
    (line,) = (line for line in body.splitlines() if "alert(1)" in line)
    assert line.startswith(
        "| law | training | &lt;script&gt;alert(1)&lt;/script&gt; \\| \\[x\\](javascript:1) --- CC0 https:"
    )
    assert "\\*all\\* | 12,345 | 678 | 901 |" in line


def test_the_command_writes_a_card_for_every_model(run: Path) -> None:
    done = demix("card", run, "--output", run / "report" / "cards")
    assert done.exit_code == 0, done.output
    assert (run / "report" / "cards" / "demix.md").read_text() == model_card(Run.read(run), "demix")
    page = (run / "report" / "cards" / "demix.html").read_text()
    assert "model-index" not in page
    assert re.findall("<(?:title|h1)>(.*?)</", page) == ["DEMix", "DEMix"], "as the first page names it"
    assert page.count("<table>") == len(re.findall(r"(?m)^\|[ :]*---", model_card(Run.read(run), "demix"))) > 2
    assert "<td>&lt;script&gt;alert(1)&lt;/script&gt; | [x](javascript:1)" in page
    with pytest.raises(DemixError, match=r"demos: is not a model of the run; did you mean demix\?"):
        model_card(Run.read(run), "demos")


def test_each_artefact_has_a_card_of_its_own(run: Path, tokens: Path, tmp_path: Path) -> None:
    """An exported expert and a merged model say nothing of the mixture's results, nor of its tokens."""
    model, tokenizer = run / "models" / "demix", Tokenizer.load(tokens / "tokenizer.json")
    shutil.rmtree(model)
    trained(model, tokenizer.sha256, tokenizer.vocab_size)
    shutil.copy(tokens / "tokenizer.json", model)

    def card(folder: str, *words: object) -> tuple[dict, str]:
        done = demix(*words, "--output", tmp_path / folder)
        assert done.exit_code == 0, (done.output, done.exception)
        return front_and_body((tmp_path / folder / "README.md").read_text())

    front, body = card("hf", "export", model, "--expert", "law")
    (index,) = front["model-index"]
    (entry,) = index["results"]
    assert (index["name"], entry["dataset"]["name"], entry["metrics"][0]["value"]) == ("demix-law", "law", 110.0)
    assert (row(body, "## Data", "law")["words: train"], row(body, "| expert", "law")["tokens"]) == ("12,345", "31")
    assert "of run made-up" in body
    assert "90 tokens" not in body
    assert "| news |" not in body

    assert demix("card", run, "--output", run / "report" / "cards").exit_code == 0
    assert (model / "README.md").read_text() == model_card(Run.read(run), "demix")
    copy = shutil.copytree(model, tmp_path / "copy")
    copied, body = card("hf2", "export", copy, "--expert", "law")
    assert copied["model-index"][0]["results"] == index["results"]
    bare = shutil.copytree(copy, tmp_path / "bare", ignore=shutil.ignore_patterns("usual.json"))
    for name, other in (("same", model), ("unknown", bare)):
        added = other / "experts" / "law.safetensors"
        assert demix("experts", "add", copy, added, "--name", name).exit_code == 0
        assert not (copy / "README.md").exists(), "its results are those of the experts before"
    assert usual_of(copy).keys() == {*usual_of(model), "same"}
    assert demix("experts", "remove", copy, "same").exit_code == 0
    assert usual_of(copy).keys() == usual_of(model).keys()
    assert demix("experts", "add", copy, model / "experts" / "law.safetensors", "--name", "same").exit_code == 0
    assert card("hf3", "export", copy, "--expert", "same")[0]["model-index"][0]["name"] == "copy-same"
    front, body = card("hf4", "export", copy, "--expert", "unknown")
    assert "model-index" not in front
    assert "not scored alone" in body

    front, body = card("merged", "merge", copy, "--weights", "law=0.25,news=0.75")
    assert "model-index" not in front
    parent = row(body, "## Parents", "news")
    assert (parent["weight"], parent["tokens of its training"]) == ("0.7500", "32")
    transformers = front | {"library_name": "transformers"}
    assert card("hf5", "export", tmp_path / "merged", "--expert", "dense") == (transformers, body)

    # What an earlier training left is not asked.
    trained(run / "models" / "dense", experts=("dense",))
    (run / "models" / "dense" / "README.md").write_text("an older card")
    front, _ = front_and_body(exported_card(run / "models" / "dense", "dense"))
    assert front["library_name"] == "transformers"
    assert "mixture-of-experts" not in front["tags"]
    assert {entry["dataset"]["name"] for entry in front["model-index"][0]["results"]} >= {"law", "news"}
