"""Asks every broker group that a request concerns, and merges the answers into one.

First come the mergers. A number of the merged answer is the sum over the broker groups, sequences included: each group
numbers its messages by itself, and the sum of the ends minus the sum of the cursors is the lag. A broker group that
does not know a consumer group, because no consumer has joined there yet, does not make the cluster refuse.

Then come the dialogs: generators that the blocking and the asyncio client drive. A dialog yields a `RoutedQuestion`,
the driver asks it, and sends the answer or the refusal back into the dialog.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import msgspec

from fairway.client.cluster.client import ClusterClient
from fairway.client.commands import ABOUT_DELAYED, AnswerT, Command
from fairway.client.core import ConnectionT
from fairway.errors import Code, Misuse, Refused
from fairway.names import Subject
from fairway.protocol.admin_messages import (
    BrokerState,
    Configure,
    Configured,
    Depth,
    Describe,
    Described,
    GroupDescription,
    Redrive,
    Redriven,
    Removed,
    RemoveGroup,
    RemoveSubject,
    Seek,
    Sought,
    SubjectDescription,
    Switch,
    Switched,
    Weigh,
)
from fairway.protocol.delay_messages import (
    Cancel,
    Decided,
    DelayTally,
    Fate,
    Reschedule,
    Resend,
    Resent,
    Stretch,
    Tallied,
    TransitReport,
)
from fairway.protocol.messages import ControlMessage, Done, Whence
from fairway.protocol.route_messages import ClientRole, Govern, Governed, GroupRoute, Route, RouteChange, Routed

MessageT = TypeVar("MessageT", bound=ControlMessage)

_NOT_HERE = frozenset({Code.NO_SUCH_GROUP, Code.NO_SUCH_SUBJECT})
# An earlier fate outweighs a later one.
_FATES = (
    Fate.CANCELLED,
    Fate.RESCHEDULED,
    Fate.ALREADY_DISPATCHED,
    Fate.UNKNOWN,
)


def check_mergeable(message: ControlMessage, groups: Sequence[str]) -> None:
    """Raise `Misuse` if the answers of several broker groups cannot be merged."""
    if len(groups) < 2:
        return
    is_place = isinstance(message, Seek) and message.whence is Whence.SEQUENCE
    if type(message) not in _MERGERS or is_place:
        what = (
            "a sequence is a place in one broker group" if is_place else f"{type(message).__name__} is for one of them"
        )
        raise one_group(what, groups)


def is_elsewhere(refused: Refused, connections: Sequence[object]) -> bool:
    """Whether a broker group does not have a subject that other groups may have."""
    return len(connections) > 1 and refused.code is Code.NO_SUCH_SUBJECT


def one_group(what: str, groups: Sequence[str]) -> Misuse:
    return Misuse(
        f"{what}, and there are {len(groups)} ({', '.join(groups)}): connect to one of them, fairway://HOST:PORT "
        "(--url; `fairway cluster` shows the addresses)"
    )


def merge(message: ControlMessage, outcomes: Sequence[ControlMessage | Refused]) -> ControlMessage:
    """The answer of the cluster. Raises `Refused` if the cluster refuses."""
    answers = [each for each in outcomes if not isinstance(each, Refused)]
    for each in outcomes:
        if isinstance(each, Refused) and (not answers or each.code not in _NOT_HERE):
            raise each
    return answers[0] if len(answers) == 1 else _MERGERS[type(message)](answers)


# --- merging descriptions ---------------------------------------------------------------------------------------------


def joined(pages: Sequence[Described]) -> Described:
    """Join all pages of one broker group."""
    return Described(pages[0].broker, _by_name([each for page in pages for each in page.subjects], _same_subject))


def _described(answers: Sequence[Described]) -> Described:
    subjects = _by_name([each for answer in answers for each in answer.subjects], _subject)
    return Described(_broker([answer.broker for answer in answers]), subjects)


def _by_name(items: Iterable[MessageT], merge_two: Callable[[Sequence[MessageT]], MessageT]) -> list[MessageT]:
    found: dict[str, list[MessageT]] = {}
    for each in items:
        found.setdefault(each.name, []).append(each)  # type: ignore[attr-defined]  # every description has a name
    return [merge_two(found[name]) for name in sorted(found)]


def _same_subject(parts: Sequence[SubjectDescription]) -> SubjectDescription:
    return msgspec.structs.replace(parts[-1], groups=[group for part in parts for group in part.groups])


def _subject(states: Sequence[SubjectDescription]) -> SubjectDescription:
    groups = _by_name([group for state in states for group in state.groups], _group)
    return SubjectDescription(
        states[0].name,
        sum(state.first_sequence for state in states),
        sum(state.committed_end for state in states),
        all(state.is_read_only for state in states),
        max(len(groups), *(state.groups_count for state in states)),
        groups,
    )


def _group(states: Sequence[GroupDescription]) -> GroupDescription:
    """Add the numbers. A switch is on if any broker group has it on. Everything else is the first group's."""
    first = states[0]
    told: dict[str, Any] = _sums(states, _ADDED)
    told |= {name: any(getattr(each, name) for each in states) for name in ("is_paused", "is_full")}
    oldest = [each.oldest_ms for each in states if each.oldest_ms is not None]
    return msgspec.structs.replace(
        first,
        **told,
        consumers_count=max(each.consumers_count for each in states),  # each consumer joins every broker group
        consumers=[consumer for each in states for consumer in each.consumers],
        actor=None,
        oldest_ms=min(oldest, default=None),
    )


_ADDED = (
    "cursor", "oldest_unacked", "lag", "in_flight", "returned", "retrying", "dying", "dead", "lost", "inbox", "lots",
    "parked", "halted", "declined",
)  # fmt: skip


def _broker(states: Sequence[BrokerState]) -> BrokerState:
    """Describe the cluster as one broker."""
    kinds = {state.durability for state in states}
    return BrokerState(
        server=f"{len(states)} broker groups",
        log_id=0,
        epoch=max(state.epoch for state in states),
        is_master=all(state.is_master for state in states),
        is_read_only=all(state.is_read_only for state in states),
        started_ms=min(state.started_ms for state in states),
        now_ms=max(state.now_ms for state in states),
        durability=kinds.pop() if len(kinds) == 1 else "mixed",
        free_bytes=min(state.free_bytes for state in states),
        **_sums(states, ("connections", "connections_max", "rotten_spans")),
    )


def _sums(answers: Sequence[object], names: Sequence[str]) -> dict[str, int]:
    return {name: sum(getattr(each, name) for each in answers) for name in names}


# --- merging the answers to changes -----------------------------------------------------------------------------------


def _sought(answers: Sequence[Sought]) -> Sought:
    return Sought(**_sums(answers, Sought.__struct_fields__))


def _redriven(answers: Sequence[Redriven]) -> Redriven:
    unknown = [each for each in answers[0].unknown if all(each in answer.unknown for answer in answers)]
    return Redriven(sum(answer.count for answer in answers), unknown)


def _removed(answers: Sequence[Removed]) -> Removed:
    return Removed(any(each.existed for each in answers), **_sums(answers, ("groups", "messages", "dead")))


def _decided(answers: Sequence[Decided]) -> Decided:
    fates = {answer.fate for answer in answers}
    return Decided(next(fate for fate in _FATES if fate in fates), sum(answer.messages for answer in answers))


def _tallied(answers: Sequence[Tallied]) -> Tallied:
    found: dict[int, int] = {}
    for each in (stretch for answer in answers for stretch in answer.stretches):
        found[each.start_ms] = found.get(each.start_ms, 0) + each.count
    stretches = [Stretch(start, found[start]) for start in sorted(found)]
    return Tallied(sum(answer.count for answer in answers), stretches, _in_transit(answers))


def _in_transit(answers: Sequence[Tallied]) -> list[TransitReport]:
    """A broker group is reachable if every delay server with messages for it reaches it."""
    found: dict[str, list[TransitReport]] = {}
    for each in (each for answer in answers for each in answer.in_transit or ()):
        found.setdefault(each.group, []).append(each)
    return [
        TransitReport(group, sum(each.messages for each in parts), all(each.is_reachable for each in parts))
        for group, parts in sorted(found.items())
    ]


_MERGERS: dict[type[ControlMessage], Callable[[Sequence[Any]], ControlMessage]] = {
    Describe: _described,
    Seek: _sought,
    Switch: lambda answers: Switched(any(answer.was_on for answer in answers)),
    Weigh: lambda _: Done(),
    Redrive: _redriven,
    RemoveSubject: _removed,
    RemoveGroup: _removed,
    Configure: lambda answers: Configured(max(answer.version for answer in answers)),
    Cancel: _decided,
    Reschedule: _decided,
    DelayTally: _tallied,
    Resend: lambda answers: Resent(**_sums(answers, Resent.__struct_fields__)),
}


ResultT = TypeVar("ResultT")


class RoutedQuestion(NamedTuple):
    """A question and the connection to ask it on."""

    connection: Any
    command: Command[Any]
    group: str = ""  # the group of servers that the connection leads to; empty: the meta server

    def unanswered(self, error: TimeoutError) -> TimeoutError:
        """A timeout that names the silent server."""
        return TimeoutError(f"{f'group {self.group}' if self.group else 'the meta server'}: {error}")


Dialog: TypeAlias = Generator[RoutedQuestion, ControlMessage | Refused, ResultT]


def groups_of(cluster_client: ClusterClient[ConnectionT], subject: str | None) -> Dialog[dict[str, ConnectionT]]:
    """The broker groups that hold a subject, or all broker groups, with their connections."""
    names = [] if subject is None else [str(subject)]  # a plain str, not a parsed `Subject`
    routed = yield RoutedQuestion(cluster_client.meta, Command(Route(ClientRole.TOOL, names), Routed))
    found = _granted(routed, Routed)
    if subject is not None and not found.subjects[0].groups:
        raise Refused(Code.NO_SUCH_SUBJECT, found.subjects[0].why)
    brokers = [each for each in found.groups if each.kind == "broker"]
    return _connections(
        cluster_client, [each for each in brokers if subject is None or each.name in found.subjects[0].groups]
    )


def delay_groups(cluster_client: ClusterClient[ConnectionT]) -> Dialog[dict[str, ConnectionT]]:
    """All groups of delay servers, with their connections. A single broker may run a delay server itself."""
    routed = yield RoutedQuestion(cluster_client.meta, Command(Route(ClientRole.TOOL, []), Routed))
    groups = _granted(routed, Routed).groups
    found = groups if len(groups) == 1 else [each for each in groups if each.kind == "delay"]
    if not found:
        raise Refused(Code.UNSUPPORTED, "no delay server is registered in this cluster: start one with --registry")
    return _connections(cluster_client, found)


def to_scan(
    cluster_client: ClusterClient[ConnectionT], subject: str, start: object, end: int | None
) -> Dialog[list[ConnectionT]]:
    """The connections to read one after the other, for all messages of a subject.

    Raises `Misuse` if a scan of several broker groups makes no sense: a sequence belongs to one of them, and messages
    in an inbox are named by the sequence that they have in their subject.
    """
    connections = yield from groups_of(cluster_client, subject)
    has_place = isinstance(start, int) or end is not None or Subject.parse_any(subject).is_inbox
    if has_place and len(connections) > 1:
        raise one_group("a sequence is a place in one broker group", [*connections])
    return [*connections.values()]


def ask_all(cluster_client: ClusterClient[ConnectionT], command: Command[AnswerT]) -> Dialog[AnswerT]:
    """Ask every group that the question concerns, and merge the answers."""
    message = command.message
    if isinstance(message, RemoveSubject | RemoveGroup):
        return cast("AnswerT", (yield from _remove(cluster_client, message)))
    if type(message) in ABOUT_DELAYED:
        connections = yield from delay_groups(cluster_client)
    else:
        connections = yield from groups_of(cluster_client, getattr(message, "subject", None))
    check_mergeable(message, [*connections])
    outcomes: list[ControlMessage | Refused] = []
    for name, connection in connections.items():
        outcome = yield from _ask_one(connection, command, name)
        outcomes.append(outcome)
    return cast("AnswerT", merge(message, outcomes))  # the command names the type


def _ask_one(connection: Any, command: Command[Any], group: str) -> Dialog[ControlMessage | Refused]:
    message = command.message
    if isinstance(message, Describe):
        return (yield from _describe(connection, message, group))
    outcome = yield RoutedQuestion(connection, command, group)
    if isinstance(message, Configure) and isinstance(outcome, Refused) and outcome.code is Code.STALE_CONFIG:
        return (yield from _configured_before(connection, message, group, outcome))
    return outcome


def _remove(cluster_client: ClusterClient[ConnectionT], message: RemoveSubject | RemoveGroup) -> Dialog[Removed]:
    """Remove a subject or a consumer group everywhere.

    The dialog asks all broker groups whether they can, then asks them to remove, and asks the meta server last. So a
    removal that one group refuses changes nothing, and a removal that breaks off can be asked for again.

    A producer may create the subject again meanwhile. Then the dialog tells the meta server where the subject is: every
    message with a receipt from after the removal needs a route.
    """
    connections = yield from groups_of(cluster_client, None)
    checks = yield from _each(connections, msgspec.structs.replace(message, is_dry=True))
    if message.is_dry:
        return cast("Removed", merge(message, [*checks.values()]))
    answers = yield from _each(connections, message)
    removed = cast("Removed", merge(message, [*answers.values()]))
    if isinstance(message, RemoveGroup) or ":" in message.subject:
        return removed
    governed = yield RoutedQuestion(cluster_client.meta, Command(Govern(RouteChange.REMOVE, message.subject), Governed))
    if isinstance(governed, Refused):
        if governed.code is Code.UNSUPPORTED:  # a single broker answers as its own meta server
            return removed
        raise governed
    had_route = isinstance(governed, Governed) and bool(governed.sentence)
    again = yield from _each(connections, RemoveSubject(message.subject, is_forced=True, is_dry=True))
    if groups := [name for name, answer in again.items() if answer.existed]:
        made = yield RoutedQuestion(
            cluster_client.meta, Command(Govern(RouteChange.CREATE, message.subject, groups), Governed)
        )
        _granted(made, Governed)
    return msgspec.structs.replace(removed, existed=removed.existed or had_route)


def _each(connections: dict[str, Any], message: RemoveSubject | RemoveGroup) -> Dialog[dict[str, Removed]]:
    answers: dict[str, Removed] = {}
    for name, connection in connections.items():
        answers[name] = _granted((yield RoutedQuestion(connection, Command(message, Removed), name)), Removed)
    return answers


def _describe(connection: Any, message: Describe, group: str) -> Dialog[Described | Refused]:
    """Ask for all pages: the answers of several broker groups cannot be paged together."""
    pages: list[Described] = []
    while True:
        outcome = yield RoutedQuestion(connection, Command(message, Described), group)
        if not isinstance(outcome, Described):
            return _refusal(outcome)
        pages.append(outcome)
        if not outcome.next:
            return joined(pages)
        message = msgspec.structs.replace(message, after=outcome.next)


def _configured_before(
    connection: Any, message: Configure, group: str, refused: Refused
) -> Dialog[ControlMessage | Refused]:
    """Accept STALE_CONFIG from a broker group that has this very configuration.

    An earlier attempt may have configured some broker groups before it failed at another.
    """
    look = Describe(Depth.CONSUMERS, message.subject, message.group)
    described = yield RoutedQuestion(connection, Command(look, Described), group)
    if isinstance(described, Described):
        configs = [each.config for subject in described.subjects for each in subject.groups]
        if any(config is not None and _says(config) == _says(message.config) for config in configs):
            return Configured(message.expected_version + 1)
    return refused


def _says(config: bytes) -> Any:
    """The decoded configuration, to compare values and not bytes: 0 and 0.0 are the same."""
    return msgspec.msgpack.decode(config)


def _connections(cluster_client: ClusterClient[ConnectionT], routes: Sequence[GroupRoute]) -> dict[str, ConnectionT]:
    """The connections to these groups, sorted by the groups' names."""
    return {route.name: cluster_client.connection_to(route) for route in sorted(routes, key=lambda route: route.name)}


def _granted(outcome: ControlMessage | Refused, kind: type[ResultT]) -> ResultT:
    if isinstance(outcome, kind):
        return outcome
    raise _refusal(outcome)


def _refusal(outcome: ControlMessage | Refused) -> Refused:
    return outcome if isinstance(outcome, Refused) else Refused(Code.OTHER, f"{type(outcome).__name__} is no answer")
