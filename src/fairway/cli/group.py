"""`fairway group`: what is done to a consumer group as a whole."""

from __future__ import annotations

from typing import Annotated

import typer

from fairway.cli import output
from fairway.cli.client import AsJson, Group, Patience, Subject, Url, connected
from fairway.cli.settings import ConfigFile
from fairway.world import terminal

app = typer.Typer(no_args_is_help=True)

Anyway = Annotated[
    bool, typer.Option("--force", help="Although it has messages to handle, or consumers are connected.")
]
DeadLetters = Annotated[bool, typer.Option("--dead-letters", help="Remove its dead letters, too.")]


@app.callback()
def _root() -> None:
    """A consumer group as a whole; `fairway groups` lists them."""


@app.command()
def remove(
    subject: Subject,
    group: Group,
    dead_letters: DeadLetters = False,
    force: Anyway = False,
    json: AsJson = False,
    url: Url = None,
    patience_s: Patience = None,
    config: ConfigFile = None,
) -> None:
    """Remove a group from a subject. Its dead letters stay, unless there are none. Whoever joins it finds a new one."""
    with connected("group remove", config, url, patience_s) as client:
        removed = client.remove_group(subject, group, force=force, dead_letters=dead_letters)
        if json:
            output.write_json({"subject": subject, "group": group, **output.named(removed)})
        elif removed.existed:
            terminal.say(f"group {group} on {subject} is removed{output.lost(0, removed.messages, removed.dead)}")
        else:
            terminal.say(f"there is no group {group} on {subject}: nothing was removed")
