"""Streams whose rows lie in disorder: they are taken in the order of their places.

A relay takes rows as their time comes, which at first is the order in which they were written. Relays that die and
brokers that go away mix that up, and a broker refuses a row that is sent before those that it follows. Where all of a
stream is taken at once that does no harm. But of thousands of rows in no order, a thousand hold hardly two that follow
one another: a relay that takes them as they come stores two rows a second.

So a stream in which a row met a gap that another row can fill is remembered. Its rows are taken from the first on,
whatever their time, in every other round, and those that come up by themselves are put off. A stream rests for a while
if its first row is held by somebody else, or could not be stored: nobody is asked about it all the time, and other
streams do not wait for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from itertools import islice
from typing import Final

from sqlalchemy import Connection

from fairway.sql.rows import Claimed, OutboxRows

STREAMS_MAX: Final = 1_000  # that are looked for at once
IDS_MAX: Final = 10_000  # that are found at once: the whole table is read for them


class StreamRepair:
    """Those that one relay has met."""

    def __init__(self, rows: OutboxRows, rest_ms: int) -> None:
        self._rows = rows
        self._rest_ms = rest_ms
        self._until_ms: dict[int, int] = {}  # for each stream: until when it rests
        self._next: deque[tuple[str, int]] = deque()  # the rows to take, and their streams

    def __contains__(self, stream: object) -> bool:
        return stream in self._until_ms

    def add(self, stream: int) -> None:
        self._until_ms.setdefault(stream, 0)

    def is_busy(self, now_ms: int) -> bool:
        """Whether there is something to take, as far as is known."""
        return any(until_ms <= now_ms for until_ms in self._until_ms.values())

    def begin_again(self, streams: Collection[int | None]) -> None:
        """Something in these was not stored: what follows it there would meet a gap."""
        if not self._until_ms.keys().isdisjoint(streams):
            self._next = deque(each for each in self._next if each[1] not in streams)

    def rest(self, streams: Collection[int | None], now_ms: int) -> None:
        """These cannot be stored just now."""
        for stream in self._until_ms.keys() & streams:
            self._until_ms[stream] = now_ms + self._rest_ms

    def take(self, connection: Connection, now_ms: int, lease_ms: int, rows_max: int, bytes_max: int) -> Claimed:
        """The next rows of these streams, in the caller's transaction."""
        if not self._next:
            self._look(connection, now_ms)
        some = [self._next.popleft() for _ in range(min(rows_max, len(self._next)))]
        found = self._rows.claim_those(connection, [row_id for row_id, _ in some], now_ms, lease_ms, bytes_max)
        if len(found.rows) < len(some):  # too large, or somebody was faster
            self.begin_again({stream for _, stream in some})
        return found

    def _look(self, connection: Connection, now_ms: int) -> None:
        awake = (stream for stream, until_ms in self._until_ms.items() if until_ms <= now_ms)
        streams = list(islice(awake, STREAMS_MAX))
        found = self._rows.in_order(connection, streams, now_ms, IDS_MAX) if streams else []
        free: set[int] = set()
        held: set[int] = set()  # from some row on
        for row_id, stream, is_held in found:
            if is_held:
                held.add(stream)
            if stream not in held:
                free.add(stream)
                self._next.append((row_id, stream))
        is_all = len(found) < IDS_MAX
        for stream in streams:
            del self._until_ms[stream]
            if stream in free or not is_all or stream in held:
                self._until_ms[stream] = now_ms + self._rest_ms if stream in held - free else 0
