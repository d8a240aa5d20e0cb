"""Batches that one producer lends and another brings to another broker: each is stored once, and its sender told."""

from __future__ import annotations

from fairway.errors import Code, FairwayError, NotSent, OutcomeUnknown
from fairway.protocol.producer_stream import SealedBatch
from fairway.protocol.receipts import BatchReceipt
from tests.unit.protocol.wired import WiredProducer, connected, ended

SUBJECT = "orders"


def lend(lender: WiredProducer, borrower: WiredProducer) -> int:
    """All that can be lent; how many batches that is."""

    def repay(sealed: SealedBatch, outcome: BatchReceipt | FairwayError) -> None:
        lender.producing.repaid(sealed, outcome)

    lent = lender.producing.lend(SUBJECT, is_due=False)
    borrower.producing.borrow(SUBJECT, lent, repay, is_due=False)
    lender.pump()
    borrower.pump()
    return len(lent)


def test_what_was_never_sent_is_stored_elsewhere_in_its_order() -> None:
    lender, borrower = WiredProducer(batch_messages_max=2), connected()
    sent = lender.send(b"a", b"b", b"c")
    assert lend(lender, borrower) == 2
    assert borrower.payloads == [[b"a", b"b"], [b"c"]]
    assert (lender.producing.messages, borrower.producing.messages) == (3, 3), "it counts here and there"
    borrower.store(7)
    borrower.store(9)
    assert [pending.receipt().sequence for pending in sent] == [7, 8, 9]
    assert (lender.producing.messages, borrower.producing.messages) == (0, 0)


def test_its_number_is_one_of_the_borrower() -> None:
    lender, borrower = WiredProducer(), connected()
    borrower.send(b"own")
    own, _, _ = borrower.places[0]
    [pending] = lender.send(b"a")
    lend(lender, borrower)
    borrower.store(0)
    assert borrower.places[0][0] == own
    borrower.store(1)
    assert pending.receipt().message_id.producer_id == own


def test_what_was_refused_is_lent_and_what_may_be_stored_is_not() -> None:
    lender, borrower = connected(batch_messages_max=1), connected()
    doubtful, clean = lender.send(b"a", b"b")
    lender.refuse(Code.READ_ONLY, at=1)
    lender.cut()
    assert lend(lender, borrower) == 1
    assert borrower.payloads == [[b"b"]]
    borrower.store(0)
    assert ended(clean) == "stored"
    lender.connect()
    assert lender.payloads == [[b"a"]], "its own broker knows it"
    lender.store(0, is_duplicate=True)
    assert ended(doubtful) == "stored"


def test_what_is_under_way_is_not_lent() -> None:
    lender, borrower = connected(), connected()
    lender.send(b"a")
    assert lend(lender, borrower) == 0


def test_the_lender_goes_on_under_a_new_stream() -> None:
    lender, borrower = connected(batch_messages_max=1), connected()
    lender.send(b"a", b"b")
    [(old, _, _), *_] = lender.places
    lender.refuse(Code.READ_ONLY)
    lender.refuse(Code.READ_ONLY)
    assert lend(lender, borrower) == 2
    lender.sleep(1_000)
    [pending] = lender.send(b"c")
    [(new, first, _)] = lender.places
    assert (new != old, first) == (True, 0), "nothing can be stored behind what has left"
    lender.store(0)
    assert ended(pending) == "stored"


def test_a_flush_of_the_lender_waits_for_what_it_has_lent() -> None:
    lender, borrower = WiredProducer(), connected()
    lender.send(b"a")
    lend(lender, borrower)
    flush = lender.producing.flush()
    assert not flush.is_done
    borrower.store(0)
    assert flush.is_done


def test_its_time_goes_on_and_its_failure_is_the_lenders() -> None:
    lender, borrower = WiredProducer(delivery_timeout_ms=1_000), WiredProducer()
    [pending] = lender.send(b"a")
    lender.sleep(400)
    borrower.sleep(400)
    lend(lender, borrower)
    borrower.sleep(599)
    assert not pending.done()
    borrower.sleep(1)
    assert isinstance(pending.exception(), NotSent)
    assert borrower.producing.take_unseen() == []


def test_a_failure_that_nobody_saw_is_told_once_by_the_lender() -> None:
    lender, borrower = WiredProducer(), connected()
    lender.send(b"a")
    lend(lender, borrower)
    borrower.producing.give_up("the client was closed")
    [error] = lender.producing.take_unseen()
    assert isinstance(error, OutcomeUnknown)
    assert borrower.producing.take_unseen() == []


def test_what_is_borrowed_can_be_lent_on() -> None:
    first, second, third = WiredProducer(), WiredProducer(), connected()
    [pending] = first.send(b"a")
    assert lend(first, second) == 1
    assert lend(second, third) == 1
    third.store(3)
    assert pending.receipt().sequence == 3
    assert [each.producing.messages for each in (first, second, third)] == [0, 0, 0]


def test_it_is_said_what_could_be_lent() -> None:
    scene = connected()
    assert scene.producing.unsettled() == []
    scene.send(b"a")
    assert scene.producing.unsettled() == [(SUBJECT, False)]
    assert scene.producing.is_flowing(SUBJECT)
    scene.refuse(Code.READ_ONLY)
    assert not scene.producing.is_flowing(SUBJECT)
    scene.sleep(1_000)
    scene.store(0)
    assert scene.producing.unsettled() == []


def test_each_failure_of_the_broker_is_told() -> None:
    told: list[str] = []
    scene = connected()
    scene.producing.on_failure = lambda: told.append("failed")
    scene.send(b"a")
    scene.refuse(Code.READ_ONLY)
    scene.cut()
    for callback in scene.line.callbacks():
        callback()
    assert told == ["failed", "failed"]
