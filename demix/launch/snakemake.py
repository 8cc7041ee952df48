"""The interface of Snakemake and commands: long arguments, the end of jobs, resources of jobs, patches of Snakemake.

A job ends when its snakemake has ended. The time and memory of a job are counted by the kernel. Snakemake's own
`benchmark:` looks at the processes of a job twice per second for 15 seconds, then twice per minute: for 12 jobs that
each had 901 MiB for a moment it recorded 474 to 832 MiB, and for a job with 1 GB and torch it needed 0.6 core-seconds.
`note_usage` records the whole peak, and needs 0.6 milliseconds.
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

# A bash function that replaces the command. Linux passes about 2 MB of arguments to a process, and a rule may have more
# inputs. Longer arguments go through a pipe, which bash names /dev/fd/<number>.
SHELL_FUNCTION = (
    'demix() { local all="$*"; if ((${#all} < 1000000)); then command demix "$@"; '
    "else command demix @<(printf '%s\\0' \"$@\"); fi; }"
)


def expanded(arguments: list[str]) -> list[str]:
    """The arguments of a command.

    A single @FILE stands for the arguments in the file, each ended by a null character.
    """
    if len(arguments) != 1 or not arguments[0].startswith("@"):
        return arguments
    return os.fsdecode(Path(arguments[0][1:]).read_bytes()).split("\0")[:-1]


# The environment variable in which the workflow passes the process id of snakemake to its jobs.
VARIABLE = "DEMIX_SNAKEMAKE"

# This variable is set in a job of snakemake.
is_job = threading.Event()
# This event is set if the process that waits for this one has ended first.
orphaned = threading.Event()


def end_with_snakemake() -> None:
    """In a job of snakemake, send this process SIGTERM when snakemake has ended.

    At SIGTERM a training saves its state.
    """
    # Child processes must not inherit the variable: this process ends local ranks itself, and SLURM jobs must continue.
    pid = os.environ.pop(VARIABLE, "")
    if pid.isdigit():
        is_job.set()
        when_ended(int(pid), terminate)


def terminate() -> None:
    """Send this process SIGTERM, because the process that waited for it has ended."""
    orphaned.set()
    os.kill(os.getpid(), signal.SIGTERM)


def when_ended(pid: int, act: Callable[[], None]) -> None:
    """Call `act` in a separate thread when the process `pid` has ended. `pid` need not be a child process."""

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
    """If this is a job of snakemake with the log logs/<job>.log, write the job's resources to benchmarks/<job>.tsv.

    These are the seconds since the process began (`s`), its CPU seconds including those of its ended child processes
    (`cpu_time`), and the maximum memory of one of these processes in MiB (`max_rss`). Nothing is written if standard
    error is not such a log, or if the system has no /proc.
    """
    if not is_job.is_set():
        return
    with suppress(OSError, DemixError):
        log = Path(os.readlink("/proc/self/fd/2"))
        if log.suffix != ".log" or "logs" not in log.parts:
            return
        # This is the 22nd field. The second one, the name in parentheses, may contain spaces.
        begun = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        # `ru_maxrss` also includes the process before this program began, when it was a copy of snakemake.
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        peak = int(status["VmHWM"].split()[0])
        own, ended = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        values = {
            "s": time.clock_gettime(time.CLOCK_BOOTTIME) - begun,
            "cpu_time": own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime,
            "max_rss": max(peak, ended.ru_maxrss) / 1024,
        }
        # The last one counts, because a run may be below a folder with that name.
        place = len(log.parts) - 1 - log.parts[::-1].index("logs")
        output = Path(*log.parts[:place], "benchmarks", *log.parts[place + 1 :]).with_suffix(".tsv")
        write_text(output, "\t".join(values) + "\n" + "\t".join(f"{value:.2f}" for value in values.values()) + "\n")


# The paths in a run at which text may come from another run (`demix.data.shared`).
_TEXT = frozenset({"documents", "corpus", "tokens", "tokenizer.json"})


def patch_snakemake() -> None:
    """Apply all patches of Snakemake."""
    end_at_errors()
    read_once()
    keep_shared_times()


def end_at_errors() -> None:
    """Let an error in determining how a file is made end Snakemake, even if the file already exists.

    Without this patch Snakemake warns and keeps such a file, and the run succeeds with old results.
    """
    # Snakemake must be imported before this module and those below.
    from snakemake import dag
    from snakemake.exceptions import RuleException

    def end(error: Exception, *_: object) -> None:
        # If the file exists, Snakemake catches all errors except this one.
        raise RuleException(str(error), rule=getattr(error, "rule", None)) from error

    dag.print_exception_warning = end


def read_once() -> None:
    """Let Snakemake read a file only once for its checksum, as long as the file does not change.

    When a job ends, Snakemake records, for each output, the checksums of all inputs, and reads the inputs again each
    time: the text of a domain nine times when it is tokenized, and the text of all training domains three times per
    domain when documents are assigned to clusters.
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
    """Keep Snakemake from changing the time of text that several runs share.

    Snakemake sets the time of every file that a job has made, and with --touch of all files. For a hard link this also
    changes the time in the other run, whose training would then be older than its tokens, and would rerun.
    """
    from snakemake import io

    touch = io._IOFile.touch

    def touch_own(file: "_IOFile", times: Any = None) -> None:
        parts = PurePath(str(file)).parts
        if not (parts[2:3] and parts[2] in _TEXT and os.path.exists(file) and os.stat(file).st_nlink > 1):
            touch(file, times)

    io._IOFile.touch = touch_own
