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


@pytest.mark.parametrize("merged", [False, True], ids=["expert", "merged"])
def test_lm_eval_finds_our_log_likelihoods(merged: bool, tokens: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(tokens / "tokenizer.json")
    model, expert = tmp_path / "model", "law"
    write_model(model, THREE, tokenizer.sha256, tokenizer.vocab_size)
    if merged:
        done = demix("merge", model, "--weights", "law=0.25,news=0.75", "--output", tmp_path / "merged")
        assert done.exit_code == 0, done.output
        model, expert = tmp_path / "merged", "dense"
    named = ("--expert", expert, "--tokenizer", tokens / "tokenizer.json", "--output", tmp_path / "hf")
    assert demix("export", model, "--format", "hf", *named).exit_code == 0

    data, tasks = tmp_path / "texts.json", tmp_path / "tasks"
    data.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS) + "\n")
    tasks.mkdir()
    (tasks / "own_text.yaml").write_text(TASK.format(data=data))
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"), "1")
    arguments = (
        *("--model", "hf", "--model_args", f"pretrained={tmp_path / 'hf'},dtype=float32", "--device", "cpu"),
        *("--tasks", "own_text", "--include_path", tasks, "--batch_size", "2"),
        *("--log_samples", "--output_path", tmp_path / "out"),
    )
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", *map(str, arguments)],
        env={**os.environ, **offline, "HF_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr

    expected = [log_likelihood(model, tokenizer, text) for text in TEXTS]
    (samples,) = (tmp_path / "out").rglob("samples_own_text_*.jsonl")
    found = {}
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        found[sample["doc"]["text"]] = float(sample["filtered_resps"][0])
    assert [found[text] for text in TEXTS] == pytest.approx(expected, rel=1e-5)

    (results,) = (tmp_path / "out").rglob("results_*.json")
    bits = -sum(expected) / sum(len(text.encode()) for text in TEXTS) / math.log(2)
    assert json.loads(results.read_text())["results"]["own_text"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)


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
