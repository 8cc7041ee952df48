"""Progress of long work: a bar on a terminal, otherwise a log line every few seconds."""

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import rich.progress

log = logging.getLogger(__name__)

T = TypeVar("T")

SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def progress(what: str, total: float | None = None, done: float = 0) -> Iterator[Callable[..., None]]:
    """Yield `advance(number=1, note="")`, to be called with the work done since the last call.

    `total` is None if it is unknown. The bar is on standard error and disappears at the end. A line has the form
    `<what> <done>/<total>  <note>  <clock> left`, which snakemake's display of running jobs reads.
    """
    if not sys.stderr.isatty():
        yield _lines(what, total, done)
        return
    bars = _bars()
    bar = bars.add_task(what, total=total, completed=done, note="")  # type: ignore[arg-type]
    bars.start()
    try:
        yield lambda number=1, note="": bars.update(bar, advance=number, note=note)
    finally:
        bars.remove_task(bar)
        if not bars.tasks:
            bars.stop()


def followed(
    items: Iterable[T], what: str, total: int | None = None, size: Callable[[T], int] = lambda _: 1
) -> Iterator[T]:
    """Yield `items` one by one and show the progress, to which each item adds its `size`."""
    with progress(what, total) as advance:
        for item in items:
            yield item
            advance(size(item))


def so_many(number: int, noun: str) -> str:
    """A number and what it counts: "1 novel domain", "8 novel domains"."""
    return f"{number:,} {noun}" + "s" * (number != 1)


def clock(seconds: float) -> str:
    """`seconds` as minutes:seconds, or from an hour on as hours:minutes:seconds."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def _lines(what: str, total: float | None, done: float) -> Callable[..., None]:
    begun = last_line = time.monotonic()
    first = done

    def advance(number: float = 1, note: str = "") -> None:
        nonlocal last_line, done
        done += number
        now = time.monotonic()
        if now - last_line <= SECONDS_BETWEEN_LINES:
            return
        last_line = now
        parts = [f"{what} {done:.0f}" if total is None else f"{what} {done:.0f}/{total:.0f}", note]
        if total is not None and done > first:
            parts.append(f"{clock((now - begun) / (done - first) * (total - done))} left")
        log.info("%s", "  ".join(part for part in parts if part))

    return advance


@cache
def _bars() -> "rich.progress.Progress":
    """The only progress display of this process. Nested work adds a bar below the outer one."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
