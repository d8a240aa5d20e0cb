"""`fairway verify DIR`: is anything wrong with a data directory? The exit status says it. Changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from fairway.cli import output
from fairway.cli.look import AsJson, Directory, look, show_wrongs, use_of

if TYPE_CHECKING:
    from rich.console import Console

    from fairway.storage.report import Survey


def verify(directory: Directory, json: AsJson = False) -> None:
    """Read every byte, open every batch, compare every view with its log.

    Exit status: 0 sound, 4 damage found, 1 the directory could not be judged. Holds no lock and writes nothing. Beside
    a process that uses the directory, a record at the very end that is still being written is no damage.
    """
    with output.failures("verify"):
        found = look(directory, verify=True)
        if json:
            output.write_json(found)
        else:
            show(output.console(), str(directory), found)
    if not found.is_sound:
        raise typer.Exit(output.Exit.DAMAGE)


def show(out: Console, title: str, found: Survey) -> None:
    """What is wrong, if anything, and the verdict."""
    show_wrongs(out, found)
    segments = len(found.messages.segments) + len(found.actions.segments)
    records = sum(found.messages.records.values()) + sum(found.actions.records.values())
    batches = found.messages.records.get("DATA", 0)
    read = (
        f"{output.size(found.bytes_read)} in {output.count(segments, 'segment')}, {output.count(records, 'record')}, "
        f"{output.count(batches, 'batch')}, {use_of(found)}"
    )
    if found.is_sound:
        out.print(f"[green]sound[/green]: {title}: {read}", soft_wrap=True)
    else:
        wrongs = f"{output.count(len(found.damages), 'damaged span')}, {output.count(len(found.flaws), 'flawed file')}"
        out.print(f"[red]damaged[/red]: {title}: {wrongs}; read {read}", soft_wrap=True)
