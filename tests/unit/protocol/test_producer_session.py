"""A producer's session: when batches leave, how they are sent again, and what their sender is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from fairway import batch, limits
from fairway.batch import MessageId
from fairway.errors import BadName, BufferFull, CircuitOpen, Code, Misuse, Refused
from fairway.protocol.producer_session import ProducerOptions
from fairway.protocol.receipts import Receipt
from tests.unit.protocol.wired import WiredProducer, connected, ended

# --- when a batch leaves ---------------------------------------------------------------------------------------------


def test_with_nothing_in_flight_a_message_leaves_at_once() -> None:
    scene = connected()
    [pending] = scene.send(b"a")
    assert scene.payloads == [[b"a"]]
    assert not pending.done()
    scene.store(42)
    receipt = pending.receipt()
    assert (receipt.subject, receipt.sequence, receipt.appended_ms) == ("orders", 42, 1_700_000_000_000)
    assert not receipt.is_duplicate


def test_while_one_is_in_flight_others_gather_for_the_linger_time() -> None:
    scene = connected(linger_ms=5)
    scene.send(b"a")
    scene.send(b"b")
    scene.sleep(4)
    scene.send(b"c")
    assert scene.payloads == [[b"a"]]
    scene.sleep(2)
    assert scene.payloads == [[b"a"], [b"b", b"c"]]


def test_an_answer_lets_what_has_gathered_leave_at_once() -> None:
    scene = connected(linger_ms=1_000)
    scene.send(b"a")
    scene.send(b"b")
    scene.store(0)
    assert scene.payloads == [[b"b"]]


def test_subjects_do_not_wait_for_one_another() -> None:
    scene = connected(linger_ms=1_000)
    scene.send(b"a")
    scene.send(b"b", subject="refunds")
    assert scene.payloads == [[b"a"], [b"b"]]
    assert len({producer_id for producer_id, _, _ in scene.places}) == 2, "a stream has one subject"


def test_a_full_batch_leaves_without_linger() -> None:
    scene = connected(linger_ms=1_000, batch_messages_max=3)
    scene.send(b"a")
    scene.send(b"b", b"c", b"d", b"e")
    assert scene.payloads == [[b"a"], [b"b", b"c", b"d"]]


def test_a_batch_is_full_by_bytes_too_and_a_large_message_has_its_own() -> None:
    scene = connected(linger_ms=1_000, batch_bytes_max=100)
    scene.send(b"a")
    scene.send(b"b" * 60, b"c" * 60, b"d" * 500, b"e")
    assert [list(map(len, each)) for each in scene.payloads] == [[1], [60], [60], [500]]


def test_the_window_bounds_what_is_in_flight() -> None:
    scene = connected(window=2, batch_messages_max=1)
    sent = scene.send(*[b"%d" % number for number in range(5)])
    assert scene.payloads == [[b"0"], [b"1"]]
    for number in range(5):
        scene.store(number)
    assert [pending.receipt().sequence for pending in sent] == [0, 1, 2, 3, 4]


def test_numbers_have_no_gaps() -> None:
    scene = connected(batch_messages_max=4)
    scene.send(*[b"x"] * 10)
    scene.producing.add_many("orders", [b"y"] * 6)
    scene.pump()
    places = scene.places
    assert [first for _, first, _ in places] == [0, 4, 8, 10, 14]
    assert len({producer_id for producer_id, _, _ in places}) == 1


def test_without_a_connection_messages_wait_and_then_leave_in_order() -> None:
    scene = WiredProducer(batch_messages_max=2)
    sent = scene.send(b"a", b"b", b"c")
    scene.sleep(3_000)
    scene.connect()
    assert scene.payloads == [[b"a", b"b"], [b"c"]]
    scene.store(0)
    scene.store(2)
    assert [ended(pending) for pending in sent] == ["stored"] * 3


def test_the_owner_is_told_once_per_batch_to_look() -> None:
    scene = connected(linger_ms=1_000)
    scene.send(b"a")
    scene.producing.is_stirred = False
    scene.producing.add("orders", b"b")
    assert scene.producing.is_stirred
    scene.producing.is_stirred = False
    for _ in range(100):
        scene.producing.add("orders", b"c")
    assert not scene.producing.is_stirred


# --- what a message may be -------------------------------------------------------------------------------------------


def test_everything_that_is_sent_arrives() -> None:
    scene = connected()
    scene.producing.add("orders", b"0")
    scene.pump()
    scene.producing.add("orders", bytearray(b"1"))
    explicit = MessageId(9, 9)
    pending = scene.producing.add("orders", b"2", "k\N{BULLET}", ["paid", "new"], {"source": "pos"}, explicit)
    scene.producing.add("orders", memoryview(b"3"), key="o-42", tags=("paid",))
    scene.sleep(10)
    scene.store(0)
    opened = batch.decode(scene.batches[0])
    assert [bytes(payload) for payload in opened.payloads] == [b"1", b"2", b"3"]
    assert [opened.key(index) for index in range(3)] == [None, "k\N{BULLET}", "o-42"]
    assert [opened.tags(index) for index in range(3)] == [[], ["paid", "new"], ["paid"]]
    assert opened.headers(1) == {"source": "pos"}
    scene.store(1)
    assert pending.receipt() == Receipt("orders", 2, 1_700_000_000_000, False, explicit)
    assert pending.receipt().id == str(explicit)


def test_the_id_in_a_receipt_is_the_one_that_consumers_see() -> None:
    scene = connected()
    _, second = scene.send(b"a", b"b")
    opened = batch.decode(scene.batches[0])
    scene.store(5)
    assert second.receipt().id == str(opened.id(1))


@pytest.mark.parametrize(
    ("message", "error", "words"),
    [
        ({"payload": "text"}, TypeError, r"\.encode\(\)"),
        ({"payload": 7}, TypeError, "serialise"),
        ({"key": 7}, TypeError, "key is a str"),
        ({"key": "k" * 1_025}, Misuse, "1024 bytes"),
        ({"key": "\ud800"}, Misuse, "surrogate"),
        ({"tags": "paid"}, TypeError, "collection"),
        ({"tags": ["t"] * 17}, Misuse, "at most 16"),
        ({"tags": ("t" * 129,)}, Misuse, "128 bytes"),
        ({"tags": (7,)}, TypeError, "tags are str"),
        ({"headers": {"a": 7}}, TypeError, "header values are str"),
        ({"id": MessageId(0, 1)}, Misuse, "names nobody"),
        ({"due_ms": -1}, Misuse, "due_ms"),
        ({"subject": "no spaces"}, BadName, "letters"),
        ({"subject": "dead:billing:orders"}, BadName, "the broker's own"),
        ({"payload": bytes(limits.BATCH_RAW_BYTES_MAX)}, Misuse, "send a reference"),
    ],
)
def test_a_mistake_is_its_callers_to_see_and_harms_nobody_else(
    message: Mapping[str, Any], error: type[Exception], words: str
) -> None:
    scene = WiredProducer(buffer_bytes_max=1 << 30)
    before = scene.producing.add("orders", b"sound")
    with pytest.raises(error, match=words):
        scene.producing.add(**{"subject": "orders", "payload": b"x", **message})
    after = scene.producing.add("orders", b"sound")
    assert scene.producing.messages == 2
    scene.connect()
    while scene.requests:
        scene.store(0)
    assert [ended(before), ended(after)] == ["stored", "stored"]


def test_a_dictionary_may_be_written_to_after_it_was_sent() -> None:
    scene = WiredProducer()
    headers = {"n": "1"}
    scene.producing.add("orders", b"a", headers=headers)
    headers["n"] = "2"
    scene.connect()
    assert batch.decode(scene.batches[0]).headers(0) == {"n": "1"}


def test_a_bad_subject_never_gets_a_place() -> None:
    scene = WiredProducer()
    with pytest.raises(BadName):
        scene.producing.add_many("a/b", [b"x"])
    assert scene.producing.messages == 0


# --- many at once ----------------------------------------------------------------------------------------------------


def test_many_go_behind_what_was_added_before_and_are_cut_by_count_and_bytes() -> None:
    scene = WiredProducer(batch_messages_max=4, batch_bytes_max=1_000)
    scene.send(b"before")
    batches = scene.producing.add_many(
        "orders", [b"%d" % number for number in range(6)] + [b"x" * 600] * 2, keys=[f"k{n}" for n in range(8)]
    )
    scene.send(b"after")
    scene.connect()
    scene.sleep(10)
    assert [each.count for each in batches] == [4, 3, 1]
    assert [len(each) for each in scene.payloads] == [1, 4, 3, 1, 1]
    assert scene.payloads[1] == [b"0", b"1", b"2", b"3"]
    assert batch.decode(scene.batches[2]).key(0) == "k4"
    for first in (0, 1, 5, 8, 9):
        scene.store(first)
    assert [each.receipt().first_sequence for each in batches] == [1, 5, 8]


def test_many_are_added_all_or_not_at_all() -> None:
    scene = WiredProducer(batch_messages_max=2)
    with pytest.raises(TypeError, match="encode"):
        scene.producing.add_many("orders", [b"a", b"b", "c"])  # type: ignore[list-item]
    with pytest.raises(Misuse, match="tags"):
        scene.producing.add_many("orders", [b"a", b"b", b"c"], tags=[None, None, ["t" * 200]])
    with pytest.raises(Misuse, match="2 keys for 3 payloads"):
        scene.producing.add_many("orders", [b"a", b"b", b"c"], keys=["a", "b"])
    assert scene.producing.messages == 0
    scene.connect()
    assert scene.batches == []
    assert scene.producing.add_many("orders", []) == []


# --- bounds ----------------------------------------------------------------------------------------------------------


def test_a_full_buffer_says_what_is_missing_and_calls_when_there_is_room() -> None:
    scene = connected(buffer_messages_max=2)
    scene.send(b"a", b"b")
    with pytest.raises(BufferFull, match="larger buffer") as full:
        scene.producing.add("orders", b"c")
    assert (full.value.messages, full.value.size_bytes) == (1, 1)
    called: list[str] = []
    scene.producing.when_room(1, 1, lambda: called.append("first"))
    scene.producing.when_room(1, 1, lambda: called.append("second"))()
    scene.producing.when_room(2, 2, lambda: called.append("third"))
    assert called == []
    scene.store(0)
    assert called == ["first"], "in order of asking, as if each took what it wants; and one was cancelled"
    assert scene.producing.room_for(1, 1)


def test_who_was_called_and_adds_nothing_lets_the_next_one_in() -> None:
    scene = connected(buffer_messages_max=2)
    scene.send(b"a", b"b")
    called: list[str] = []
    cancel = scene.producing.when_room(1, 1, lambda: called.append("first"))
    scene.producing.when_room(2, 2, lambda: called.append("second"))
    scene.store(0)
    assert called == ["first"]
    cancel()
    assert called == ["first", "second"]


def test_the_buffer_is_bounded_in_bytes_and_an_empty_one_takes_anything() -> None:
    scene = connected(buffer_bytes_max=1_000)
    [large] = scene.send(b"x" * 5_000)
    with pytest.raises(BufferFull):
        scene.producing.add("orders", b"c")
    with pytest.raises(BufferFull):
        scene.producing.add_many("orders", [b"c"])
    scene.store(0)
    assert ended(large) == "stored"
    assert scene.producing.size_bytes == 0


def test_a_producer_that_chose_so_fails_fast_until_a_probe_succeeds() -> None:
    scene = connected(fails_fast=True, breaker_failures=3, breaker_ms=1_000)
    [pending] = scene.send(b"a")
    for _ in range(3):
        scene.refuse(Code.BUSY, retry_after_ms=1)
        scene.sleep(100)
    with pytest.raises(CircuitOpen, match="no"):
        scene.producing.add("orders", b"b")
    with pytest.raises(CircuitOpen):
        scene.producing.add_many("orders", [b"b"])
    scene.sleep(1_000)
    [probe] = scene.send(b"c")
    with pytest.raises(CircuitOpen):
        scene.producing.add("orders", b"d")
    scene.store(0)
    scene.sleep(10)
    scene.store(1)
    assert [ended(pending), ended(probe)] == ["stored", "stored"]
    scene.send(b"e")


def test_one_lost_connection_or_one_refused_window_is_one_failure() -> None:
    scene = connected(fails_fast=True, breaker_failures=3, batch_messages_max=1)
    scene.send(*[b"a"] * 8)
    scene.cut()
    scene.connect()
    for _ in range(8):
        scene.refuse(Code.BUSY)
    scene.producing.add("orders", b"b")


def test_connections_that_cannot_be_had_open_the_circuit() -> None:
    scene = WiredProducer(fails_fast=True, breaker_failures=3)
    for _ in range(3):
        scene.line.unreachable("nobody is there", scene.now_ns)
    with pytest.raises(CircuitOpen, match="nobody is there"):
        scene.producing.add("orders", b"b")


def test_a_producer_that_did_not_choose_so_goes_on_buffering() -> None:
    scene = connected(breaker_failures=1)
    scene.send(b"a")
    scene.refuse(Code.BUSY)
    scene.producing.add("orders", b"b")


@pytest.mark.parametrize(
    "options", [{"window": 65}, {"batch_messages_max": 4_097}, {"linger_ms": -1}, {"delivery_timeout_ms": 0}]
)
def test_options_that_cannot_be_right_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(Misuse):
        ProducerOptions(**options)


# --- the end ---------------------------------------------------------------------------------------------------------


def test_flush_does_not_wait_for_linger_and_knows_when_all_is_settled() -> None:
    scene = connected(linger_ms=1_000)
    scene.send(b"a")
    scene.send(b"b")
    flush = scene.producing.flush()
    done: list[bool] = []
    flush.when_done(lambda: done.append(True))
    scene.send(b"too late to count")
    scene.pump()
    assert scene.payloads[:2] == [[b"a"], [b"b"]]
    scene.store(0)
    assert done == []
    scene.store(1)
    assert done == [True]
    assert flush.is_done
    assert not scene.producing.flush().is_done


def test_flush_of_nothing_is_done() -> None:
    assert WiredProducer().producing.flush().is_done


def test_failures_that_nobody_looked_at_are_told_once() -> None:
    scene = connected(batch_messages_max=1)
    seen, _unseen = scene.send(b"a", b"b")
    scene.refuse(Code.TOO_LARGE)
    scene.refuse(Code.TOO_LARGE)
    assert ended(seen) == "Refused"
    assert [type(error) for error in scene.producing.take_unseen()] == [Refused]
    assert scene.producing.take_unseen() == []


def test_giving_up_tells_the_truth_about_each() -> None:
    scene = connected(window=1, batch_messages_max=1)
    under_way, waiting = scene.send(b"a", b"b")
    scene.producing.give_up("the client was closed")
    assert [ended(under_way), ended(waiting)] == ["OutcomeUnknown", "NotSent"]
    assert scene.producing.messages == 0


# --- looking at outcomes ---------------------------------------------------------------------------------------------


def test_an_outcome_that_is_not_there_yet_cannot_be_had() -> None:
    scene = connected()
    [pending] = scene.send(b"a")
    with pytest.raises(Misuse, match="wait"):
        pending.exception()
    with pytest.raises(Misuse, match="wait"):
        pending.receipt()


def test_a_failure_is_raised_where_the_receipt_is_asked_for() -> None:
    scene = connected()
    [pending] = scene.send(b"a")
    scene.refuse(Code.TOO_LARGE)
    with pytest.raises(Refused):
        pending.receipt()


def test_users_callbacks_wait_and_the_hook_of_a_client_is_called_at_once() -> None:
    scene = connected()
    [pending] = scene.send(b"a")
    told: list[object] = []
    pending.add_done_callback(told.append)
    pending.batch.when_settled(lambda _: told.append("hook"))
    scene.store(0)
    assert told == ["hook"]
    for callback in scene.line.callbacks():
        callback()
    assert told == ["hook", pending]
    pending.add_done_callback(told.append)
    assert told == ["hook", pending, pending]
