"""Where broker groups are: a broker given by its address, the copies of one group, or groups that meta servers know.

A `ServerGroupAddress` is all that a task needs to find its broker group, whichever copy is master by then. A task that
loses its connection, or reaches a copy that is not the master, looks again and repeats the same request. That is safe:
all copies of a group have the same log, and a new master has everything that was committed under the old one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from fairway.client import url as urls
from fairway.client.url import BrokerAddress
from fairway.errors import Code, FairwayError, Misuse, Refused, Unreachable
from fairway.limits import ROUTE_SUBJECTS_MAX
from fairway.protocol.admin_messages import Depth, Describe, Described
from fairway.protocol.route_messages import ClientRole, GroupRoute, Route, Routed, SubjectRoute
from fairway.spark.connection import BlockingClient, Finder, Fixed

BROKER_GROUP: Final = "default"  # the name for a broker that is given by its address
BROKER, DELAY = "broker", "delay"  # kinds of groups
_LOOK_S: Final = 2.0  # for one look at who leads; the next dial looks again
_BEHIND_ALL: Final = "\x7f"  # sorts behind every name
_WAITS_S: Final = 15  # for a copy to catch up with another copy
_ANY: Final = "fairway.any"
_META: Final = "meta server"
_SHOWS: Final = "`fairway cluster` shows who lives."

_log = logging.getLogger("fairway.spark")


class SubjectPart(NamedTuple):
    """A subject as far as one broker group holds it: its sequences are those of that group."""

    subject: str
    broker_group: str = BROKER_GROUP


class ServerGroupAddress(NamedTuple):
    """How to find one group of servers, for as long as a job takes."""

    url: str
    patience_s: int
    broker_group: str = BROKER_GROUP
    is_replica: bool = False  # read from a replica, if one is alive

    @property
    def has_copies(self) -> bool:
        """Whether the next request may be answered by another copy than the last."""
        target = urls.parse_any(self.url)
        return bool(target.meta) or len(target.brokers) > 1

    @property
    def waits_s(self) -> int:
        """How long to wait for a copy that shows less than another copy has shown."""
        return min(self.patience_s, _WAITS_S) if self.has_copies else 0


def caller_to(place: ServerGroupAddress) -> BlockingClient:
    """A conversation with the group at that address."""
    target = urls.parse_any(place.url)
    finder: Finder
    if target.meta:
        finder = _Routed(target.meta, place.broker_group, place.is_replica)
    elif len(target.brokers) > 1:
        finder = _Listed(target.brokers, place.is_replica)
    else:
        finder = Fixed(target.brokers)
    return BlockingClient(finder, place.patience_s)


def broker_places(url: str, patience_s: int) -> list[ServerGroupAddress]:
    """All broker groups."""
    if not urls.parse_any(url).meta:
        return [ServerGroupAddress(url, patience_s)]
    with ServerGroups(url, patience_s) as server_groups:
        return [ServerGroupAddress(url, patience_s, name) for name in sorted(server_groups.groups())]


def delay_places(url: str, patience_s: int) -> list[ServerGroupAddress]:
    """The groups of delay servers: those that the URL or a meta server names, else the broker itself."""
    target = urls.parse_any(url)
    if not target.meta:
        at = ",".join(map(str, target.delay or target.brokers))
        return [ServerGroupAddress(f"{urls.SCHEME}{at}", patience_s)]
    with ServerGroups(url, patience_s) as server_groups:
        return [ServerGroupAddress(url, patience_s, name) for name in server_groups.delay_groups()]


def some_delay_places(url: str, patience_s: int, what: str) -> list[ServerGroupAddress]:
    """`delay_places` for features that need a delay server; `what` names the feature."""
    places = delay_places(url, patience_s)
    if not places:
        raise Misuse(f"{what} needs a delay server, and none is registered at {url}: start one (`fairway delay serve`)")
    return places


# --- finders ----------------------------------------------------------------------------------------------------------


class _Listed(Finder):
    """Finds the master among the given copies of one broker group, by asking each."""

    def __init__(self, addresses: Sequence[BrokerAddress], is_replica: bool) -> None:
        self._addresses = tuple(addresses)
        self._is_replica = is_replica
        self.where = urls.SCHEME + ",".join(map(str, self._addresses))
        self.remedy = "Is one of them running, and does it lead?"

    def addresses(self) -> Sequence[BrokerAddress]:
        masters: list[BrokerAddress] = []
        replicas: list[BrokerAddress] = []
        problems = []
        for each in self._addresses:
            try:
                with BlockingClient(Fixed([each]), _LOOK_S) as caller:
                    state = caller.ask(Describe(Depth.SUBJECTS, items_max=1), Described).broker
                (masters if state.is_master else replicas).append(each)
            except FairwayError as problem:
                problems.append(f"{each}: {problem}")
        if self._is_replica:
            _remark_without(replicas, self.where)
            masters = [*replicas, *masters]
        if not masters:
            said = "; ".join(problems) or "all of them are replicas"
            raise Unreachable(f"nobody leads there ({said})")
        return masters


def _remark_without(replicas: Iterable[object], where: str) -> None:
    if not replicas:
        _log.warning("from=replica: no replica of %s lives, so its master is read", where)


class _Routed(Finder):
    """Finds a group by its name at the meta servers."""

    def __init__(self, metas: Sequence[BrokerAddress], name: str, is_replica: bool) -> None:
        self._metas = Fixed(metas, urls.META_SCHEME, _META)
        self._name = name
        self._is_replica = is_replica
        self.where = f"group {name} of {self._metas.where}"
        self.remedy = _SHOWS

    def addresses(self) -> Sequence[BrokerAddress]:
        with BlockingClient(self._metas, _LOOK_S) as caller:
            routed = caller.ask(Route(ClientRole.TOOL, [], after=_BEHIND_ALL), Routed)
        route = next((each for each in routed.groups if each.name == self._name), None)
        if route is None:
            raise Unreachable(f"the meta server knows no group {self._name}")
        found = [] if not self._is_replica else route.replicas
        if self._is_replica:
            _remark_without(found, self.where)
        if not route.master and not found:
            raise Unreachable(route.why or f"group {self._name} has no master")
        return [BrokerAddress.parse(each) for each in (*found, route.master) if each]


# --- what meta servers know -------------------------------------------------------------------------------------------


class ServerGroups(BlockingClient):
    """A driver's conversation with meta servers."""

    def __init__(self, url: str, patience_s: float) -> None:
        remedy = "Is a meta server running there (`fairway meta`)?"
        super().__init__(Fixed(urls.parse_any(url).meta, urls.META_SCHEME, _META, remedy), patience_s)

    def groups(self, kind: str = BROKER) -> dict[str, GroupRoute]:
        routed = self._routed(Route(ClientRole.TOOL, [], after=_BEHIND_ALL))
        return {each.name: each for each in routed.groups if each.kind == kind}

    def delay_groups(self) -> list[str]:
        """The groups of delay servers. A single broker keeps delayed messages, and names itself for any subject."""
        known = sorted(self.groups(DELAY))
        return known or self._routed(Route(ClientRole.SCHEDULER, [_ANY])).subjects[0].groups

    def _routed(self, route: Route) -> Routed:
        try:
            return self.ask(route, Routed)
        except Refused as refused:
            if refused.code is not Code.UNSUPPORTED:
                raise
            raise Misuse(f"{self.where} is no meta server ({refused.sentence}): write {urls.SCHEME}HOST:PORT") from None

    def holders(self, subjects: Sequence[str]) -> dict[str, list[str]]:
        """By subject, the broker groups that hold its messages; an empty list if the subject does not exist."""
        found: dict[str, list[str]] = {}
        for at in range(0, len(subjects), ROUTE_SUBJECTS_MAX):
            asked = Route(ClientRole.TOOL, list(subjects[at : at + ROUTE_SUBJECTS_MAX]))
            found |= {each.name: each.groups for each in self._routed(asked).subjects}
        return found

    def all_holders(self) -> dict[str, list[str]]:
        """`holders` for every subject that exists."""
        found: dict[str, list[str]] = {}
        after, has_more = "", True
        while has_more:
            routed = self._routed(Route(ClientRole.TOOL, [], after=after))
            found |= {each.name: each.groups for each in routed.subjects}
            after = max(found, default="")
            has_more = routed.has_more
        return found

    def receivers(self, subject: str, *, is_due: bool) -> SubjectRoute:
        """Where messages for a subject may go: to brokers, or, for later delivery, to delay servers."""
        asker = ClientRole.SCHEDULER if is_due else ClientRole.PRODUCER
        return self._routed(Route(asker, [subject], may_create=True)).subjects[0]
