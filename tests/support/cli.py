"""`demix` in this process."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from typer.testing import CliRunner, Result

from demix.commands import main as cli


@contextmanager
def levels_restored() -> Iterator[None]:
    """A command may change what is logged until its process ends; here the process goes on with other tests."""
    loggers = logging.getLogger(), logging.getLogger("demix")
    levels = [logger.level for logger in loggers]
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def demix(*arguments: object) -> Result:
    with levels_restored():
        return CliRunner().invoke(cli.command_line(*map(str, arguments[:1])), [str(argument) for argument in arguments])


def succeeds(*arguments: object) -> Result:
    """What `demix` with these arguments does, which ends well."""
    done = demix(*arguments)
    assert done.exit_code == 0, (arguments, done.exception, done.output)
    return done


def said(arguments: list[str]) -> str | None:
    """Do what `demix` with these arguments does, in this process; returns the error's line, None without one."""
    try:
        with patch.object(sys, "argv", ["demix", *arguments]), levels_restored():
            cli.main()
    except SystemExit as ended:
        return None if ended.code in (0, None) else str(ended.code)
    return None


def refusal(*arguments: object, of: object) -> str:
    """The line in which `demix` with these arguments ends with status 1; it names `of` as what is at fault."""
    line = said([str(argument) for argument in arguments])
    assert line is not None
    assert line.startswith("demix: error: ")
    assert "\n" not in line
    subject = line.removeprefix("demix: error: ").partition(": ")[0]
    assert str(of) in subject, line
    return line
