"""`fairway`: the entry point, and which verbs there are."""

from __future__ import annotations

from typing import Annotated

import typer

from fairway import __version__
from fairway.cli.broker import broker
from fairway.cli.inspect import inspect
from fairway.cli.verify import verify

app = typer.Typer(
    name="fairway",
    help="A message queue for Python shops whose data platform is Spark.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # so that the lines of a docstring flow
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _say_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"fairway {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Run a broker, or look at a data directory."""


app.command()(broker)
app.command()(inspect)
app.command()(verify)


def main() -> None:
    """What the console script calls."""
    app()


if __name__ == "__main__":
    main()
