"""`demix` in this process."""

from typer.testing import CliRunner, Result

from demix.commands.main import app


def demix(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])
