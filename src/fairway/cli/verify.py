"""`fairway verify DIR`: is anything wrong with a data directory? The exit status says it. Changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from fairway.cli import output
from fairway.cli.look import AsJson, Directory, look, show_wrongs, use_of
from fairway.world import terminal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from fairway.storage.report import DirectorySurvey

_REGISTRY_FILE = "registry.sqlite"


def verify(directory: Directory, json: AsJson = False) -> None:
    """Read every byte, open every batch, compare every view with its log. In the directory of a registry
    (`sqlite:DIR`): check every row.

    Exit status: 0 sound, 4 damage found, 1 the directory could not be judged. Holds no lock and writes nothing. Beside
    a process that uses the directory, a record at the very end that is still being written is no damage.
    """
    with output.failures("verify"):
        if (directory / _REGISTRY_FILE).is_file():
            _verify_registry(str(directory), json=json)
            return
        found = look(directory, verify=True)
        if json:
            output.write_json(found)
        else:
            show(terminal.console(), str(directory), found)
    if not found.is_sound:
        raise typer.Exit(output.Exit.DAMAGE)


def _verify_registry(directory: str, *, json: bool) -> None:
    from fairway.registry.sqlite import survey

    found = survey(directory)
    if json:
        output.write_json({"registry": found, "is_sound": found.is_sound})
    else:
        out = terminal.console()
        rows = f"{output.count(found.nodes, 'node')}, {output.count(found.sessions, 'session')}"
        out.print(_verdict(is_sound=found.is_sound), f": {found.file}: {rows}", sep="", soft_wrap=True)
        for problem in found.problems:
            out.print(f"  {problem}", soft_wrap=True)
        if found.is_sound and found.version == 1:
            out.print("its rows have no checksums yet: they get them when a meta server opens it", soft_wrap=True)
        if not found.is_sound:
            out.print(
                "Stop all brokers and delay servers and restore a backup of it; docs/registry.md says what to do "
                "without one.",
                soft_wrap=True,
            )
    if not found.is_sound:
        raise typer.Exit(output.Exit.DAMAGE)


def show(out: Console, title: str, found: DirectorySurvey) -> None:
    """What is wrong, if anything, and the verdict; of the delay server inside first."""
    if found.delay is not None:
        show(out, f"{title}/delay", found.delay)
    show_wrongs(out, found)
    segments = len(found.messages.segments) + len(found.actions.segments)
    records = sum(found.messages.records.values()) + sum(found.actions.records.values())
    batches = found.messages.records.get("DATA", 0)
    read = (
        f"{output.size(found.bytes_read)} in {output.count(segments, 'segment')}, {output.count(records, 'record')}, "
        f"{output.count(batches, 'batch')}, {use_of(found)}"
    )
    if not found.damages and not found.flaws:
        out.print(_verdict(is_sound=True), f": {title}: {read}", sep="", soft_wrap=True)
    else:
        wrongs = f"{output.count(len(found.damages), 'damaged span')}, {output.count(len(found.flaws), 'flawed file')}"
        out.print(_verdict(is_sound=False), f": {title}: {wrongs}; read {read}", sep="", soft_wrap=True)


def _verdict(*, is_sound: bool) -> Text:
    from rich.text import Text

    return Text("sound", "green") if is_sound else Text("damaged", "red")
