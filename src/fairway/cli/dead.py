"""`fairway dead list|show|redrive`: messages that a group has given up, why, and back to it with them.

Dead letters of a group are a subject of the broker's own; what was redriven from it lies in the group's inbox, copied
under the sequence that it has among the dead letters. So both together tell which letters are still dead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from fairway.cli import messages, output
from fairway.cli.client import AsJson, Group, Patience, Subject, Url, connected
from fairway.cli.messages import ShownMessage
from fairway.cli.settings import ConfigFile
from fairway.errors import Code, Misuse, Refused
from fairway.world import terminal

if TYPE_CHECKING:
    from fairway import Client
    from fairway.groups.attempts import AttemptHistory
    from fairway.protocol.page import LazyBatch

app = typer.Typer(no_args_is_help=True)

_PAYLOAD_CHARS = 40  # of a payload in a table

Limit = Annotated[int, typer.Option("--limit", min=1, metavar="N", help="Show at most so many.")]
WithRedriven = Annotated[bool, typer.Option("--all", help="Those that were redriven, too.")]
Id = Annotated[str, typer.Argument(metavar="ID", help="Its id, as `dead list` shows it.", show_default=False)]
Ids = Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Which ones.", show_default=False)]
Everything = Annotated[bool, typer.Option("--all", help="All that are there now.")]
Rate = Annotated[int, typer.Option("--rate", min=0, metavar="N", help="At most so many a second; 0: no bound.")]


class _Letter(ShownMessage, frozen=True, omit_defaults=True):
    """What `--json` prints for a dead letter."""

    history: AttemptHistory | None = None  # None: it died before histories were kept, or has no room for one


@app.callback()
def _root() -> None:
    """Messages that a group has given up: look at them, and hand them to it again."""


@app.command("list")
def list_letters(
    subject: Subject,
    group: Group,
    limit: Limit = 100,
    with_redriven: WithRedriven = False,
    json: AsJson = False,
    url: Url = None,
    patience_s: Patience = None,
    config: ConfigFile = None,
) -> None:
    """Dead letters, oldest first: how often each was tried, and the last reason."""
    from fairway.broker.dead_letter import HISTORY_ATTEMPTS, HISTORY_REASON, HISTORY_TIME

    with connected("dead list", config, url, patience_s) as client:
        letters = _letters(client, subject, group, with_redriven=with_redriven)
        found = [each for _, each in zip(range(limit), letters, strict=False)]
        has_more = len(found) == limit and next(letters, None) is not None
    if json:
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
            _short(each),
        )
        for each in found
    ]
    output.show_rows(table, rows, f"no dead letters of {group} on {subject}", rows_max=limit)
    if has_more:
        terminal.say(f"there are more: --limit {10 * limit}")


@app.command("show")
def show_letter(
    subject: Subject,
    group: Group,
    id: Id,
    json: AsJson = False,
    url: Url = None,
    patience_s: Patience = None,
    config: ConfigFile = None,
) -> None:
    """One dead letter whole: headers, failed attempts, and the payload. The latest, if it died more than once."""
    from fairway.broker.dead_letter import HISTORY

    with connected("dead show", config, url, patience_s) as client:
        found = None
        for each in _letters(client, subject, group, with_redriven=True):
            found = each if each.id == id.upper() else found
        if found is None:
            raise Refused(Code.BAD_REQUEST, f"there is no dead letter {id} of {group} on {subject}")
    if json:
        output.write_json(found)
        return
    out = terminal.console()
    table = output.table(f"dead letter {found.id}", "", "")
    lines = [("key", found.key or ""), ("tags", " ".join(found.tags)), ("created", found.created_at.isoformat())]
    headers = [each for each in found.headers.items() if found.history is None or each[0] != HISTORY]
    output.fill(table, [*lines, *headers])
    out.print(table)
    if found.history is not None:
        _show_attempts(found.history)
    payload = found.payload if found.payload is not None else f"(base 64) {found.payload_base64}"
    terminal.write_text(f"{payload}\n")


@app.command("redrive")
def redrive_letters(
    subject: Subject,
    group: Group,
    ids: Ids = None,
    everything: Everything = False,
    rate: Rate = 0,
    json: AsJson = False,
    url: Url = None,
    patience_s: Patience = None,
    config: ConfigFile = None,
) -> None:
    """Hand dead letters to their group again; no other group sees them. Exit status 1 if an id is not among them."""
    with connected("dead redrive", config, url, patience_s) as client:
        if bool(ids) == everything:
            raise Misuse("name the ids, or say --all")
        redriven = client.redrive(subject, group, ids or None, rate_per_s=rate)
    if json:
        output.write_json(output.named(redriven))
    else:
        terminal.say(f"{output.count(redriven.count, 'message')} handed to {group} on {subject} again")
        for unknown in redriven.unknown:
            terminal.say(f"fairway dead redrive: {unknown} is not among the dead letters", err=True)
    if redriven.unknown:
        raise typer.Exit(output.Exit.FAILED)


def _show_attempts(history: AttemptHistory) -> None:
    rows = [(str(each.attempt), output.moment(each.time_ms), each.consumer, each.reason) for each in history.attempts]
    table = output.table("failed attempts", "attempt>", "time (UTC)", "consumer", "reason")
    output.show_rows(table, rows, "its failed attempts were not kept")
    if history.left_out:
        terminal.say(f"left out: {output.count(history.left_out, 'attempt')}")


# --- reading ----------------------------------------------------------------------------------------------------------


def _letters(client: Client, subject: str, group: str, *, with_redriven: bool) -> Iterator[_Letter]:
    from fairway import names
    from fairway.broker.copies import stream_of
    from fairway.broker.dead_letter import HISTORY
    from fairway.groups.attempts import decode

    who, where = names.GroupName.parse(group), names.Subject.parse_any(subject)
    dead = names.Subject.dead_letters(who, where)
    gone: set[int] = set()
    if not with_redriven:
        stream = stream_of(dead, who)
        for page in _scan(client, names.Subject.inbox(who, where)):
            if page.header.producer_id == stream:
                first = page.header.first_sequence
                gone.update(range(first, first + len(page)))
    for page in _scan(client, dead):
        for sequence in range(page.first_sequence, page.end_sequence):
            if sequence not in gone:
                shown = messages.of_page(str(dead), page, sequence)
                yield _Letter(**msgspec.structs.asdict(shown), history=decode(shown.headers.get(HISTORY, "")))


def _scan(client: Client, subject: str) -> Iterator[LazyBatch]:
    """All that is stored; a subject of the broker's own that was never needed has nothing."""
    try:
        yield from client.scan(subject)
    except Refused as refused:
        if refused.code is not Code.NO_SUCH_SUBJECT:
            raise


def _number(text: str | None) -> int:
    """Of milliseconds; more digits than these are a time that no calendar shows, and not the broker's."""
    return int(text) if text is not None and len(text) <= 14 and text.isascii() and text.isdigit() else 0


def _short(shown: ShownMessage) -> str:
    text = shown.payload if shown.payload is not None else f"(base 64) {shown.payload_base64}"
    return text if len(text) <= _PAYLOAD_CHARS else f"{text[:_PAYLOAD_CHARS]}…"
