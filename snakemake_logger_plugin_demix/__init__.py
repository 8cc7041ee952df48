"""`snakemake --logger demix`: the running stages, the progress of the run, and an estimate of the time left.

A terminal gets a live display; other output gets one line every few seconds. Errors are printed as snakemake prints
them. The first error is repeated at the end, where later output does not hide the error.
"""

import re
import signal
import threading
import time
from dataclasses import dataclass, field
from logging import WARNING, LogRecord
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from snakemake.logging import DefaultFormatter, logger
from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent

from demix.progress import clock

# Seconds per job of the longest rules in the sample on one slow core, where others need one. Only ratios matter.
COSTS = {"train": 150.0, "train_expert": 150.0, "adapt": 12.0, "adapt_dense": 12.0, "score": 22.0}
SECONDS_BETWEEN_LINES = 15.0
# The progress that `demix.progress` writes: done/total.
DONE = re.compile(r" (\d+)/([1-9]\d*)(  |$)")


@dataclass
class Job:
    """A running job: its name, its estimated seconds, its log and its start (monotonic seconds)."""

    label: str
    cost: float
    log: Path | None
    begun: float = field(default_factory=time.monotonic)

    def last_line(self) -> str:
        """The newest line of the job's log."""
        if self.log is None or not self.log.is_file():
            return ""
        return (self.log.read_text(errors="replace").splitlines() or [""])[-1]

    def fraction(self) -> float:
        """The fraction of the job that is done by its log; 0 without progress in the log."""
        done = DONE.search(self.last_line())
        return min(1.0, int(done[1]) / int(done[2])) if done else 0.0


def unread_config_in_one_line(record: LogRecord) -> bool:
    """Put one line in place of Snakemake's own code, which it shows where a --configfile cannot be opened."""
    said = str(record.msg)
    if getattr(record, "event", None) is LogEvent.ERROR and "in load_configfile" in said and "[Errno" in said:
        cause = said.rpartition("] ")[2].strip()
        record.msg = f"error: --configfile: {cause}; give the path of a config file, such as config/sample.yaml"
    return True


# Snakemake reads the files before it reads the Snakefile or a profile's logger, but after it has imported this package.
logger.addFilter(unread_config_in_one_line)

# What Snakemake says of a signal, and of the jobs that it has ended.
OF_A_SIGNAL = ("on user request", "Will exit after finishing")
OF_ENDED_JOBS = ("RuleException", "At least one job did not complete")


class LogHandler(LogHandlerBase):
    """The handler that snakemake finds by the name of this package."""

    writes_to_stream = True
    writes_to_file = False
    has_filter = True
    has_formatter = True
    needs_rulegraph = False

    def __post_init__(self) -> None:
        self.console = Console(stderr=True)
        self.setFormatter(DefaultFormatter(show_failed_logs=True))
        self.jobs: dict[int, Job] = {}
        self.first_failed: Job | None = None
        self.finished = self.total = 0
        self.cost_done = self.cost_total = 0.0
        self.begun = time.monotonic()
        self.stopped = threading.Event()
        self.live: Live | None = None
        self.interrupted = self.waiting = False
        if callable(before := signal.getsignal(signal.SIGINT)):

            def note(number: int, frame: FrameType | None) -> None:
                self.interrupted = True
                before(number, frame)

            signal.signal(signal.SIGINT, note)

    def emit(self, record: LogRecord) -> None:
        """Show one event of the workflow."""
        # Snakemake writes the fields of an event into the record as attributes that the type does not declare.
        fields: dict[str, Any] = vars(record)
        event, text = fields.get("event"), str(record.msg)
        # Snakemake's scheduler handles SIGTERM itself.
        scheduler = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        self.interrupted = self.interrupted or getattr(scheduler, "_user_kill", None) is not None
        if not self.waiting and any(said in text for said in OF_A_SIGNAL):
            self.interrupted = self.waiting = True
            running = ", ".join(job.label for job in self.jobs.values()) or "nothing"
            self.console.print(Text(f"Interrupted: no job begins any more; waiting for {running}"), soft_wrap=True)
        # A signal to all running jobs ends them, which is not an error of theirs.
        if self.interrupted and (
            event in (LogEvent.JOB_ERROR, LogEvent.GROUP_ERROR) or any(said in text for said in OF_ENDED_JOBS)
        ):
            return
        match event:
            case LogEvent.RUN_INFO if not (self.common_settings.dryrun and self.total):
                stats = {rule: count for rule, count in fields["stats"].items() if rule != "total"}
                self.total = sum(stats.values())
                self.cost_total = sum(COSTS.get(rule, 1.0) * n for rule, n in stats.items())
                if self.common_settings.dryrun:
                    self.console.print(Text(self.format(record)))
                elif self.live is None:
                    self._start()
            case LogEvent.JOB_INFO:
                label = " ".join([fields["rule_name"], *dict(fields["wildcards"] or {}).values()])
                log = Path(str(fields["log"][0])) if fields["log"] else None
                self.jobs[fields["jobid"]] = Job(label, COSTS.get(fields["rule_name"], 1.0), log)
            case LogEvent.JOB_FINISHED:
                if job := self.jobs.pop(fields["job_id"], None):
                    self.finished += 1
                    self.cost_done += job.cost
            case LogEvent.JOB_ERROR | LogEvent.GROUP_ERROR | LogEvent.ERROR:
                failed = self.jobs.pop(fields.get("jobid", -1), None)
                self.first_failed = self.first_failed or failed
                self.console.print(Text(self.format(record), style="red"), soft_wrap=True)
            case None if record.levelno >= WARNING or "Nothing to be done" in text:
                self.console.print(Text(self.format(record)), soft_wrap=True)

    def close(self) -> None:
        """End the display and repeat the first error."""
        if self.stopped.is_set():
            return
        self.stopped.set()
        if self.live:
            self.live.stop()
        if failed := self.first_failed:
            said = f"{failed.last_line()} (log: {failed.log})" if failed.log else "without a log"
            self.console.print(Text(f"The first to fail was {failed.label}: {said}", style="red"), soft_wrap=True)
        if self.interrupted:
            left = f"begun and not done: {', '.join(job.label for job in self.jobs.values()) or 'none'}"
            said = f"Interrupted: {self.finished} of {self.total} jobs are done; {left}. The same command goes on."
            self.console.print(Text(said), soft_wrap=True)
        elif 0 < self.total <= self.finished:
            self.console.print(Text(f"[{self._summary()}]"), soft_wrap=True)
        super().close()

    def _start(self) -> None:
        self.live = Live(get_renderable=self._picture, console=self.console, refresh_per_second=1, transient=True)
        if self.console.is_terminal:
            self.live.start()
        else:
            threading.Thread(target=self._print_lines, daemon=True).start()

    def _print_lines(self) -> None:
        while not self.stopped.wait(SECONDS_BETWEEN_LINES):
            running = "; ".join(f"{job.label} {job.last_line()}".strip() for job in list(self.jobs.values()))
            self.console.print(Text(f"[{self._summary()}] {running}"), soft_wrap=True)

    def _share(self) -> float:
        under_way = sum(job.cost * job.fraction() for job in list(self.jobs.values()))
        return min(1.0, (self.cost_done + under_way) / self.cost_total) if self.cost_total else 0.0

    def _summary(self) -> str:
        share, elapsed = self._share(), time.monotonic() - self.begun
        done = f"{share:4.0%} done, {self.finished} of {self.total} jobs, {clock(elapsed)}"
        # A short run first starts processes, and its share of the whole does not show how long that lasts.
        if share < (0.1 if elapsed < 120 else 0.01) or self.finished == self.total:
            return done
        return f"{done} so far, about {clock(elapsed / share * (1 - share))} left"

    def _picture(self) -> Group:
        rows = Table.grid(padding=(0, 2))
        now = time.monotonic()
        for job in list(self.jobs.values()):
            rows.add_row(Text(job.label, style="bold"), clock(now - job.begun), Text(job.last_line(), style="dim"))
        return Group(ProgressBar(total=1.0, completed=self._share()), Text(self._summary()), rows)
