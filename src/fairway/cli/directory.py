"""`fairway inspect DIR` shows what a data directory holds; `fairway verify DIR` checks it for damage.

Both read the directory alone and change nothing. `verify` says by its exit status what it found.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairway.batch.layout import numpy_or_none
from fairway.cli import output
from fairway.errors import NoSuchFile, WrongDirectory
from fairway.runtime import terminal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from fairway.runtime.real_disk import RealDisk
    from fairway.storage.survey_report import DamageReport, DirectorySurvey, LogReport


Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="The data directory; it may be in use.", show_default=False)
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON on stdout, for programs; docs/how-to/operations.md describes it.")
]

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
    """Survey the directory, with a progress bar on a terminal."""
    from fairway.runtime.real_disk import RealDisk
    from fairway.storage.survey import survey

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
    """Add the damage of the buckets of delayed messages."""
    if numpy_or_none() is None:
        found.remarks.append("schedule/ was not looked at: it takes numpy, pip install 'fairway[server]'")
        return
    from fairway.delay.schedule.repair import audit

    audited = audit(disk)
    found.damages += audited.damages
    found.flaws += audited.flaws
    found.bytes_read += audited.bytes
    found.is_sound = found.is_sound and not audited.damages and not audited.flaws


def show_wrongs(out: Console, found: DirectorySurvey) -> None:
    """Print damage, flaws, torn tails kept aside, and remarks; nothing for a clean directory."""
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
    flaws = output.table("flaws", "file", "why", "remedy")
    output.print_rows(out, flaws, [(each.file, each.why, each.remedy) for each in found.flaws])
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


Records = Annotated[
    int, typer.Option("--records", metavar="N", min=0, help="Also list the newest N records of each log.")
]


def inspect(directory: Directory, json: AsJson = False, records: Records = 0) -> None:
    """Show the segments, records, subjects, groups and damage of a data directory.

    Reads both logs and compares every checksum. It takes no lock and writes
    nothing: the directory may be in use, damaged or on a read-only disk.

    The exit status is 0 even for damage; that of `fairway verify` is 4.
    """
    with output.failures("inspect"):
        found = look(directory, verify=False, records_max=records)
        if json:
            output.write_json(found)
        else:
            show_survey(terminal.console(), str(directory), found)


def show_survey(out: Console, title: str, found: DirectorySurvey) -> None:
    """Print the survey as tables."""
    identity = f"directory id {found.directory_id}" if found.directory_id else "identity lost"
    out.print(f"{title}: format {found.format_version}, {identity}, {use_of(found)}", soft_wrap=True, style="bold")
    out.print()
    _show_log(out, "messages", found.messages)
    _show_log(out, "actions", found.actions)
    _show_subjects(out, found)
    _show_groups(out, found)
    for each in found.checkpoints:
        if each.why_unreadable is not None:
            out.print(f"{each.file}: unreadable, {each.why_unreadable}", soft_wrap=True)
        else:
            ends = f"messages up to {each.messages_end:,}, actions up to {each.actions_end:,}"
            out.print(f"{each.file}: covers {ends}, epoch {each.epoch}", soft_wrap=True)
    _show_records(out, found)
    show_wrongs(out, found)


def _show_log(out: Console, name: str, log: LogReport) -> None:
    kinds = ", ".join(f"{number:,} {kind}" for kind, number in log.records.items()) or "no records"
    title = f"{name}: {kinds}; ends at {log.end:,}, synced up to {log.synced_end:,}"
    segments = output.table(title, "segment", "bytes>", "records>", "first append (UTC)", "last", "epochs", "index")
    rows = [
        (
            each.file,
            f"{each.end - each.base:,}",
            f"{each.records:,}",
            output.moment(each.first_appended_ms),
            output.moment(each.last_appended_ms),
            "" if each.first_epoch is None else f"{each.first_epoch} to {each.last_epoch}",
            each.index or "",
        )
        for each in log.segments
    ]
    output.fill(segments, rows)
    out.print(segments)


def _show_subjects(out: Console, found: DirectorySurvey) -> None:
    subjects = output.table("subjects", "id>", "name", "first>", "next>", "batches>", "messages>", "bytes>")
    rows = [
        (
            str(each.id),
            each.name,
            "" if each.first_sequence is None else f"{each.first_sequence:,}",
            f"{each.next_sequence:,}",
            f"{each.batches:,}",
            f"{each.messages:,}",
            output.size(each.bytes),
        )
        for each in found.subjects
    ]
    output.print_rows(out, subjects, rows)


def _show_groups(out: Console, found: DirectorySurvey) -> None:
    groups = output.table("groups", "id>", "actions", "subjects>", "first (UTC)", "last")
    rows = [
        (
            str(each.id),
            ", ".join(f"{number:,} {kind}" for kind, number in each.actions.items()),
            str(len(each.subjects)),
            output.moment(each.first_ms),
            output.moment(each.last_ms),
        )
        for each in found.groups
    ]
    output.print_rows(out, groups, rows)


def _show_records(out: Console, found: DirectorySurvey) -> None:
    columns = ("log", "position>", "bytes>", "kind", "epoch>", "appended (UTC)", "subject", "first>", "count>")
    records = output.table("newest records", *columns)
    rows = [
        (
            each.log,
            f"{each.position:,}",
            f"{each.bytes:,}",
            each.kind,
            str(each.epoch),
            output.moment(each.appended_ms),
            each.subject or "",
            "" if each.first_sequence is None else f"{each.first_sequence:,}",
            f"{each.count:,}",
        )
        for each in found.records
    ]
    output.print_rows(out, records, rows)


_REGISTRY_FILE = "registry.sqlite"


def verify(directory: Directory, json: AsJson = False) -> None:
    """Check a data directory, or the directory of a SQLite registry, for damage.

    Reads every byte, opens every batch, and compares every index and checkpoint
    with its log; of a registry (sqlite:DIR) every row. It takes no lock and
    writes nothing: the directory may be in use.

    Exit status: 0 sound, 4 damage found, 1 the check could not be made.
    """
    with output.failures("verify"):
        if (directory / _REGISTRY_FILE).is_file():
            _verify_registry(str(directory), json=json)
            return
        found = look(directory, verify=True)
        if json:
            output.write_json(found)
        else:
            show_verified(terminal.console(), str(directory), found)
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
                "Stop all brokers and delay servers and restore a backup of it; docs/internals/registry.md says what "
                "to do without one.",
                soft_wrap=True,
            )
    if not found.is_sound:
        raise typer.Exit(output.Exit.DAMAGE)


def show_verified(out: Console, title: str, found: DirectorySurvey) -> None:
    """Print the damage and the verdict; first those of the delay server inside."""
    if found.delay is not None:
        show_verified(out, f"{title}/delay", found.delay)
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
