"""A task of the standard harness of each kind, over one local file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

PASSAGE = "And it came to pass in those days, that he went out into a mountain to pray, and continued all night."
DOCUMENTS = [
    {"text": "The house divided.", "choices": [" The house", " a mountain", " the committee"], "gold": 0},
    {"text": PASSAGE, "choices": [" And he called", " the committee", "."], "gold": 1},
    {"text": "Zoë’s naïve café – 東京", "choices": [" is open", " 東京", " the the"], "gold": 2},
    {"text": "", "choices": ["The law", "shall", "a"], "gold": 0},
]
TASKS = {
    "choice": {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "gold"},
    "word": {"output_type": "loglikelihood", "doc_to_target": "{{choices[gold]}}"},
    "rolling": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"},
    "text": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["zz", "\n"], "max_gen_toks": 7, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}
TASKS["word"]["metric_list"] = [{"metric": "perplexity"}, {"metric": "acc"}]
TASKS["rolling"]["metric_list"] = [{"metric": "bits_per_byte"}]


def write_tasks(folder: Path) -> None:
    """Write the folder `tasks` with a YAML file of each of `TASKS`, and their data."""
    (folder / "tasks").mkdir()
    (folder / "data.jsonl").write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    files = {"test": str(folder / "data.jsonl")}
    for name, task in TASKS.items():
        common = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": files}, "test_split": "test"}
        text = yaml.safe_dump(
            common | {"doc_to_text": "{{text}}", "target_delimiter": "", "fewshot_split": "test"} | task
        )
        (folder / "tasks" / f"{name}.yaml").write_text(text)


OFFLINE = """
import socket, sys
def refuse(*arguments, **named):
    print("ASKED", arguments, file=sys.stderr)
    raise OSError("no network")
socket.socket.connect = socket.getaddrinfo = refuse
from demix.commands.main import main
main()
"""


def ran_offline(home: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """`demix` in a process of its own that nobody told to be offline, and that asks nothing of the network."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "DO_NOT"))}
    command = [sys.executable, "-c", OFFLINE, *map(str, words)]
    done = subprocess.run(command, env=inherited | {"HF_HOME": str(home)}, capture_output=True, text=True, check=False)
    assert "ASKED" not in done.stderr
    return done
