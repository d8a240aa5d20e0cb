"""How verbs ask servers: their common options, a client of a broker, one request to a meta server.

Answers that list subjects come in pages; `describe` and `everything` put the pages together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

import fairway
from fairway import Client
from fairway.cli import output
from fairway.cli.arguments import AsJson
from fairway.cli.settings import CliOptions, ConfigFile, Patience, Url, gathered, resolve
from fairway.errors import Code, FairwayError, InvariantViolated, Refused, Unreachable
from fairway.lookup.registries import Inquirer, parse_meta
from fairway.protocol.admin_messages import (
    BrokerState,
    Depth,
    Describe,
    Described,
    GroupDescription,
    SubjectDescription,
)
from fairway.protocol.messages import ControlMessage
from fairway.protocol.route_messages import ClientRole, Govern, Governed, Route, RouteChange, Routed
from fairway.runtime import terminal
from fairway.runtime.clock import RealClock
from fairway.runtime.net import RealNet
from fairway.runtime.rng import RealRng

if TYPE_CHECKING:
    AnswerT = TypeVar("AnswerT", bound=ControlMessage)


_ANSWER_S = 30.0  # a busy broker answers late; a broker that is silent for so long is unreachable


class CommonOptions(NamedTuple):
    """The options of every verb that asks a server: --json, --url, --patience-s and --config."""

    json: bool
    url: str | None
    patience_s: float | None
    config: Path | None

    def resolve(self) -> CliOptions:
        """All settings, with these options over the environment and the file."""
        return resolve(self.config, url=self.url, patience_s=self.patience_s).options

    @contextmanager
    def connected(self, verb: str) -> Iterator[Client]:
        """A client of the broker. An error becomes a sentence and an exit status."""
        with output.failures(verb):
            options = self.resolve()
            with fairway.connect(options.url, patience=options.patience_s) as client:
                yield client

    def say(self, document: object, *sentences: str) -> None:
        """Print the document as JSON, or else the sentences that are not empty."""
        if self.json:
            output.write_json(document)
        for sentence in filter(None, () if self.json else sentences):
            terminal.say(sentence)

    def decide(
        self,
        verb: str,
        change: RouteChange,
        name: str,
        *,
        groups: Sequence[str] = (),
        number: int = 0,
        is_on: bool = True,
        is_forced: bool = False,
        settings: dict[str, str] | None = None,
    ) -> None:
        """Have the meta server carry out a decision, and print what it did."""
        with output.failures(verb):
            asked = Govern(change, name, list(groups), number, is_on, is_forced, settings or {})
            done = ask(self.resolve(), asked, Governed)
            document = {"name": name, "changed": bool(done.sentence), "groups": done.groups}
            self.say(document, done.sentence or f"{name}: nothing to change")


common_options = gathered(
    "common", {"json": AsJson, "url": Url, "patience_s": Patience, "config": ConfigFile}, CommonOptions
)


def describe(
    client: Client,
    depth: Depth,
    subject: str | None = None,
    group: str | None = None,
    timeout_s: float = _ANSWER_S,
) -> tuple[BrokerState, list[SubjectDescription]]:
    """The broker and all its subjects, page by page; puts together a subject that spans pages."""
    found: dict[str, SubjectDescription] = {}
    page = _page(client, Describe(depth, subject, group), timeout_s)
    while True:
        for each in page.subjects:
            before = found.get(each.name)
            groups = [] if before is None else before.groups
            found[each.name] = msgspec.structs.replace(each, groups=groups + each.groups)
        if not page.next:
            break
        page = _page(client, Describe(depth, subject, group, page.next), timeout_s)
    if subject is not None and not found:
        raise Refused(
            Code.NO_SUCH_SUBJECT,
            f"nothing was ever sent to {subject} on this broker: `fairway subjects` lists its subjects",
        )
    return page.broker, list(found.values())


def _page(client: Client, asked: Describe, timeout_s: float) -> Described:
    answer = client.ask(asked, timeout_s)
    if not isinstance(answer, Described):
        raise InvariantViolated(f"a DESCRIBE was answered with {answer!r}")
    return answer


def groups_of(
    client: Client, subject: str | None, group: str | None, depth: Depth | None = None
) -> list[tuple[SubjectDescription, GroupDescription]]:
    """The groups on all subjects or on one. `Refused` if no group has the given name."""
    _, subjects = describe(client, depth or Depth.GROUPS, subject, group)
    found = [(each, one) for each in subjects for one in each.groups]
    if group is not None and not found:
        raise Refused(
            Code.NO_SUCH_GROUP, f"there is no group {group} on {subject or 'any subject'}: `fairway groups` lists them"
        )
    return found


_FIRST_S = 5.0  # until the first attempt to connect succeeds or fails


def ask(options: CliOptions, message: ControlMessage, kind: type[AnswerT]) -> AnswerT:
    """The answer of the meta server that the URL names; `Unreachable` names the addresses."""
    return asyncio.run(ask_at(options.url, options.patience_s, message, kind))


async def ask_at(url: str, patience_s: float, message: ControlMessage, kind: type[AnswerT]) -> AnswerT:
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


def unknown_fate(group: str) -> FairwayError:
    return FairwayError(
        f"the meta server cannot reach the registry, and cannot tell whether group {group} is gone: try again later"
    )


def everything(options: CliOptions, subjects: Sequence[str] = ()) -> Routed:
    """All routes that the meta server knows, or those of these subjects."""
    found = page = ask(options, Route(ClientRole.TOOL, list(subjects)), Routed)
    routes = [*found.subjects]
    while page.has_more:
        page = ask(options, Route(ClientRole.TOOL, [], after=page.subjects[-1].name), Routed)
        routes += page.subjects
    return msgspec.structs.replace(found, subjects=routes)
