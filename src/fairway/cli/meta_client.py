"""What the verbs that speak to a meta server share: one question, one answer, and everything there is, page by page."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fairway.cli import output
from fairway.cli.settings import resolve
from fairway.errors import Unreachable
from fairway.world import terminal

if TYPE_CHECKING:
    from fairway.cli.options import CliOptions
    from fairway.protocol.messages import ControlMessage
    from fairway.protocol.routing import RouteChange, Routed

    AnswerT = TypeVar("AnswerT", bound=ControlMessage)

_ANSWER_S = 30.0
_FIRST_S = 5.0  # for the first attempt to connect to succeed or fail


def ask(options: CliOptions, message: ControlMessage, kind: type[AnswerT]) -> AnswerT:
    """The answer of the meta server that the URL names; `Unreachable` says where nobody is."""
    return asyncio.run(ask_at(options.url, options.patience_s, message, kind))


async def ask_at(url: str, patience_s: float, message: ControlMessage, kind: type[AnswerT]) -> AnswerT:
    from fairway.lookup.asking import Inquirer
    from fairway.lookup.opening import parse_meta
    from fairway.world.clock import RealClock
    from fairway.world.net import RealNet
    from fairway.world.rng import RealRng

    addresses = parse_meta(url)
    inquirer = Inquirer(RealNet(), RealClock(), RealRng(), addresses, name="fairway")
    try:
        if not await inquirer.connected(patience_s, _FIRST_S):
            where = ",".join(f"{host}:{port}" for host, port in addresses)
            raise Unreachable(
                f"no meta server at {where}: {inquirer.line.trouble or 'no answer yet'}. Is it running there "
                f"(`fairway meta --registry sqlite:meta --port {addresses[0][1]}`)? Name others with --url meta://HOST:PORT,HOST:PORT"
            )
        return await inquirer.ask(message, kind, _ANSWER_S)
    finally:
        await inquirer.close()


def everything(options: CliOptions, subjects: Sequence[str] = ()) -> Routed:
    """What the meta server knows: all of it, or of these subjects."""
    import msgspec

    from fairway.protocol.routing import ClientRole, Route, Routed

    found = page = ask(options, Route(ClientRole.TOOL, list(subjects)), Routed)
    routes = [*found.subjects]
    while page.has_more:
        page = ask(options, Route(ClientRole.TOOL, [], after=page.subjects[-1].name), Routed)
        routes += page.subjects
    return msgspec.structs.replace(found, subjects=routes)


def decide(
    verb: str,
    config: Path | None,
    url: str | None,
    patience_s: float | None,
    change: RouteChange,
    name: str,
    *,
    groups: Sequence[str] = (),
    number: int = 0,
    is_on: bool = True,
    is_forced: bool = False,
    settings: dict[str, str] | None = None,
    as_json: bool = False,
) -> None:
    """Have the meta server carry out a decision, and say what it did."""
    from fairway.protocol.routing import Govern, Governed

    with output.failures(verb):
        options = resolve(config, url=url, patience_s=patience_s).options
        asked = Govern(change, name, list(groups), number, is_on, is_forced, settings or {})
        done = ask(options, asked, Governed)
        if as_json:
            output.write_json({"name": name, "changed": bool(done.sentence), "groups": done.groups})
        else:
            terminal.say(done.sentence or f"{name}: it was so already")
