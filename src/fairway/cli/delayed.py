"""`fairway delay list|count|histogram|cancel|reschedule|retry`: what waits for its time, another mind about it, and the
way out where a broker group is gone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairway.cli import meta_client, output, times
from fairway.cli.client import AsJson, Patience, Url, connected
from fairway.cli.settings import ConfigFile, resolve
from fairway.client.url import META_SCHEME
from fairway.errors import FairwayError, Misuse
from fairway.world import terminal
from fairway.world.clock import RealClock

if TYPE_CHECKING:
    from fairway import DelayedMessage, DelayedOutcome
    from fairway.client.delaying import Between

_BAR_CHARS = 40  # of the longest
_ROWS_MAX = 60  # of a histogram for people

OfSubject = Annotated[str | None, typer.Option("--subject", "-s", metavar="SUBJECT", help="Only this subject.")]
KeyPrefix = Annotated[str | None, typer.Option("--key-prefix", metavar="TEXT", help="Only keys that begin so.")]
From = Annotated[
    str | None, typer.Option("--from", metavar="WHEN", help=f"Due then or later: a time, or {times.SPAN_HELP} ahead.")
]
To = Annotated[str | None, typer.Option("--to", metavar="WHEN", help="Due before then.")]
Limit = Annotated[int, typer.Option("--limit", min=1, metavar="N", help="Show at most so many.")]
Width = Annotated[str, typer.Option("--width", "-w", metavar="SPAN", help=f"Of one row: {times.SPAN_HELP}.")]
Ids = Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Which ones, by id; or --subject and --key.")]
InSubject = Annotated[str | None, typer.Option("--subject", "-s", metavar="SUBJECT", help="Their subject.")]
Key = Annotated[str | None, typer.Option("--key", "-k", metavar="KEY", help="All that are pending of this key.")]
After = Annotated[str | None, typer.Option("--after", metavar="SPAN", help=f"So long from now: {times.SPAN_HELP}.")]
At = Annotated[str | None, typer.Option("--at", metavar="TIME", help="Then: 2027-01-01T00:00:00Z.")]
GoneGroup = Annotated[str, typer.Option("--group", metavar="GROUP", help="The broker group that is gone.")]
MayRepeat = Annotated[bool, typer.Option("--may-repeat", help="Although some of them may be delivered twice.")]


def list_delayed(
    subject: OfSubject = None,
    key_prefix: KeyPrefix = None,
    start: From = None,
    end: To = None,
    limit: Limit = 100,
    json: AsJson = False,
    url: Url = None,
    patience_s: Patience = None,
    config: ConfigFile = None,
) -> None:
    """Messages that wait for their time, the next one first."""
    with connected("delay list", config, url, patience_s) as client:
        found = client.delayed.list(subject, key_prefix, _between(start, end))
        shown = list(islice(found, limit))
        has_more = len(shown) == limit and next(found, None) is not None
    if json:
        output.write_json({"messages": shown, "has_more": has_more})
        return
    now_ms = RealClock().wall_ms()
    table = output.table("delayed messages", "due (UTC)", "in>", "subject", "id", "key", "size>")
    output.show_rows(table, [_row(each, now_ms) for each in shown], "nothing waits for its time", rows_max=limit)
    if has_more:
        terminal.say(f"there are more: --limit {10 * limit}")


def _row(message: DelayedMessage, now_ms: int) -> tuple[str, ...]:
    due_ms = round(message.due_at.timestamp() * 1_000)
    wait = output.age((due_ms - now_ms) / 1_000) if due_ms > now_ms else "due"
    return (
        output.moment(due_ms),
        wait,
        message.subject,
        message.id,
        message.key or "",
        output.size(message.size_bytes),
    )


def count_delayed(
    subject: OfSubject = None,
    key_prefix: KeyPrefix = None,
    start: From = None,
    end: To = None,
    json: AsJson = False,
    url: Url = None,
    patience_s: Patience = None,
    config: ConfigFile = None,
) -> None:
    """How many wait for their time; and how many are due, on their way to a broker group."""
    with connected("delay count", config, url, patience_s) as client:
        count = client.delayed.count(subject, key_prefix, _between(start, end))
        in_transit = client.delayed.in_transit()
    if json:
        output.write_json({"count": count, "in_transit": in_transit})
        return
    terminal.say(f"{output.count(count, 'message')} pending")
    for each in in_transit:
        where = f"broker group {each.group}" + ("" if each.is_reachable else ", which cannot be reached")
        terminal.say(f"{output.count(each.messages, 'message')} of all subjects on the way to {where}")


def retry_delayed(
    group: GoneGroup,
    may_repeat: MayRepeat = False,
    json: AsJson = False,
    url: Url = None,
    patience_s: Patience = None,
    config: ConfigFile = None,
) -> None:
    """Send to other broker groups what is on its way to one that is gone for good.

    Only that group could say what it has stored, so it must be gone: start it again if you can. Exit status 1 if some
    of the messages cannot be sent to another group now: they wait, and nothing is lost.
    """
    with connected("delay retry", config, url, patience_s) as client:
        waiting = sum(each.messages for each in client.delayed.in_transit() if each.group == group)
        if waiting and not may_repeat:
            raise Misuse(
                f"{output.count(waiting, 'message')} may be stored in broker group {group} already: sent again, they "
                "may be delivered twice. Say --may-repeat if they may"
            )
        if waiting:
            _check_gone(group, config, url, patience_s)
        done = client.delayed.resend(group) if waiting else None
    messages, left = (0, 0) if done is None else (done.messages, done.left)
    if json:
        output.write_json({"messages": messages, "left": left})
    elif not waiting:
        terminal.say(f"nothing waits for broker group {group}")
    else:
        terminal.say(f"{output.count(messages, 'message')} sent to other broker groups")
    if left:
        terminal.say(
            f"fairway delay retry: {output.count(left, 'message')} left: no other group takes them now, or {group} "
            "can be reached and is asked",
            err=True,
        )
        raise typer.Exit(output.Exit.FAILED)


def _check_gone(group: str, config: Path | None, url: str | None, patience_s: float | None) -> None:
    """While a broker group may come back, it is the one to say what it has."""
    options = resolve(config, url=url, patience_s=patience_s).options
    if not options.url.startswith(META_SCHEME):
        return
    found = meta_client.everything(options)
    if any(each.name == group for each in found.groups):
        raise FairwayError(
            f"the meta server knows broker group {group}, which can say what it has stored: start its servers; or, if "
            f"its disks are lost, give it up first with `fairway cluster decommission {group} --force`"
        )
    if found.is_old:
        raise FairwayError(f"the registry cannot be reached, so nobody knows whether group {group} is gone: try again")


def histogram_delayed(
    width: Width = "1d",
    subject: OfSubject = None,
    key_prefix: KeyPrefix = None,
    start: From = None,
    end: To = None,
    json: AsJson = False,
    url: Url = None,
    patience_s: Patience = None,
    config: ConfigFile = None,
) -> None:
    """When they are due: so many in each stretch of time. Stretches without any are left out."""
    with connected("delay histogram", config, url, patience_s) as client:
        stretch = times.span(width)
        found = client.delayed.histogram(stretch, subject, key_prefix, _between(start, end))
    if json:
        stretches = [{"start_at": at, "count": count} for at, count in found.items()]
        output.write_json({"width_s": stretch.total_seconds(), "stretches": stretches})
        return
    most = max(found.values(), default=1)
    table = output.table(f"due, by {width}", "from (UTC)", "messages>", "")
    rows = [
        (output.moment(round(at.timestamp() * 1_000)), f"{count:,}", "█" * max(round(_BAR_CHARS * count / most), 1))
        for at, count in islice(found.items(), _ROWS_MAX)
    ]
    output.show_rows(table, rows, "nothing waits for its time", rows_max=_ROWS_MAX)
    if len(found) > _ROWS_MAX:
        terminal.say(f"{len(found) - _ROWS_MAX:,} more behind these: a larger --width shows them, or --json")


def cancel_delayed(
    ids: Ids = None,
    subject: InSubject = None,
    key: Key = None,
    json: AsJson = False,
    url: Url = None,
    patience_s: Patience = None,
    config: ConfigFile = None,
) -> None:
    """Never send these. Exit status 1 if one of them cannot be cancelled: it was sent before, or nobody knows it."""
    with connected("delay cancel", config, url, patience_s) as client:
        decided = _each(ids, key, lambda one: client.delayed.cancel(one, subject=subject, key=key))
    _say("cancel", decided, subject, key, as_json=json)


def reschedule_delayed(
    ids: Ids = None,
    subject: InSubject = None,
    key: Key = None,
    after: After = None,
    at: At = None,
    json: AsJson = False,
    url: Url = None,
    patience_s: Patience = None,
    config: ConfigFile = None,
) -> None:
    """Send these at another time. Exit status 1 if one of them was sent or cancelled before, or nobody knows it."""
    with connected("delay reschedule", config, url, patience_s) as client:
        wait = None if after is None else times.span(after)
        due = None if at is None else times.due(at)
        decided = _each(
            ids, key, lambda one: client.delayed.reschedule(one, subject=subject, key=key, after=wait, at=due)
        )
    _say("reschedule", decided, subject, key, as_json=json)


# --- words ------------------------------------------------------------------------------------------------------------

_DONE = {"cancel": "cancelled", "reschedule": "rescheduled"}
_WHY_NOT = {
    "already_dispatched": "was sent before",
    "unknown": "is not known here: never scheduled, or sent long ago",
    "cancelled": "was cancelled before",
}


def _between(start: str | None, end: str | None) -> Between:
    found: tuple[datetime | None, datetime | None] = (
        None if start is None else times.ahead(start),
        None if end is None else times.ahead(end),
    )
    return found


def _each(
    ids: Sequence[str] | None, key: str | None, decide: Callable[[str | None], DelayedOutcome]
) -> list[tuple[str | None, DelayedOutcome]]:
    if bool(ids) == (key is not None):
        raise Misuse("name the ids, or --subject and --key")
    meant: Sequence[str | None] = ids or [None]
    return [(one, decide(one)) for one in meant]


def _say(
    verb: str, decided: list[tuple[str | None, DelayedOutcome]], subject: str | None, key: str | None, *, as_json: bool
) -> None:
    """What became of each, and the exit status."""
    failed = [(one, each) for one, each in decided if each.fate != _DONE[verb]]
    if as_json:
        named = [{"id": one, "subject": subject, "key": key, **output.named(each)} for one, each in decided]
        output.write_json({"decisions": named})
    else:
        changed = sum(each.messages for _, each in decided)
        if changed or not failed:
            before = "" if changed else ": that was done before"
            terminal.say(f"{output.count(changed, 'message')} {_DONE[verb]}{before}")
        for one, each in failed:
            what = one if one is not None else f"what has the key {key} in {subject}"
            terminal.say(f"fairway delay {verb}: {what} {_WHY_NOT[each.fate]}", err=True)
    if failed:
        raise typer.Exit(output.Exit.FAILED)
