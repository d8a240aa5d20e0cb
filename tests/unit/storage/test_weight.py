"""The estimates of memory in a store against what Python has allocated, and what goes where they reach their bounds."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable

import pytest

from fairway import batch, limits
from fairway.batch.identity import verifier_of
from fairway.errors import Code, Refused
from fairway.names import Subject
from fairway.storage.dedupe import DedupeWindow
from fairway.storage.subjects import SubjectTable

RATIO_MIN, RATIO_MAX = 1.0, 2.2  # a subject counts its place in an index, too


def _header(producer_id: int, sequence: int) -> batch.BatchHeader:
    return batch.peek(batch.encode([b"x"], producer_id=producer_id, first_sequence=sequence, created_ms=1))


def _send(window: DedupeWindow, producer_id: int, batches: int) -> None:
    statement = producer_id.to_bytes(8, "little") + verifier_of(bytes(16), producer_id)
    window.state(statement, 7, 10**9)
    for sequence in range(batches):
        window.note(_header(producer_id, sequence), 7, 10**9 + sequence, 10**12 + sequence, 10**12)


def _streams(batches: int) -> DedupeWindow:
    window = DedupeWindow()
    for number in range(500):
        _send(window, 10**18 + number, batches)
    return window


def _subjects() -> SubjectTable:
    table = SubjectTable()
    for number in range(2_000):
        table.introduce(Subject(f"{number}".ljust(200, "x")), 10**9 + number)
    return table


def _estimate(made: DedupeWindow | SubjectTable) -> int:
    return made.held_bytes if isinstance(made, DedupeWindow) else len(made) * limits.SUBJECT_BYTES


@pytest.mark.parametrize("make", [lambda: _streams(1), lambda: _streams(64), lambda: _streams(70), _subjects])
def test_the_estimate_is_no_less_than_what_is_allocated(make: Callable[[], DedupeWindow | SubjectTable]) -> None:
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        made = make()
        gc.collect()
        allocated = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert RATIO_MIN <= _estimate(made) / allocated <= RATIO_MAX


def test_streams_go_by_their_last_use_where_memory_is_short() -> None:
    window = DedupeWindow()
    window.bytes_max = 100 * limits.KIB
    _send(window, 1, 3)
    for number in range(2, 500):
        _send(window, number, 10)
        window.note(_header(1, 1 + number), 7, 10**9, 10**12, 10**12)
        assert window.held_bytes <= window.bytes_max
    assert window.judge(_header(1, 501), 7, bytes(16)) is None
    with pytest.raises(Refused) as caught:
        window.judge(_header(2, 10), 7, bytes(16))
    assert caught.value.code is Code.UNKNOWN_PRODUCER


def test_a_replay_keeps_what_the_memory_of_another_life_had_room_for() -> None:
    window = _streams(64)
    packed = window.pack(1 << 62, dict)
    again = DedupeWindow.unpack(packed)
    assert len(again) == len(window)
    assert again.held_bytes == window.held_bytes
    again.bytes_max = again.held_bytes // 2
    again.note(_header(10**18, 64), 7, 10**9, 10**12, 10**12)
    assert len(again) == 500, "a window that is full does not grow"
    _send(again, 5, 1)
    assert again.held_bytes <= again.bytes_max


def test_the_count_follows_what_is_cut_and_forgotten() -> None:
    window = _streams(10)
    window.cut(10**12 + 5, dict)
    fewer = window.held_bytes
    assert fewer < _streams(10).held_bytes
    window.expire(10**12 + limits.STREAM_IDLE_MS_MAX + 1)
    assert window.held_bytes == 0
