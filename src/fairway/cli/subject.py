"""`fairway subjects`, `groups` and `lag` ask a broker what it holds, and which groups are behind.

`fairway subject` asks a meta server which broker groups carry a subject, and changes that.
"""

from __future__ import annotations

from typing import Annotated

import typer

from fairway.cli import connections, output
from fairway.cli.arguments import OnlySubject, Subject
from fairway.cli.connections import CommonOptions, common_options, describe, groups_of
from fairway.errors import Misuse
from fairway.groups.config import as_document, decode
from fairway.protocol.admin_messages import Depth, GroupDescription, SubjectDescription
from fairway.protocol.route_messages import RouteChange, SubjectRoute
from fairway.runtime.clock import RealClock

MaybeGroup = Annotated[str | None, typer.Option("--group", "-g", metavar="GROUP", help="Only this group.")]
All = Annotated[bool, typer.Option("--all", help="Also the broker's own subjects, such as dead letters.")]
Above = Annotated[
    int | None, typer.Option("--above", min=0, metavar="N", help="Exit status 4 if the lag of a group is above N.")
]
Older = Annotated[
    float | None,
    typer.Option("--older-s", min=0, metavar="SECONDS", help="Exit status 4 if a group's oldest message is older."),
]


@common_options
def subjects(all_of_them: All = False, *, common: CommonOptions) -> None:
    """List subjects, and how many messages each holds."""
    with common.connected("subjects") as client:
        _, found = describe(client, Depth.SUBJECTS)
        found = [each for each in found if all_of_them or ":" not in each.name]
        if common.json:
            documents = [output.named(each) for each in found]
            for document in documents:
                del document["groups"]
            output.write_json({"subjects": documents})
            return
        table = output.table("subjects", "subject", "messages>", "first>", "next>", "groups>", "")
        rows = [
            (
                each.name,
                f"{each.committed_end - each.first_sequence:,}",
                f"{each.first_sequence:,}",
                f"{each.committed_end:,}",
                f"{each.groups_count:,}",
                "read-only" if each.is_read_only else "",
            )
            for each in found
        ]
        output.show_rows(table, rows, "no subjects yet: nothing was sent")


@common_options
def groups(subject: OnlySubject = None, group: MaybeGroup = None, *, common: CommonOptions) -> None:
    """List consumer groups: lag, in-flight and waiting messages. With --json also their consumers."""
    with common.connected("groups") as client:
        found = groups_of(client, subject, group, Depth.CONSUMERS)
        if common.json:
            documents = [{"subject": on.name, **output.named(each)} for on, each in found]
            for document, (_, each) in zip(documents, found, strict=True):
                document["config"] = None if each.config is None else as_document(decode(each.config))
            output.write_json({"groups": documents})
            return
        columns = ("consumers>", "lag>", "in flight>", "waiting>", "dead>", "lost>", "weight>", "")
        table = output.table("groups", "subject", "group", *columns)
        rows = [
            (
                on.name,
                each.name,
                f"{each.consumers_count:,}",
                f"{each.lag:,}",
                f"{each.in_flight:,}",
                f"{_waiting(each):,}",
                f"{each.dead:,}",
                f"{each.lost:,}",
                f"{each.weight:g}",
                _group_remarks(each),
            )
            for on, each in found
        ]
        output.show_rows(table, rows, "no groups yet: nobody has consumed")


def _waiting(group: GroupDescription) -> int:
    """Messages that are neither in flight nor new: returned, retrying, dying, parked, or in the inbox."""
    return group.returned + group.retrying + group.dying + group.inbox + group.parked


def _group_remarks(group: GroupDescription) -> str:
    """What is special about the group, and why it waits."""
    remarks = ["paused"] if group.is_paused else []
    if group.order != "none":
        remarks.append("by key" if group.order == "key" else group.order)
    if group.coalesce != "none":
        remarks.append(f"{group.declined:,} declined")
    if group.rate_per_s:
        remarks.append(f"{group.rate_per_s:g}/s")
    if group.rate_per_key:
        remarks.append(f"{group.rate_per_key:g}/s a key")
    if group.is_full:
        remarks.append("waits: parked_max is reached")
    if group.halted:
        remarks.append(f"{output.count(group.halted, 'key')} halted")
    if group.lost:
        remarks.append(f"{group.lost:,} lost")
    return ", ".join(remarks)


@common_options
def lag(
    subject: OnlySubject = None,
    group: MaybeGroup = None,
    above: Above = None,
    older_s: Older = None,
    *,
    common: CommonOptions,
) -> None:
    """Show the lag of consumer groups: undelivered messages, and the age of the oldest unfinished one.

    For monitoring: with --above or --older-s the exit status is 4 if a group is
    beyond the limit, otherwise 0.
    """
    with common.connected("lag") as client:
        now_ms = RealClock().wall_ms()
        found = groups_of(client, subject, group)
    behind = [
        (on, each, None if each.oldest_ms is None else max(now_ms - each.oldest_ms, 0) / 1_000) for on, each in found
    ]
    if common.json:
        output.write_json({"groups": [_lag_document(*each) for each in behind]})
    else:
        table = output.table("lag", "subject", "group", "lag>", "in flight>", "waiting>", "oldest>", "consumers>", "")
        rows = [
            (
                on.name,
                each.name,
                f"{each.lag:,}",
                f"{each.in_flight:,}",
                f"{_waiting(each):,}",
                "" if oldest_s is None else output.age(oldest_s),
                f"{each.consumers_count:,}",
                _group_remarks(each),
            )
            for on, each, oldest_s in behind
        ]
        output.show_rows(table, rows, "no groups yet: nobody has consumed")
    is_far = above is not None and any(each.lag > above for _, each, _ in behind)
    is_old = older_s is not None and any(oldest_s is not None and oldest_s > older_s for *_, oldest_s in behind)
    if is_far or is_old:
        raise typer.Exit(output.Exit.DAMAGE)


def _lag_document(subject: SubjectDescription, group: GroupDescription, oldest_s: float | None) -> dict[str, object]:
    return {
        "subject": subject.name,
        "group": group.name,
        "lag": group.lag,
        "in_flight": group.in_flight,
        "waiting": _waiting(group),
        "oldest_s": oldest_s,
        "consumers": group.consumers_count,
        "is_paused": group.is_paused,
        "parked": group.parked,
        "is_full": group.is_full,
        "lost": group.lost,
    }


app = typer.Typer(no_args_is_help=True)

Names = Annotated[list[str] | None, typer.Argument(metavar="SUBJECT", help="Only these subjects.", show_default=False)]
On = Annotated[
    list[str] | None,
    typer.Option("--on", metavar="GROUP", help="A broker group; may be repeated. Unset: the least loaded."),
]
Number = Annotated[
    int, typer.Option("--groups", min=0, metavar="N", help="Number of broker groups; 0: the meta server's --spread.")
]
To = Annotated[
    list[str] | None,
    typer.Option("--to", metavar="GROUP", help="A broker group; may be repeated. Unset: the least loaded."),
]
InAll = Annotated[
    int, typer.Option("--groups", min=0, metavar="N", help="Number of broker groups in all; 0: one more than now.")
]
From = Annotated[list[str], typer.Option("--from", metavar="GROUP", help="A broker group; may be repeated.")]
Off = Annotated[bool, typer.Option("--off", help="Undo.")]
Force = Annotated[bool, typer.Option("--force", help="Retreat even if no broker group takes messages then.")]
Anyway = Annotated[bool, typer.Option("--force", help="Remove even if messages are lost or consumers are connected.")]
Ordered = Annotated[bool, typer.Option("--ordered", help="Each key stays on one broker group.")]
ConsumerGroups = Annotated[
    list[str], typer.Argument(metavar="GROUP", help="Consumer groups on the subject.", show_default=False)
]
Pairs = Annotated[
    list[str], typer.Argument(metavar="NAME=VALUE", help="Options; an empty value removes one.", show_default=False)
]


@app.callback()
def _root() -> None:
    """Place and configure subjects of a cluster. Needs a meta server: --url meta://HOST:PORT.

    `fairway subject remove` also works with a single broker.
    """


@app.command()
@common_options
def show(subjects: Names = None, *, common: CommonOptions) -> None:
    """Show which broker groups hold each subject, and which take its new messages."""
    with output.failures("subject show"):
        options = common.resolve()
        found = connections.everything(options, subjects or ()).subjects
        if common.json:
            output.write_json({"subjects": [output.named(each) for each in found]})
            return
        table = output.table("subjects", "subject", "on", "new messages to", "")
        rows = [(each.name, " ".join(each.groups), " ".join(each.writable), _route_remarks(each)) for each in found]
        output.show_rows(table, rows, "no subjects yet: nothing was sent, and none was created")


def _route_remarks(route: SubjectRoute) -> str:
    remarks = [] if route.writable else [route.why]
    if route.is_ordered:
        remarks.append("ordered by key")
    if route.paused:
        remarks.append(f"paused: {', '.join(route.paused)}")
    remarks += [f"{name}={value}" for name, value in sorted(route.options.items())]
    return "; ".join(remarks)


@app.command()
@common_options
def create(
    subject: Subject, on: On = None, groups: Number = 0, ordered: Ordered = False, *, common: CommonOptions
) -> None:
    """Create a subject before its first message."""
    settings = {"ordered": "true"} if ordered else None
    common.decide("subject create", RouteChange.CREATE, subject, groups=on or (), number=groups, settings=settings)


@app.command()
@common_options
def extend(subject: Subject, to: To = None, groups: InAll = 0, *, common: CommonOptions) -> None:
    """Spread a subject over more broker groups: producers use them at once."""
    with output.failures("subject extend"):
        if not to and not groups:
            options = common.resolve()
            [route] = connections.everything(options, [subject]).subjects
            groups = len(route.writable) + 1
    common.decide("subject extend", RouteChange.EXTEND, subject, groups=to or (), number=groups)


@app.command()
@common_options
def retreat(subject: Subject, source: From, force: Force = False, *, common: CommonOptions) -> None:
    """Send no new messages of a subject to a broker group. Consumers still get those that it holds."""
    common.decide("subject retreat", RouteChange.RETREAT, subject, groups=source, is_forced=force)


@app.command("read-only")
@common_options
def read_only(subject: Subject, off: Off = False, *, common: CommonOptions) -> None:
    """Refuse new messages of a subject on all broker groups, until --off."""
    common.decide("subject read-only", RouteChange.READ_ONLY, subject, is_on=not off)


@app.command()
@common_options
def pause(subject: Subject, groups: ConsumerGroups, off: Off = False, *, common: CommonOptions) -> None:
    """Pause consumer groups of a subject on all broker groups, until --off."""
    common.decide("subject pause", RouteChange.PAUSE, subject, groups=groups, is_on=not off)


@app.command("set")
@common_options
def set_options(subject: Subject, pairs: Pairs, *, common: CommonOptions) -> None:
    """Set options of a subject, such as ordered=true. Clients get them with its route."""
    with output.failures("subject set"):
        settings = {}
        for raw in pairs:
            name, equals, value = raw.partition("=")
            if not name or not equals:
                raise Misuse(f"{raw!r} is not NAME=VALUE: write an option such as ordered=true")
            settings[name] = value
    common.decide("subject set", RouteChange.OPTIONS, subject, settings=settings)


@app.command()
@common_options
def remove(subject: Subject, force: Anyway = False, *, common: CommonOptions) -> None:
    """Remove a subject with its groups, their inboxes and dead letters, on all brokers."""
    with common.connected("subject remove") as client:
        removed = client.remove_subject(subject, force=force)
        said = f"there is no subject {subject}: nothing was removed"
        if removed.existed:
            said = f"subject {subject} is removed{output.lost(removed.groups, removed.messages, removed.dead)}"
        common.say({"subject": subject, **output.named(removed)}, said)
