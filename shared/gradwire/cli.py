"""The `gradwire` command. The services add their sub-commands through the entry-point group `gradwire.commands`."""

from __future__ import annotations

import logging
import sys
from importlib.metadata import entry_points
from typing import Annotated

import typer

from gradwire.demo import demo
from gradwire.errors import GradwireError
from gradwire.signals import Stopped
from gradwire.status import health, status

GROUP = "gradwire.commands"


def main() -> None:
    """Runs the command line. Whatever gradwire refuses is one line on stderr and exit code 1."""
    try:
        _app()()
    except Stopped:
        sys.exit(0)  # asked to end, and ended in order
    except GradwireError as error:
        print(f"gradwire: {error}", file=sys.stderr)
        sys.exit(1)


def _app() -> typer.Typer:
    app = typer.Typer(
        name="gradwire",
        help="Train one PyTorch model on machines that share only an ordinary network.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_configure)
    app.command()(demo)
    app.command()(status)
    app.command()(health)
    # The services bring PyTorch along, which takes seconds; a health check should not.
    if sys.argv[1:2] not in (["demo"], ["status"], ["health"]):
        for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
            app.command(entry.name)(entry.load())
    return app


def _configure(
    log_level: Annotated[
        str, typer.Option(help="debug, info, warning or error.", envvar="GRADWIRE_LOG_LEVEL")
    ] = "info",
) -> None:
    levels = {"debug", "info", "warning", "error"}
    if log_level not in levels:
        raise typer.BadParameter(f"{log_level!r}: allowed are {', '.join(sorted(levels))}", param_hint="--log-level")
    logging.basicConfig(
        format="%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S", level=log_level.upper(), stream=sys.stderr
    )
