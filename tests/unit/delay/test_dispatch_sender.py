"""What goes to one broker group: in order, byte for byte, and no refusal holds back another subject."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from fairway import batch
from fairway.batch import MessageId
from fairway.delay.dispatch.dispatcher import Intent
from fairway.delay.dispatch.sender import IN_FLIGHT_MAX, DispatchBatch, TargetSender
from fairway.errors import Code, Refused, StoredRange
from fairway.names import Subject
from fairway.protocol.line import Answer, Ask, ConnectionLost
from fairway.protocol.messages import Produce, Produced
from fairway.runtime.rng import SeededRng

ORDERS, BILLS = Subject("orders"), Subject("bills")
STORED = Answer(Produced(0, 1, 0, False, 1))
SECOND_NS = 1_000_000_000


def intent(number: int, subject: Subject = ORDERS) -> Intent:
    producer_id = 7 if subject == ORDERS else 8
    data = batch.encode(
        [b"%d" % number],
        producer_id=producer_id,
        first_sequence=number,
        created_ms=0,
        ids=[MessageId(1_000, number)],
    )
    return Intent(number, "east", subject, producer_id, number, 1, data)


@dataclass
class Line:
    """Asks a carrier as a line does, and tells it what a broker says."""

    target_sender: TargetSender = field(init=False)
    sent: list[int] = field(default_factory=list)
    now_ns: int = 0

    def __post_init__(self) -> None:
        self.target_sender = TargetSender(
            SeededRng(1), on_sent=lambda one, _: self.sent.append(one.number), on_open=lambda: None
        )

    def asks(self, room: int = 1_000) -> list[Ask]:
        return list(self.target_sender.asks(room, self.now_ns))

    def tell(self, ask: Ask, outcome: Answer | Refused | ConnectionLost) -> None:
        self.target_sender.answered(ask.token, outcome, self.now_ns)


def numbers(asks: list[Ask]) -> list[int]:
    return [ask.token.intent.number for ask in asks if isinstance(ask.token, DispatchBatch)]


def subjects(asks: list[Ask]) -> set[str]:
    return {ask.message.subject for ask in asks if isinstance(ask.message, Produce)}


def test_a_stream_goes_out_in_order_a_few_at_a_time() -> None:
    line = Line()
    for number in range(IN_FLIGHT_MAX + 3):
        line.target_sender.send(intent(number))
    asks = line.asks()
    assert numbers(asks) == list(range(IN_FLIGHT_MAX))
    assert line.asks() == []
    line.tell(asks[0], STORED)
    assert numbers(line.asks()) == [IN_FLIGHT_MAX]
    assert line.sent == [0]


def test_after_a_refusal_the_stream_waits_and_goes_on_from_there_with_the_same_bytes() -> None:
    line = Line()
    for number in range(4):
        line.target_sender.send(intent(number))
    first = line.asks()
    line.tell(first[0], STORED)
    line.tell(first[1], Refused(Code.BUSY, "wait", retry_after_ms=50))
    line.tell(first[3], Refused(Code.SEQUENCE_GAP, "one is missing"))
    assert line.asks() == [], "an answer is still to come"
    line.tell(first[2], Refused(Code.SEQUENCE_GAP, "one is missing"))
    assert line.asks() == []
    due_ns = line.target_sender.next_deadline()
    assert due_ns is not None
    assert due_ns >= 50_000_000
    line.now_ns = due_ns
    again = line.asks()
    assert numbers(again) == [1], "the others would be refused with it"
    line.tell(again[0], STORED)
    again += line.asks()
    assert numbers(again) == [1, 2, 3]
    assert [each.attachments for each in again] == [each.attachments for each in first[1:]]


def test_a_broker_without_room_is_asked_again_within_a_second_however_often_it_had_none() -> None:
    line = Line()
    line.target_sender.send(intent(0))
    for _ in range(50):
        for ask in line.asks():
            line.tell(ask, Refused(Code.BUSY, "too many requests are waiting", retry_after_ms=50))
        due_ns = line.target_sender.next_deadline()
        assert due_ns is not None
        assert SECOND_NS // 20 <= due_ns - line.now_ns < SECOND_NS
        line.now_ns = due_ns
    line.tell(line.asks()[0], STORED)
    assert line.sent == [0]


@pytest.mark.parametrize("code", [Code.READ_ONLY, Code.BAD_REQUEST, Code.TOO_LARGE, Code.OTHER])
def test_a_refused_subject_waits_longer_each_time_and_nobody_waits_with_it(code: Code) -> None:
    line = Line()
    line.target_sender.send(intent(0))
    waits_ns = []
    for number in range(12):
        line.target_sender.send(intent(number, BILLS))
        for ask in line.asks():
            assert isinstance(ask.message, Produce)
            line.tell(ask, STORED if ask.message.subject == BILLS else Refused(code, "no"))
        due_ns = line.target_sender.next_deadline()
        assert due_ns is not None
        waits_ns.append(due_ns - line.now_ns)
        line.now_ns = due_ns
    assert line.sent == list(range(12)), "all of the other subject, and none was lost"
    assert waits_ns[0] < SECOND_NS < waits_ns[-1] <= 20 * SECOND_NS
    assert line.target_sender.refusals[code] == 12
    assert [flow.subject for flow in line.target_sender.refused] == [ORDERS]
    assert line.target_sender.messages == 1
    for ask in line.asks():
        line.tell(ask, STORED)
    assert not line.target_sender.refused
    assert line.target_sender.messages == 0


def test_what_was_lost_with_the_connection_is_sent_again() -> None:
    line = Line()
    line.target_sender.send(intent(0))
    line.target_sender.send(intent(1))
    first = line.asks()
    for ask in first:
        line.tell(ask, ConnectionLost("cut"))
    line.target_sender.opened(0)
    again = line.asks()
    assert [each.attachments for each in again] == [each.attachments for each in first]


def test_who_does_not_lead_is_no_reason_to_wait_once_another_is_connected() -> None:
    line = Line()
    line.target_sender.send(intent(0))
    line.target_sender.send(intent(1))
    first = line.asks()
    for ask in first:
        line.tell(ask, Refused(Code.NOT_MASTER, "this is a replica", retry_after_ms=500))
    assert not line.target_sender.is_refused(ORDERS), "the group takes the subject, whoever leads it"
    line.target_sender.opened(0)
    again = line.asks()
    assert [each.attachments for each in again] == [each.attachments for each in first]


def conflict(*stored: StoredRange) -> Refused:
    return Refused(Code.SEQUENCE_CONFLICT, "there is something", stored=stored)


def range_of(ask: Ask) -> StoredRange:
    header = batch.peek(bytes(ask.attachments[0]))
    return StoredRange(header.first_sequence, header.count, header.crc)


def test_a_conflict_with_exactly_this_batch_says_that_the_broker_has_it() -> None:
    line = Line()
    line.target_sender.send(intent(5))
    [ask] = line.asks()
    line.tell(ask, conflict(range_of(ask)))
    assert line.sent == [5]


@pytest.mark.parametrize(
    "refused",
    [
        Refused(Code.SEQUENCE_CONFLICT, "there is something, says a broker that cannot tell what"),
        conflict(),
        conflict(StoredRange(5, 1, 0xBAD)),
        conflict(StoredRange(4, 3, 0xBAD)),
        Refused(Code.FOREIGN_STREAM, "the stream has another secret"),
    ],
    ids=["not known", "nothing there", "other bytes", "another range", "a stranger's stream"],
)
@pytest.mark.parametrize("secret", [b"", bytes(range(16))], ids=["without a secret", "with one"])
def test_nothing_is_dropped_on_any_other_conflict(
    refused: Refused, secret: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A backup that was restored, or a stranger: the place is somebody else's, and the intent goes out all the same."""
    streams: list[set[int]] = []
    for _ in range(2):  # the second time: another life, whose intent is the same
        line = Line()
        line.target_sender.send(intent(5)._replace(secret=secret))
        line.target_sender.send(intent(6)._replace(secret=secret))
        first, second = line.asks()
        line.tell(first, refused)
        line.tell(second, STORED)
        assert line.sent == [6], "the one behind it is judged by itself"
        seen: set[int] = set()
        for _ in range(3):  # somebody has been there, too
            [again] = line.asks()
            assert isinstance(again.message, Produce)
            sent = batch.decode(bytes(again.attachments[0]))
            assert (sent.header.first_sequence, sent.id(0), sent.payloads) == (0, MessageId(1_000, 5), [b"5"])
            assert sent.header.producer_id not in seen | {7}
            assert bool(again.message.secret) is bool(secret)
            assert again.message.secret != secret or not secret
            seen.add(sent.header.producer_id)
            line.tell(again, refused)
        [again] = line.asks()
        line.tell(again, STORED)
        assert line.sent == [6, 5]
        assert line.target_sender.detours == 4
        streams.append(seen)
    assert streams[0] == streams[1], "so the broker recognises what it has"
    assert "restored from a backup" in caplog.text


def test_without_the_secret_nobody_knows_where_an_intent_goes_next() -> None:
    found = []
    for secret in (b"", bytes(range(16)), bytes(range(1, 17))):
        line = Line()
        line.target_sender.send(intent(0)._replace(secret=secret))
        [ask] = line.asks()
        line.tell(ask, conflict())
        [again] = line.asks()
        found.append(batch.peek(bytes(again.attachments[0])).producer_id)
    assert len(set(found)) == 3


def test_a_new_stream_of_a_subject_waits_for_what_is_left_of_the_old_one() -> None:
    line = Line()
    line.target_sender.send(intent(0))
    line.target_sender.send(intent(1))
    line.target_sender.send(intent(2)._replace(producer_id=99, first_sequence=0))
    line.target_sender.send(intent(3)._replace(producer_id=99, first_sequence=1))
    line.target_sender.send(intent(0, BILLS))
    first = line.asks()
    assert [each.token.intent.producer_id for each in first if isinstance(each.token, DispatchBatch)] == [7, 8, 7]
    line.tell(first[0], STORED)
    assert line.asks() == []
    line.tell(first[2], Refused(Code.READ_ONLY, "not now"))
    assert line.target_sender.is_refused(ORDERS)
    due_ns = line.target_sender.next_deadline()
    assert due_ns is not None
    line.now_ns = due_ns
    [again] = line.asks()
    line.tell(again, STORED)
    assert numbers(line.asks()) == [2, 3]
    assert not line.target_sender.is_refused(ORDERS)


@pytest.mark.parametrize("code", [Code.UNKNOWN_PRODUCER, Code.SEQUENCE_GAP])
def test_a_broker_that_forgot_the_stream_gets_each_as_a_stream_of_its_own_and_knows_it_again(code: Code) -> None:
    seen = []
    for _ in range(2):  # the second time: another life, which knows nothing of the first
        line = Line()
        line.target_sender.send(intent(5))
        line.target_sender.send(intent(6))
        for ask in line.asks():
            line.tell(ask, Refused(code, "never heard of it"))
        head, tail = line.asks()
        line.tell(tail, Refused(code, "never heard of it"))
        line.tell(head, STORED)
        [tail] = line.asks()
        line.tell(tail, STORED)
        assert line.sent == [5, 6]
        assert line.target_sender.detours == 2
        seen.append([bytes(each.attachments[0]) for each in (head, tail)])
    assert seen[0] == seen[1]
    opened = [batch.decode(data) for data in seen[0]]
    assert [each.ids() for each in opened] == [[MessageId(1_000, 5)], [MessageId(1_000, 6)]]
    assert {each.header.first_sequence for each in opened} == {0}
    assert len({each.header.producer_id for each in opened}) == 2


def test_streams_share_the_room_of_the_line() -> None:
    line = Line()
    for number in range(10):
        line.target_sender.send(intent(number))
        line.target_sender.send(intent(number, BILLS))
    assert subjects(line.asks(room=2)) == {"orders", "bills"}


def test_no_secret_is_in_the_repr_of_an_intent() -> None:
    shown = repr(intent(3)._replace(secret=b"0123456789abcdef"))
    assert "0123456789abcdef" not in shown
    assert "number=3" in shown
    assert "secret=<16 bytes>" in shown
