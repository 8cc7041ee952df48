"""The whole command line: the stages of the workflow, then the commands for people."""

import logging
import sys

import typer

from demix.commands import people, stages, training
from demix.errors import DemixError, masked
from demix.launch.parents import end_with_snakemake

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Language models made of domain experts: one command per stage. Snakemake prints each command that it runs; "
    "each command can be copied and run by hand.",
)
app.add_typer(stages.app)
app.add_typer(training.app)
app.add_typer(people.app)


class _StandardError(logging.Handler):
    """Writes log lines to the current sys.stderr, because a progress bar replaces sys.stderr while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        print(masked(self.format(record)), file=sys.stderr, flush=True)


def main() -> None:
    """Run the command line. Bad input ends in a one-line error and exit status 1."""
    logging.basicConfig(format="%(message)s", level=logging.INFO, handlers=[_StandardError()])
    end_with_snakemake()
    try:
        app()
    except DemixError as error:
        sys.exit(f"demix: error: {error}")
    except OSError as error:
        if error.filename is None:
            raise
        sys.exit(f"demix: error: {error.filename}: {error.strerror}; mend the path or its permissions and rerun")
