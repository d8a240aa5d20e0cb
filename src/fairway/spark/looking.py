"""What a driver asks: which subjects there are, in which broker groups, where they begin and end, how far so many bytes
reach. One broker is a cluster of one group, which nobody has to ask a meta server for."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Generic, TypeVar

from fairway.client import url
from fairway.errors import Misuse
from fairway.limits import MIB
from fairway.protocol.admin import Depth, Describe, Scan
from fairway.spark.brokers import BrokerSession, LogId, SubjectExtent, dry
from fairway.spark.calling import wait_any_of
from fairway.spark.options import ReadOptions, Where, is_pattern
from fairway.spark.places import BROKER_GROUP, ServerGroupAddress, ServerGroups, SubjectPart
from fairway.spark.splits import ScanRange
from fairway.world import host

SAMPLE_BYTES: Final = 64 * MIB  # looked at, not read, to learn how large messages are

BrokerT = TypeVar("BrokerT", bound=BrokerSession)


class PlannerPort(Generic[BrokerT]):
    """One driver's conversations."""

    def __init__(self, options: ReadOptions, meet: Callable[[ServerGroupAddress], BrokerT]) -> None:
        self._options = options
        self._meet = meet
        self._brokers: dict[str, BrokerT] = {}
        is_cluster = bool(url.parse_any(options.url).meta)
        self.atlas = ServerGroups(options.url, options.patience_s) if is_cluster else None

    def close(self) -> None:
        for each in self._brokers.values():
            each.close()
        if self.atlas is not None:
            self.atlas.close()

    def broker(self, group: str) -> BrokerT:
        """The conversation with one broker group."""
        found = self._brokers.get(group)
        if found is None:
            found = self._brokers[group] = self._meet(self._options.place(group))
        return found

    @property
    def where(self) -> str:
        return self.broker(BROKER_GROUP).caller.where if self.atlas is None else self.atlas.where

    @property
    def logs(self) -> dict[str, LogId]:
        """Of the broker groups that were asked so far."""
        return {group: each.log for group, each in self._brokers.items() if each.log.id}

    def place(self, group: str) -> ServerGroupAddress:
        return self._options.place(group)

    # --- subjects ----------------------------------------------------------------------------------------------------

    def extents(self) -> dict[SubjectPart, SubjectExtent]:
        """The subjects that the options mean, in the order of their names."""
        return self._alone() if self.atlas is None else self._in_cluster(self.atlas)

    def _alone(self) -> dict[SubjectPart, SubjectExtent]:
        broker, names = self.broker(BROKER_GROUP), self._options.names
        alone = self._options.subjects[0] if len(self._options.subjects) == 1 else None
        stored = broker.extents(None if alone is None or is_pattern(alone) else alone)
        for name in names:
            if name not in stored:
                stored |= broker.extents(name)  # an inbox is shown only to who asks for it by its name
            if name not in stored:
                raise unknown(name, broker.extents(), self.where)
        wanted = set(names) | {name for name in stored if self._is_matched(name)}
        return {SubjectPart(name): stored[name] for name in sorted(wanted)}

    def _in_cluster(self, atlas: ServerGroups) -> dict[SubjectPart, SubjectExtent]:
        """A broker group that is to hold a subject and has nothing of it yet holds an empty one."""
        names = self._options.names
        held = atlas.holders(names) if names else {}
        for name in names:
            if not held.get(name):
                raise unknown(name, atlas.all_holders(), self.where)
        found = self._named([SubjectPart(name, group) for name in names for group in held[name]])
        self._check_known(atlas, found)
        if self._options.patterns:
            found |= self._matched(atlas)
        return {part: found[part] for part in sorted(found)}

    def _check_known(self, atlas: ServerGroups, found: Mapping[SubjectPart, SubjectExtent]) -> None:
        """A broker alone, asked as a meta server is, takes any name for that of a subject."""
        stored = {part.subject for part, extent in found.items() if extent.end}
        empty = [part.subject for part in found if part.subject not in stored]
        listed = atlas.all_holders() if empty else {}
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
            found[part] = (
                SubjectExtent(states[0].first_sequence, states[0].committed_end) if states else SubjectExtent(0, 0)
            )
        return found

    def _matched(self, atlas: ServerGroups) -> dict[SubjectPart, SubjectExtent]:
        """Of the brokers' own subjects, which a pattern may mean, meta servers know nothing."""
        held = {name: groups for name, groups in atlas.all_holders().items() if self._is_matched(name)}
        wants_internal = any(":" in pattern for pattern in self._options.patterns)
        groups = list(atlas.groups()) if wants_internal else [each for of in held.values() for each in of]
        found = {SubjectPart(name, group): SubjectExtent(0, 0) for name, of in held.items() for group in of}
        for group in sorted(set(groups)):
            stored = self.broker(group).extents()
            found |= {SubjectPart(name, group): stored[name] for name in stored if self._is_matched(name)}
        return found

    def _is_matched(self, name: str) -> bool:
        return any(_matches(name, pattern) for pattern in self._options.patterns)

    # --- places ------------------------------------------------------------------------------------------------------

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
        """The same, with about how many bytes each message has."""
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

    def reach(self, part: SubjectPart, begin: int, end: int, bytes_max: int) -> int:
        """The sequence up to which there are so many bytes; whole batches, and at least one."""
        return self.broker(part.broker_group).reach(part.subject, begin, end, bytes_max)

    def awaited(self, part: SubjectPart, end: int) -> int:
        """Where a subject ends that was seen to end later; 0: nobody but the one that said so can know."""
        return self.broker(part.broker_group).awaited(part.subject, end)

    # --- waiting -----------------------------------------------------------------------------------------------------

    def wait(self, ends: Mapping[SubjectPart, int], wait_ms: int) -> None:
        """Until something is stored behind one of these ends, or so long."""
        of: dict[str, dict[str, int]] = {}
        for part, end in ends.items():
            of.setdefault(part.broker_group, {})[part.subject] = end
        waits = [(self.broker(group).caller, self.broker(group).poll(each, wait_ms)) for group, each in of.items()]
        if waits:
            wait_any_of(waits, wait_ms / 1_000)
        else:
            host.sleep(wait_ms / 1_000)  # nothing is there yet that a pattern means

    # --- the query's group -------------------------------------------------------------------------------------------

    def hold(self, part: SubjectPart, group: str, place: Where) -> int:
        """Where the group stands on the subject; one that is new is made, and stands at `place` from then on."""
        return self.broker(part.broker_group).hold(part.subject, group, place)

    def progress(self, part: SubjectPart, group: str, sequence: int) -> None:
        """The query is done with everything below `sequence`."""
        self.broker(part.broker_group).progress(part.subject, group, sequence)


class Planner(PlannerPort[BrokerSession]):
    """What a driver asks for the sake of messages."""

    def __init__(self, options: ReadOptions) -> None:
        super().__init__(options, BrokerSession)


def unknown(name: str, stored: Iterable[str], where: str) -> Misuse:
    """There is no such subject."""
    near = difflib.get_close_matches(name, stored, 1)
    hint = f"did you mean {near[0]!r}?" if near else "`fairway subjects` lists those that are there"
    return Misuse(f"no subject {name!r} at {where}: nothing was ever sent to it; {hint}")


def _matches(name: str, pattern: str) -> bool:
    """The broker's own subjects only where the pattern says so."""
    return fnmatch.fnmatchcase(name, pattern) and (":" not in name or ":" in pattern)
