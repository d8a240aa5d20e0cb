"""`fairway consume` prints messages as a consumer of a group; `fairway tail` prints them without a group.

`ShownMessage` is a message as JSON, for `dead` and `trace`, too.
"""

from __future__ import annotations

import base64
import enum
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Annotated

import msgspec
import typer

from fairway import Client, Consumer, Message
from fairway.cli import arguments, output
from fairway.cli.arguments import Subject
from fairway.cli.connections import CommonOptions, common_options, describe
from fairway.client.commands import SeekTarget, place_of
from fairway.errors import Code, InvariantViolated, Refused
from fairway.protocol.admin_messages import Depth, Scan, Scanned
from fairway.protocol.delivery import LazyBatch
from fairway.protocol.messages import Whence
from fairway.runtime import host, terminal
from fairway.runtime.host import Ending


class ShownMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """What `--json` prints for a message. A payload that is not UTF-8 is in `payload_base64` instead."""

    subject: str
    sequence: int
    id: str
    created_at: datetime
    appended_at: datetime
    key: str | None = None
    tags: list[str] = []
    headers: dict[str, str] = {}
    group: str | None = None
    attempt: int | None = None
    payload: str | None = None
    payload_base64: str | None = None


def of_message(message: Message) -> ShownMessage:
    """A delivered message."""
    text, coded = of_payload(message.payload)
    return ShownMessage(
        subject=message.subject,
        sequence=message.sequence,
        id=str(message.id),
        created_at=message.created_at,
        appended_at=message.appended_at,
        key=message.key,
        tags=list(message.tags),
        headers=message.headers,
        group=message.group,
        attempt=message.attempt,
        payload=text,
        payload_base64=coded,
    )


def of_page(subject: str, page: LazyBatch, sequence: int) -> ShownMessage:
    """A message of a stored batch."""
    batch, index = page.batch, sequence - page.first_sequence
    text, coded = of_payload(batch.payloads[index])
    return ShownMessage(
        subject=subject,
        sequence=sequence,
        id=str(batch.id(index)),
        created_at=_time(batch.created_ms(index)),
        appended_at=_time(page.appended_ms),
        key=batch.key(index),
        tags=batch.tags(index),
        headers=batch.headers(index),
        payload=text,
        payload_base64=coded,
    )


def write_line(shown: ShownMessage) -> None:
    """Write one line of JSON to stdout."""
    terminal.write_payload(msgspec.json.encode(shown))


def of_payload(payload: bytes) -> tuple[str | None, str | None]:
    """A payload as text, or else in base 64."""
    try:
        return payload.decode("utf-8"), None
    except UnicodeDecodeError:
        return None, base64.b64encode(payload).decode("ascii")


def _time(ms: int) -> datetime:
    return datetime.fromtimestamp(ms // 1_000, UTC) + timedelta(milliseconds=ms % 1_000)


_PRINTED_MAX = 256  # messages printed before a flush, and acked after it
_PREFETCH = 2_000
_LOOK_S = 0.2  # between two checks whether to end


class StartChoice(enum.Enum):
    """Where a new group begins."""

    EARLIEST = "earliest"
    LATEST = "latest"


InGroup = Annotated[str, typer.Option("--group", "-g", metavar="GROUP", help="The group.", show_default=False)]
Count = Annotated[int | None, typer.Option("--count", "-n", min=1, metavar="N", help="Stop after N messages.")]
Ack = Annotated[bool, typer.Option("--ack/--no-ack", help="Ack printed messages, or hand them back at the end.")]
NewStart = Annotated[StartChoice, typer.Option("--start", help="Where a new group begins.")]
Create = Annotated[
    bool,
    typer.Option("--create/--no-create", help="Create a missing subject or group, or refuse it."),
]
Idle = Annotated[
    float | None,
    typer.Option("--idle-s", min=0.01, metavar="SECONDS", help="Stop after SECONDS without a message; unset: never."),
]


@common_options
def consume(
    subject: Subject,
    group: InGroup,
    count: Count = None,
    ack: Ack = True,
    start: NewStart = StartChoice.EARLIEST,
    create: Create = True,
    idle_s: Idle = None,
    *,
    common: CommonOptions,
) -> None:
    """Consume as a member of a group: print payloads, one a line, and ack what is printed.

    A subject or a group that does not exist is created, and a line on stderr
    says so; --no-create refuses it instead.

    Ctrl-C or SIGTERM ends it: what was printed is acked, the rest goes back to
    the group at once.
    """
    with common.connected("consume") as client:
        _check_existence(client, subject, group, start, may_create=create)
        prefetch = min(count or _PREFETCH, _PREFETCH)
        whence = Whence.LATEST if start is StartChoice.LATEST else Whence.EARLIEST
        consuming = client.consumer(subject, group, start=whence, prefetch_messages=prefetch)
        with consuming as consumer, host.asked_to_end() as ending:
            printed = _print_taken(consumer, count, idle_s, ending, as_json=common.json, is_acking=ack)
        if terminal.is_terminal(err=True):
            verb = "printed and acked" if ack else "printed and handed back"
            terminal.say(f"{output.count(printed, 'message')} {verb}", err=True)


def _check_existence(client: Client, subject: str, group: str, start: StartChoice, *, may_create: bool) -> None:
    """Say what joining creates: a misspelt name would otherwise wait for ever without a word."""
    has_subject, has_group = _existing(client, subject, group)
    if has_subject and has_group:
        return
    missing = f"group {group} on {subject}" if has_subject else f"subject {subject}"
    if not may_create:
        remedy = "leave out --no-create to make it" if has_subject else "send something to it, or leave out --no-create"
        code = Code.NO_SUCH_GROUP if has_subject else Code.NO_SUCH_SUBJECT
        raise Refused(code, f"there is no {missing}: {remedy}")
    if has_subject:
        terminal.say(f"fairway consume: {missing} is new, and begins at the {start.value} message", err=True)
    else:
        terminal.say(
            f"fairway consume: {missing} does not exist yet: making it, with group {group}, and waiting", err=True
        )


def _existing(client: Client, subject: str, group: str) -> tuple[bool, bool]:
    """Whether the subject exists, and whether it has the group."""
    try:
        _, found = describe(client, Depth.GROUPS, subject, group)
    except Refused as refused:
        if refused.code is Code.NO_SUCH_GROUP:
            return True, False
        if refused.code is Code.NO_SUCH_SUBJECT:
            return False, False
        raise
    return True, any(each.groups for each in found)


def _print_taken(
    consumer: Consumer, count: int | None, idle_s: float | None, ending: Ending, *, as_json: bool, is_acking: bool
) -> int:
    """Print the messages of a consumer; returns how many."""
    printed, quiet_s = 0, 0.0
    while not ending.is_asked and (count is None or printed < count) and (idle_s is None or quiet_s < idle_s):
        most = _PRINTED_MAX if count is None else min(_PRINTED_MAX, count - printed)
        wait_s = _LOOK_S if idle_s is None else min(_LOOK_S, idle_s - quiet_s)
        found = consumer.take(most, wait_s)
        quiet_s = 0.0 if found else quiet_s + wait_s
        for message in found:
            if as_json:
                write_line(of_message(message))
            else:
                terminal.write_payload(message.payload)
        terminal.flush()
        printed += len(found)
        if is_acking and found:
            consumer.ack(found)  # only messages that have left this process
    return printed


From = Annotated[str, typer.Option("--from", metavar="POSITION", help=arguments.HELP)]
Follow = Annotated[
    bool, typer.Option("--follow/--no-follow", help="Wait for new messages, or end with those stored now.")
]


@common_options
def tail(
    subject: Subject, start: From = "latest", count: Count = None, follow: Follow = True, *, common: CommonOptions
) -> None:
    """Print the payloads of a subject, one a line, and wait for new messages until Ctrl-C.

    It reads the log without a group: nothing is acked, and no consumer gets
    less. Dead letters are a subject, too: dead:GROUP:SUBJECT.
    """
    with common.connected("tail") as client, host.asked_to_end() as ending:
        _Tail(client, subject, ending, as_json=common.json).run(arguments.parse(start), count, is_following=follow)


class _Tail:
    """Prints a subject from a position on."""

    def __init__(self, client: Client, subject: str, ending: Ending, *, as_json: bool) -> None:
        self._client = client
        self._subject = subject
        self._ending = ending
        self._as_json = as_json
        self._printed = 0

    def run(self, start: SeekTarget, count: int | None, *, is_following: bool) -> None:
        at = self._begin(start, is_following=is_following)
        while True:
            before = at
            for page in self._pages(at):
                for sequence in range(max(at, page.first_sequence), page.end_sequence):
                    self._print(page, sequence)
                    if self._printed == count:
                        terminal.flush()
                        return
                at = max(at, page.end_sequence)
            terminal.flush()
            if not is_following or self._ending.wait(_LOOK_S if at == before else 0.0):
                return

    def _pages(self, at: int) -> Iterator[LazyBatch]:
        """The stored batches from a sequence on, until the process is asked to end."""
        for page in self._client.scan(self._subject, at):
            yield page
            if self._ending.is_asked:
                return

    def _print(self, page: LazyBatch, sequence: int) -> None:
        self._printed += 1
        if self._as_json:
            write_line(of_page(self._subject, page, sequence))
        else:
            terminal.write_payload(page.batch.payloads[sequence - page.first_sequence])

    def _begin(self, start: SeekTarget, *, is_following: bool) -> int:
        """The sequence of the position now, so that `tail` skips nothing that arrives meanwhile."""
        has_waited = False
        while not self._ending.is_asked:
            whence, value = place_of(start)
            try:
                answer = self._client.ask(Scan(self._subject, whence, value, None, 0))
            except Refused as refused:
                if refused.code is not Code.NO_SUCH_SUBJECT or not is_following:
                    raise
                if not has_waited:
                    terminal.say(f"fairway tail: nothing was sent to {self._subject} yet, waiting for it", err=True)
                start, has_waited = "earliest", True
                self._ending.wait(_LOOK_S)
            else:
                if not isinstance(answer, Scanned):
                    raise InvariantViolated(f"a scan was answered with {answer!r}")
                return start if isinstance(start, int) else answer.next_sequence
        return 0
