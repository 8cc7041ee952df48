"""`demix` in this process."""

import sys
from unittest.mock import patch

from typer.testing import CliRunner, Result

from demix.commands import main as cli


def demix(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def said(arguments: list[str]) -> str | None:
    """Do what `demix` with these arguments does, in this process; returns the error's line, None without one."""
    try:
        with patch.object(sys, "argv", ["demix", *arguments]):
            cli.main()
    except SystemExit as ended:
        return None if ended.code in (0, None) else str(ended.code)
    return None
