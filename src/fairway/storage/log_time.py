"""The two times of a store: the append times that its logs write down, and the time by which their contents are old.

Append times never decrease within a segment. They go back where a segment begins, once the log is known to be ahead:

    the clock was ahead for less than an hour   a minute after it was put right: ages never followed it
    the clock was ahead for longer              an hour after it was put right: ages had followed it
    the clock is set back wrongly               not at all within an hour: append times stand still

So a message in front of such a segment was stored no later than that segment began, whatever its append time says. Its
*effective* time is the earlier of the two. Effective times never decrease: look-up by time and retention go by them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from fairway.storage.segment import Segment
from fairway.world.clock import Clock
from fairway.world.timekeeper import AGE_HOLD_MS, HOLD_MS, Timekeeper

IsAhead: TypeAlias = Callable[[int, int], bool]  # `LogClock.is_ahead`
AHEAD_MS = 60_000  # append times that are ahead by less stand still until the clock has caught up


class LogClock:
    """Dates what is appended to a log, as a `Clock`, and tells what is old.

    Where nobody knows what time it was when the log was written last, two times bound it: things are old by the earlier
    one, and append times are ahead by the later one. Both follow the clock after an hour.
    """

    def __init__(self, clock: Clock, newest_ms: int, aging_ms: int | None, latest_ms: int | None) -> None:
        """`newest_ms`: the last append time of the log. `aging_ms` and `latest_ms`: it was no earlier, and no later,
        when the process before wrote that down."""
        self._clock = clock
        self._begin(max(clock.wall_ms(), newest_ms), aging_ms, latest_ms)

    def _begin(self, dating_ms: int, aging_ms: int | None, latest_ms: int | None) -> None:
        self._dating = Timekeeper(self._clock, holds_back=True, since_ms=dating_ms)
        self._aging = Timekeeper(self._clock, hold_ms=AGE_HOLD_MS, holds_back=True, since_ms=aging_ms)
        self._latest = Timekeeper(self._clock, hold_ms=AGE_HOLD_MS, holds_back=True, since_ms=latest_ms)

    def take_over(self, newest_ms: int, written_ms: int) -> None:
        """Another process dated the log until now, by the clock of its machine; `written_ms` is the last time that it
        wrote down. Where the two clocks are apart, either may be wrong."""
        self._begin(max(self._dating.now_ms(), newest_ms), *self._bounds(written_ms))

    def _bounds(self, written_ms: int | None = None) -> tuple[int, int]:
        """No earlier and no later than which it is, by this clock and by what another process wrote down. Both look at
        the clock together, so that both see the same jumps."""
        aging_ms, latest_ms = self._aging.now_ms(), self._latest.now_ms()
        return (aging_ms, latest_ms) if written_ms is None else (min(aging_ms, written_ms), max(latest_ms, written_ms))

    def wall_ms(self) -> int:
        """The append time of now. A jump that is put right within a minute leaves no trace in it."""
        return self._dating.now_ms()

    def monotonic_ns(self) -> int:
        return self._clock.monotonic_ns()

    def aging_ms(self) -> int:
        """The time by which things are too old to be kept: a clock that jumps ahead makes nothing old for an hour."""
        return min(self._bounds()[0], self._clock.wall_ms())

    def ages_from_ms(self) -> int:
        """The time from which a thing ages that begins to do so now: a clock that is set back makes nothing old either,
        if it is put right within an hour."""
        return max(self._bounds()[0], self._clock.wall_ms())

    def is_ahead(self, appended_ms: int, now_ms: int) -> bool:
        """Whether this append time is known to be one of a clock that was ahead, and `now_ms` is not known to be one of
        a clock that is behind."""
        latest_ms = self._bounds()[1]
        return latest_ms + AHEAD_MS < appended_ms and latest_ms - AHEAD_MS <= now_ms

    def vouched_ms(self, segments: Sequence[Segment], written_ms: int | None = None) -> tuple[int, int]:
        """What a checkpoint says of the time, no earlier and no later than which it is: 0 where the append times tell,
        and where the later one is no other. `written_ms`: another process dates the log, as for `take_over`."""
        aging_ms, latest_ms = self._bounds(written_ms)
        newest_ms = max((each.newest_ms for each in segments), default=0)
        is_apart = latest_ms - aging_ms > HOLD_MS
        return aging_ms if newest_ms - aging_ms > HOLD_MS else 0, latest_ms if is_apart else 0


def effective_ms(segments: Sequence[Segment]) -> list[int]:
    """By segment: the effective time of its last record."""
    times: list[int] = []
    bound_ms: int | None = None
    for each in reversed(segments):
        times.append(each.newest_ms if bound_ms is None else min(each.newest_ms, bound_ms))
        if each.set_back_ms:
            bound_ms = each.set_back_ms if bound_ms is None else min(each.set_back_ms, bound_ms)
    return times[::-1]


def begin_at(segments: Sequence[Segment], time_ms: int) -> int:
    """A position: everything below it has an effective time before `time_ms`. From there on, append times at or after
    `time_ms` are followed by no earlier ones."""
    return max((each.base for each in segments if 0 < each.set_back_ms < time_ms), default=0)


def segment_at(segments: Sequence[Segment], time_ms: int) -> Segment | None:
    """The segment in which the first record with that effective time or a later one lies; None: there is none yet."""
    begin = begin_at(segments, time_ms)
    return next((each for each in segments if each.base >= begin and each.newest_ms >= time_ms), None)
