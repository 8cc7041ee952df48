"""How benchmarks show their rows: name, ours, peer, unit, ratio."""

import json
from pathlib import Path


def show(rows: list[dict], path: Path | None) -> None:
    """Print the rows as a table and, given a path, write them there as JSON."""
    width = max(len(row["name"]) for row in rows)
    print(f"{'':{width}}  {'ours':>10}  {'peer':>10}  {'ratio':>7}  unit")
    for row in rows:
        cells = [f"{'-' if row[key] is None else format(row[key], '.3f')}" for key in ("ours", "peer", "ratio")]
        print(f"{row['name']:{width}}  {cells[0]:>10}  {cells[1]:>10}  {cells[2]:>7}  {row['unit']}")
    if path:
        path.write_text(json.dumps(rows, indent=2) + "\n")
