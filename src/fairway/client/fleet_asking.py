"""A question to a cluster: where to ask it, of whom, and one answer from all.

Written as dialogs that both faces drive: what is yielded is to be asked, what comes back is the answer or a refusal.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import msgspec

from fairway.client import merging
from fairway.client.asking import ABOUT_DELAYED, AnswerT, Command
from fairway.client.fleet import ClusterClient
from fairway.client.ways import WayT
from fairway.errors import Code, Refused
from fairway.protocol.admin import (
    Configure,
    Configured,
    Depth,
    Describe,
    Described,
    Removed,
    RemoveGroup,
    RemoveSubject,
)
from fairway.protocol.messages import ControlMessage
from fairway.protocol.routing import ClientRole, Govern, Governed, GroupRoute, Route, RouteChange, Routed

T = TypeVar("T")


class RoutedQuestion(NamedTuple):
    """What is to be asked, on which way."""

    way: Any
    command: Command[Any]
    group: str = ""  # of servers, whose way that is; empty: the meta server's

    def unanswered(self, error: TimeoutError) -> TimeoutError:
        """Nobody has said anything: who that was."""
        return TimeoutError(f"{f'group {self.group}' if self.group else 'the meta server'}: {error}")


Dialog: TypeAlias = Generator[RoutedQuestion, ControlMessage | Refused, T]


def groups_of(fleet: ClusterClient[WayT], subject: str | None) -> Dialog[dict[str, WayT]]:
    """The broker groups that hold a subject, or all of them, and the ways there."""
    names = [] if subject is None else [str(subject)]  # plain, where it was parsed
    routed = yield RoutedQuestion(fleet.meta, Command(Route(ClientRole.TOOL, names), Routed))
    found = _granted(routed, Routed)
    if subject is not None and not found.subjects[0].groups:
        raise Refused(Code.NO_SUCH_SUBJECT, found.subjects[0].why)
    brokers = [each for each in found.groups if each.kind == "broker"]
    return _ways(fleet, [each for each in brokers if subject is None or each.name in found.subjects[0].groups])


def delay_groups(fleet: ClusterClient[WayT]) -> Dialog[dict[str, WayT]]:
    """All groups of delay servers, and the ways there. A broker that is all there is may run one itself."""
    routed = yield RoutedQuestion(fleet.meta, Command(Route(ClientRole.TOOL, []), Routed))
    groups = _granted(routed, Routed).groups
    found = groups if len(groups) == 1 else [each for each in groups if each.kind == "delay"]
    if not found:
        raise Refused(Code.UNSUPPORTED, "no delay server is registered in this cluster: start one with --registry")
    return _ways(fleet, found)


def ask_all(fleet: ClusterClient[WayT], command: Command[AnswerT]) -> Dialog[AnswerT]:
    """The same question to every group that it concerns."""
    message = command.message
    if isinstance(message, RemoveSubject | RemoveGroup):
        return cast("AnswerT", (yield from _remove(fleet, message)))
    if type(message) in ABOUT_DELAYED:
        ways = yield from delay_groups(fleet)
    else:
        ways = yield from groups_of(fleet, getattr(message, "subject", None))
    merging.check_mergeable(message, sorted(ways))
    outcomes: list[ControlMessage | Refused] = []
    for name in sorted(ways):
        outcome = yield from _ask_one(ways[name], command, name)
        outcomes.append(outcome)
    return cast("AnswerT", merging.merge(message, outcomes))  # as the command says


def _ask_one(way: Any, command: Command[Any], group: str) -> Dialog[ControlMessage | Refused]:
    message = command.message
    if isinstance(message, Describe):
        return (yield from _describe(way, message, group))
    outcome = yield RoutedQuestion(way, command, group)
    if isinstance(message, Configure) and isinstance(outcome, Refused) and outcome.code is Code.STALE_CONFIG:
        return (yield from _configured_before(way, message, group, outcome))
    return outcome


def _remove(fleet: ClusterClient[WayT], message: RemoveSubject | RemoveGroup) -> Dialog[Removed]:
    """All broker groups are asked first whether they can, then to remove, and last the meta server. So a removal that
    one of them refuses changes nothing, and one that was broken off can be asked for again.

    A producer may have made the subject again meanwhile. Then the meta server is told where: no message that was
    acknowledged after the removal may be without a route."""
    ways = yield from groups_of(fleet, None)
    checks = yield from _each(ways, msgspec.structs.replace(message, is_dry=True))
    if message.is_dry:
        return cast("Removed", merging.merge(message, [*checks.values()]))
    answers = yield from _each(ways, message)
    removed = cast("Removed", merging.merge(message, [*answers.values()]))
    if isinstance(message, RemoveGroup) or ":" in message.subject:
        return removed
    governed = yield RoutedQuestion(fleet.meta, Command(Govern(RouteChange.REMOVE, message.subject), Governed))
    if isinstance(governed, Refused):
        if governed.code is Code.UNSUPPORTED:  # one broker is all there is
            return removed
        raise governed
    had_route = isinstance(governed, Governed) and bool(governed.sentence)
    again = yield from _each(ways, RemoveSubject(message.subject, is_forced=True, is_dry=True))
    if groups := [name for name, answer in again.items() if answer.existed]:
        made = yield RoutedQuestion(fleet.meta, Command(Govern(RouteChange.CREATE, message.subject, groups), Governed))
        _granted(made, Governed)
    return msgspec.structs.replace(removed, existed=removed.existed or had_route)


def _each(ways: dict[str, Any], message: RemoveSubject | RemoveGroup) -> Dialog[dict[str, Removed]]:
    answers: dict[str, Removed] = {}
    for name in sorted(ways):
        answers[name] = _granted((yield RoutedQuestion(ways[name], Command(message, Removed), name)), Removed)
    return answers


def _describe(way: Any, message: Describe, group: str) -> Dialog[Described | Refused]:
    """Page after page, to the end: what several groups say cannot be paged together."""
    pages: list[Described] = []
    while True:
        outcome = yield RoutedQuestion(way, Command(message, Described), group)
        if not isinstance(outcome, Described):
            return _refusal(outcome)
        pages.append(outcome)
        if not outcome.next:
            return merging.joined(pages)
        message = msgspec.structs.replace(message, after=outcome.next)


def _configured_before(way: Any, message: Configure, group: str, refused: Refused) -> Dialog[ControlMessage | Refused]:
    """Some broker groups may have taken the same configuration the last time, before another one could not be asked:
    then it is as it should be."""
    look = Describe(Depth.CONSUMERS, message.subject, message.group)
    described = yield RoutedQuestion(way, Command(look, Described), group)
    if isinstance(described, Described):
        configs = [each.config for subject in described.subjects for each in subject.groups]
        if any(config is not None and _says(config) == _says(message.config) for config in configs):
            return Configured(message.expected_version + 1)
    return refused


def _says(config: bytes) -> Any:
    """What it says, however it is written: 0 and 0.0 are the same."""
    return msgspec.msgpack.decode(config)


def _ways(fleet: ClusterClient[WayT], routes: Sequence[GroupRoute]) -> dict[str, WayT]:
    return {route.name: fleet.way_to(route) for route in routes}


def _granted(outcome: ControlMessage | Refused, kind: type[T]) -> T:
    if isinstance(outcome, kind):
        return outcome
    raise _refusal(outcome)


def _refusal(outcome: ControlMessage | Refused) -> Refused:
    return outcome if isinstance(outcome, Refused) else Refused(Code.OTHER, f"{type(outcome).__name__} is no answer")
