"""Streams whose rows lie in disorder: they are taken in the order of their places.

A relay takes rows as their time comes, which at first is the order in which they were written. Relays that die and
brokers that go away mix that up, and a broker refuses a row that is sent before those that it follows. Where all of a
stream is taken at once that does no harm. But of thousands of rows in no order, a thousand hold hardly two that follow
one another: a relay that takes them as they come stores two rows a second.

So a stream in which a row met a gap that another row can fill is remembered. Its rows are taken from the first on,
whatever their time, and those that come up otherwise are put off. Where somebody else holds the first one, the stream
is his affair.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from itertools import islice
from typing import Final

from sqlalchemy import Connection

from fairway.sql.letters import Row
from fairway.sql.rows import OutboxRows

STREAMS_MAX: Final = 1_000  # that are looked for at once
IDS_MAX: Final = 10_000  # that are found at once: the whole table is read for them


class Untangling:
    """Those that one relay has met."""

    def __init__(self, rows: OutboxRows) -> None:
        self._rows = rows
        self._streams: dict[int, None] = {}
        self._ids: deque[str] = deque()  # of the rows to take next

    def __contains__(self, stream: object) -> bool:
        return stream in self._streams

    def add(self, stream: int) -> None:
        self._streams[stream] = None

    def begin_again(self, unsent: Collection[int | None]) -> None:
        """In these streams something was not stored: what follows it would meet a gap."""
        if not self._streams.keys().isdisjoint(unsent):
            self._ids.clear()

    def take(self, connection: Connection, now_ms: int, lease_ms: int, rows_max: int, bytes_max: int) -> list[Row]:
        """The next rows of these streams, in the caller's transaction."""
        if self._streams and not self._ids:
            self._look(connection, now_ms)
        ids = [self._ids.popleft() for _ in range(min(rows_max, len(self._ids)))]
        found = self._rows.claim_those(connection, ids, now_ms, lease_ms, bytes_max) if ids else []
        if len(found) < len(ids):  # too large, or somebody was faster
            self._ids.clear()
        return found

    def _look(self, connection: Connection, now_ms: int) -> None:
        streams = list(islice(self._streams, STREAMS_MAX))
        found = self._rows.in_order(connection, streams, now_ms, IDS_MAX)
        held: set[int] = set()  # from some row on
        free: set[int] = set()
        for row_id, stream, is_held in found:
            if is_held:
                held.add(stream)
            if stream not in held:
                free.add(stream)
                self._ids.append(row_id)
        is_all = len(found) < IDS_MAX
        for stream in streams:
            if stream not in free and (is_all or stream in held):
                del self._streams[stream]
