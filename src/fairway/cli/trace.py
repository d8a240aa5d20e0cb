"""`fairway trace ID`: one message's life as a timeline, from the logs of brokers and, if need be, from an archive."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from fairway.cli import output
from fairway.cli.client import AsJson, Patience, Url, connected
from fairway.cli.settings import ConfigFile, resolve
from fairway.errors import FairwayError
from fairway.world import terminal

if TYPE_CHECKING:
    from fairway import DelayedMessage
    from fairway.batch import MessageId
    from fairway.cli.trace_story import InGroup, Story

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

    From the broker's own logs, without Spark; of a cluster, meta://HOST:PORT, from those of every broker group.
    `fairway pipeline trace` does it for many.
    """
    with connected("trace", config, url, patience_s) as client:
        from fairway.batch import MessageId
        from fairway.cli import trace_find, trace_homes
        from fairway.cli.trace_story import Telling

        wanted, options = MessageId.parse(id), resolve(config, url=url, patience_s=patience_s).options
        with trace_homes.asked(client, options, subject, is_lenient=archive is not None) as asked:
            found = trace_find.find(asked, wanted, subject, archive)
            story = Telling(asked, wanted).tell(found, is_to_end=to_end) if isinstance(found, list) and found else None
        if not found:
            raise FairwayError(_unknown(wanted, subject, archive, asked.unasked))
    if story is not None:
        output.write_json(story) if json else _show(story)
    elif not isinstance(found, list):
        output.write_json({"pending": found}) if json else _show_pending(found)


def _unknown(id: MessageId, subject: str | None, archive: str | None, unasked: dict[str, str]) -> str:
    where = f"{subject} has" if subject is not None else "the broker has"
    hint = f", nor {archive}" if archive is not None else "; --archive DIR looks in an archive, too"
    silent = "".join(f". {each} could not be asked: {why}" for each, why in unasked.items())
    return f"no message {id}: {where} none of that id{hint}{silent}"


# --- showing ----------------------------------------------------------------------------------------------------------


def _show(story: Story) -> None:
    message, out = story.message, terminal.console()
    facts = [f"{message.subject}, sequence {message.sequence:,}"]
    facts += [f"broker group {story.broker_group}"] if story.broker_group is not None else []
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
        elsewhere = "" if each.broker_group is None else f"in broker group {each.broker_group}"
        detail = ": ".join(filter(None, (elsewhere, detail, each.detail)))
        attempt = "" if each.attempt is None else str(each.attempt)
        rows.append((_clock(each.at), wait, each.event, each.group or "", each.consumer or "", attempt, detail))
        before = each.at
    terminal.say(", ".join(facts))
    output.fill(table, rows, len(rows))
    out.print(table)
    is_in_many = len({group.broker_group for group in story.groups}) > 1
    for group in story.groups:
        terminal.say(_sentence(group, f" in broker group {group.broker_group}" if is_in_many else ""))
    if not story.groups and story.is_of_this_log:
        terminal.say("no group consumes it")
    for name, why in story.unasked.items():
        terminal.say(f"{name} could not be asked, and may know more: {why}")


def _sentence(group: InGroup, where: str) -> str:
    parts = [f"{group.group}{where}: {group.state}"]
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
    terminal.say(f"message {pending.id} of {pending.subject} waits for its time: due {_clock(pending.due_at)} UTC")


def _clock(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S}.{at.microsecond // 1_000:03}"


def _span(span: timedelta) -> str:
    seconds = max(span.total_seconds(), 0.0)
    return f"{round(seconds * 1_000)} ms" if seconds < 1 else output.age(seconds)
