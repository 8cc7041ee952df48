"""Writes the first words of six domains of the sample to texts/, and a psalm that is in none of them to unknown.txt.

Usage: python docs/tutorials/five_texts.py WORDS
"""

import json
import sys
from pathlib import Path

import zstandard

WORDS = int(sys.argv[1])
SOURCES = {"novels": "novels", "scripture": "scripture", "manual": "python_docs"}
SOURCES |= {"speeches": "parliament", "faq": "politics", "jargon": "jargon"}
Path("texts").mkdir()
for name, source in SOURCES.items():
    sample = f"resources/sample/{source}.jsonl.zst"
    with zstandard.open(sample, "rt", encoding="utf-8") as file:
        documents = [json.loads(line)["text"] for line in file]
    chosen = []
    while sum(len(text.split()) for text in chosen) <= WORDS:
        chosen.append(documents.pop(0))
    Path(f"texts/{name}.txt").write_text("\n\n".join(chosen))
    if name == "scripture":
        Path("unknown.txt").write_text(documents[-1])
