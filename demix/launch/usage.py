"""The time and memory of a job of the workflow, as the kernel counts them.

Snakemake's own `benchmark:` looks at the processes of a job twice a second for 15 seconds, then twice a minute. It saw
474 to 832 MiB of 12 jobs that each had 901 MiB for a moment. Its looks at a job with 1 GB and torch took 0.6 seconds of
a core. `note_usage` sees the whole peak, and takes 0.6 milliseconds.
"""

import os
import resource
import time
from contextlib import suppress
from pathlib import Path

from demix.errors import DemixError
from demix.files.atomic import write_text
from demix.launch.parents import is_job


def note_usage() -> None:
    """In a job of snakemake, write what this process has used to benchmarks/<job>.tsv beside logs/<job>.log.

    Seconds since the process began (`s`), seconds of processors with those of its own processes that have ended
    (`cpu_time`), and the MiB that the largest of these processes had in memory (`max_rss`). Nothing is written where
    standard error is no such log, or by a system without /proc.
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
