"""What a driver asks of a broker: which subjects there are, where they begin and end, how far so many bytes reach; and
where a query stands, kept on the broker as the cursor of a group that nobody consumes."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from fairway.client import url
from fairway.errors import Code, FairwayError, Misuse, Refused
from fairway.limits import MIB
from fairway.protocol.admin import BrokerState, Depth, Describe, Described, Scan, Scanned, Seek, Sought
from fairway.protocol.messages import Done, Join, Joined, Leave, Whence
from fairway.spark.calling import Caller, Ticket
from fairway.spark.options import LATEST, ReadOptions, Where, is_pattern
from fairway.spark.reading import explained
from fairway.spark.splits import Range

MEMBER: Final = "spark"  # who makes the group, and leaves it at once: progress is kept by seeking
SAMPLE_BYTES: Final = 64 * MIB  # looked at, not read, to learn how large messages are
POLLS_MAX: Final = 64  # subjects that an idle stream waits for; others are looked at once per poll


class Extent(NamedTuple):
    """What is stored of a subject."""

    first: int
    end: int


class Log(NamedTuple):
    """Which log it is."""

    id: int
    epoch: int


class Looker:
    """One driver's conversation with a broker."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._caller = Caller(url.parse(options.url).brokers, options.patience_s)
        self._polls: dict[str, Ticket] = {}
        self.log = Log(0, 0)

    def close(self) -> None:
        self._caller.close()

    @property
    def where(self) -> str:
        return self._caller.where

    # --- subjects ----------------------------------------------------------------------------------------------------

    def extents(self) -> dict[str, Extent]:
        """The subjects that the options mean, in the order of their names."""
        alone = self._options.subjects[0] if len(self._options.subjects) == 1 else None
        stored = self._all(None if alone is None or is_pattern(alone) else alone)
        for name in self._options.names:
            if name not in stored:
                stored |= self._all(name)  # an inbox is shown only to who asks for it by its name
            if name not in stored:
                raise unknown(name, self._all(None), self.where)
        wanted = set(self._options.names)
        for pattern in self._options.patterns:
            wanted |= {name for name in stored if _matches(name, pattern)}
        return {name: stored[name] for name in sorted(wanted)}

    def _all(self, asked: str | None) -> dict[str, Extent]:
        """Every subject, or one of them."""
        found: dict[str, Extent] = {}
        after = ""
        while True:
            try:
                page = self._caller.ask(Describe(Depth.SUBJECTS, asked, None, after), Described)
            except Refused as refused:
                if refused.code is Code.NO_SUCH_SUBJECT:
                    return {}
                raise
            self._note(page.broker)
            found.update({each.name: Extent(each.first_sequence, each.committed_end) for each in page.subjects})
            if not page.next:
                return found
            after = page.next

    def _note(self, broker: BrokerState) -> None:
        self.log = Log(broker.log_id, broker.epoch)

    # --- places ------------------------------------------------------------------------------------------------------

    def resolve(self, places: Mapping[str, Where]) -> dict[str, int]:
        """The sequences that these places stand for now."""
        tickets = {
            name: self._caller.put(Scan(name, place.whence, place.value, None, 0)) for name, place in places.items()
        }
        return {name: self._scanned(name, ticket).next_sequence for name, ticket in tickets.items()}

    def measured(self, ranges: Iterable[Range]) -> list[Range]:
        """The same, with about how many bytes each message has."""
        tickets = [(each, self._caller.put(_dry(each.subject, each.begin, each.end, SAMPLE_BYTES))) for each in ranges]
        measured = []
        for each, ticket in tickets:
            scanned = self._scanned(each.subject, ticket)
            messages = scanned.next_sequence - max(each.begin, scanned.first_sequence)
            mean = scanned.size_bytes / messages if messages > 0 and scanned.size_bytes else each.message_bytes
            measured.append(each._replace(message_bytes=mean))
        return measured

    def reach(self, subject: str, begin: int, end: int, bytes_max: int) -> int:
        """The sequence up to which there are so many bytes; whole batches, and at least one."""
        at, left = begin, bytes_max
        while at < end and left > 0:
            scanned = self._scanned(subject, self._caller.put(_dry(subject, at, end, left)))
            left -= scanned.size_bytes
            if scanned.next_sequence <= at or not scanned.size_bytes:
                return end  # nothing is left but a hole
            if left < 0 and at > begin:
                return at  # one batch more is too much
            at = scanned.next_sequence
        return min(at, end)

    def _scanned(self, subject: str, ticket: Ticket) -> Scanned:
        try:
            return self._caller.take(ticket, Scanned)[0]
        except Refused as refused:
            raise explained(refused, subject, self.where) from refused

    # --- waiting -----------------------------------------------------------------------------------------------------

    def wait(self, ends: Mapping[str, int], wait_ms: int) -> None:
        """Until something is stored behind one of these ends, or so long. One question per subject, kept open from one
        wait to the next."""
        for name in [name for name, poll in self._polls.items() if poll.is_answered() or name not in ends]:
            del self._polls[name]
        for name, end in list(ends.items())[:POLLS_MAX]:
            if name not in self._polls:
                self._polls[name] = self._caller.put(Scan(name, Whence.SEQUENCE, end, None, 0, None, wait_ms))
        self._caller.wait_any(list(self._polls.values()), wait_ms / 1_000 if self._polls else 0.0)

    # --- the query's group -------------------------------------------------------------------------------------------

    def hold(self, subject: str, group: str, place: Where) -> int:
        """Where the group stands on the subject; one that is new is made, and stands at `place` from then on."""
        cursor = self._cursor(subject, group)
        if cursor is not None:
            return cursor
        start = Whence.LATEST if place == LATEST else Whence.EARLIEST
        self._caller.ask(Join(subject, group, MEMBER, 0, 0, start), Joined)
        self._caller.ask(Leave(subject, group, MEMBER, 0), Done)
        if place.whence in {Whence.TIME, Whence.SEQUENCE}:
            return self._caller.ask(Seek(subject, group, place.whence, place.value), Sought).sequence
        made = self._cursor(subject, group)
        if made is None:
            raise FairwayError(f"group {group} on {subject} was made and is gone: is somebody removing it?")
        return made

    def _cursor(self, subject: str, group: str) -> int | None:
        """None: there is no such group."""
        try:
            described = self._caller.ask(Describe(Depth.GROUPS, subject, group), Described)
        except Refused as refused:
            if refused.code is Code.NO_SUCH_GROUP:
                return None
            raise
        states = [each for of in described.subjects for each in of.groups if each.name == group]
        if states and states[0].consumers_count:
            raise Misuse(
                f"group {group} on {subject} has consumers, and a Spark query would move their cursor: "
                "give the query a group of its own"
            )
        return states[0].cursor if states else None

    def progress(self, subject: str, group: str, sequence: int) -> None:
        """The query is done with everything below `sequence`."""
        try:
            self._caller.ask(Seek(subject, group, Whence.SEQUENCE, sequence), Sought)
        except Refused as refused:
            if refused.code is not Code.NO_SUCH_GROUP:
                raise
            self.hold(subject, group, Where(Whence.SEQUENCE, sequence))


def unknown(name: str, stored: Iterable[str], where: str) -> Misuse:
    """There is no such subject."""
    near = difflib.get_close_matches(name, stored, 1)
    hint = f"did you mean {near[0]!r}?" if near else "`fairway subjects` lists those that are there"
    return Misuse(f"no subject {name!r} at {where}: nothing was ever sent to it; {hint}")


def _dry(subject: str, begin: int, end: int, bytes_max: int) -> Scan:
    return Scan(subject, Whence.SEQUENCE, begin, end, bytes_max, None, 0, [], True)


def _matches(name: str, pattern: str) -> bool:
    """The broker's own subjects only where the pattern says so."""
    return fnmatch.fnmatchcase(name, pattern) and (":" not in name or ":" in pattern)
