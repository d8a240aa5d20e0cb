"""What the verbs that look at a data directory share: the look itself, and the words for what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairway.cli import output
from fairway.errors import NoSuchFile, WrongDirectory

if TYPE_CHECKING:
    from rich.console import Console

    from fairway.storage.report import DamageReport, DirectorySurvey
    from fairway.world.real_disk import RealDisk

Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="A data directory; it may be in use.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document; docs/operations.md describes it.")]

_DELAY, _SCHEDULE, _MESSAGES = "delay", "schedule", "messages"  # folders of a delay server

_MEANING = {
    "rotten": "rotten: the disk has lost what it once had. Everything else is served. Replace the disk, and restore "
    "these messages from a copy of the directory.",
    "torn": "torn: a crash left an unfinished tail, of which nothing was ever confirmed. The next start cuts it off, "
    "and keeps it in aside/.",
    "invalid": "invalid: the checksums hold but the content breaks its format, which no disk does. Please report it, "
    "with a copy of the file.",
}


def look(path: Path, *, verify: bool, records_max: int = 0) -> DirectorySurvey:
    """Survey the directory with a bar on the terminal."""
    from fairway.storage.survey import survey
    from fairway.world.real_disk import RealDisk

    if not path.exists():
        raise NoSuchFile(f"there is no directory {path}: check the path")
    if not path.is_dir():
        raise WrongDirectory(f"{path} is a file: name the data directory itself")
    disk = RealDisk(path)
    try:
        with output.progress_bar("verifying" if verify else "reading") as progress:
            found = survey(disk, verify=verify, records_max=records_max, owner=disk.owner, progress=progress)
        if verify and (path / _SCHEDULE).is_dir():
            _add_schedule(disk, found)
    except WrongDirectory as error:
        raise WrongDirectory(f"{path}: {error}") from error
    finally:
        disk.close()
    if verify and (path / _DELAY / _MESSAGES).is_dir():
        found.delay = look(path / _DELAY, verify=True, records_max=records_max)
        found.is_sound = found.is_sound and found.delay.is_sound
    return found


def _add_schedule(disk: RealDisk, found: DirectorySurvey) -> None:
    """What is wrong with the buckets of delayed messages."""
    from fairway.batch.arrays import numpy_or_none

    if numpy_or_none() is None:
        found.remarks.append("schedule/ was not looked at: it takes numpy, pip install 'fairway[server]'")
        return
    from fairway.delay.schedule_audit import audit

    audited = audit(disk)
    found.damages += audited.damages
    found.flaws += audited.flaws
    found.bytes_read += audited.bytes
    found.is_sound = found.is_sound and not audited.damages and not audited.flaws


def show_wrongs(out: Console, found: DirectorySurvey) -> None:
    """Damage, flaws, what was kept aside, remarks; nothing for a clean directory."""
    if found.damages:
        rows = [
            (each.verdict, each.file, f"{each.start:,}", f"{each.end - each.start:,}", each.why, _holds(each))
            for each in found.damages
        ]
        damages = output.table("damage", "verdict", "file", "position>", "bytes>", "why", "what it held")
        output.fill(damages, rows)
        out.print(damages)
        for verdict in dict.fromkeys(each.verdict for each in found.damages):
            out.print(_MEANING[verdict], soft_wrap=True)
        out.print()
    if found.flaws:
        flaws = output.table("flaws", "file", "why", "remedy")
        output.fill(flaws, [(each.file, each.why, each.remedy) for each in found.flaws])
        out.print(flaws)
    if found.aside:
        kept = sum(each.bytes for each in found.aside)
        out.print(f"aside: {output.count(len(found.aside), 'torn tail')} of earlier crashes, {output.size(kept)}")
    for remark in found.remarks:
        out.print(f"remark: {remark}", soft_wrap=True)


def _holds(damage: DamageReport) -> str:
    if damage.subject is None or damage.first_sequence is None or damage.messages is None:
        return "known already" if damage.is_known else ""
    span = f"{damage.subject} {damage.first_sequence:,} to {damage.first_sequence + damage.messages - 1:,}"
    return f"{span}, known already" if damage.is_known else span


def use_of(found: DirectorySurvey) -> str:
    if found.owner is None:
        return "not in use"
    return f"in use by process {found.owner}" if found.owner else "in use"
