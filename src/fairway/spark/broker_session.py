"""A driver's conversation with one broker group: extents of subjects, positions, and a streaming query's progress.

The broker keeps the progress as the cursor of a group without consumers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from fairway.errors import Code, FairwayError, Misuse, Refused
from fairway.protocol.admin_messages import Depth, Describe, Described, Scan, Scanned, Seek, Sought
from fairway.protocol.messages import Done, Join, Joined, Leave, Whence
from fairway.spark.connection import Ticket
from fairway.spark.options import LATEST, Where
from fairway.spark.reader import awaited, explained
from fairway.spark.server_groups import ServerGroupAddress, caller_to

MEMBER: Final = "spark"  # the consumer that makes the group and leaves at once: progress is kept with seeks
POLLS_MAX: Final = 64  # subjects that an idle stream waits for; it looks at others once per poll


class SubjectExtent(NamedTuple):
    """The first stored sequence of a subject, and its committed end."""

    first: int
    end: int


class LogId(NamedTuple):
    """The id and the epoch of a message log."""

    id: int
    epoch: int


class BrokerSession:
    """Asks the copy that is read. Makes and moves the query's group at the master."""

    def __init__(self, place: ServerGroupAddress) -> None:
        self._place = place
        self.caller = caller_to(place)
        self._steering = self.caller if not place.is_replica else caller_to(place.of_master)
        self._polls: dict[str, Ticket] = {}
        self._absent: set[str] = set()  # subjects with nothing stored here, for which the broker refuses to wait
        self.log = LogId(0, 0)

    def close(self) -> None:
        self.caller.close()
        self._steering.close()

    # --- subjects ----------------------------------------------------------------------------------------------------

    def extents(self, asked: str | None = None) -> dict[str, SubjectExtent]:
        """The extents of every subject, or of one."""
        found: dict[str, SubjectExtent] = {}
        after = ""
        while True:
            page = self.described(self.caller.put(Describe(Depth.SUBJECTS, asked, None, after)))
            if page is None:
                return {}
            found.update({each.name: SubjectExtent(each.first_sequence, each.committed_end) for each in page.subjects})
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

    # --- places ------------------------------------------------------------------------------------------------------

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
        """Wait until this copy has the subject up to `end`; returns where the subject ends here by then."""
        wait_s = self._place.waits_s
        return awaited(self.caller, subject, end, self.log.id, wait_s) if wait_s else 0

    # --- waiting -----------------------------------------------------------------------------------------------------

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

    # --- the query's group -------------------------------------------------------------------------------------------

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
