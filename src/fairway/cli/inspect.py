"""`fairway inspect DIR`: what is in a data directory. Changes nothing; `verify` is the judge."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fairway.cli import output
from fairway.cli.look import AsJson, Directory, look, show_wrongs, use_of
from fairway.world import terminal

if TYPE_CHECKING:
    from rich.console import Console

    from fairway.storage.report import DirectorySurvey, LogReport

Records = Annotated[int, typer.Option("--records", metavar="N", min=0, help="Also list the newest N of each log.")]


def inspect(directory: Directory, json: AsJson = False, records: Records = 0) -> None:
    """Show segments, records, subjects, groups and damage.

    Reads both logs and compares every checksum, without a lock and without writing: the directory may be in use,
    damaged or on a read-only disk. The exit status is 0 whatever is found; `fairway verify` is the judge.
    """
    with output.failures("inspect"):
        found = look(directory, verify=False, records_max=records)
        if json:
            output.write_json(found)
        else:
            show(terminal.console(), str(directory), found)


def show(out: Console, title: str, found: DirectorySurvey) -> None:
    """The tables for people."""
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
    if not found.subjects:
        return
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
    output.fill(subjects, rows)
    out.print(subjects)


def _show_groups(out: Console, found: DirectorySurvey) -> None:
    if not found.groups:
        return
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
    output.fill(groups, rows)
    out.print(groups)


def _show_records(out: Console, found: DirectorySurvey) -> None:
    if not found.records:
        return
    columns = ("log", "position>", "bytes>", "kind", "epoch>", "appended (UTC)", "subject", "first>", "count>")
    records = output.table("newest records", *columns)
    for each in found.records:
        records.add_row(
            each.log,
            f"{each.position:,}",
            f"{each.bytes:,}",
            each.kind,
            str(each.epoch),
            output.moment(each.appended_ms),
            output.cell(each.subject or ""),
            "" if each.first_sequence is None else f"{each.first_sequence:,}",
            f"{each.count:,}",
        )
    out.print(records)
