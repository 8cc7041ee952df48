"""Model cards: every number from the run's files, nothing of what others wrote taken for markup."""

import shutil
from pathlib import Path

import pytest
import yaml
from synthetic_run import build_run
from test_experts import demix, write_model

from demix.errors import DemixError
from demix.files import read_json, write_json
from demix.report.card import model_card

EVIL = "<script>alert(1)</script> | [x](javascript:1)\n---\nCC0 https://example.org *all*"


def trained(directory: Path, *tokenizer: object) -> None:
    """A model of the made-up run's training domains, with the counts that training records beside it."""
    write_model(directory, ("code", "law", "news"), *tokenizer)
    sizes = {"shared_parameters": 1000, "expert_parameters": 2000}
    write_json(directory / "model.json", read_json(directory / "model.json") | sizes)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The made-up run, with its model `demix` written as weights, and a licence that is none."""
    run = build_run(tmp_path / "made-up")
    # The others of the made-up run are no whole models.
    shutil.rmtree(run.path / "models", ignore_errors=True)
    trained(run.path / "models" / "demix")
    config = read_json(run.path / "config.json")
    config["domains"]["training"]["law"] |= {"licence": EVIL, "anonymize": True}
    write_json(run.path / "config.json", config)
    counts = {"words": {"train": 12345, "dev": 678, "test": 901}, "replacements": {"EMAIL": 4321, "USER": 0}}
    for domain in ("code", "law", "news"):
        write_json(run.path / "corpus" / domain / "card.json", counts)
    return run.path


def front_and_body(card: str) -> tuple[dict, str]:
    front, body = card.removeprefix("---\n").split("\n---\n", 1)
    return yaml.safe_load(front), body


def test_the_card_says_what_the_files_hold(run: Path) -> None:
    front, body = front_and_body(model_card(run, "demix"))
    assert "12,345 | 678 | 901" in body
    assert "| law | 4,321 | 0 |" in body
    assert "90 tokens in 9 steps" in body
    assert "1,000 shared parameters and 3 experts of 2,000 each" in body
    lineage = read_json(run / "models" / "demix" / "experts" / "law.json")
    assert f"| law | – | law | 31 | 9 | {lineage['sha256'][:12]} |" in body
    index = {part["dataset"]["name"]: part["metrics"] for part in front["model-index"][0]["results"]}
    cached = {part["name"]: part["value"] for part in index["law"]}["perplexity, experts training, cached"]
    # The made-up law has perplexity 110 by its own expert, and 1.01 times that by the cached prior.
    assert cached == pytest.approx(111.1)
    (line,) = (line for line in body.splitlines() if line.startswith("| law | training | cached | history |"))
    assert "| 111.10 | " in line
    assert " to " in line


def test_what_others_wrote_stays_text(run: Path) -> None:
    _, body = front_and_body(model_card(run, "demix"))
    assert "<script>" not in body
    assert "[x](" not in body
    (line,) = (line for line in body.splitlines() if "alert(1)" in line)
    assert line.startswith("| law | &lt;script&gt;alert(1)&lt;/script&gt; \\| \\[x\\](javascript:1) --- CC0 https:")
    assert line.endswith("\\*all\\* | 12,345 | 678 | 901 | yes |")


def test_the_command_writes_a_card_for_every_model(run: Path) -> None:
    done = demix("card", run, "--output", run / "report" / "cards")
    assert done.exit_code == 0, done.output
    assert (run / "report" / "cards" / "demix.md").read_text() == model_card(run, "demix")
    with pytest.raises(DemixError, match=r"nobody: is not a model of the run"):
        model_card(run, "nobody")


def test_an_exported_folder_has_the_card_of_its_model(run: Path, tokens: Path, tmp_path: Path) -> None:
    from demix.data.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(tokens / "tokenizer.json")
    shutil.rmtree(run / "models" / "demix")
    trained(run / "models" / "demix", tokenizer.sha256, tokenizer.vocab_size)
    named = ("--expert", "law", "--tokenizer", tokens / "tokenizer.json", "--output", tmp_path / "hf")
    done = demix("export", run / "models" / "demix", *named)
    assert done.exit_code == 0, done.output
    text = (tmp_path / "hf" / "README.md").read_text()
    front, body = front_and_body(text)
    assert front["model-index"][0]["name"] == "demix"
    assert "# demix: expert law" in body
    assert "12,345 | 678 | 901" in body
