"""The whole command line: the commands for people, and one command for each stage of the workflow."""

import gc
import logging
import os
import sys
from importlib import import_module
from typing import Annotated

import typer

from demix.commands.stages import STAGES, add_stage, list_stages
from demix.errors import DemixError, masked, printable
from demix.launch.local import end_rank
from demix.launch.snakemake import end_with_snakemake, expanded, note_usage

# The modules with the commands for people.
PEOPLE = ("configs", "people", "questions", "exchange")


def command_line(asked: str = "") -> typer.Typer:
    """The command line with only the command `asked`, or with all commands for people if no command has this name.

    `asked` may be a stage. A single command starts faster: other modules are not imported, and typer reads one
    signature.
    """
    app = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        help="Language models made of domain experts. `demix stages` lists the commands that Snakemake runs; each can "
        "also be copied and run by hand.",
    )
    app.callback()(_options)
    if asked in STAGES:
        add_stage(app, asked)
        return app
    app.command("stages", rich_help_panel="Results")(list_stages)
    for module in PEOPLE:
        found = import_module(f"demix.commands.{module}").app
        app.registered_groups += found.registered_groups
        for command in found.registered_commands:
            if asked == (command.name or command.callback.__name__):
                app.registered_commands = [command]
                return app
        app.registered_commands += found.registered_commands
    return app


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"demix {version('demix')}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


class _StandardError(logging.Handler):
    """Writes log lines to the current sys.stderr, because a progress bar replaces sys.stderr while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        print(printable(masked(self.format(record))), file=sys.stderr, flush=True)


def main() -> None:
    """Run the command line. Bad input ends in a one-line error and exit status 1."""
    # If a stream is closed, Python sets it to None, and the next opened file would get the stream's descriptor.
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r" if name == "stdin" else "w"))
    # Imported modules are not garbage, and to search those of torch for garbage would delay the start by 0.25 s.
    gc.set_threshold(100_000)
    logging.basicConfig(format="%(message)s", level=logging.INFO, handlers=[_StandardError()])
    end_with_snakemake()
    try:
        sys.argv[1:] = expanded(sys.argv[1:])
        command_line(*sys.argv[1:2])()
    except DemixError as error:
        sys.exit(f"demix: error: {error}")
    except SystemExit as ended:
        if not ended.code:
            note_usage()
            _write_out()
            end_rank()
        # typer exits with this status at Ctrl-C.
        elif ended.code == 130:
            print("demix: interrupted", file=sys.stderr)
        raise
    except OSError as error:
        if error.filename is None:
            _write_out("\n")
            raise
        name = printable(str(error.filename))
        sys.exit(f"demix: error: {name}: {error.strerror}; fix the path or its permissions and rerun")
    finally:
        _write_out()


def _write_out(text: str = "") -> None:
    """Print `text` and flush standard output. Exit if that fails, without a message if the reader closed the pipe."""
    try:
        # On a full disk even an empty write fails.
        if text:
            sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # Without this the interpreter would flush again when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        cure = "free space or redirect it elsewhere, then rerun"
        line = f"demix: error: standard output: cannot be written ({error.strerror}); {cure}"
        sys.exit(1 if isinstance(error, BrokenPipeError) else line)
