"""`fairway trace ID`: the history of a message as a timeline, from the logs of brokers and, if need be, an archive.

In a cluster each broker group numbers its messages by itself and has its own action log. A message lies in one group;
its redriven or replayed copies may lie in others. So the verb asks every broker group over its own connection. It names
groups that do not answer, and prints what the others know.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from fairway.cli import connections, output
from fairway.cli.connections import CommonOptions, common_options, describe
from fairway.errors import Code, FairwayError, Refused, Unreachable
from fairway.runtime import terminal

if TYPE_CHECKING:
    from fairway import Client
    from fairway.batch import MessageId
    from fairway.cli.settings import CliOptions
    from fairway.cli.trace_timeline import InGroup, Timeline
    from fairway.protocol.admin_messages import SubjectDescription
    from fairway.protocol.route_messages import GroupRoute


@dataclass(frozen=True)
class Home:
    """A broker group and the client that asks it."""

    name: str | None  # None: a broker that is named by its address
    client: Client
    subjects: list[SubjectDescription] = field(default_factory=list)  # subjects to search, with their groups

    def has_log(self, log_id: str) -> bool:
        from fairway.protocol.admin_messages import Depth

        return f"{self.client.describe(depth=Depth.SUBJECTS).broker.log_id:016x}" == log_id


@dataclass(frozen=True)
class SearchScope:
    """The broker groups to search, and why others could not be asked, by name."""

    client: Client  # of the whole cluster: it knows the delay servers
    homes: list[Home]
    unasked: dict[str, str] = field(default_factory=dict)


@contextmanager
def search_scope(
    client: Client, options: CliOptions, subject: str | None, *, is_lenient: bool
) -> Iterator[SearchScope]:
    """The broker groups that may hold a message. `is_lenient`: the subject need not exist."""
    from fairway.client.url import parse_any

    with ExitStack() as stack:
        unasked: dict[str, str] = {}
        homes = [Home(None, client)]
        if parse_any(options.url).meta:
            found = [each for each in connections.everything(options).groups if each.kind == "broker"]
            if not found:
                raise Unreachable(
                    f"no broker is registered at {options.url}: start brokers with --registry and --group"
                )
            routes = sorted(found, key=lambda each: each.name)
            homes = list(_connected(routes, options, stack, unasked))
        homes = _with_subjects(homes, subject, unasked, is_lenient=is_lenient)
        if not homes:
            said = "; ".join(f"{name}: {why}" for name, why in unasked.items())
            raise Unreachable(f"none of the broker groups at {options.url} can be asked ({said})")
        yield SearchScope(client, homes, unasked)


def _connected(
    routes: Sequence[GroupRoute], options: CliOptions, stack: ExitStack, unasked: dict[str, str]
) -> Iterator[Home]:
    import fairway
    from fairway.client.url import SCHEME

    for each in routes:
        if not each.master:
            unasked[each.name] = each.why or "nobody leads it"
            continue
        url = SCHEME + ",".join((each.master, *each.replicas))
        try:
            yield Home(each.name, stack.enter_context(fairway.connect(url, patience=options.patience_s)))
        except Unreachable as error:
            unasked[each.name] = str(error)


def _with_subjects(
    homes: Sequence[Home], subject: str | None, unasked: dict[str, str], *, is_lenient: bool
) -> list[Home]:
    """The broker groups with their subjects; the broker's own subjects only if the user names one."""
    from fairway.protocol.admin_messages import Depth

    found: list[Home] = []
    refusals: list[Refused] = []
    for home in homes:
        subjects: list[SubjectDescription] = []
        try:
            _, subjects = describe(home.client, Depth.GROUPS, subject)
        except Refused as refused:
            if refused.code is not Code.NO_SUCH_SUBJECT:
                raise
            refusals.append(refused)
        except TimeoutError as error:
            if home.name is None:
                raise
            unasked[home.name] = str(error)
            continue
        wanted = [each for each in subjects if subject is not None or ":" not in each.name]
        found.append(Home(home.name, home.client, wanted))
    if found and len(refusals) == len(found) and not unasked and not is_lenient:
        raise refusals[0]
    return found


Id = Annotated[str, typer.Argument(metavar="ID", help="Message ID, 26 characters.", show_default=False)]
OfSubject = Annotated[str | None, typer.Option("--subject", "-s", metavar="SUBJECT", help="Only this subject: faster.")]
Archive = Annotated[
    str | None,
    typer.Option(
        "--archive", metavar="DIR", help="Also look in this archive, if the broker no longer has the message."
    ),
]
ToEnd = Annotated[
    bool,
    typer.Option("--to-end", help="Read the log to its end: also show what happened after all groups were done."),
]


@common_options
def trace(
    id: Id, subject: OfSubject = None, archive: Archive = None, to_end: ToEnd = False, *, common: CommonOptions
) -> None:
    """Show the history of a message: when it was stored, and what each group did with it.

    Reads the logs of the broker, or of all broker groups of a cluster (--url
    meta://HOST:PORT), without Spark. `fairway pipeline trace` does it for many.
    """
    with common.connected("trace") as client:
        from fairway.batch import MessageId
        from fairway.cli import trace_search
        from fairway.cli.trace_timeline import TimelineBuilder

        wanted, options = MessageId.parse(id), common.resolve()
        with search_scope(client, options, subject, is_lenient=archive is not None) as asked:
            found = trace_search.find(asked, wanted, subject, archive)
            timeline = (
                TimelineBuilder(asked, wanted).build(found, is_to_end=to_end)
                if isinstance(found, list) and found
                else None
            )
        if not found:
            raise FairwayError(_unknown(wanted, subject, archive, asked.unasked))
    if timeline is not None:
        output.write_json(timeline) if common.json else _show(timeline)
    elif not isinstance(found, list):
        if common.json:
            output.write_json({"pending": found})
        else:
            terminal.say(f"message {found.id} of {found.subject} waits for its time: due {_clock(found.due_at)} UTC")


def _unknown(id: MessageId, subject: str | None, archive: str | None, unasked: dict[str, str]) -> str:
    where = f"{subject} has" if subject is not None else "the broker has"
    hint = f", nor {archive}" if archive is not None else "; --archive DIR looks in an archive, too"
    silent = "".join(f". {each} could not be asked: {why}" for each, why in unasked.items())
    return f"no message {id}: {where} none of that id{hint}{silent}"


# --- showing ----------------------------------------------------------------------------------------------------------


def _show(timeline: Timeline) -> None:
    message, out = timeline.message, terminal.console()
    facts = [f"{message.subject}, sequence {message.sequence:,}"]
    facts += [f"broker group {timeline.broker_group}"] if timeline.broker_group is not None else []
    facts += [f"key {message.key}"] if message.key is not None else []
    facts += [f"tags {' '.join(message.tags)}"] if message.tags else []
    facts += ["in the archive only"] if timeline.is_archived_only else []
    facts += ["of another log than the broker has"] if not timeline.is_of_this_log else []
    table = output.table(f"message {message.id}", "time (UTC)", "after>", "what", "group", "consumer", "attempt>", "")
    before: datetime | None = None
    rows = []
    for each in timeline.events:
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
    is_in_many = len({group.broker_group for group in timeline.groups}) > 1
    for group in timeline.groups:
        terminal.say(_sentence(group, f" in broker group {group.broker_group}" if is_in_many else ""))
    if not timeline.groups and timeline.is_of_this_log:
        terminal.say("no group consumes it")
    for name, why in timeline.unasked.items():
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


def _clock(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S}.{at.microsecond // 1_000:03}"


def _span(span: timedelta) -> str:
    seconds = max(span.total_seconds(), 0.0)
    return f"{round(seconds * 1_000)} ms" if seconds < 1 else output.age(seconds)
