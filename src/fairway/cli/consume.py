"""`fairway consume SUBJECT --group GROUP`: be a consumer of the group; print what it gets, then ack it."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Annotated

import typer

from fairway.cli import messages, output
from fairway.cli.client import AsJson, Patience, Subject, Url, connected, describe
from fairway.cli.settings import ConfigFile
from fairway.errors import Code, Refused
from fairway.world import host, terminal

if TYPE_CHECKING:
    from fairway import Client, Consumer, Message
    from fairway.world.workers import Ending

_HANDFUL = 256  # printed between two flushes, after which they are acked
_PREFETCH = 2_000
_LOOK_S = 0.2  # between two looks at whether to end


class StartChoice(enum.Enum):
    """Where a group that is new begins."""

    EARLIEST = "earliest"
    LATEST = "latest"


InGroup = Annotated[str, typer.Option("--group", "-g", metavar="GROUP", help="The group.", show_default=False)]
Count = Annotated[int | None, typer.Option("--count", "-n", min=1, metavar="N", help="End after so many messages.")]
Ack = Annotated[bool, typer.Option("--ack/--no-ack", help="Without ack they go back to the group at the end.")]
NewStart = Annotated[StartChoice, typer.Option("--start", help="Where a group that is new begins.")]
Create = Annotated[
    bool,
    typer.Option("--create/--no-create", help="Make a subject or a group that does not exist; else refuse it."),
]
Idle = Annotated[
    float | None,
    typer.Option("--idle-s", min=0.01, metavar="SECONDS", help="End when none has come for so long; else never."),
]


def consume(
    subject: Subject,
    group: InGroup,
    count: Count = None,
    ack: Ack = True,
    start: NewStart = StartChoice.EARLIEST,
    create: Create = True,
    idle_s: Idle = None,
    json: AsJson = False,
    url: Url = None,
    patience_s: Patience = None,
    config: ConfigFile = None,
) -> None:
    """Print the payloads that a group is owed, one a line, as a consumer of it; each is acked once it is printed.

    A subject or a group that does not exist is made, and a line on stderr says so; --no-create refuses it instead.
    Ctrl-C or SIGTERM ends it: what was printed is acked, the rest goes back to the group at once.
    """
    with connected("consume", config, url, patience_s) as client:
        from fairway.protocol.messages import Whence

        _check_existence(client, subject, group, start, may_create=create)
        prefetch = min(count or _PREFETCH, _PREFETCH)
        whence = Whence.LATEST if start is StartChoice.LATEST else Whence.EARLIEST
        with client.consumer(subject, group, start=whence, prefetch_messages=prefetch) as consumer:
            printed = _Printing(consumer, as_json=json, is_acking=ack)
            with host.asked_to_end() as ending:
                printed.run(count, idle_s, ending)
        if terminal.is_terminal(err=True):
            verb = "printed and acked" if ack else "printed and handed back"
            terminal.say(f"{output.count(printed.count, 'message')} {verb}", err=True)


def _check_existence(client: Client, subject: str, group: str, start: StartChoice, *, may_create: bool) -> None:
    """Say what joining will make: a name that is misspelt would else wait for ever without a word."""
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
    """Whether the subject exists, and whether the group does on it."""
    from fairway.protocol.admin import Depth

    try:
        _, found = describe(client, Depth.GROUPS, subject, group)
    except Refused as refused:
        if refused.code is Code.NO_SUCH_GROUP:
            return True, False
        if refused.code is Code.NO_SUCH_SUBJECT:
            return False, False
        raise
    return True, any(each.groups for each in found)


class _Printing:
    """One consumer's messages on stdout."""

    def __init__(self, consumer: Consumer, *, as_json: bool, is_acking: bool) -> None:
        self._consumer = consumer
        self._as_json = as_json
        self._is_acking = is_acking
        self.count = 0

    def run(self, count: int | None, idle_s: float | None, ending: Ending) -> None:
        quiet_s = 0.0
        while not ending.is_asked and (count is None or self.count < count) and (idle_s is None or quiet_s < idle_s):
            most = _HANDFUL if count is None else min(_HANDFUL, count - self.count)
            wait_s = _LOOK_S if idle_s is None else min(_LOOK_S, idle_s - quiet_s)
            found = self._consumer.take(most, wait_s)
            quiet_s = 0.0 if found else quiet_s + wait_s
            if found:
                self._print(found)

    def _print(self, found: list[Message]) -> None:
        """What leaves this process is acked, and nothing else is."""
        for message in found:
            if self._as_json:
                messages.write_line(messages.of_message(message))
            else:
                terminal.write_payload(message.payload)
        terminal.flush()
        self.count += len(found)
        if self._is_acking:
            self._consumer.ack(found)
