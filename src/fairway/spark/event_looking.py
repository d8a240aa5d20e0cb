"""What a driver asks for the sake of events: where the action log begins and ends, and what is new."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from fairway.protocol.admin import Depth, Describe, Described, Scan, Seek, Sought
from fairway.protocol.messages import Whence
from fairway.protocol.tracing import Index, Indexed, Retrace, Retraced
from fairway.spark.calling import Ticket
from fairway.spark.event_log import Trail
from fairway.spark.event_options import HELD, EventOptions, is_meant
from fairway.spark.event_reading import ACTIONS, ENTRIES_MAX
from fairway.spark.looking import POLLS_MAX, Extent, Looker
from fairway.spark.options import Where
from fairway.spark.splits import SPLIT_BYTES, Range
from fairway.storage.action_log import walk
from fairway.storage.index_file import ENTRY_BYTES
from fairway.storage.record import Kind

# Of a message, in an index: a batch has some ten. Wrong by far does little harm: tasks are larger or smaller.
_MESSAGE_BYTES: Final = ENTRY_BYTES / 10


class EventLooker(Looker):
    """One driver's conversation with a broker."""

    def __init__(self, options: EventOptions) -> None:
        super().__init__(options.read)
        self._has_delayed = options.has_delayed
        self._trail = Trail(self._caller, None, is_strict=options.read.fail_on_data_loss)
        self._watches: dict[str, Ticket] = {}

    def extents(self) -> dict[str, Extent]:
        # One that was named may have nothing but delayed messages yet, and is no mistake then.
        stored = self._all(None) if self._has_delayed else super().extents()
        return {name: stored[name] for name in sorted(stored) if is_meant(name, self._options.subjects)}

    def actions(self) -> Retraced:
        """Which log it is, where it begins and ends."""
        return self._trail.look(Whence.LATEST)

    def position(self, place: Where) -> int:
        """The position that a place stands for now."""
        if place.whence is Whence.TIME:
            return self._trail.position_at(place.value)
        found = self.actions()
        return found.first_position if place.whence is Whence.EARLIEST else found.committed_end

    def held_ms(self, query: str) -> int:
        """When the query was first asked to begin at the latest place. That is the cursor of a group of its name, on a
        subject that nobody sends to, where all the broker's cursors are: it outlives driver and broker."""
        now_ms = self._caller.ask(Describe(Depth.SUBJECTS, HELD), Described).broker.now_ms
        held_ms = self.hold(HELD, query, Where(Whence.SEQUENCE, now_ms))
        if not held_ms:  # a driver died between making the group and setting it
            held_ms = self._caller.ask(Seek(HELD, query, Whence.SEQUENCE, now_ms), Sought).sequence
        return held_ms

    def boundary(self, position: int, end: int) -> int:
        return end if position >= end else self._trail.boundary(position, end)

    def reach_actions(self, begin: int, end: int, rows: int) -> tuple[int, int]:
        """The position up to which the action log has so many events, and how many it has: whole records, at least one.
        They are counted here, so the driver reads as much of the log as the micro-batch will."""
        counted = 0
        for each in self._trail.records(begin, end):
            more = sum(spot.ranges or 1 for spot in walk(each.body)) if each.header.kind == Kind.ACTIONS else 0
            if counted and counted + more > rows:
                return each.header.position, counted
            counted += more
        return end, counted

    def reach_entries(self, subject: str, begin: int, end: int, entries: int) -> int:
        """The sequence up to which so many batches reach."""
        at = begin
        while at < end and entries > 0:
            asked = Index(subject, Whence.SEQUENCE, at, end, min(entries, ENTRIES_MAX), None, True)
            found = self._caller.ask(asked, Indexed)
            if found.next_sequence <= at:
                return end
            at, entries = found.next_sequence, entries - max(found.entries, 1)
        return min(at, end)

    def pieces(self, begin: int, end: int, min_partitions: int | None) -> list[Range]:
        """A stretch of the action log, cut where records begin."""
        size = min(SPLIT_BYTES, (end - begin) // (min_partitions or 1) + 1)
        ranges = []
        while begin < end:
            edge = self.boundary(begin + size, end)
            ranges.append(Range(ACTIONS, begin, edge, 1.0))
            begin = edge
        return ranges

    def wait_for_any(self, position: int, ends: Mapping[str, int], wait_ms: int) -> None:
        """Until there is something behind this position, or one of these ends, or so long. One question each, kept open
        from one wait to the next."""
        watches = self._watches
        for name in [name for name, watch in watches.items() if watch.is_answered() or name not in {ACTIONS, *ends}]:
            del watches[name]
        if ACTIONS not in watches:
            watches[ACTIONS] = self._caller.put(Retrace(Whence.SEQUENCE, position, 0, None, wait_ms))
        polls = self._polls_of(ends, wait_ms)
        for name, ticket in polls:
            watches.setdefault(name, ticket)
        self._caller.wait_any(list(watches.values()), wait_ms / 1_000)

    def _polls_of(self, ends: Mapping[str, int], wait_ms: int) -> Iterable[tuple[str, Ticket]]:
        return [
            (name, self._caller.put(Scan(name, Whence.SEQUENCE, end, None, 0, None, wait_ms)))
            for name, end in list(ends.items())[:POLLS_MAX]
            if name not in self._watches
        ]


def of_subject(subject: str, begin: int, end: int) -> Range:
    return Range(subject, begin, end, _MESSAGE_BYTES)
