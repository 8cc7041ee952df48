"""Made-up scores of tasks, and a small model whose blocks hold a prompt."""

import json
from pathlib import Path

import numpy as np
import torch

from demix.config.architecture import Architecture
from demix.config.tasks import ExamplesRecipe
from demix.data.examples import Example, Prompt, read_examples, write_examples
from demix.data.tokenizer import Tokenizer
from demix.evaluate.classification import Scored
from support.models import model_of, save_model

SIZES = Architecture(layers=2, width=32, heads=4, context=96)
LABELS = (" yes", " no", " it may be")


def write_prompted(directory: Path, experts: tuple[str, ...], tokenizer: Tokenizer) -> None:
    """A model with random weights and blocks of 96 tokens."""
    model = model_of(experts, torch.float32, architecture=SIZES, vocab_size=tokenizer.vocab_size)
    save_model(model, directory, tokenizer.sha256, tokens=1, steps=1)


def made_up(
    experts: int, tests: int = 30, seeds: tuple[int, ...] = (1,), cues: bool = True, seed: int = 0
) -> list[Scored]:
    """Random scores of tests, validation examples, permutations and cues, with labels of one to three tokens."""
    generator = np.random.default_rng(seed)
    sizes = (1, 2, 3)

    def scored(split: str, of: int, number: int, cue: int) -> Scored:
        context = -generator.exponential(2.0, (int(generator.integers(0, 9)) if split == "cue" else 7, experts))
        labels = tuple(-generator.exponential(2.0, (size, experts)) for size in sizes)
        # Some experts are better than others.
        answer = int(generator.integers(3))
        labels[answer][:] *= np.linspace(0.3, 1.0, experts)
        return Scored(
            Prompt(split, of, number, f"{split} {of} {number}", LABELS, answer, cue),
            context,
            labels,
        )

    found = []
    for of in seeds:
        counts = {"test": tests, "validation": 8, "permutation": 8}
        found += [scored(split, of, n, n % 2 if cues else -1) for split, count in counts.items() for n in range(count)]
        found += [scored("cue", of, n, -1) for n in range(2 * cues)]
    return found


def write_lines(path: Path, rows: list[dict[str, object]]) -> str:
    """Write records as JSON lines; returns the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read_task(tokens: Path, folder: Path, **task: object) -> list[Example]:
    """The examples of the task `topics`, made by the stage in `folder` from its source."""
    given = ExamplesRecipe(**task, length=SIZES.context, seed=1)
    write_examples("topics", tokens / "tokenizer.json", given, folder / "out.parquet")
    return read_examples(folder / "out.parquet")
