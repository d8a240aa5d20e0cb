"""A driver's questions to broker groups: which subjects exist and where, their extents, positions and sizes.

`BrokerSession` is the conversation with one broker group. It also keeps the progress of a streaming query, as the
cursor of a group without consumers. `Planner` asks all broker groups of a cluster; a broker that is named by its
address counts as a cluster of one group, and needs no meta server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, Generic, NamedTuple, Self, TypeVar

from fairway.client import url
from fairway.errors import Code, FairwayError, Misuse, Refused
from fairway.limits import MIB
from fairway.protocol.admin_messages import Depth, Describe, Described, Scan, Scanned, Seek, Sought, SubjectDescription
from fairway.protocol.messages import Done, Join, Joined, Leave, Whence
from fairway.runtime import host
from fairway.spark.connection import Ticket, wait_any_of
from fairway.spark.options import LATEST, ReadOptions, Where, hint, is_pattern, matches
from fairway.spark.reader import ScanRange, awaited, explained
from fairway.spark.server_groups import BROKER_GROUP, ServerGroupAddress, ServerGroups, SubjectPart, caller_to

MEMBER: Final = "spark"  # the consumer that makes the group and leaves at once: progress is kept with seeks
POLLS_MAX: Final = 64  # subjects that an idle stream waits for; it looks at others once per poll


class SubjectExtent(NamedTuple):
    """The first stored sequence of a subject, and its committed end."""

    first: int
    end: int

    @classmethod
    def of(cls, described: SubjectDescription) -> Self:
        return cls(described.first_sequence, described.committed_end)


class LogId(NamedTuple):
    """The id and the epoch of a message log."""

    id: int
    epoch: int


class BrokerSession:
    """Asks the copy that is read. Makes and moves the query's group at the master."""

    def __init__(self, place: ServerGroupAddress) -> None:
        self._place = place
        self.caller = caller_to(place)
        self._steering = self.caller if not place.is_replica else caller_to(place._replace(is_replica=False))
        self._polls: dict[str, Ticket] = {}
        self._absent: set[str] = set()  # subjects with nothing stored here, for which the broker refuses to wait
        self.log = LogId(0, 0)

    def close(self) -> None:
        self.caller.close()
        self._steering.close()

    def extents(self, asked: str | None = None) -> dict[str, SubjectExtent]:
        """The extents of every subject, or of one."""
        found: dict[str, SubjectExtent] = {}
        after = ""
        while True:
            page = self.described(self.caller.put(Describe(Depth.SUBJECTS, asked, None, after)))
            if page is None:
                return {}
            found.update({each.name: SubjectExtent.of(each) for each in page.subjects})
            if not page.next:
                return found
            after = page.next

    def described(self, ticket: Ticket) -> Described | None:
        """None: there is no such subject."""
        try:
            page = self.caller.take(ticket, Described)[0]
        except Refused as refused:
            if refused.code is Code.NO_SUCH_SUBJECT:
                return None
            raise
        self.log = LogId(page.broker.log_id, page.broker.epoch)
        return page

    def scanned(self, subject: str, ticket: Ticket) -> Scanned:
        try:
            return self.caller.take(ticket, Scanned)[0]
        except Refused as refused:
            if refused.code is Code.NO_SUCH_SUBJECT and self._place.has_copies:
                return Scanned([], 0, 0, 0, self.log.id, self.log.epoch)  # other broker groups have the subject
            raise explained(refused, subject, self.caller.where) from refused

    def reach(self, subject: str, begin: int, end: int, bytes_max: int) -> int:
        """The sequence up to which there are `bytes_max` bytes: whole batches, and at least one."""
        at, left = begin, bytes_max
        while at < end and left > 0:
            scanned = self.scanned(subject, self.caller.put(dry(subject, at, end, left)))
            left -= scanned.size_bytes
            if scanned.next_sequence <= at or not scanned.size_bytes:
                return end  # no batch is left before the end, only a hole
            if left < 0 and at > begin:
                return at  # the last batch was too much
            at = scanned.next_sequence
        return min(at, end)

    def awaited(self, subject: str, end: int) -> int:
        """Wait until this copy has the subject up to `end`; returns where the subject ends here by then. 0: there is no
        other copy that could know."""
        wait_s = self._place.waits_s
        return awaited(self.caller, subject, end, self.log.id, wait_s) if wait_s else 0

    def poll(self, ends: Mapping[str, int], wait_ms: int) -> list[Ticket]:
        """Requests that the broker answers when a subject has something behind its end. There is one per subject, kept
        open from one wait to the next."""
        for name, poll in list(self._polls.items()):
            if poll.is_answered() or name not in ends:
                del self._polls[name]
            if isinstance(poll.outcome, Refused):
                self._absent.add(name)
        self._absent = {name for name in self._absent if not ends.get(name)}
        waited = [name for name in ends if name not in self._absent]
        for name in waited[:POLLS_MAX]:
            if name not in self._polls:
                self._polls[name] = self.caller.put(Scan(name, Whence.SEQUENCE, ends[name], None, 0, None, wait_ms))
        return list(self._polls.values())

    def hold(self, subject: str, group: str, place: Where) -> int:
        """The group's cursor on the subject. A missing group is made, with its cursor at `place`."""
        cursor = self.cursor(subject, group)
        if cursor is not None:
            return cursor
        start = Whence.LATEST if place == LATEST else Whence.EARLIEST
        self._steering.ask(Join(subject, group, MEMBER, 0, 0, start), Joined)
        self._steering.ask(Leave(subject, group, MEMBER, 0), Done)
        if place.whence in {Whence.TIME, Whence.SEQUENCE}:
            return self._seek(subject, group, place)
        made = self.cursor(subject, group)
        if made is None:
            raise FairwayError(f"group {group} on {subject} was made and is gone: is somebody removing it?")
        return made

    def cursor(self, subject: str, group: str) -> int | None:
        """The group's cursor; None: there is no such group."""
        try:
            described = self._steering.ask(Describe(Depth.GROUPS, subject, group), Described)
        except Refused as refused:
            if refused.code in {Code.NO_SUCH_GROUP, Code.NO_SUCH_SUBJECT}:
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
        """Move the cursor: the query is done with everything below `sequence`."""
        try:
            self._seek(subject, group, Where(Whence.SEQUENCE, sequence))
        except Refused as refused:
            if refused.code is not Code.NO_SUCH_GROUP:
                raise
            self.hold(subject, group, Where(Whence.SEQUENCE, sequence))

    def _seek(self, subject: str, group: str, place: Where) -> int:
        return self._steering.ask(Seek(subject, group, place.whence, place.value), Sought).sequence


def dry(subject: str, begin: int, end: int, bytes_max: int) -> Scan:
    return Scan(subject, Whence.SEQUENCE, begin, end, bytes_max, None, 0, [], True)


SAMPLE_BYTES: Final = 64 * MIB  # of the log that a dry scan covers, to learn how large messages are

BrokerT = TypeVar("BrokerT", bound=BrokerSession)


class BasePlanner(Generic[BrokerT]):
    """A driver's conversations with broker groups, and with the meta servers of a cluster."""

    def __init__(self, options: ReadOptions, meet: Callable[[ServerGroupAddress], BrokerT]) -> None:
        self._options = options
        self._meet = meet
        self._brokers: dict[str, BrokerT] = {}
        is_cluster = bool(url.parse_any(options.url).meta)
        self.server_groups = ServerGroups(options.url, options.patience_s) if is_cluster else None

    def close(self) -> None:
        for each in self._brokers.values():
            each.close()
        if self.server_groups is not None:
            self.server_groups.close()

    def broker(self, group: str) -> BrokerT:
        """The conversation with one broker group."""
        found = self._brokers.get(group)
        if found is None:
            found = self._brokers[group] = self._meet(self._options.place(group))
        return found

    @property
    def where(self) -> str:
        return self.broker(BROKER_GROUP).caller.where if self.server_groups is None else self.server_groups.where

    @property
    def logs(self) -> dict[str, LogId]:
        """The logs of the broker groups that were asked so far."""
        return {group: each.log for group, each in self._brokers.items() if each.log.id}

    def extents(self) -> dict[SubjectPart, SubjectExtent]:
        """The extents of the subjects that the options mean, in the order of their names."""
        return self._alone() if self.server_groups is None else self._in_cluster(self.server_groups)

    def _alone(self) -> dict[SubjectPart, SubjectExtent]:
        broker, names = self.broker(BROKER_GROUP), self._options.names
        alone = self._options.subjects[0] if len(self._options.subjects) == 1 else None
        stored = broker.extents(None if alone is None or is_pattern(alone) else alone)
        for name in names:
            if name not in stored:
                stored |= broker.extents(name)  # a broker lists an inbox only if asked for the inbox by name
            if name not in stored:
                raise unknown(name, broker.extents(), self.where)
        wanted = set(names) | {name for name in stored if self._is_matched(name)}
        return {SubjectPart(name): stored[name] for name in sorted(wanted)}

    def _in_cluster(self, server_groups: ServerGroups) -> dict[SubjectPart, SubjectExtent]:
        """Extents in a cluster. A broker group that is to hold a subject, and has nothing of it yet, has an empty
        extent."""
        names = self._options.names
        held = server_groups.holders(names) if names else {}
        for name in names:
            if not held.get(name):
                raise unknown(name, server_groups.all_holders(), self.where)
        found = self._named([SubjectPart(name, group) for name in names for group in held[name]])
        self._check_known(server_groups, found)
        if self._options.patterns:
            found |= self._matched(server_groups)
        return {part: found[part] for part in sorted(found)}

    def _check_known(self, server_groups: ServerGroups, found: Mapping[SubjectPart, SubjectExtent]) -> None:
        """Refuse subjects that do not exist: a single broker that acts as meta server accepts any name of a subject."""
        stored = {part.subject for part, extent in found.items() if extent.end}
        empty = [part.subject for part in found if part.subject not in stored]
        listed = server_groups.all_holders() if empty else {}
        for name in empty:
            if name.rpartition(":")[2] not in listed:
                raise unknown(name, listed, self.where)

    def _named(self, parts: Iterable[SubjectPart]) -> dict[SubjectPart, SubjectExtent]:
        tickets = [
            (part, self.broker(part.broker_group).caller.put(Describe(Depth.SUBJECTS, part.subject))) for part in parts
        ]
        found = {}
        for part, ticket in tickets:
            page = self.broker(part.broker_group).described(ticket)
            states = [] if page is None else [each for each in page.subjects if each.name == part.subject]
            found[part] = SubjectExtent.of(states[0]) if states else SubjectExtent(0, 0)
        return found

    def _matched(self, server_groups: ServerGroups) -> dict[SubjectPart, SubjectExtent]:
        """The subjects that match a pattern. Meta servers do not know the brokers' internal subjects, so broker groups
        are asked for those."""
        held = {name: groups for name, groups in server_groups.all_holders().items() if self._is_matched(name)}
        wants_internal = any(":" in pattern for pattern in self._options.patterns)
        groups = list(server_groups.groups()) if wants_internal else [each for of in held.values() for each in of]
        found = {SubjectPart(name, group): SubjectExtent(0, 0) for name, of in held.items() for group in of}
        for group in sorted(set(groups)):
            stored = self.broker(group).extents()
            found |= {SubjectPart(name, group): stored[name] for name in stored if self._is_matched(name)}
        return found

    def _is_matched(self, name: str) -> bool:
        return any(matches(name, pattern) for pattern in self._options.patterns)

    def resolve(self, places: Mapping[SubjectPart, Where]) -> dict[SubjectPart, int]:
        """The sequences that these places stand for now."""
        tickets = {
            part: self.broker(part.broker_group).caller.put(Scan(part.subject, place.whence, place.value, None, 0))
            for part, place in places.items()
        }
        return {
            part: self.broker(part.broker_group).scanned(part.subject, ticket).next_sequence
            for part, ticket in tickets.items()
        }

    def measured(self, ranges: Iterable[ScanRange]) -> list[ScanRange]:
        """The ranges, each with the mean size of its messages."""
        tickets = [
            (each, self.broker(each.broker_group).caller.put(dry(each.subject, each.begin, each.end, SAMPLE_BYTES)))
            for each in ranges
        ]
        measured = []
        for each, ticket in tickets:
            scanned = self.broker(each.broker_group).scanned(each.subject, ticket)
            messages = scanned.next_sequence - max(each.begin, scanned.first_sequence)
            mean = scanned.size_bytes / messages if messages > 0 and scanned.size_bytes else each.message_bytes
            measured.append(each._replace(message_bytes=mean))
        return measured

    def wait(self, ends: Mapping[SubjectPart, int], wait_ms: int) -> None:
        """Wait until something is stored behind one of these ends, or for `wait_ms`."""
        of: dict[str, dict[str, int]] = {}
        for part, end in ends.items():
            of.setdefault(part.broker_group, {})[part.subject] = end
        waits = [(self.broker(group).caller, self.broker(group).poll(each, wait_ms)) for group, each in of.items()]
        if waits:
            wait_any_of(waits, wait_ms / 1_000)
        else:
            host.sleep(wait_ms / 1_000)  # no subject matches the patterns yet


class Planner(BasePlanner[BrokerSession]):
    """The planner of reads of messages."""

    def __init__(self, options: ReadOptions) -> None:
        super().__init__(options, BrokerSession)


def unknown(name: str, stored: Iterable[str], where: str) -> Misuse:
    """The error for a subject that does not exist."""
    more = hint(name, stored, "`fairway subjects` lists those that are there")
    return Misuse(f"no subject {name!r} at {where}: nothing was ever sent to it; {more}")
