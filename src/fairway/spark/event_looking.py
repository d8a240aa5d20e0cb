"""What a driver asks for the sake of events: where the action logs begin and end, and what is new."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fairway.errors import Misuse
from fairway.protocol.admin import Depth, Describe, Described
from fairway.protocol.messages import Whence
from fairway.protocol.tracing import Index, Indexed, Retrace, Retraced
from fairway.spark.brokers import BrokerSession, SubjectExtent
from fairway.spark.calling import Ticket, wait_any_of
from fairway.spark.event_log import SparkActionLogReader
from fairway.spark.event_options import HELD, EventOptions, is_meant
from fairway.spark.event_reading import ACTIONS, ENTRIES_MAX, awaited_actions
from fairway.spark.looking import PlannerPort
from fairway.spark.options import Where
from fairway.spark.places import BROKER_GROUP, ServerGroupAddress, SubjectPart
from fairway.spark.splits import SPLIT_BYTES, ScanRange
from fairway.storage.action_log import walk
from fairway.storage.index_file import ENTRY_BYTES
from fairway.storage.record import RecordKind

# Of a message, in an index: a batch has some ten. Wrong by far does little harm: tasks are larger or smaller.
_MESSAGE_BYTES: Final = ENTRY_BYTES / 10


class EventBroker(BrokerSession):
    """A driver's conversation with one broker group, about its action log too."""

    def __init__(self, place: ServerGroupAddress, *, is_strict: bool) -> None:
        super().__init__(place)
        self._trail = SparkActionLogReader(self.caller, None, is_strict=is_strict)
        self._watch: Ticket | None = None

    def actions(self) -> Retraced:
        """Which log it is, where it begins and ends."""
        return self._trail.look(Whence.LATEST)

    def position(self, place: Where) -> int:
        """The position that a place stands for now."""
        if place.whence is Whence.TIME:
            return self._trail.position_at(place.value)
        found = self.actions()
        return found.first_position if place.whence is Whence.EARLIEST else found.committed_end

    def awaited_position(self, end: int) -> int:
        """Where the action log ends, when this copy has had the time to get as far as another one was."""
        return awaited_actions(self.caller, end, None, self._place.waits_s)

    def now_ms(self) -> int:
        return self.caller.ask(Describe(Depth.SUBJECTS, HELD), Described).broker.now_ms

    def boundary(self, position: int, end: int) -> int:
        return end if position >= end else self._trail.boundary(position, end)

    def reach_actions(self, begin: int, end: int, rows: int) -> tuple[int, int]:
        """The position up to which the action log has so many events, and how many it has: whole records, at least one.
        They are counted here, so the driver reads as much of the log as the micro-batch will."""
        counted = 0
        for each in self._trail.records(begin, end):
            more = sum(spot.ranges or 1 for spot in walk(each.body)) if each.header.kind == RecordKind.ACTIONS else 0
            if counted and counted + more > rows:
                return each.header.position, counted
            counted += more
        return end, counted

    def reach_entries(self, subject: str, begin: int, end: int, entries: int) -> int:
        """The sequence up to which so many batches reach."""
        at = begin
        while at < end and entries > 0:
            asked = Index(subject, Whence.SEQUENCE, at, end, min(entries, ENTRIES_MAX), None, True)
            found = self.caller.ask(asked, Indexed)
            if found.next_sequence <= at:
                return end
            at, entries = found.next_sequence, entries - max(found.entries, 1)
        return min(at, end)

    def pieces(self, begin: int, end: int, min_partitions: int | None) -> list[ScanRange]:
        """A stretch of the action log, cut where records begin."""
        size = min(SPLIT_BYTES, (end - begin) // (min_partitions or 1) + 1)
        ranges = []
        while begin < end:
            edge = self.boundary(begin + size, end)
            ranges.append(ScanRange(ACTIONS, begin, edge, 1.0, self._place.broker_group))
            begin = edge
        return ranges

    def watch(self, position: int, wait_ms: int) -> Ticket:
        """A question that is answered when there is something behind this position, kept open from one wait to the
        next."""
        if self._watch is None or self._watch.is_answered():
            self._watch = self.caller.put(Retrace(Whence.SEQUENCE, position, 0, None, wait_ms))
        return self._watch


class EventPlanner(PlannerPort[EventBroker]):
    """One driver's conversations with broker groups."""

    def __init__(self, options: EventOptions) -> None:
        super().__init__(options.read, lambda place: EventBroker(place, is_strict=options.read.fail_on_data_loss))
        self._has_delayed = options.has_delayed

    def extents(self) -> dict[SubjectPart, SubjectExtent]:
        # One that was named may have nothing but delayed messages yet, and is no mistake then.
        stored = self._everything() if self._has_delayed else super().extents()
        return {part: stored[part] for part in sorted(stored) if is_meant(part.subject, self._options.subjects)}

    def _everything(self) -> dict[SubjectPart, SubjectExtent]:
        groups = [BROKER_GROUP] if self.atlas is None else list(self.atlas.groups())
        return {
            SubjectPart(name, group): extent
            for group in groups
            for name, extent in self.broker(group).extents().items()
        }

    def groups(self, parts: Mapping[SubjectPart, SubjectExtent]) -> list[str]:
        """The broker groups that hold any of this; of one broker that is the one there is."""
        return [BROKER_GROUP] if self.atlas is None else sorted({part.broker_group for part in parts})

    def held_ms(self, query: str) -> int:
        """When the query was first asked to begin at the latest place. That is the cursor of a group of its name, on a
        subject that nobody sends to, where all the broker's cursors are: it outlives driver and broker. In a cluster it
        is held by the first broker group, unless another one has it already."""
        names = [BROKER_GROUP] if self.atlas is None else sorted(self.atlas.groups())
        if not names:
            raise Misuse(f"no broker group is registered at {self.where}: start brokers, with --registry and --group")
        holding = next((name for name in names if self.broker(name).cursor(HELD, query) is not None), names[0])
        broker = self.broker(holding)
        now_ms = broker.now_ms()
        held_ms = broker.hold(HELD, query, Where(Whence.SEQUENCE, now_ms))
        if not held_ms:  # a driver died between making the group and setting it
            broker.progress(HELD, query, now_ms)
        return held_ms or now_ms

    def wait_for_any(self, ends: Mapping[str, tuple[int, Mapping[str, int]]], wait_ms: int) -> None:
        """Until there is something behind the position, or one of the ends, of one of these broker groups, or so
        long."""
        waits = []
        for group, (position, sequences) in ends.items():
            broker = self.broker(group)
            waits.append((broker.caller, [broker.watch(position, wait_ms), *broker.poll(sequences, wait_ms)]))
        if waits:
            wait_any_of(waits, wait_ms / 1_000)


def of_subject(subject: str, begin: int, end: int, broker_group: str) -> ScanRange:
    return ScanRange(subject, begin, end, _MESSAGE_BYTES, broker_group)
