"""Precision, recall and speed of the anonymizer beside the rules published with the paper.

    python benchmarks/anonymize.py [--labelled ../shared/pii/labelled.jsonl] [--json rows.json]

Precision and recall of exact spans on labelled texts; recall by country and by what tells the number on "known" texts,
which the rules were made on (tests/support/numbering.py), and by kind on "unseen" ones (tests/support/unseen.py); MB
per second of CPU time, one core, on the sample corpus against seven sequential `re.sub` of the published patterns. No
newspaper is in the sample: politics, parliament and wiki are the prose nearest to one.
"""

import json
import re
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow.parquet as pq
from common import ROOT, SAMPLE, arguments, row, show

from demix.data.anonymize import CATEGORIES, anonymize
from demix.data.sources import Source, download

sys.path.append(str(ROOT / "tests"))
from support import released

DOMAINS = ("politics", "parliament", "wiki", "novels", "packages", "fortunes", "changelogs")
# Each side's rules, with what they put in the place of a category.
SYSTEMS = {
    "ours": (anonymize, {category: f"<{category}>" for category in CATEGORIES}),
    "peer": (released.anonymize, {category: token for category, (_, token) in released.PATTERNS.items()}),
}


def spans(text: str, rules, tokens: dict[str, str]) -> set[tuple[int, int, str]]:
    """Where the rules replaced something, found from their output alone."""
    categories = {token: category for category, token in tokens.items()}
    pieces = re.split("(" + "|".join(map(re.escape, categories)) + ")", rules(text)[0])
    pattern = re.escape(pieces[0]) + "".join(f"(.+?){re.escape(piece)}" for piece in pieces[2::2])
    found = re.fullmatch(pattern, text, re.DOTALL)
    return {(*found.span(place + 1), categories[token]) for place, token in enumerate(pieces[1::2])}


def quality(path: Path) -> list[dict]:
    cases = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    right, missed, false = ({name: Counter() for name in SYSTEMS} for _ in range(3))
    for case in cases:
        wanted = {(span["start"], span["end"], span["category"]) for span in case["spans"]}
        for name, (rules, tokens) in SYSTEMS.items():
            found = spans(case["text"], rules, tokens)
            right[name].update(span[2] for span in wanted & found)
            missed[name].update(span[2] for span in wanted - found)
            false[name].update(span[2] for span in found - wanted)
    rows = []
    for category in [*CATEGORIES, "all"]:
        for measure, others in (("recall", missed), ("precision", false)):
            values = {}
            for name in SYSTEMS:
                good, bad = (
                    (counter[name].total() if category == "all" else counter[name][category])
                    for counter in (right, others)
                )
                values[name] = good / (good + bad) if good + bad else None
            if values["ours"] is not None or values["peer"] is not None:
                rows.append(row(f"{measure} {category}", values["ours"], values["peer"], "share"))
    return rows


def recall() -> list[dict]:
    """Recall of whole spans by country and by what stands beside them, on each set of made texts."""
    from support.numbering import every_country
    from support.unseen import unseen

    right = {name: Counter() for name in SYSTEMS}
    cases: Counter[str] = Counter()

    def measure(keys: list[str], text: str, wanted: str) -> None:
        cases.update(keys)
        for name, (rules, tokens) in SYSTEMS.items():
            own = re.sub("|".join(f"<{one}>" for one in tokens), lambda found, by=tokens: by[found[0][1:-1]], wanted)
            right[name].update(keys * (rules(text)[0] == own))

    countries = set()
    for country, how, text, number in every_country():
        countries.add(country)
        keys = [f"known: {how}", f"known: country {country}", "known: all"]
        measure(keys, text, text.replace(number, "<PHONE_NUMBER>"))
    for kind, text, wanted in unseen(known=sorted(countries)):
        measure([f"unseen: {kind}", "unseen: all"], text, wanted)
    return [row(f"recall {key}", *(right[name][key] / cases[key] for name in SYSTEMS), "share") for key in cases]


def speed() -> list[dict]:
    rows = []
    with TemporaryDirectory() as folder:
        for domain in DOMAINS:
            raw = Path(folder, domain, "documents.parquet")
            download(Source(path=str(SAMPLE / f"{domain}.jsonl.zst")), domain, raw)
            texts = pq.read_table(raw)["text"].to_pylist()
            size = sum(len(text.encode()) for text in texts) / 1e6
            start = time.process_time()
            for text in texts:
                anonymize(text)
            ours = size / (time.process_time() - start)
            start = time.process_time()
            for text in texts:
                released.anonymize(text)
            peer = size / (time.process_time() - start)
            rows.append(row(f"speed {domain}", ours, peer, "MB/s"))
    return rows


if __name__ == "__main__":
    given = arguments(__doc__, labelled=str(ROOT / "tests" / "unit" / "data" / "pii_excerpt.jsonl"))
    show([*quality(Path(given.labelled)), *recall(), *speed()], given.json)
