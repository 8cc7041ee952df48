"""The command `demix` for runs of the workflow, whose jobs fork one process that has imported what takes seconds."""

import atexit
import functools
import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from pathlib import Path

from demix.files import is_alive
from support.forks import FORKS

# The program that stands in the PATH in place of the command. It sends its streams, folder and environment to the
# server, passes signals on to the job, and ends with the job's exit status.
COMMAND = """#!{python} -IS
import json, os, signal, socket, sys
ours = socket.socket(socket.AF_UNIX)
ours.connect({address!r})
socket.send_fds(ours, [b"+"], [0, 1, 2])
job = {{"arguments": sys.argv, "folder": os.getcwd(), "environment": dict(os.environ)}}
ours.sendall(json.dumps(job).encode() + b"\\n")
answers = ours.makefile()
pid = int(answers.readline())
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
    signal.signal(number, lambda number, _: os.kill(pid, number))
sys.exit(int(answers.readline() or 1))
"""


def warm(environment: dict[str, str]) -> dict[str, str]:
    """`environment` with the command of this module in place of the installed one.

    The server of the jobs ends with the process that calls this function.
    """
    return environment | {"PATH": f"{_commands()}{os.pathsep}{environment['PATH']}"}


@functools.cache
def _commands() -> str:
    """The folder with the command."""
    folder = Path(tempfile.mkdtemp(prefix="demix-warm-"))
    atexit.register(shutil.rmtree, folder)
    address = str(folder / "socket")
    command = folder / "demix"
    command.write_text(COMMAND.format(python=sys.executable, address=address))
    command.chmod(0o755)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen(64)
    FORKS.Process(target=_serve, args=(listening, os.getpid()), daemon=True).start()
    listening.close()
    return str(folder)


def _serve(listening: socket.socket, whom: int) -> None:
    # The kernel reaps the jobs.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listening.settimeout(5.0)
    while is_alive(whom):
        try:
            connection, _ = listening.accept()
        except TimeoutError:
            continue
        if os.fork() == 0:
            _be_a_job(connection)
        connection.close()


def _be_a_job(connection: socket.socket) -> None:
    """Run one command as an interpreter of its own would, say its exit status and end."""
    from demix.commands.main import main

    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        connection.setblocking(True)
        _, streams, *_ = socket.recv_fds(connection, 1, 3)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        sys.stdin, sys.stdout, sys.stderr = (open(n, mode, closefd=False) for n, mode in enumerate("rww"))  # noqa: SIM115
        job = json.loads(connection.makefile().readline())
        os.chdir(job["folder"])
        os.environ.clear()
        os.environ.update(job["environment"])
        sys.argv = job["arguments"]
        connection.sendall(b"%d\n" % os.getpid())
        main()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        connection.sendall(b"%d\n" % status)
        os._exit(status)
