"""Batches that come back: sent again byte for byte and in order, or given up with a truthful word."""

from __future__ import annotations

import pytest

from fairway.errors import Code, NotSent, OutcomeUnknown, Refused
from tests.unit.protocol.wired import WiredProducer, connected, ended

# --- sending again ---------------------------------------------------------------------------------------------------


def test_what_was_lost_is_sent_again_byte_for_byte_in_order() -> None:
    scene = connected(batch_messages_max=2)
    sent = scene.send(b"a", b"b", b"c", b"d", b"e")
    first = scene.batches
    scene.cut()
    scene.connect()
    assert scene.batches[:2] == first
    scene.store(0, is_duplicate=True)
    scene.store(2)
    scene.store(4)
    assert [pending.receipt().sequence for pending in sent] == [0, 1, 2, 3, 4]
    assert sent[0].receipt().is_duplicate


def test_after_busy_the_whole_window_is_sent_again_in_order_when_the_wait_is_over() -> None:
    scene = connected(batch_messages_max=1)
    sent = scene.send(b"a", b"b", b"c")
    first = scene.batches
    scene.refuse(Code.BUSY, retry_after_ms=100)
    scene.refuse(Code.SEQUENCE_GAP)
    assert len(scene.batches) == 1, "c is still under way"
    scene.refuse(Code.SEQUENCE_GAP)
    scene.sleep(99)
    assert scene.batches == []
    scene.sleep(30)
    assert scene.batches == first
    for number in range(3):
        scene.store(number)
    assert [ended(pending) for pending in sent] == ["stored"] * 3


@pytest.mark.parametrize("code", [Code.BUSY, Code.READ_ONLY, Code.EXPIRED, Code.DRAINING])
def test_a_refusal_that_passes_is_waited_out(code: Code) -> None:
    scene = connected()
    [pending] = scene.send(b"a")
    for _ in range(4):
        scene.refuse(code)
        scene.sleep(1_000)
    scene.store(0)
    assert ended(pending) == "stored"


@pytest.mark.parametrize("code", [Code.TOO_LARGE, Code.BAD_NAME, Code.BAD_REQUEST, Code.SEQUENCE_CONFLICT, Code.OTHER])
def test_a_final_refusal_fails_its_batch_alone_and_the_rest_goes_on_under_a_new_stream(code: Code) -> None:
    scene = connected(batch_messages_max=1)
    bad, good, better = scene.send(b"a", b"b", b"c")
    [(old_stream, _, _), *_] = scene.places
    scene.refuse(code)
    scene.refuse(Code.SEQUENCE_GAP)
    scene.refuse(Code.SEQUENCE_GAP)
    scene.sleep(100)
    assert scene.payloads == [[b"b"], [b"c"]]
    [(new_stream, first, _), (same, second, _)] = scene.places
    assert (first, second) == (0, 1)
    assert new_stream == same != old_stream
    scene.store(0)
    scene.store(1)
    refused = bad.exception()
    assert isinstance(refused, Refused)
    assert refused.code is code
    assert [ended(good), ended(better)] == ["stored", "stored"]


def test_a_stream_that_the_broker_forgot_leaves_what_was_lost_unknown_and_nothing_else() -> None:
    scene = connected(batch_messages_max=1)
    scene.send(b"a")
    scene.store(0)
    lost, waiting = scene.send(b"b", b"c")
    scene.cut()
    [never_left] = scene.send(b"d")
    scene.connect()
    for _ in range(3):
        scene.refuse(Code.UNKNOWN_PRODUCER)
    assert [ended(lost), ended(waiting)] == ["OutcomeUnknown", "OutcomeUnknown"]
    scene.sleep(100)
    assert scene.payloads == [[b"d"]]
    assert scene.places[0][1] == 0
    scene.store(1)
    assert ended(never_left) == "stored"


def test_behind_a_batch_that_has_to_wait_it_means_nothing_that_the_broker_knows_no_stream() -> None:
    """The first of a stream came while the broker was closed, the second when it had opened again."""
    scene = connected(batch_messages_max=1)
    sent = scene.send(b"a", b"b")
    first = scene.batches
    scene.cut()
    scene.connect()
    scene.refuse(Code.READ_ONLY)
    scene.refuse(Code.UNKNOWN_PRODUCER)
    scene.sleep(1_000)
    assert scene.batches == first
    scene.store(0)
    scene.store(1)
    assert [ended(pending) for pending in sent] == ["stored", "stored"]


def test_a_stream_that_was_idle_too_long_begins_anew_without_anybody_noticing() -> None:
    scene = connected()
    scene.send(b"a")
    scene.store(0)
    [pending] = scene.send(b"b")
    scene.refuse(Code.UNKNOWN_PRODUCER)
    scene.sleep(100)
    assert scene.places[0][1] == 0
    scene.store(1)
    assert ended(pending) == "stored"


def test_what_is_doubtful_in_a_broken_stream_is_asked_about_before_anything_new_leaves() -> None:
    scene = connected(batch_messages_max=1)
    doubtful, unlucky, behind = scene.send(b"a", b"b", b"c")
    scene.cut()
    [fresh] = scene.send(b"d")
    scene.connect()
    [old_stream, *_] = [producer_id for producer_id, _, _ in scene.places]
    scene.refuse(Code.BUSY)
    scene.refuse(Code.BAD_REQUEST)
    scene.refuse(Code.SEQUENCE_GAP)
    scene.refuse(Code.SEQUENCE_GAP)
    scene.sleep(100)
    assert scene.payloads == [[b"a"], [b"c"]], "they may be stored: only the same bytes can tell"
    assert {producer_id for producer_id, _, _ in scene.places} == {old_stream}
    scene.store(0, is_duplicate=True)
    scene.refuse(Code.SEQUENCE_GAP)
    scene.sleep(100)
    assert scene.payloads == [[b"d"]]
    assert scene.places[0][0] != old_stream
    scene.store(1)
    assert [ended(each) for each in (doubtful, unlucky, behind, fresh)] == [
        "stored", "OutcomeUnknown", "OutcomeUnknown", "stored",
    ]  # fmt: skip


def test_behind_a_hole_nothing_can_be_stored_so_what_was_lost_there_is_sent_under_a_new_stream() -> None:
    scene = connected(batch_messages_max=1)
    bad, lost = scene.send(b"a", b"b")
    scene.refuse(Code.TOO_LARGE)
    scene.cut()
    scene.connect()
    scene.sleep(100)
    assert scene.payloads == [[b"b"]]
    assert scene.places[0][1] == 0
    scene.store(0)
    assert [ended(bad), ended(lost)] == ["Refused", "stored"]


# --- time ------------------------------------------------------------------------------------------------------------


def test_what_never_left_in_time_is_not_sent() -> None:
    scene = WiredProducer(delivery_timeout_ms=5_000)
    [pending] = scene.send(b"a")
    scene.line.unreachable("nobody listens on port 20880", scene.now_ns)
    scene.sleep(4_900)
    assert not pending.done()
    scene.sleep(200)
    error = pending.exception()
    assert isinstance(error, NotSent)
    assert "5 s" in str(error)
    assert "20880" in str(error)
    assert scene.producing.messages == 0


def test_what_was_refused_until_its_time_was_up_is_not_sent() -> None:
    scene = connected(delivery_timeout_ms=1_000)
    [pending] = scene.send(b"a")
    scene.refuse(Code.READ_ONLY, retry_after_ms=5_000)
    scene.sleep(1_001)
    error = pending.exception()
    assert isinstance(error, NotSent)
    assert isinstance(error.__cause__, Refused)
    [later] = scene.send(b"b")
    scene.sleep(5_100)
    assert ended(later) == "NotSent"


def test_what_left_and_was_not_answered_in_time_is_unknown() -> None:
    scene = connected(delivery_timeout_ms=1_000)
    [pending] = scene.send(b"a")
    scene.sleep(1_001)
    assert isinstance(pending.exception(), OutcomeUnknown)


def test_a_late_answer_changes_nothing_and_the_stream_goes_on() -> None:
    scene = connected(delivery_timeout_ms=1_000)
    [late] = scene.send(b"a")
    scene.sleep(1_001)
    [next_one] = scene.send(b"b")
    scene.sleep(10)
    scene.store(0)
    assert ended(late) == "OutcomeUnknown"
    assert scene.places[0][1] == 1
    scene.store(1)
    assert ended(next_one) == "stored"
