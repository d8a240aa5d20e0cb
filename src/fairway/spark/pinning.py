"""Which broker group of a cluster a task's rows go to.

All rows of one task for one subject go to one broker group, so that a task that runs again finds there what it had
stored. The first time it is chosen by rendezvous: of the groups that take messages, the one whose hash with the
stream's name is highest; so tasks are spread evenly, and a group more takes only its share of them. Later it must be
the same one, although subjects are extended, and groups drained, meanwhile. So whoever begins a task first asks every
group that holds the subject whether it remembers the stream: with a batch of that stream which leaves a gap, and can
never be stored. A broker that remembers the stream refuses it as SEQUENCE_GAP, one that does not as UNKNOWN_PRODUCER.
The one that remembers it is the one; where nobody does, nothing of it was stored, and the choice is free.

That needs an answer from all of them: a group that nobody leads is waited for, and named when patience runs out. And it
is exact as long as two runs of one task do not choose at the same moment from different groups, which takes a
speculative copy, or a task that outlived its driver, *and* a subject that is extended between the two questions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Final

from fairway.client import url as urls
from fairway.errors import Code, FairwayError, Refused
from fairway.protocol.messages import Produce
from fairway.protocol.routing import SubjectRoute
from fairway.spark.calling import NS, BlockingClient
from fairway.spark.places import ServerGroupAddress, ServerGroups, caller_to, delay_places
from fairway.spark.sending import Sending, explained, is_passing
from fairway.world import host

PROBE_SEQUENCE: Final = 1 << 62  # no stream gets there
_NAP_S: Final = 0.2
_REMEMBERED: Final = frozenset({Code.SEQUENCE_GAP, Code.SEQUENCE_CONFLICT})
_NOT_HERE: Final = frozenset({Code.NO_SUCH_SUBJECT, Code.NO_SUCH_GROUP, Code.BAD_NAME})


class GroupConnections:
    """The conversations of one task: one for each group of servers that it sends to."""

    def __init__(self, url: str, patience_s: int) -> None:
        self._url = url
        self._patience_s = patience_s
        self._atlas = ServerGroups(url, patience_s) if urls.parse_any(url).meta else None
        self._sendings: dict[
            tuple[ServerGroupAddress, bool], Sending
        ] = {}  # and whether an earlier run has begun to send there
        self._asked: dict[str, BlockingClient] = {}  # which groups remember what

    def sending(self, stream_id: int, request: Produce, probe: Callable[[], bytes], *, is_due: bool) -> Sending:
        """Where the rows of a stream go, at once or to a delay server; `request` is what a batch of it goes with."""
        is_pinned = False
        if self._atlas is not None:
            pin = _Pin(self._atlas, self._caller, stream_id, request, is_due)
            group, is_pinned = pin.find(probe, self._atlas.now_ns + self._patience_s * NS)
            place = self._place(group)
        elif is_due:
            place = delay_places(self._url, self._patience_s)[0]
        else:
            place = ServerGroupAddress(self._url, self._patience_s)
        found = self._sendings.get((place, is_pinned))
        if found is None:
            found = self._sendings[place, is_pinned] = Sending(place, is_pinned=is_pinned)
        return found

    def _place(self, group: str) -> ServerGroupAddress:
        return ServerGroupAddress(self._url, self._patience_s, group)

    def _caller(self, group: str) -> BlockingClient:
        found = self._asked.get(group)
        if found is None:
            found = self._asked[group] = caller_to(self._place(group))
        return found

    def finish(self) -> tuple[int, int]:
        """See all of it stored: how many messages, and how many of them an earlier run had stored."""
        for each in self._sendings.values():
            each.finish()
        return (
            sum(each.messages for each in self._sendings.values()),
            sum(each.duplicates for each in self._sendings.values()),
        )

    def close(self) -> None:
        for sending in self._sendings.values():
            sending.close()
        for caller in self._asked.values():
            caller.close()
        if self._atlas is not None:
            self._atlas.close()


class _Pin:
    """One stream's way to its group."""

    def __init__(
        self,
        atlas: ServerGroups,
        caller: Callable[[str], BlockingClient],
        stream_id: int,
        request: Produce,
        is_due: bool,
    ) -> None:
        self._atlas = atlas
        self._caller = caller
        self._stream_id = stream_id
        self._request = request
        self._subject = request.subject
        self._is_due = is_due

    def find(self, probe: Callable[[], bytes], until_ns: int) -> tuple[str, bool]:
        """The group that remembers the stream, or one that takes it; and whether it remembers the stream."""
        while True:
            route = self._atlas.receivers(self._subject, is_due=self._is_due)
            if len(route.groups) == 1 and route.writable:
                return route.groups[0], False
            if route.groups:
                found = self._among(route, probe())
                if found is not None:
                    return found
            self._wait(route, until_ns)

    def _among(self, route: SubjectRoute, probe: bytes) -> tuple[str, bool] | None:
        """None: nobody takes messages now."""
        answers = {group: self._answer(self._caller(group), probe) for group in route.groups}
        remembering = [group for group, code in answers.items() if code in _REMEMBERED]
        if remembering:
            return remembering[0], True
        here = [group for group, code in answers.items() if code not in _NOT_HERE]
        if not here:  # each of them will say why
            return route.groups[0], False
        able = [group for group in route.writable if group in here]
        return (chosen(self._stream_id, able), False) if able else None

    def _answer(self, caller: BlockingClient, probe: bytes) -> Code:
        since_ns = caller.now_ns
        request = Produce(self._subject, is_pinned=True, secret=self._request.secret)
        ticket = caller.put(request, [probe])  # a group that is drained answers, too
        while True:
            outcome = caller.outcome(ticket)
            if not isinstance(outcome, Refused):
                raise FairwayError(f"a batch that leaves a gap was taken at {caller.where}: {outcome!r}")
            if outcome.code in _REMEMBERED | _NOT_HERE or outcome.code is Code.UNKNOWN_PRODUCER:
                return outcome.code
            if not is_passing(outcome):
                raise explained(outcome, ticket.message)
            caller.pause(outcome, since_ns)
            caller.resend([ticket])

    def _wait(self, route: SubjectRoute, until_ns: int) -> None:
        if self._atlas.now_ns > until_ns:
            raise FairwayError(f"nobody takes messages to {self._subject} at {self._atlas.where}: {route.why}")
        host.sleep(_NAP_S)


def chosen(stream_id: int, groups: Sequence[str]) -> str:
    """By rendezvous: the same from the same groups, and spread evenly over streams."""

    def weight(group: str) -> bytes:
        return hashlib.sha256(f"{stream_id:016x}\0{group}".encode()).digest()

    return max(groups, key=weight)
