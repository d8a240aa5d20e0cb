"""What the broker counts as it goes: what was answered and refused, and how long the disk took.

Whatever can be asked when somebody looks (lag, connections, room) is not counted here: `metrics` asks for it then.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from fairway.errors import Code
from fairway.protocol import Bytes, ControlMessage
from fairway.protocol.admin import Scanned
from fairway.protocol.messages import Produced, Pulled, Settled
from fairway.world.clock import Clock

# Upper bounds, in ms: from a write cache that answers at once to a disk that has lost its way.
SYNC_MS_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 1_000.0)


class Histogram:
    """How many were at most so large, for fixed bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)  # the last: larger than all bounds
        self.total = 0.0

    def note(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class SyncWatch:
    """Times the syncs of one log, of which one is under way at most."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._begun_ns = 0
        self.times_ms = Histogram(SYNC_MS_BUCKETS)

    def begun(self) -> None:
        self._begun_ns = self._clock.monotonic_ns()

    def ended(self) -> None:
        self.times_ms.note((self._clock.monotonic_ns() - self._begun_ns) / 1e6)


class ServerCounters:
    """Counters of one broker's life; they only grow."""

    def __init__(self) -> None:
        self.connections = 0
        self.duplicate_messages = 0
        self.pulls = 0
        self.pulled_bytes = 0  # whole batches, as they were sent
        self.settled_messages = 0
        self.stale_messages = 0  # settled by somebody who no longer held them
        self.scanned_bytes = 0
        self.refusals: Counter[Code] = Counter()

    def refused(self, code: Code) -> None:
        self.refusals[code] += 1

    def answered(self, message: ControlMessage, attachments: Sequence[Bytes]) -> None:
        """Count by what was answered: every answer passes here, whichever part of the broker gave it."""
        if isinstance(message, Produced):
            self.duplicate_messages += message.count if message.is_duplicate else 0
        elif isinstance(message, Pulled):
            self.pulls += 1
            self.pulled_bytes += sum(map(len, attachments))
        elif isinstance(message, Settled):
            self.settled_messages += message.settled
            self.stale_messages += message.stale
        elif isinstance(message, Scanned):
            self.scanned_bytes += sum(map(len, attachments))
