"""`fairway config show`: every setting, its value, and where that came from."""

from __future__ import annotations

from typing import Annotated

import typer

from fairway.cli import output
from fairway.cli.options import SETTINGS, shown
from fairway.cli.settings import ConfigFile, Settings, resolve
from fairway.redaction import without_password
from fairway.world import terminal

app = typer.Typer(no_args_is_help=True, help="What is set, and where.")

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@app.callback()
def _root() -> None:
    """What is set, and where."""


@app.command()
def show(config: ConfigFile = None, json: AsJson = False) -> None:
    """Every setting, its value, and where that came from.

    A flag counts more than the environment, that more than the file, and that more than the default.
    """
    with output.failures("config show"):
        settings = resolve(config)
        if json:
            output.write_json(_document(settings))
        else:
            _show(settings)


def _document(settings: Settings) -> dict[str, object]:
    return {
        "file": None if settings.file is None else str(settings.file),
        "settings": {
            name: {"value": _value(getattr(settings.options, name)), "from": origin}
            for name, origin in settings.origins.items()
        },
        "unknown_variables": list(settings.strangers),
    }


def _value(value: object) -> object:
    return without_password(value) if type(value) is str else value


def _show(settings: Settings) -> None:
    table = output.table("settings", "setting", "value", "from", "flag", "variable")
    rows = [
        (name, shown(getattr(settings.options, name)), origin, SETTINGS[name].flag, SETTINGS[name].variable)
        for name, origin in settings.origins.items()
    ]
    output.fill(table, rows)
    terminal.console().print(table)
    for name in settings.strangers:
        terminal.say(f"{name} is set, and is no setting of Fairway's", err=True)
