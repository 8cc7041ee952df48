"""`demix serve` for the standard harness's own client of such servers, against `demix lm-eval`."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from demix.data.tokenizer import Tokenizer
from demix.generate.completions import MOST_TOKENS, served
from support.cli import demix
from support.decoding import LENGTH, write_run
from support.harness_tasks import DOCUMENTS, TASKS, write_tasks
from support.models import SMALL, write_model
from support.serving import serving

pytestmark = pytest.mark.full
WIDE = 64


@pytest.fixture(scope="module")
def run(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the model demix, a model of longer blocks, and tasks of the harness."""
    folder = write_run(tmp_path_factory.mktemp("served"), tokens)
    encoder = Tokenizer.load(folder / "tokenizer.json")
    sizes = replace(SMALL, context=WIDE)
    write_model(folder / "models" / "wide", tokenizer=encoder.sha256, vocab_size=encoder.vocab_size, architecture=sizes)
    write_tasks(folder)
    return folder


@pytest.mark.parametrize(
    ("rule", "options"),
    [({}, ()), ({"weights": "history", "top_k": 2}, ("--weights", "history", "--top-k", 2))],
    ids=["default", "history"],
)
def test_the_harness_finds_what_it_finds_without_a_server(run, tmp_path, monkeypatch, rule, options) -> None:
    """To the last digit where its requests are scored one at a time, as the server does."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    manager = TaskManager(include_path=str(run / "tasks"), include_defaults=False)
    encoder = Tokenizer.load(run / "tokenizer.json")
    most = max(len(encoder.encode(one["text"] + choice)) for one in DOCUMENTS for choice in one["choices"])
    assert LENGTH < most <= WIDE
    for name, tasks in (("wide", [*TASKS]), ("demix", ["rolling"])):
        named = ("--include-path", run / "tasks", "--output", tmp_path / f"{name}.json", "--log-samples", *options)
        done = demix("lm-eval", run / "models" / name, "--tasks", ",".join(tasks), "--batch-size", 1, *named)
        assert done.exit_code == 0, (done.exception, done.output)
        with serving(served(run / "models" / name, **rule)) as address:
            # Of texts, and of requests, several at a time.
            for batch, concurrent in ((1, 1), (3, 2)):
                how = {"batch_size": batch, "num_concurrent": concurrent, "max_length": MOST_TOKENS + 1}
                theirs = simple_evaluate(
                    "local-completions",
                    model_args={"model": name, "base_url": f"{address}/v1/completions"} | how,
                    tasks=tasks,
                    task_manager=manager,
                )["samples"]
                for task in tasks:
                    lines = (tmp_path / f"{name}.{task}.jsonl").read_text().splitlines()
                    for our, their in zip(map(json.loads, lines), theirs[task], strict=True):
                        assert our["doc"] == their["doc"]
                        told = json.loads(json.dumps(their["filtered_resps"]), parse_constant=None)
                        if task == "text":
                            assert our["filtered_resps"] == told
                            continue
                        ours, told = (np.atleast_2d(np.array(one, object)) for one in (our["filtered_resps"], told))
                        assert [str(one) for one in ours[:, 1:].ravel()] == [str(one) for one in told[:, 1:].ravel()]
                        values = [[float(one) for one in rows[:, 0]] for rows in (ours, told)]
                        # Without a server, the blocks of a longer text are scored together.
                        assert values[0] == pytest.approx(values[1], rel=1e-7 if name == "demix" else 1e-14)
