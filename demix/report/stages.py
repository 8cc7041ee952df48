"""The stages of a run: what each does, the rules that make it up, and all of them as a drawing."""

from dataclasses import dataclass
from xml.sax.saxutils import escape


@dataclass(frozen=True)
class Stage:
    """A stage: its name, what it does in two short lines, and its rules, by the folders below `benchmarks/`.

    `column` and `row` are its place in the drawing; `after` names the stages whose output it takes. `accelerated`
    stages run on a GPU where there is one.
    """

    name: str
    does: tuple[str, str]
    rules: tuple[str, ...]
    column: float
    row: int = 0
    after: tuple[str, ...] = ()
    accelerated: bool = False


STAGES = (
    Stage(
        "data",
        ("fetch, anonymize,", "deduplicate, split"),
        (
            *("read", "download", "divide", "source_card", "import_parent", "anonymize"),
            *("deduplicate", "novel_duplicates", "split", "hold_out"),
        ),
        0,
    ),
    Stage("tokenizer", ("byte-level BPE,", "or another's"), ("tokenizer",), 1, after=("data",)),
    Stage(
        "shards",
        ("token ids,", "memory-mapped"),
        (
            *("tokenize", "tokenize_suite", "overlap", "fit_clusters", "assign", "cluster_shards", "examples"),
            *("harness_documents", "contamination"),
        ),
        2,
        after=("tokenizer",),
    ),
    Stage(
        "train",
        ("DEMix and dense,", "one domain left out"),
        ("sweep", "choose_rate", "seed", "train", "join"),
        3,
        after=("shards",),
        accelerated=True,
    ),
    Stage(
        "adapt",
        ("one more expert for", "each novel domain"),
        ("adapt", "adapt-dense"),
        3.5,
        1,
        after=("train",),
        accelerated=True,
    ),
    Stage(
        "score",
        ("each expert once", "on each domain"),
        ("score", "score_ngrams", "merge_routed", "route", "fewshot", "harness"),
        4,
        after=("train", "adapt"),
        accelerated=True,
    ),
    Stage("remove", ("leave experts out,", "audit what stays"), ("audit",), 4.5, 1, after=("score",)),
    Stage(
        "mix, evaluate",
        ("weights and priors:", "no forward pass"),
        ("average", "choose_mixing", "evaluate", "contexts", "results", "suites", "classify"),
        5,
        after=("score", "remove"),
    ),
    Stage(
        "report, track",
        ("tables, figures,", "claims, MLflow"),
        ("run_config", "report", "card", "track"),
        6,
        after=("mix, evaluate",),
    ),
)
_WIDTH, _HEIGHT, _PITCH, _DROP, _EDGE = 128, 64, 152, 104, 8
_FILLS = {False: "#eef3f8", True: "#fde9d4"}


def drawing() -> str:
    """The stages as SVG: one box per stage, one arrow per dependency. docs/pipeline.svg is this text."""
    width, height = round(_PITCH * max(stage.column for stage in STAGES)) + _WIDTH + 2 * _EDGE, 220
    places = {stage.name: (_EDGE + _PITCH * stage.column, _EDGE + _DROP * stage.row) for stage in STAGES}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'aria-label="The stages of a run" font-family="Liberation Sans, Arial, Helvetica, sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for stage in STAGES:
        x, y = places[stage.name]
        parts += [_arrow(*places[before], x, y) for before in stage.after]
        parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{_WIDTH}" height="{_HEIGHT}" rx="6" fill="{_FILLS[stage.accelerated]}" '
            'stroke="#5b6570"/>'
        )
        for text, below, style in (
            (stage.name, 20, 'font-size="14" font-weight="bold" fill="#1a1a1a"'),
            (stage.does[0], 39, 'font-size="12" fill="#3c444d"'),
            (stage.does[1], 54, 'font-size="12" fill="#3c444d"'),
        ):
            parts.append(
                f'<text x="{x + _WIDTH / 2:g}" y="{y + below:g}" text-anchor="middle" {style}>{escape(text)}</text>'
            )
    for number, (accelerated, told) in enumerate(((True, "on a GPU where there is one"), (False, "on a CPU"))):
        x, y = _EDGE + 210 * number, height - 26
        parts.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{_FILLS[accelerated]}" stroke="#5b6570"/>')
        parts.append(f'<text x="{x + 22}" y="{y + 12}" font-size="12" fill="#3c444d">{told}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _arrow(from_x: float, from_y: float, x: float, y: float) -> str:
    """An arrow between two boxes: level, or down from the right half of a box, or up into the left half of one."""
    if y == from_y:
        start, end, head = (from_x + _WIDTH, y + _HEIGHT / 2), (x - 2, y + _HEIGHT / 2), (-7, -4, -7, 4)
    elif y > from_y:
        middle = x + _WIDTH / 4
        start, end, head = (middle, from_y + _HEIGHT), (middle, y - 2), (-4, -7, 4, -7)
    else:
        middle = from_x + 3 * _WIDTH / 4
        start, end, head = (middle, from_y), (middle, y + _HEIGHT + 2), (-4, 7, 4, 7)
    (x1, y1), (x2, y2), (a, b, c, d) = start, end, head
    return (
        f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}M{x2 + a:g} {y2 + b:g}L{x2:g} {y2:g}L{x2 + c:g} {y2 + d:g}" '
        'fill="none" stroke="#5b6570" stroke-width="1.4"/>'
    )
