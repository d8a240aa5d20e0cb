"""Look-up by time where append times go back, compared with a walk over all entries."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fairway.runtime.rng import SeededRng
from fairway.simulation.disk import SimDisk
from fairway.storage import log as logs
from fairway.storage.consume_log import ConsumeLog, ConsumeLogEntry
from fairway.storage.segment import Segment

SEGMENT_BYTES = 1_000
EVERYTHING = 1 << 40
TIMES = st.lists(st.integers(1, 30), min_size=1, max_size=5).map(sorted)


@given(st.lists(TIMES, min_size=1, max_size=6), st.integers(0, 6))
def test_effective_times_never_decrease_and_are_what_is_found(dates: list[list[int]], sealed: int) -> None:
    log = ConsumeLog(SimDisk(SeededRng(0), lambda *_: None), 5, rebuild=lambda _: {})
    segments: list[Segment] = []
    appended: list[tuple[int, int]] = []  # time, and the segment's number
    for number, times in enumerate(dates):
        base = number * SEGMENT_BYTES
        is_back = bool(segments) and times[0] < segments[-1].newest_ms
        segments.append(Segment(base, base + SEGMENT_BYTES, times[-1], times[0] if is_back else 0))
        for index, time_ms in enumerate(times):
            position = base + 64 + 72 * index
            log.append(1, ConsumeLogEntry(len(appended), 1, 72, position, time_ms, 0, 1, len(appended)))
            appended.append((time_ms, number))
    for each in segments[: min(sealed, len(segments))]:
        log.seal(each.base, each.end)  # the runs stay in memory until the index is written
    effective = [min([time_ms, *(later[0] for later in dates[number + 1 :])]) for time_ms, number in appended]
    assert effective == sorted(effective)
    newest = [
        max(each for each, (_, own) in zip(effective, appended, strict=True) if own == number)
        for number in range(len(dates))
    ]
    assert logs.effective_ms(segments) == newest
    for time_ms in range(32):
        sequence = next((at for at, each in enumerate(effective) if each >= time_ms), None)
        assert log.sequence_at(1, time_ms, EVERYTHING, logs.begin_at(segments, time_ms)) == sequence
        found = logs.segment_at(segments, time_ms)
        assert (found and found.base // SEGMENT_BYTES) == (None if sequence is None else appended[sequence][1])
