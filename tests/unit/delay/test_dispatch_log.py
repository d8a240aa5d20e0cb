"""Decisions as bytes, what they add up to, and the picture that a checkpoint has of them."""

from __future__ import annotations

import numpy as np
import pytest

from fairway.delay.dispatch.log import DispatchEvent, DispatchLog, EventKind, pack, ranges_of, unpack
from fairway.delay.schedule.bucket_record import BucketIndex
from fairway.delay.schedule.pending_rows import Rows, RowState
from fairway.errors import Refused, RemoteProtocolError

INTENT = DispatchEvent(EventKind.INTENT, 3, ((10, 2), (20, 1)), 7, 99, 1_000, 1_700_000_000_000, 0xABCD, "east")
EVENTS = [
    INTENT,
    DispatchEvent(EventKind.SENT, number=6),
    DispatchEvent(EventKind.CANCEL, 3, ((11, 1),)),
    DispatchEvent(EventKind.RESCHEDULE, 3, ((30, 5),), time_ms=5),
    DispatchEvent(EventKind.STREAM, 3, producer_id=1, first_sequence=2, time_ms=3, target="väst"),
]


def opened(log: DispatchLog) -> DispatchLog:
    log.open(lambda body, _count: log.end + len(body))
    return log


def test_events_come_back() -> None:
    assert list(unpack(pack(EVENTS))) == EVENTS
    assert len(pack(EVENTS)) % 8 == 0


@pytest.mark.parametrize("size", range(1, len(pack([INTENT]))))
def test_a_cut_event_is_refused(size: int) -> None:
    with pytest.raises(RemoteProtocolError):
        list(unpack(pack([INTENT])[:size]))


def test_ranges() -> None:
    assert ranges_of(np.array([1, 2, 3, 7, 9, 10], np.uint64)) == ((1, 3), (7, 1), (9, 2))
    assert ranges_of(np.array([], np.uint64)) == ()


def test_nothing_is_decided_before_the_store_is_open() -> None:
    with pytest.raises(Refused):
        DispatchLog().append([INTENT])


def test_a_stream_goes_on_where_its_last_intent_ended() -> None:
    log = opened(DispatchLog())
    log.append([INTENT])
    stream = log.streams[3, "east"]
    assert (stream.producer_id, stream.next_sequence, stream.outstanding) == (99, 1_003, 1)
    log.append([DispatchEvent(EventKind.SENT, number=7)])
    assert (log.intents, log.streams[3, "east"].outstanding, log.next_number) == ({}, 0, 8)


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_picture_says_the_same(is_loaded: bool) -> None:
    log, rows = opened(DispatchLog()), Rows()
    sequences = np.arange(40, dtype=np.uint64)
    nothing = np.zeros(40, np.uint64)
    numbers = rows.add(3, sequences, BucketIndex(np.zeros(40, np.int64), nothing, nothing, nothing))
    if is_loaded:
        log.loaded(rows)
    log.append([DispatchEvent(EventKind.INTENT, 3, ((0, 5),), 1, 99, 0, 50, 1, "east")])
    log.append([DispatchEvent(EventKind.SENT, number=1)])
    log.append([DispatchEvent(EventKind.INTENT, 3, ((5, 5),), 2, 99, 5, 60, 1, "east")])
    log.append(
        [
            DispatchEvent(EventKind.CANCEL, 3, ((20, 2),)),
            DispatchEvent(EventKind.RESCHEDULE, 3, ((30, 1),), time_ms=777),
        ]
    )
    rows.state[numbers[:5]], rows.state[numbers[5:10]] = RowState.DISPATCHED, RowState.INTENDED
    rows.state[numbers[20:22]] = RowState.CANCELLED
    rows.due_ms[30], rows.is_rescheduled[30] = 777, True
    copy = DispatchLog()
    copy.restore(log.picture(), 0)
    assert (copy.intents, copy.streams, copy.next_number) == (log.intents, log.streams, 3)
    decision_index = copy.decision_index()
    assert decision_index.states(3, sequences).tolist() == rows.state[numbers].tolist()
    assert decision_index.states(4, sequences).tolist() == [RowState.PENDING] * 40
    assert [each.tolist() for each in decision_index.dues(3, sequences)] == [[30], [777]]
    assert [each.tolist() for each in decision_index.dues(4, sequences)] == [[], []]


def test_a_picture_that_cannot_be_read_is_refused() -> None:
    for picture in (b"", b"x" * 24, DispatchLog().picture() + b"\x01"):
        with pytest.raises(RemoteProtocolError):
            DispatchLog().restore(picture, 0)
