"""Which connections a server reads on: bounds on frames that have arrived in part, and turns for those that send much.

`FrameAdmission` reads on in a large frame only with room for all of it.

    small frame     read as it comes. If parts of small frames exceed their bound, the oldest part goes (`Budget`)
    large frame     its header states its length. With room, the frame is granted that length and read to its end.
                    Without, its connection is not read, and waits in line: first come, first served
    granted         until the frame is whole. While others wait, a sender that stands still or is too slow is
                    dismissed, so every grant ends, and so does the line
    waiting         bounded in number and in time. A sender beyond either bound is told to come back (BUSY)

Without grants, large frames compete for one bound, and the oldest gives way. Then twelve senders of 63 MiB evict one
another for ever, each shortly before its end.

Small frames never wait for large ones. Grants may take the whole bound. Parts of small frames may use the room that
grants leave, and always an eighth of the bound beside it.

`ReadThrottle` is the queue of connections that send more than a helping at a time, so that no other connection waits
for them. A loop would serve a connection for as long as it has bytes. So a connection that sends thousands of small
requests at once, or a large frame at full speed, would hold up all others. A session reads each connection one helping
at a time (`session` sets its size). A connection that has more, or has used more of the loop than others, joins this
queue.

In every turn of the loop the throttle serves the connections that have used the least, for a bounded time, and lets a
bounded number of them send on. After a chunk of a large frame it skips two turns: all others have the loop. An empty
turn takes some microseconds, so a sender of large frames on an idle broker loses no speed.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

from fairway import limits
from fairway.runtime.clock import Clock
from fairway.serving.memory_budget import Budget

SenderT = TypeVar("SenderT")

_NS_PER_MS = 1_000_000
_NS_PER_S = 1_000_000_000
_STALL_NS = limits.FRAME_STALL_MS * _NS_PER_MS
_WAIT_NS = limits.FRAME_WAIT_MS * _NS_PER_MS
_SMALL_SHARE = 8  # an eighth of the bound, which grants never take
_TIMER_SLACK_S = 0.001  # uvloop rounds to milliseconds

STALLED = "the broker has too many frames of which only a part has come, and this one stands still"
OLDEST = "the broker has too many frames of which only a part has come, and this one is the oldest"
CROWDED = f"{limits.LARGE_FRAMES_WAITING_MAX} large frames wait for room already: send it again later"
OVERDUE = "no room for a frame of this size came up in time: send it again later"


@dataclass(slots=True)
class _Grant:
    size: int
    moved_ns: int  # when bytes last arrived
    until_ns: int  # when the frame is whole if its sender is fast enough


@dataclass(slots=True)
class _Turn:
    """A place in the line."""

    size: int
    since_ns: int


class FrameAdmission(Generic[SenderT]):
    """The frames of all connections.

    `weigh`: the bytes that a sender has of a frame. `listens`: whether the server reads the sender; if not, its silence
    is not its fault. `go_on`: the sender is granted its frame. `dismiss`: the sender is dismissed, with a reason.
    """

    def __init__(
        self,
        bytes_max: int,
        clock: Clock,
        call_later: Callable[..., asyncio.TimerHandle],
        weigh: Callable[[SenderT], int],
        listens: Callable[[SenderT], bool],
        go_on: Callable[[SenderT], None],
        dismiss: Callable[[SenderT, str], None],
    ) -> None:
        self.bytes_max = bytes_max
        self.granted_bytes = 0
        self._clock = clock
        self._call_later = call_later
        self._listens = listens
        self._go_on = go_on
        self._dismiss = dismiss
        self._small: Budget[SenderT] = Budget(bytes_max, weigh, lambda sender: dismiss(sender, OLDEST))
        self._grants: dict[SenderT, _Grant] = {}
        self._line: dict[SenderT, _Turn] = {}
        self._sent_away = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def taken_bytes(self) -> int:
        """The granted bytes, and the parts of small frames. Beside these, each sender in the line holds the bytes that
        came with its header, one read of at most 256 KiB."""
        return self.granted_bytes + self._small.taken_bytes

    @property
    def evictions(self) -> int:
        return self._sent_away + self._small.evictions

    @property
    def waiting(self) -> int:
        return len(self._line)

    def note(self, sender: SenderT, frame_bytes: int, *, anew: bool) -> bool:
        """Note that a part of a frame has arrived. Returns whether the server reads the sender on.

        `frame_bytes` is the length of the frame; 0: its header is not whole, or nothing is partial. `anew`: the frame
        is another than before.
        """
        if anew:
            self._release(sender)
        if frame_bytes <= limits.LARGE_FRAME_BYTES:
            self._small.note(sender, anew=anew)
            is_read = True
        elif sender in self._grants:
            self._grants[sender].moved_ns = self._clock.monotonic_ns()
            is_read = True
        elif sender in self._line:
            is_read = False
        else:
            is_read = self._ask(sender, frame_bytes)
        if anew:
            self._serve_line()
        return is_read

    def forget(self, sender: SenderT) -> None:
        """Forget a sender that is gone."""
        self._small.forget(sender)
        if self._release(sender):
            self._serve_line()

    # --- the line ----------------------------------------------------------------------------------------------------

    def _ask(self, sender: SenderT, size: int) -> bool:
        self._small.forget(sender)
        if not self._line and self._has_room(size):
            self._grant(sender, size)
            return True
        if len(self._line) >= limits.LARGE_FRAMES_WAITING_MAX:
            self._send_away(sender, CROWDED)
            return False
        self._line[sender] = _Turn(size, self._clock.monotonic_ns())
        self._serve_line()
        return sender in self._grants

    def _serve_line(self) -> None:
        """Grant frames while there is room, and dismiss senders that keep others waiting."""
        now_ns = self._clock.monotonic_ns()
        while self._line:
            sender, turn = next(iter(self._line.items()))
            if self._has_room(turn.size):
                del self._line[sender]
                self._grant(sender, turn.size)
                self._go_on(sender)
            elif (holder := self._overdue_holder(now_ns)) is not None:
                self._release(holder)
                self._send_away(holder, STALLED)
            elif now_ns - turn.since_ns >= _WAIT_NS:
                del self._line[sender]
                self._send_away(sender, OVERDUE)
            else:
                break
        self._arm(now_ns)

    def _has_room(self, size: int) -> bool:
        """Whether the frame fits. Without other grants any frame fits, however large."""
        return not self._grants or self.granted_bytes + size <= self.bytes_max

    def _overdue_holder(self, now_ns: int) -> SenderT | None:
        """The sender that has stood still, or has been too slow, for longest."""
        for sender, grant in self._grants.items():
            if not self._listens(sender):
                grant.moved_ns = now_ns
        overdue = [each for each in self._grants if self._due_ns(self._grants[each]) <= now_ns]
        return min(overdue, key=lambda each: self._due_ns(self._grants[each]), default=None)

    @staticmethod
    def _due_ns(grant: _Grant) -> int:
        return min(grant.moved_ns + _STALL_NS, grant.until_ns)

    def _arm(self, now_ns: int) -> None:
        """Set one timer, as long as the line is not empty."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._line:
            first = next(iter(self._line.values()))
            due_ns = min((first.since_ns + _WAIT_NS, *map(self._due_ns, self._grants.values())))
            delay_s = max(due_ns - now_ns, 0) / _NS_PER_S
            self._timer = self._call_later(delay_s + _TIMER_SLACK_S, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        self._serve_line()

    # --- grants ------------------------------------------------------------------------------------------------------

    def _grant(self, sender: SenderT, size: int) -> None:
        now_ns = self._clock.monotonic_ns()
        time_ns = limits.FRAME_GRACE_MS * _NS_PER_MS + size * _NS_PER_S // limits.FRAME_BYTES_PER_S_MIN
        self._grants[sender] = _Grant(size, now_ns, now_ns + time_ns)
        self._resize(size)

    def _release(self, sender: SenderT) -> bool:
        """Release the sender's grant or place. Returns whether there was any."""
        grant = self._grants.pop(sender, None)
        if grant is not None:
            self._resize(-grant.size)
        return self._line.pop(sender, None) is not None or grant is not None

    def _resize(self, size: int) -> None:
        self.granted_bytes += size
        self._small.set_bound(max(self.bytes_max - self.granted_bytes, self.bytes_max // _SMALL_SHARE))

    def _send_away(self, sender: SenderT, why: str) -> None:
        self._sent_away += 1
        self._dismiss(sender, why)


WaiterT = TypeVar("WaiterT")

TURN_NS_MAX = 100_000  # half a slice of the actors: a small request of another client takes six turns of the loop
FREE_TURNS = 2  # after a chunk of a large frame: a small request takes six turns, and so waits for two chunks, not six
SENDERS_MAX = 1  # per turn: it may then send a chunk, 256 KB, whose page faults take 0.3 ms (bench/hostile)


class ReadThrottle(Generic[WaiterT]):
    """Serves the waiter that has used the least first.

    `used` returns what a waiter has used. `serve` reads a helping of the waiter, and returns whether the waiter goes on
    sending. If not, a waiter with more to read has joined again.
    """

    def __init__(
        self,
        clock: Clock,
        call_soon: Callable[[Callable[[], None]], object],
        serve: Callable[[WaiterT], bool],
        used: Callable[[WaiterT], float],
    ) -> None:
        self._clock = clock
        self._call_soon = call_soon
        self._serve = serve
        self._used = used
        self._queue: list[tuple[float, int, WaiterT]] = []
        self._numbers = count()
        self._is_called = False
        self._free_turns = 0  # the next turns of the loop in which no waiter is served

    def __len__(self) -> int:
        return len(self._queue)

    def join(self, waiter: WaiterT) -> None:
        heapq.heappush(self._queue, (self._used(waiter), next(self._numbers), waiter))
        self._call()

    def rest(self) -> None:
        """Leave the next turns of the loop to all others, after a chunk of a large frame. Chunks of small requests do
        not call this: connections that have used more than their share wait here too, and would wait longer."""
        self._free_turns = FREE_TURNS

    def _call(self) -> None:
        if self._queue and not self._is_called:
            self._is_called = True
            self._call_soon(self._turn)

    def _turn(self) -> None:
        self._is_called = False
        if self._free_turns:
            self._free_turns -= 1
            self._call()
            return
        end_ns = self._clock.monotonic_ns() + TURN_NS_MAX
        senders = 0
        try:
            while self._queue and senders < SENDERS_MAX:
                senders += self._serve(heapq.heappop(self._queue)[2])
                if self._clock.monotonic_ns() >= end_ns:
                    break
        finally:
            self._call()
