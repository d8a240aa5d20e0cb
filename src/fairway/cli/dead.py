"""`fairway dead list|show|redrive`: messages that a group has given up.

The dead letters of a group are a subject. The broker copies redriven letters to the inbox of the group, and the copy
carries the letter's sequence. The letters that have no copy in the inbox are still dead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec
import typer

from fairway import Client, names
from fairway.cli import consume, output
from fairway.cli.arguments import Group, Limit, Subject
from fairway.cli.connections import CommonOptions, common_options
from fairway.cli.consume import ShownMessage
from fairway.errors import Code, Misuse, Refused
from fairway.groups.attempts import AttemptHistory, decode
from fairway.protocol.delivery import LazyBatch
from fairway.runtime import terminal

app = typer.Typer(no_args_is_help=True)

_PAYLOAD_CHARS = 40  # of a payload in a table

WithRedriven = Annotated[bool, typer.Option("--all", help="Also those that were redriven.")]
Id = Annotated[str, typer.Argument(metavar="ID", help="Message ID, as `dead list` shows it.", show_default=False)]
Ids = Annotated[list[str] | None, typer.Argument(metavar="ID", help="IDs of dead letters.", show_default=False)]
Everything = Annotated[bool, typer.Option("--all", help="All dead letters that exist now.")]
Rate = Annotated[int, typer.Option("--rate", min=0, metavar="N", help="At most N a second; 0: no limit.")]


class _Letter(ShownMessage, frozen=True, omit_defaults=True):
    """What `--json` prints for a dead letter."""

    history: AttemptHistory | None = None  # None: the broker kept no histories then, or the message had no room for one


@app.callback()
def _root() -> None:
    """Dead letters: messages that a group has given up. List, show and redrive them."""


@app.command("list")
@common_options
def list_letters(
    subject: Subject, group: Group, limit: Limit = 100, with_redriven: WithRedriven = False, *, common: CommonOptions
) -> None:
    """List dead letters, oldest first, with their attempts and the last reason."""
    from fairway.broker.dead_letters import HISTORY_ATTEMPTS, HISTORY_REASON, HISTORY_TIME

    with common.connected("dead list") as client:
        letters = _letters(client, subject, group, with_redriven=with_redriven)
        found = [each for _, each in zip(range(limit), letters, strict=False)]
        has_more = len(found) == limit and next(letters, None) is not None
    if common.json:
        output.write_json({"letters": found, "has_more": has_more})
        return
    table = output.table("dead letters", "id", "died (UTC)", "attempts>", "reason", "key", "payload")
    rows = [
        (
            each.id,
            output.moment(_number(each.headers.get(HISTORY_TIME)) or round(each.appended_at.timestamp() * 1_000)),
            each.headers.get(HISTORY_ATTEMPTS, ""),
            each.headers.get(HISTORY_REASON, ""),
            each.key or "",
            text if len(text := _payload(each)) <= _PAYLOAD_CHARS else f"{text[:_PAYLOAD_CHARS]}…",
        )
        for each in found
    ]
    output.show_rows(table, rows, f"no dead letters of {group} on {subject}", rows_max=limit)
    if has_more:
        terminal.say(f"there are more: --limit {10 * limit}")


@app.command("show")
@common_options
def show_letter(subject: Subject, group: Group, id: Id, *, common: CommonOptions) -> None:
    """Show a dead letter: headers, failed attempts, payload. The latest, if it died more than once."""
    from fairway.broker.dead_letters import HISTORY

    with common.connected("dead show") as client:
        found = None
        for each in _letters(client, subject, group, with_redriven=True):
            found = each if each.id == id.upper() else found
        if found is None:
            raise Refused(
                Code.BAD_REQUEST,
                f"there is no dead letter {id} of {group} on {subject}: `fairway dead list` shows their IDs",
            )
    if common.json:
        output.write_json(found)
        return
    out = terminal.console()
    table = output.table(f"dead letter {found.id}", "", "")
    lines = [("key", found.key or ""), ("tags", " ".join(found.tags)), ("created", found.created_at.isoformat())]
    headers = [each for each in found.headers.items() if found.history is None or each[0] != HISTORY]
    output.fill(table, [*lines, *headers])
    out.print(table)
    if found.history is not None:
        attempts = found.history.attempts
        rows = [(str(each.attempt), output.moment(each.time_ms), each.consumer, each.reason) for each in attempts]
        table = output.table("failed attempts", "attempt>", "time (UTC)", "consumer", "reason")
        output.show_rows(table, rows, "its failed attempts were not kept")
        if found.history.left_out:
            terminal.say(f"left out: {output.count(found.history.left_out, 'attempt')}")
    terminal.write_text(f"{_payload(found)}\n")


@app.command("redrive")
@common_options
def redrive_letters(
    subject: Subject,
    group: Group,
    ids: Ids = None,
    everything: Everything = False,
    rate: Rate = 0,
    *,
    common: CommonOptions,
) -> None:
    """Deliver dead letters to their group again, and to no other. Exit status 1 if an ID is unknown."""
    with common.connected("dead redrive") as client:
        if bool(ids) == everything:
            raise Misuse("give the IDs of dead letters, or --all")
        redriven = client.redrive(subject, group, ids or None, rate_per_s=rate)
    if common.json:
        output.write_json(output.named(redriven))
    else:
        terminal.say(f"{output.count(redriven.count, 'message')} handed to {group} on {subject} again")
        for unknown in redriven.unknown:
            terminal.say(f"fairway dead redrive: there is no dead letter {unknown}", err=True)
    if redriven.unknown:
        raise typer.Exit(output.Exit.FAILED)


# --- reading ----------------------------------------------------------------------------------------------------------


def _letters(client: Client, subject: str, group: str, *, with_redriven: bool) -> Iterator[_Letter]:
    from fairway.broker.dead_letters import HISTORY
    from fairway.broker.message_copies import stream_of

    group_name, subject_name = names.GroupName.parse(group), names.Subject.parse_any(subject)
    dead = names.Subject.dead_letters(group_name, subject_name)
    gone: set[int] = set()
    if not with_redriven:
        stream = stream_of(dead, group_name)
        for page in _scan(client, names.Subject.inbox(group_name, subject_name)):
            if page.header.producer_id == stream:
                first = page.header.first_sequence
                gone.update(range(first, first + len(page)))
    for page in _scan(client, dead):
        for sequence in range(page.first_sequence, page.end_sequence):
            if sequence not in gone:
                shown = consume.of_page(str(dead), page, sequence)
                yield _Letter(**msgspec.structs.asdict(shown), history=decode(shown.headers.get(HISTORY, "")))


def _scan(client: Client, subject: str) -> Iterator[LazyBatch]:
    """All stored batches of a subject; none, if the broker never needed the subject."""
    try:
        yield from client.scan(subject)
    except Refused as refused:
        if refused.code is not Code.NO_SUCH_SUBJECT:
            raise


def _number(text: str | None) -> int:
    """A header in milliseconds, or 0. The broker writes no more digits, and no calendar shows such a time."""
    return int(text) if text is not None and len(text) <= 14 and text.isascii() and text.isdigit() else 0


def _payload(shown: ShownMessage) -> str:
    return shown.payload if shown.payload is not None else f"(base 64) {shown.payload_base64}"
