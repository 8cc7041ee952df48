"""A task of the standard harness of each kind, over one local file."""

import json
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
