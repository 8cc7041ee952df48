"""The trainings under way in a run, from its files alone: a login node sees what compute nodes do."""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from demix.launch.pace import last_rows, seconds_left, speed
from demix.progress import clock
from demix.report.read import read_metrics
from demix.run.run import Run

SECONDS_BETWEEN_PICTURES = 2.0
# So long an ended training is shown. A training on another node that has written nothing for so long has ended.
RECENT = 600.0
# Speed and training loss are means over so many updates.
UPDATES = 20
# The last loss on dev is looked for in so many last rows.
ROWS = 2000
NO_VALUE = "–"


@dataclass(frozen=True)
class Course:
    """Where a training is: `step` of at most `steps` updates, losses in nats per token, tokens and seconds left.

    `state` is `running`, `ended`, or `stopped` where a training has ended without its results.
    """

    name: str
    state: str
    step: int = 0
    steps: int = 1
    loss: float | None = None
    dev_loss: float | None = None
    tokens_per_second: float = 0.0
    seconds_left: float | None = None


def watch(folder: Path, console: Console) -> None:
    """Draw the trainings of the run in `folder` until none runs and its snakemake has ended.

    Where `console` is no terminal it gets one picture. Raises DemixError if `folder` is none of a run.
    """
    run = Run.read(folder)
    if not console.is_terminal:
        console.print(picture(run, courses(run)))
        return
    with Live(console=console, auto_refresh=False) as live:
        while True:
            found = courses(run)
            live.update(picture(run, found), refresh=True)
            if not (any(one.state == "running" for one in found) or _held(run.folder / ".lock")):
                return
            time.sleep(SECONDS_BETWEEN_PICTURES)


def courses(run: Run) -> list[Course]:
    """The trainings of a run that are under way, or that have ended in the last minutes, in the order of the config."""
    return [course for name, steps in _planned(run) if (course := _course(run, name, steps))]


def picture(run: Run, found: list[Course]) -> Table:
    """One line per training. A narrow terminal breaks names and shortens bars; numbers stay whole.

    A column without a value in any line is left out.
    """
    running = sum(one.state == "running" for one in found)
    title = f"{run.folder.resolve().name}: {running} in training"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    table.add_column("model", min_width=8, overflow="fold")
    table.add_column(max_width=8)
    shares = [1.0 if one.state == "ended" else one.step / one.steps for one in found]
    columns = {
        "": [f"{share:.0%}" for share in shares],
        "update": [f"{one.step:,}/{one.steps:,}" for one in found],
        "loss": [_shown(one.loss, ".3f") for one in found],
        "dev loss": [_shown(one.dev_loss, ".3f") for one in found],
        "tokens/s": [_shown(one.tokens_per_second or None, ",.0f") for one in found],
        "left": [one.state if one.seconds_left is None else clock(one.seconds_left) for one in found],
    }
    columns = {head: values for head, values in columns.items() if {*values} != {NO_VALUE}}
    for head in columns:
        table.add_column(head, justify="right", no_wrap=True)
    for one, share, *values in zip(found, shares, *columns.values(), strict=True):
        table.add_row(one.name, ProgressBar(total=1.0, completed=share), *values)
    return table


def _shown(value: float | None, form: str) -> str:
    return NO_VALUE if value is None else format(value, form)


def _planned(run: Run) -> Iterator[tuple[str, int]]:
    """All trainings of a config: the folder below checkpoints/, and the most updates."""
    for model in run.swept:
        if sweep := model.settings.sweep:
            for rate in model.swept_rates:
                yield f"sweep/{model.name}/{rate}", sweep.tokens // model.step_tokens
    for part in (part for model in run.trained for job in model.jobs for part in job):
        yield part.place, part.updates
    for parent, step in run.seeds:
        yield f"{parent}-step-{step:08d}", step
    section = run.config.adaptation
    for one in run.adaptations:
        yield one.name, max(1, section.tokens // (section.sequences * run.context))


def _course(run: Run, name: str, steps: int) -> Course | None:
    """How far a training is; None if it has not begun, or ended a while ago."""
    folder, metrics = run.folder / "checkpoints" / name, run.folder / "metrics" / f"{name}.jsonl"
    since = time.time() - RECENT
    running = any(_held(rows.with_name("lock")) for rows in folder.glob("*/metrics.jsonl"))
    rows = last_rows(folder, 0.0 if running else since, ROWS)
    state = "running" if running else "stopped"
    if not running and metrics.is_file() and (written := metrics.stat().st_mtime) > since:
        rows, state = _ended(metrics, written), "ended"
    if not rows:
        return Course(name, state, steps=steps) if running else None
    updates = [row for row in rows if "tokens_per_second" in row][-UPDATES:]
    dev = [row[key] for row in rows for key in ("dev_loss", "early_stopping_loss") if key in row]
    return Course(
        name,
        state,
        rows[-1]["step"],
        steps,
        sum(row["loss"] for row in updates) / len(updates) if updates else None,
        dev[-1] if dev else None,
        speed(updates) if updates else 0.0,
        seconds_left(updates, steps) if state == "running" and updates else None,
    )


@lru_cache
def _ended(metrics: Path, written: float) -> list[dict[str, Any]]:
    return list(read_metrics(metrics))


def _held(lock: Path) -> bool:
    """Whether the process that a lock file names still runs.

    To try the lock itself could keep a process from it. A process of another node runs while files beside it change.
    """
    try:
        node, _, pid = lock.read_text().strip().partition(" ")
        if node != os.uname().nodename:
            # A folder changes when a file in it appears or goes.
            return time.time() - max(map(_changed, [*lock.parent.iterdir(), *lock.parent.glob("*/*")])) < RECENT
        # A later process may have got the same number.
        return psutil.Process(int(pid)).create_time() < lock.stat().st_mtime + 1
    except (OSError, ValueError, psutil.Error):
        return False


def _changed(path: Path) -> float:
    """The time of the last change of a file or folder; 0 if it has just gone."""
    with suppress(FileNotFoundError):
        return path.stat().st_mtime
    return 0.0
