"""`fairway seek`, `weight`, `pause`, `resume`, `configure` and `group remove`: administer a consumer group.

The broker answers when the change is durable.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any

import msgspec
import typer

from fairway import Client
from fairway.cli import arguments, output
from fairway.cli.arguments import Group, Subject
from fairway.cli.connections import CommonOptions, common_options, describe
from fairway.errors import Code, Misuse, Refused
from fairway.groups import GroupConfig
from fairway.groups.config import as_document, decode
from fairway.protocol.admin_messages import Depth

Changes = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAME=VALUE", help="Settings to change, such as order=key.", show_default=False),
]

_NOT_BY_HAND = frozenset({"version", "is_broadcast", "backoff", "tags"})


@common_options
def configure(subject: Subject, group: Group, changes: Changes = None, *, common: CommonOptions) -> None:
    """Show or change the configuration of a group; its members join again by themselves.

    A group that does not exist is created, if there is a NAME=VALUE. The
    settings are described in docs/how-to/order-by-key.md and
    docs/reference/clients.md.
    """
    with common.connected("configure") as client:
        before = _find(client, subject, group)
        after = before
        if changes:
            after = _changed(before, changes)
            client.configure(subject, group, after, expected_version=after.version - 1)
        elif before is None:
            raise Refused(Code.NO_SUCH_GROUP, f"there is no group {group} on {subject}: give a NAME=VALUE to create it")
        if after is None:
            return
        document = as_document(after)
        if common.json:
            output.write_json({"subject": subject, "group": group, **document})
            return
        known = {} if before is None else as_document(before)
        changed = {name for name, value in document.items() if known.get(name, value) != value} - {"version"}
        rows = [
            (name, _shown(value), f"was {_shown(known[name])}" if name in changed else "")
            for name, value in document.items()
        ]
        output.show_rows(output.table("configuration", "setting", "value", ""), rows, "")


def _find(client: Client, subject: str, group: str) -> GroupConfig | None:
    """The current configuration; None if the group or the subject does not exist."""
    try:
        _, subjects = describe(client, Depth.CONSUMERS, subject, group)
    except Refused as refused:
        if refused.code is not Code.NO_SUCH_SUBJECT:
            raise
        return None
    for each in (one for of in subjects for one in of.groups):
        if each.config is None:
            raise Refused(Code.UNSUPPORTED, "this broker is too old to report the configuration of groups: upgrade it")
        return decode(each.config)
    return None


def _changed(before: GroupConfig | None, changes: list[str]) -> GroupConfig:
    document: dict[str, Any] = msgspec.to_builtins(before if before is not None else GroupConfig(version=0))
    names = sorted(document.keys() - _NOT_BY_HAND)
    for change in changes:
        name, is_given, value = change.partition("=")
        if not is_given or name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]}=...?" if near else f"the settings are {', '.join(names)}"
            raise Misuse(f"{change!r} is not a setting of groups as NAME=VALUE: {hint}")
        document[name] = None if value in ("", "none") and name.endswith("max_handling_ms") else value
    document["version"] += 1
    try:
        return msgspec.convert(document, GroupConfig, strict=False)
    except msgspec.ValidationError as error:
        raise Misuse(f"this configuration is not valid: {error}") from error


def _shown(value: object) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


ToPlace = Annotated[str, typer.Argument(metavar="POSITION", help=arguments.HELP, show_default=False)]
Weight = Annotated[float, typer.Argument(metavar="WEIGHT", help="Above 0; a new group has 1.", show_default=False)]
OneConsumer = Annotated[
    str | None, typer.Option("--consumer", metavar="NAME", help="Only this consumer; unset: the whole group.")
]
OneKey = Annotated[
    str | None, typer.Option("--key", metavar="KEY", help="Only this key, which halted behind a dead letter.")
]
Halted = Annotated[bool, typer.Option("--halted", help="All keys that halted behind a dead letter.")]


@common_options
def seek(subject: Subject, group: Group, to: ToPlace, *, common: CommonOptions) -> None:
    """Move a group to a position in its subject.

    Messages in flight are forgotten: acks of them have no effect any more.
    """
    with common.connected("seek") as client:
        sought = client.seek(subject, group, arguments.parse(to))
        forgotten = sought.held + sought.waiting + sought.dying
        common.say(
            output.named(sought),
            f"{group} on {subject}: next is {sought.sequence:,}, it was {sought.was:,}",
            f"forgotten, begun and not finished: {output.count(forgotten, 'message')}" if forgotten else "",
        )


@common_options
def weight(subject: Subject, group: Group, weight: Weight, *, common: CommonOptions) -> None:
    """Set a group's share of the broker's time. Under load, weight 2 gets twice as much as weight 1."""
    with common.connected("weight") as client:
        client.weight(subject, group, weight)
        document = {"subject": subject, "group": group, "weight": weight}
        common.say(document, f"{group} on {subject}: weight {weight:g}")


@common_options
def pause(subject: Subject, group: Group, consumer: OneConsumer = None, *, common: CommonOptions) -> None:
    """Pause delivery to a group, or to one consumer, until `fairway resume`.

    Consumers keep the messages that they have in flight.
    """
    with common.connected("pause") as client:
        was_on = client.pause(subject, group, consumer).was_on
        _say_switch(common, subject, group, consumer, was_on=was_on, is_on=True)


@common_options
def resume(
    subject: Subject,
    group: Group,
    consumer: OneConsumer = None,
    key: OneKey = None,
    halted: Halted = False,
    *,
    common: CommonOptions,
) -> None:
    """Resume delivery to a paused group or consumer, or delivery of halted keys."""
    with common.connected("resume") as client:
        if key is not None or halted:
            was_halted = client.go_on(subject, group, key).was_on
            what = "all keys" if key is None else f"key {key}"
            common.say(
                {"subject": subject, "group": group, "key": key, "was_halted": was_halted},
                f"{what} of {group} on {subject}: {'going on' if was_halted else 'nothing had halted'}",
            )
            return
        was_on = client.resume(subject, group, consumer).was_on
        _say_switch(common, subject, group, consumer, was_on=was_on, is_on=False)


def _say_switch(
    common: CommonOptions, subject: str, group: str, consumer: str | None, *, was_on: bool, is_on: bool
) -> None:
    who = group if consumer is None else f"{consumer} of {group}"
    state = "paused" if is_on else "running"
    document = {"subject": subject, "group": group, "consumer": consumer, "was_paused": was_on, "is_paused": is_on}
    common.say(document, f"{who} on {subject}: {state}{', as before' if was_on == is_on else ''}")


app = typer.Typer(no_args_is_help=True)

Anyway = Annotated[
    bool, typer.Option("--force", help="Remove even if it has messages to handle or connected consumers.")
]
DeadLetters = Annotated[bool, typer.Option("--dead-letters", help="Also remove its dead letters.")]


@app.callback()
def _root() -> None:
    """Remove consumer groups; `fairway groups` lists them."""


@app.command()
@common_options
def remove(
    subject: Subject, group: Group, dead_letters: DeadLetters = False, force: Anyway = False, *, common: CommonOptions
) -> None:
    """Remove a group from a subject. Dead letters stay. A consumer that joins later makes a new group."""
    with common.connected("group remove") as client:
        removed = client.remove_group(subject, group, force=force, dead_letters=dead_letters)
        said = f"there is no group {group} on {subject}: nothing was removed"
        if removed.existed:
            said = f"group {group} on {subject} is removed{output.lost(0, removed.messages, removed.dead)}"
        common.say({"subject": subject, "group": group, **output.named(removed)}, said)
