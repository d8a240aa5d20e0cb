"""`fairway trace ID`: one message's life as a timeline, from the broker's logs and, if need be, from an archive."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from fairway.cli import output
from fairway.cli.client import AsJson, Patience, Url, connected, describe
from fairway.cli.settings import ConfigFile
from fairway.errors import Code, FairwayError, Refused

if TYPE_CHECKING:
    from fairway import Client, DelayedMessage
    from fairway.batch import MessageId
    from fairway.cli.trace_story import InGroup, Story
    from fairway.protocol.admin import SubjectState

Id = Annotated[str, typer.Argument(metavar="ID", help="Its id, 26 characters.", show_default=False)]
OfSubject = Annotated[
    str | None, typer.Option("--subject", "-s", metavar="SUBJECT", help="Look in this subject alone: it is quicker.")
]
Archive = Annotated[
    str | None,
    typer.Option("--archive", metavar="DIR", help="Look in this archive, too, if the broker has it no more."),
]
ToEnd = Annotated[
    bool,
    typer.Option(
        "--to-end", help="Read on when all groups are done with it: what was done with it again, if anything."
    ),
]


def trace(
    id: Id,
    subject: OfSubject = None,
    archive: Archive = None,
    to_end: ToEnd = False,
    json: AsJson = False,
    url: Url = None,
    patience_s: Patience = None,
    config: ConfigFile = None,
) -> None:
    """One message's life: when it was stored, who got it, what came of it, in every group.

    From the broker's own logs, without Spark; `fairway pipeline trace` does it for many.
    """
    with connected("trace", config, url, patience_s) as client:
        from fairway.batch import MessageId
        from fairway.cli import trace_find
        from fairway.cli.trace_story import Telling

        wanted = MessageId.parse(id)
        subjects = _subjects(client, subject, is_lenient=archive is not None)
        found = trace_find.find(client, wanted, subjects, subject, archive)
        if found is None:
            raise FairwayError(_unknown(wanted, subject, archive))
        if isinstance(found, trace_find.Found):
            telling = Telling(client, wanted, subjects)
            story = telling.tell(found, is_to_end=to_end)
        else:
            story = None
    if story is not None:
        output.write_json(story) if json else _show(story)
    elif not isinstance(found, trace_find.Found):
        output.write_json({"pending": found}) if json else _show_pending(found)


def _subjects(client: Client, subject: str | None, *, is_lenient: bool) -> list[SubjectState]:
    """Where a message may be: what the broker keeps for itself only where it is named."""
    from fairway.protocol.admin import Depth

    try:
        _, found = describe(client, Depth.GROUPS, subject)
    except Refused as refused:
        if refused.code is not Code.NO_SUCH_SUBJECT or not is_lenient:
            raise
        return []
    return [each for each in found if subject is not None or ":" not in each.name]


def _unknown(id: MessageId, subject: str | None, archive: str | None) -> str:
    where = f"{subject} has" if subject is not None else "the broker has"
    hint = f", nor {archive}" if archive is not None else "; --archive DIR looks in an archive, too"
    return f"no message {id}: {where} none of that id{hint}"


# --- showing ----------------------------------------------------------------------------------------------------------


def _show(story: Story) -> None:
    message, out = story.message, output.console()
    facts = [f"{message.subject}, sequence {message.sequence:,}"]
    facts += [f"key {message.key}"] if message.key is not None else []
    facts += [f"tags {' '.join(message.tags)}"] if message.tags else []
    facts += ["in the archive only"] if story.is_archived_only else []
    facts += ["of another log than the broker has"] if not story.is_of_this_log else []
    table = output.table(f"message {message.id}", "time (UTC)", "after>", "what", "group", "consumer", "attempt>", "")
    before: datetime | None = None
    rows = []
    for each in story.events:
        wait = "" if before is None else f"+{_span(each.at - before)}"
        detail = f"again at {each.due_at:%H:%M:%S}" if each.due_at is not None else ""
        detail = ": ".join(filter(None, (detail, each.detail)))
        attempt = "" if each.attempt is None else str(each.attempt)
        rows.append((_clock(each.at), wait, each.event, each.group or "", each.consumer or "", attempt, detail))
        before = each.at
    typer.echo(", ".join(facts))
    output.fill(table, rows, len(rows))
    out.print(table)
    for group in story.groups:
        typer.echo(_sentence(group))
    if not story.groups and story.is_of_this_log:
        typer.echo("no group consumes it")


def _sentence(group: InGroup) -> str:
    parts = [f"{group.group}: {group.state}"]
    if group.total_ms is not None:
        parts.append(f"acked {_span(timedelta(milliseconds=group.total_ms))} after its creation")
    if group.due_at is not None:
        parts.append(f"again at {_clock(group.due_at)}")
    if group.pulls > 1:
        parts.append(f"handed out {group.pulls} times")
    if group.acks > 1:
        parts.append(f"acked {group.acks} times")
    return ", ".join(parts)


def _show_pending(pending: DelayedMessage) -> None:
    typer.echo(f"message {pending.id} of {pending.subject} waits for its time: due {_clock(pending.due_at)} UTC")


def _clock(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S}.{at.microsecond // 1_000:03}"


def _span(span: timedelta) -> str:
    seconds = max(span.total_seconds(), 0.0)
    return f"{round(seconds * 1_000)} ms" if seconds < 1 else output.age(seconds)
