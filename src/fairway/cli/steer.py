"""`fairway seek`, `weight`, `pause` and `resume`: move and steer a group. Each answers when the change is durable."""

from __future__ import annotations

from typing import Annotated

import typer

from fairway.cli import output, place
from fairway.cli.client import AsJson, Group, Patience, Subject, Url, connected
from fairway.cli.settings import ConfigFile
from fairway.world import terminal

ToPlace = Annotated[str, typer.Argument(metavar="PLACE", help=place.HELP, show_default=False)]
Weight = Annotated[
    float, typer.Argument(metavar="WEIGHT", help="Above 0; 1 is what every group has.", show_default=False)
]
OneConsumer = Annotated[
    str | None, typer.Option("--consumer", metavar="NAME", help="Only this consumer; else the whole group.")
]
OneKey = Annotated[
    str | None, typer.Option("--key", metavar="KEY", help="Only this key, which had halted behind a dead letter.")
]
Halted = Annotated[bool, typer.Option("--halted", help="All keys that had halted behind a dead letter.")]


def seek(
    subject: Subject,
    group: Group,
    to: ToPlace,
    json: AsJson = False,
    url: Url = None,
    patience_s: Patience = None,
    config: ConfigFile = None,
) -> None:
    """Move a group to a place. What its consumers have in hand is forgotten: it is a clean start from there."""
    with connected("seek", config, url, patience_s) as client:
        sought = client.seek(subject, group, place.parse(to))
        if json:
            output.write_json(output.named(sought))
            return
        terminal.say(f"{group} on {subject}: next is {sought.sequence:,}, it was {sought.was:,}")
        forgotten = sought.held + sought.waiting + sought.dying
        if forgotten:
            terminal.say(f"forgotten, begun and not finished: {output.count(forgotten, 'message')}")


def weight(
    subject: Subject,
    group: Group,
    weight: Weight,
    json: AsJson = False,
    url: Url = None,
    patience_s: Patience = None,
    config: ConfigFile = None,
) -> None:
    """Set a group's share of the broker's time: one of weight 2 gets twice that of weight 1, while both want it."""
    with connected("weight", config, url, patience_s) as client:
        client.weight(subject, group, weight)
        if json:
            output.write_json({"subject": subject, "group": group, "weight": weight})
        else:
            terminal.say(f"{group} on {subject}: weight {weight:g}")


def pause(
    subject: Subject,
    group: Group,
    consumer: OneConsumer = None,
    json: AsJson = False,
    url: Url = None,
    patience_s: Patience = None,
    config: ConfigFile = None,
) -> None:
    """Hand nothing out to a group, or to one consumer of it, until `fairway resume`. What is in hand stays there."""
    with connected("pause", config, url, patience_s) as client:
        was_on = client.pause(subject, group, consumer).was_on
        _say_switch(subject, group, consumer, was_on=was_on, is_on=True, as_json=json)


def resume(
    subject: Subject,
    group: Group,
    consumer: OneConsumer = None,
    key: OneKey = None,
    halted: Halted = False,
    json: AsJson = False,
    url: Url = None,
    patience_s: Patience = None,
    config: ConfigFile = None,
) -> None:
    """Go on handing out to a group, or to one consumer of it, that was paused; or with keys that have halted."""
    with connected("resume", config, url, patience_s) as client:
        if key is not None or halted:
            was_on = client.go_on(subject, group, key).was_on
            _say_keys(subject, group, key, was_on=was_on, as_json=json)
            return
        was_on = client.resume(subject, group, consumer).was_on
        _say_switch(subject, group, consumer, was_on=was_on, is_on=False, as_json=json)


def _say_keys(subject: str, group: str, key: str | None, *, was_on: bool, as_json: bool) -> None:
    if as_json:
        output.write_json({"subject": subject, "group": group, "key": key, "was_halted": was_on})
        return
    what = "all keys" if key is None else f"key {key}"
    terminal.say(f"{what} of {group} on {subject}: {'going on' if was_on else 'nothing had halted'}")


def _say_switch(subject: str, group: str, consumer: str | None, *, was_on: bool, is_on: bool, as_json: bool) -> None:
    if as_json:
        document = {"subject": subject, "group": group, "consumer": consumer}
        output.write_json({**document, "was_paused": was_on, "is_paused": is_on})
        return
    who = group if consumer is None else f"{consumer} of {group}"
    state = "paused" if is_on else "running"
    terminal.say(f"{who} on {subject}: {state}{', as before' if was_on == is_on else ''}")
