"""EleutherAI's lm-eval runs, offline, on what `demix export` writes, and measures what demix does."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from demix.data.tokenizer import Tokenizer
from demix.model.checkpoint import load_model
from support.cli import demix
from support.models import THREE, write_model

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

# Shorter than a block, longer than one, and characters of several bytes.
TEXTS = (
    "The house divided.",
    "In the beginning was the word, and the word was long enough to fill more than one block of the model. " * 4,
    "Zoë’s naïve café – 東京",
)
TASK = """\
task: own_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: bits_per_byte
"""


# The command line of lm-eval for each of several argument lists: its imports take longer than what it computes.
LM_EVAL = """
import json, sys
from lm_eval.__main__ import cli_evaluate
for arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = arguments
    cli_evaluate()
"""


def test_lm_eval_finds_our_log_likelihoods(tokens: Path, tmp_path: Path) -> None:
    """Of an expert and of a merged model."""
    tokenizer = Tokenizer.load(tokens / "tokenizer.json")
    models = {"law": tmp_path / "model", "dense": tmp_path / "merged"}
    write_model(models["law"], THREE, tokenizer.sha256, tokenizer.vocab_size)
    done = demix("merge", models["law"], "--weights", "law=0.25,news=0.75", "--output", models["dense"])
    assert done.exit_code == 0, done.output
    for expert, model in models.items():
        named = ("--expert", expert, "--tokenizer", tokens / "tokenizer.json", "--output", tmp_path / "hf" / expert)
        assert demix("export", model, "--format", "hf", *named).exit_code == 0

    data, tasks = tmp_path / "texts.json", tmp_path / "tasks"
    data.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS) + "\n")
    tasks.mkdir()
    (tasks / "own_text.yaml").write_text(TASK.format(data=data))
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"), "1")
    runs = [
        [
            *("--model", "hf", "--model_args", f"pretrained={tmp_path / 'hf' / expert},dtype=float32"),
            *("--device", "cpu", "--tasks", "own_text", "--include_path", str(tasks), "--batch_size", "2"),
            *("--log_samples", "--output_path", str(tmp_path / "out" / expert)),
        ]
        for expert in models
    ]
    done = subprocess.run(
        [sys.executable, "-c", LM_EVAL, json.dumps(runs)],
        env={**os.environ, **offline, "HF_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr

    totals = []
    for expert, model in models.items():
        expected = [log_likelihood(model, tokenizer, text) for text in TEXTS]
        (samples,) = (tmp_path / "out" / expert).rglob("samples_own_text_*.jsonl")
        found = {}
        for line in samples.read_text().splitlines():
            sample = json.loads(line)
            found[sample["doc"]["text"]] = float(sample["filtered_resps"][0])
        assert [found[text] for text in TEXTS] == pytest.approx(expected, rel=1e-5)

        (results,) = (tmp_path / "out" / expert).rglob("results_*.json")
        bits = -sum(expected) / sum(len(text.encode()) for text in TEXTS) / math.log(2)
        told = json.loads(results.read_text())["results"]["own_text"]["bits_per_byte,none"]
        assert told == pytest.approx(bits, rel=1e-5)
        totals.append(sum(expected))
    assert totals[0] != totals[1]


def log_likelihood(model: Path, tokenizer: Tokenizer, text: str) -> float:
    """Nats of the text by the first expert, in consecutive blocks, each after the token before it.

    One thing is as lm-eval has it and not as demix: the last block is filled up with the tokens before it, as context.
    """
    name = "dense" if (model / "experts" / "dense.safetensors").exists() else "law"
    gpt = load_model(model, (name,))
    ids = torch.tensor([tokenizer.end_of_text, *tokenizer.encode(text).tolist()])
    total, context, last = 0.0, gpt.architecture.context, len(ids) - 1
    with torch.no_grad():
        for start in range(0, last, context):
            end = min(start + context, last)
            seen = max(0, end - context)
            block = ids[seen : end + 1][None, None]
            scores = gpt.log_probabilities(gpt(block[..., :-1]), block[..., 1:])
            total += float(scores[0, 0, start - seen :].sum())
    return total
