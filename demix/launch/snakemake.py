"""What lies between Snakemake and commands: long arguments, the end of jobs, what jobs use, changes of Snakemake.

A job ends when its snakemake has ended. The time and memory of a job are what the kernel counts: Snakemake's own
`benchmark:` looks at the processes of a job twice a second for 15 seconds, then twice a minute. It saw 474 to 832 MiB
of 12 jobs that each had 901 MiB for a moment. Its looks at a job with 1 GB and torch cost 0.6 seconds of a core.
`note_usage` sees the whole peak, and needs 0.6 milliseconds.
"""

import os
import resource
import select
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from demix.errors import DemixError
from demix.files import is_alive, write_text

if TYPE_CHECKING:
    from snakemake.io import _IOFile

# A function of bash in place of the command: Linux passes some 2 MB of arguments to a process, and a rule may name more
# inputs. Beyond so many characters the arguments go through a pipe, which bash names /dev/fd/<number>.
SHELL_FUNCTION = (
    'demix() { local all="$*"; if ((${#all} < 1000000)); then command demix "$@"; '
    "else command demix @<(printf '%s\\0' \"$@\"); fi; }"
)


def expanded(arguments: list[str]) -> list[str]:
    """The arguments of a command: those given, or for a single @FILE those in the file, each ended by a null
    character."""
    if len(arguments) != 1 or not arguments[0].startswith("@"):
        return arguments
    return os.fsdecode(Path(arguments[0][1:]).read_bytes()).split("\0")[:-1]


# The environment variable in which the workflow passes the process id of snakemake to its jobs.
VARIABLE = "DEMIX_SNAKEMAKE"

# Set in a job of snakemake.
is_job = threading.Event()
# Set when the process that waits for this one has ended first.
orphaned = threading.Event()


def end_with_snakemake() -> None:
    """In a job of snakemake, send this process SIGTERM when snakemake has ended.

    At SIGTERM a training saves its state.
    """
    # Child processes must not inherit the variable: this process ends local ranks itself, and SLURM jobs must go on.
    pid = os.environ.pop(VARIABLE, "")
    if pid.isdigit():
        is_job.set()
        when_ended(int(pid), terminate)


def terminate() -> None:
    """Send this process SIGTERM, because the process that waited for it has ended."""
    orphaned.set()
    os.kill(os.getpid(), signal.SIGTERM)


def when_ended(pid: int, act: Callable[[], None]) -> None:
    """Call `act` in a thread of its own when the process `pid` has ended. `pid` need not be a child process."""

    def watch() -> None:
        _wait(pid)
        act()

    threading.Thread(target=watch, daemon=True).start()


def _wait(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):
        # Only Linux has pidfd, and a container may forbid it.
        while is_alive(pid):
            time.sleep(1.0)
        return
    with open(descriptor, "rb", buffering=0):
        select.select([descriptor], [], [])


def note_usage() -> None:
    """In a job of snakemake, write what this process has used to benchmarks/<job>.tsv, as its log is logs/<job>.log.

    Seconds since the process began (`s`), seconds of processors with those of its own processes that have ended
    (`cpu_time`), and the MiB that the largest of these processes had in memory (`max_rss`). Nothing is written where
    standard error is not such a log, or by a system without /proc.
    """
    if not is_job.is_set():
        return
    with suppress(OSError, DemixError):
        log = Path(os.readlink("/proc/self/fd/2"))
        if log.suffix != ".log" or "logs" not in log.parts:
            return
        # The 22nd field; the second, the name in parentheses, may hold spaces.
        begun = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        # `ru_maxrss` also counts the process as it was before this program began, such as a copy of snakemake.
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        peak = int(status["VmHWM"].split()[0])
        own, ended = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        values = {
            "s": time.clock_gettime(time.CLOCK_BOOTTIME) - begun,
            "cpu_time": own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime,
            "max_rss": max(peak, ended.ru_maxrss) / 1024,
        }
        # The last one: a run may lie below a folder of that name.
        place = len(log.parts) - 1 - log.parts[::-1].index("logs")
        output = Path(*log.parts[:place], "benchmarks", *log.parts[place + 1 :]).with_suffix(".tsv")
        write_text(output, "\t".join(values) + "\n" + "\t".join(f"{value:.2f}" for value in values.values()) + "\n")


# The places in a run of text that another run may have made (`demix.data.shared`).
_TEXT = frozenset({"documents", "corpus", "tokens", "tokenizer.json"})


def patch_snakemake() -> None:
    """Make all of these changes."""
    end_at_errors()
    read_once()
    keep_shared_times()


def end_at_errors() -> None:
    """Let an error in finding out how a file is made end Snakemake, of a file that is there already, too.

    Snakemake by itself warns and keeps such a file as it is: the run ends well, with old results.
    """
    # This module cannot be the first of Snakemake's that is imported, and neither can those below.
    from snakemake import dag
    from snakemake.exceptions import RuleException

    def end(error: Exception, *_: object) -> None:
        # Snakemake catches all errors but this one where the file is there.
        raise RuleException(str(error), rule=getattr(error, "rule", None)) from error

    dag.print_exception_warning = end


def read_once() -> None:
    """Let Snakemake read a file once for its checksum, as long as the file stays the same.

    When a job ends, Snakemake notes with each file that the job made the checksums of all files that the job read, and
    reads these files again for each: nine times the text of a domain that is tokenized, and the text of all training
    domains three times for each domain when their documents are assigned to clusters.
    """
    from snakemake import io

    checksum: Callable[..., Awaitable[str | None]] = io._IOFile.checksum
    known: dict[tuple[Any, ...], str | None] = {}

    async def of_unchanged(
        file: "_IOFile", threshold: int | None = None, force: bool = False, algorithm: Any = None
    ) -> str | None:
        if file.is_storage or not os.path.isfile(file):
            return await checksum(file, threshold, force, algorithm)
        found = os.stat(file)
        key = str(file), found.st_ino, found.st_size, found.st_mtime_ns, threshold, force, algorithm
        if key not in known:
            known[key] = await checksum(file, threshold, force, algorithm)
        return known[key]

    io._IOFile.checksum = of_unchanged


def keep_shared_times() -> None:
    """Let Snakemake leave the time of text that several runs share as it is.

    Snakemake sets the time of every file that a job has made, and of all files with --touch. Of a hard link that is the
    time in the other run too, whose training would then be older than its tokens, and run again.
    """
    from snakemake import io

    touch = io._IOFile.touch

    def touch_own(file: "_IOFile", times: Any = None) -> None:
        parts = PurePath(str(file)).parts
        if not (parts[2:3] and parts[2] in _TEXT and os.path.exists(file) and os.stat(file).st_nlink > 1):
            touch(file, times)

    io._IOFile.touch = touch_own
