"""The card of a model, as Hugging Face's hub shows it: what it was made of, how, how good it is, what it is not."""

import html
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from demix.errors import DemixError
from demix.files import read_json
from demix.report.results import comparable, read_results

LIMITS = """\
- It continues text. It was not tuned to follow instructions, to be right, or to be harmless.
- Anonymizing replaces what patterns find: e-mail addresses, phone, card and social security numbers, user names.
  Names of people and places stay, and so does what the patterns miss.
- The intervals are of documents resampled within this run's test split. They hold nothing of another seed.
- Text of a removed expert's domain also shaped the shared weights, which removing the expert leaves as they are.
- A licence below is what the config says of the text. Where it says none, ask the source."""


def model_card(run: Path, model: str) -> str:
    """The card of `models/<model>` of a finished run, as Markdown with YAML front matter.

    All is read from the run's files; what others wrote (names, licences) is escaped. Raises DemixError where the run
    has no such model or a file of it is missing.
    """
    directory = run / "models" / model
    if not (directory / "model.json").is_file():
        raise DemixError(directory, "is not a model of the run", f"name one of {run / 'models'}")
    config, description = read_json(run / "config.json"), read_json(directory / "model.json")
    experts = [read_json(path) | {"name": path.stem} for path in sorted((directory / "experts").glob("*.json"))]
    domains = {**config["domains"]["training"], **config["domains"]["novel"]}
    known = [description.get("data_sha256") or {}, *(expert.get("data_sha256") or {} for expert in experts)]
    learned = sorted({name for hashes in known for name in hashes if name in domains}, key=list(domains).index)
    cards = {name: read_json(run / "corpus" / name / "card.json") for name in learned}
    results = _results(run, model)

    front = {
        "library_name": "demix",
        "license": "other",
        "tags": ["demix", "mixture-of-experts", "text-generation"],
        "model-index": [{"name": model, "results": _index(results)}],
    }
    categories = sorted({name for card in cards.values() for name in card["replacements"]})
    data = [
        (
            name,
            domains[name].get("licence") or "not stated",
            *(f"{cards[name]['words'][split]:,}" for split in ("train", "dev", "test")),
            "yes" if domains[name].get("anonymize", True) else "no",
        )
        for name in learned
    ]
    replaced = [
        (name, *(f"{card['replacements'].get(key, 0):,}" for key in categories)) for name, card in cards.items()
    ]
    parts = [
        "---\n" + yaml.safe_dump(front, sort_keys=False, allow_unicode=True).rstrip() + "\n---",
        f"# {_text(model)}",
        f"A language model of kind {_text(description.get('kind', 'unknown'))}, of run {_text(config['run'])}: "
        f"{description['shared_parameters']:,} shared parameters and {len(experts)} experts of "
        f"{description['expert_parameters']:,} each.",
        f"It went on from the model {_text(description['parent'])}, whose own data is in that model's card."
        if description.get("parent")
        else "",
        "## Data",
        _table(("domain", "licence", "words: train", "dev", "test", "anonymized"), data),
        "Replacements made in each domain's text when it was anonymized:",
        _table(("domain", *categories), replaced),
        "## Training",
        f"{description.get('tokens', 0):,} tokens in {description.get('steps', 0):,} steps.",
        _table(("setting", "value"), _settings(description)),
        "## Experts",
        _table(
            ("expert", "parent", "data", "tokens", "steps", "sha256"),
            [
                (
                    expert["name"],
                    expert.get("parent") or "–",
                    ", ".join(expert.get("data_sha256") or {}) or "–",
                    *(f"{expert[key]:,}" if key in expert else "–" for key in ("tokens", "steps")),
                    str(expert.get("sha256", "–"))[:12],
                )
                for expert in experts
            ],
        ),
        "## Results",
        "Test perplexity, with a 95% interval where there are documents enough. "
        "\\* an oracle, chosen on the test data.",
        _table(
            ("domain", "experts", "method", "weights", "tokens", "perplexity", "95% interval", "bits per byte"),
            [_shown(row) for row in results.itertuples()],
        ),
        "## Limits",
        LIMITS,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _results(run: Path, model: str) -> pd.DataFrame:
    results = comparable(read_results(run / "results.parquet"), run / "results.parquet")
    return results[
        (results["model"] == model)
        & (results["split"] == "test")
        & (results["variant"] == "")
        & (results["method"] != "expert")
        & results["top_k"].isna()
        & results["weights"].isin(["", "history"])
    ]


def _index(results: pd.DataFrame) -> list[dict[str, Any]]:
    """The hub's `model-index`: one entry a domain."""
    return [
        {
            "task": {"type": "text-generation"},
            "dataset": {"name": str(domain), "type": str(domain), "split": "test"},
            "metrics": [
                {
                    "type": "perplexity",
                    "name": f"perplexity, experts {row.experts}, {row.method}",
                    "value": round(float(row.perplexity), 4),
                }
                for row in rows.itertuples()
            ],
        }
        for domain, rows in results.groupby("domain", sort=False)
    ]


def _shown(row: Any) -> tuple[str, ...]:
    interval = "–" if pd.isna(row.perplexity_low) else f"{row.perplexity_low:.2f} to {row.perplexity_high:.2f}"
    bits = "–" if pd.isna(row.bits_per_byte) else f"{row.bits_per_byte:.3f}"
    perplexity = f"{row.perplexity:.2f}{'*' if row.oracle else ''}"
    return (row.domain, row.experts, row.method, row.weights or "–", f"{row.tokens:,}", perplexity, interval, bits)


def _settings(description: dict[str, Any]) -> list[tuple[str, str]]:
    settings = (description.get("training") or {}) | (description.get("adaptation") or {})
    settings |= {f"architecture.{key}": value for key, value in (settings.pop("architecture", None) or {}).items()}
    return [(key, str(value)) for key, value in sorted(settings.items())]


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads, rows = list(heads), [list(row) for row in rows]
    if not rows:
        return ""
    head, *body = ([_text(cell) for cell in line] for line in (heads, *rows))
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *body))


def _text(value: object) -> str:
    """`value` as plain text in Markdown: no markup, no HTML, no link, no end of a line or cell."""
    line = html.escape(" ".join(str(value).split()), quote=False)
    return re.sub(r"([\\`*_\[\]|#~$!])|(?<=:)(?=//)", lambda found: f"\\{found[1]}" if found[1] else "\u200b", line)
