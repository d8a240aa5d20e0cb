"""`fairway subject`: which broker groups carry a subject, and how it is treated, as meta servers have it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fairway.cli import meta_client, output
from fairway.cli.client import AsJson, Patience, Subject, Url, connected
from fairway.cli.settings import ConfigFile, resolve
from fairway.errors import Misuse
from fairway.world import terminal

if TYPE_CHECKING:
    from fairway.protocol.routing import SubjectRoute

app = typer.Typer(no_args_is_help=True)

Names = Annotated[list[str] | None, typer.Argument(metavar="[SUBJECT]...", help="Only these.", show_default=False)]
On = Annotated[
    list[str] | None, typer.Option("--on", metavar="GROUP", help="A broker group; again for others. Else by load.")
]
Number = Annotated[
    int, typer.Option("--groups", min=0, metavar="N", help="How many broker groups; 0: as the meta server's --spread.")
]
To = Annotated[
    list[str] | None, typer.Option("--to", metavar="GROUP", help="A broker group; again for others. Else by load.")
]
InAll = Annotated[
    int, typer.Option("--groups", min=0, metavar="N", help="How many broker groups in all; 0: one more than now.")
]
From = Annotated[list[str], typer.Option("--from", metavar="GROUP", help="A broker group; again for others.")]
Off = Annotated[bool, typer.Option("--off", help="Undo it.")]
Force = Annotated[bool, typer.Option("--force", help="Although nobody takes messages then.")]
Anyway = Annotated[bool, typer.Option("--force", help="Although messages are lost by it, or consumers are connected.")]
Ordered = Annotated[bool, typer.Option("--ordered", help="A key stays with one broker group.")]
ConsumerGroups = Annotated[
    list[str], typer.Argument(metavar="GROUP...", help="Consumer groups on it.", show_default=False)
]
Pairs = Annotated[
    list[str], typer.Argument(metavar="NAME=VALUE...", help="An empty value takes it away.", show_default=False)
]


@app.callback()
def _root() -> None:
    """Where a subject is in a cluster, and how it is treated: asked of a meta server, --url meta://HOST:PORT.

    `fairway subject remove` works with a broker alone, too.
    """


@app.command()
def show(
    subjects: Names = None,
    json: AsJson = False,
    url: Url = None,
    patience_s: Patience = None,
    config: ConfigFile = None,
) -> None:
    """Which broker groups hold the subjects, and which take their new messages."""
    with output.failures("subject show"):
        options = resolve(config, url=url, patience_s=patience_s).options
        found = meta_client.everything(options, subjects or ()).subjects
        if json:
            output.write_json({"subjects": [output.named(each) for each in found]})
            return
        table = output.table("subjects", "subject", "on", "new messages to", "")
        rows = [(each.name, " ".join(each.groups), " ".join(each.writable), _remarks(each)) for each in found]
        output.show_rows(table, rows, "no subjects yet: nothing was sent, and none was created")


def _remarks(route: SubjectRoute) -> str:
    remarks = [] if route.writable else [route.why]
    if route.is_ordered:
        remarks.append("ordered by key")
    if route.paused:
        remarks.append(f"paused: {', '.join(route.paused)}")
    remarks += [f"{name}={value}" for name, value in sorted(route.options.items())]
    return "; ".join(remarks)


@app.command()
def create(
    subject: Subject,
    on: On = None,
    groups: Number = 0,
    ordered: Ordered = False,
    json: AsJson = False,
    url: Url = None,
    patience_s: Patience = None,
    config: ConfigFile = None,
) -> None:
    """Make a subject before its first message."""
    from fairway.protocol.routing import RouteChange

    meta_client.decide(
        "subject create", config, url, patience_s, RouteChange.CREATE, subject,
        groups=on or (), number=groups, settings={"ordered": "true"} if ordered else None, as_json=json,
    )  # fmt: skip


@app.command()
def extend(
    subject: Subject,
    to: To = None,
    groups: InAll = 0,
    json: AsJson = False,
    url: Url = None,
    patience_s: Patience = None,
    config: ConfigFile = None,
) -> None:
    """Give a subject more broker groups: producers use them at once, and consumers take from all."""
    from fairway.protocol.routing import RouteChange

    with output.failures("subject extend"):
        if not to and not groups:
            options = resolve(config, url=url, patience_s=patience_s).options
            [route] = meta_client.everything(options, [subject]).subjects
            groups = len(route.writable) + 1
    meta_client.decide(
        "subject extend",
        config,
        url,
        patience_s,
        RouteChange.EXTEND,
        subject,
        groups=to or (),
        number=groups,
        as_json=json,
    )


@app.command()
def retreat(
    subject: Subject,
    source: From,
    force: Force = False,
    json: AsJson = False,
    url: Url = None,
    patience_s: Patience = None,
    config: ConfigFile = None,
) -> None:
    """Send no new messages of a subject to a broker group. What it holds is still consumed there."""
    from fairway.protocol.routing import RouteChange

    meta_client.decide(
        "subject retreat", config, url, patience_s, RouteChange.RETREAT, subject, groups=source, is_forced=force,
        as_json=json,
    )  # fmt: skip


@app.command("read-only")
def read_only(
    subject: Subject,
    off: Off = False,
    json: AsJson = False,
    url: Url = None,
    patience_s: Patience = None,
    config: ConfigFile = None,
) -> None:
    """Take no messages of a subject, on any broker group, until it is undone."""
    from fairway.protocol.routing import RouteChange

    meta_client.decide(
        "subject read-only", config, url, patience_s, RouteChange.READ_ONLY, subject, is_on=not off, as_json=json
    )


@app.command()
def pause(
    subject: Subject,
    groups: ConsumerGroups,
    off: Off = False,
    json: AsJson = False,
    url: Url = None,
    patience_s: Patience = None,
    config: ConfigFile = None,
) -> None:
    """Switch consumer groups off on a subject, on all broker groups at once, until it is undone."""
    from fairway.protocol.routing import RouteChange

    meta_client.decide(
        "subject pause", config, url, patience_s, RouteChange.PAUSE, subject, groups=groups, is_on=not off, as_json=json
    )


@app.command("set")
def set_options(
    subject: Subject,
    pairs: Pairs,
    json: AsJson = False,
    url: Url = None,
    patience_s: Patience = None,
    config: ConfigFile = None,
) -> None:
    """Set options of a subject, such as ordered=true; clients are told of them with its route."""
    from fairway.protocol.routing import RouteChange

    with output.failures("subject set"):
        settings = dict(_pair(raw) for raw in pairs)
    meta_client.decide(
        "subject set", config, url, patience_s, RouteChange.OPTIONS, subject, settings=settings, as_json=json
    )


@app.command()
def remove(
    subject: Subject,
    force: Anyway = False,
    json: AsJson = False,
    url: Url = None,
    patience_s: Patience = None,
    config: ConfigFile = None,
) -> None:
    """Remove a subject with its groups, their inboxes and dead letters, on all brokers. A broker alone does it, too."""
    with connected("subject remove", config, url, patience_s) as client:
        removed = client.remove_subject(subject, force=force)
        if json:
            output.write_json({"subject": subject, **output.named(removed)})
        elif removed.existed:
            terminal.say(f"subject {subject} is removed{output.lost(removed.groups, removed.messages, removed.dead)}")
        else:
            terminal.say(f"there is no subject {subject}: nothing was removed")


def _pair(raw: str) -> tuple[str, str]:
    name, equals, value = raw.partition("=")
    if not name or not equals:
        raise Misuse(f"{raw!r} is no option: write NAME=VALUE, such as ordered=true")
    return name, value
