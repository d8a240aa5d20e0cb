"""The client without a loop against a real broker: what goes in comes out, and every outcome is what was said."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from datetime import UTC, datetime, timedelta
from itertools import islice

import pytest

import fairway
from fairway.batch import MessageId
from fairway.client.taken_messages import ConsumerSettings
from fairway.groups import GroupConfig
from fairway.groups.config import Backoff, encode
from fairway.protocol.admin_messages import Depth, Describe, Described
from fairway.protocol.messages import Hello
from fairway.protocol.receipts import Pending
from tests.unit.client.broker import WAIT_S, Running


def drained(consumer: fairway.Consumer, count: int) -> list[bytes]:
    """Take and ack so many."""
    found = []
    for message in islice(consumer, count):
        found.append(message.payload)
        message.ack()
    return found


def test_a_message_comes_out_as_it_went_in(client: fairway.Client, subject: str) -> None:
    pending = client.send(subject, b"\x00paid", key="o-42", tags=("paid", "big"), headers={"source": "pos", "ü": "é"})
    receipt = pending.result(WAIT_S)
    assert pending.done()
    assert pending.exception() is None
    assert (receipt.subject, receipt.sequence, receipt.is_duplicate) == (subject, 0, False)
    with client.consumer(subject, group="hotel") as consumer:
        message = consumer.poll(WAIT_S)
        assert message is not None
        assert message.payload == b"\x00paid"
        assert message.key == "o-42"
        assert message.tags == ("paid", "big")
        assert message.headers == {"source": "pos", "ü": "é"}
        assert (message.subject, message.group, message.sequence, message.attempt) == (subject, "hotel", 0, 1)
        assert str(message.id) == receipt.id
        assert abs(message.created_at - datetime.now(UTC)) < timedelta(hours=1)
        message.ack()


def test_an_id_that_was_given_is_kept(client: fairway.Client, subject: str) -> None:
    given = MessageId(7, 42)
    assert client.send(subject, b"a", id=given).result(WAIT_S).id == str(given)
    assert client.send(subject, b"b", id=str(given)).result(WAIT_S).message_id == given
    with pytest.raises(fairway.Misuse, match="bad message id"):
        client.send(subject, b"c", id="nonsense")
    with client.consumer(subject, group="hotel") as consumer:
        assert [message.id for message in islice(consumer, 2)] == [given, given]


def test_many_messages_keep_their_order_and_share_batches(client: fairway.Client, subject: str) -> None:
    payloads = [b"%d" % number for number in range(20_000)]
    pendings = [client.send(subject, payload) for payload in payloads]
    client.flush(WAIT_S)
    assert [pending.result().sequence for pending in pendings] == list(range(20_000))
    assert len({id(pending.batch) for pending in pendings}) < 2_000
    with client.consumer(subject, group="hotel") as consumer:
        assert drained(consumer, 20_000) == payloads


def test_send_many_gives_a_receipt_for_each_batch(client: fairway.Client, subject: str) -> None:
    payloads = [b"%d" % number for number in range(30_000)]
    keys = [f"k-{number}" for number in range(30_000)]
    receipts = client.send_many(subject, payloads, keys=keys).result(WAIT_S)
    assert sum(receipt.count for receipt in receipts) == 30_000
    assert len(receipts) <= 31  # a batch for each thousand; slices of a few thousand may end with a shorter one
    with client.consumer(subject, group="hotel") as consumer:
        found: list[tuple[bytes, str | None]] = []
        while len(found) < 30_000:
            messages = consumer.take(1_000, WAIT_S)
            found += [(message.payload, message.key) for message in messages]
            consumer.ack(messages)
        assert found == list(zip(payloads, keys, strict=True))
    assert client.send_many(subject, []).result() == []


def test_groups_are_independent_and_members_share(broker: Running, client: fairway.Client, subject: str) -> None:
    client.send_many(subject, [b"%d" % number for number in range(3_000)]).result(WAIT_S)
    with client.consumer(subject, group="alone") as alone:
        assert len(drained(alone, 3_000)) == 3_000
    seen: Counter[bytes] = Counter()
    with (
        fairway.connect(broker.url) as other,
        client.consumer(subject, group="shared", prefetch_messages=100) as one,
        other.consumer(subject, group="shared", prefetch_messages=100) as two,
    ):
        while seen.total() < 3_000:
            for consumer in (one, two):
                messages = consumer.take(100, 1)
                seen.update(message.payload for message in messages)
                consumer.ack(messages)
        assert one.counts.handed_out > 0
        assert two.counts.handed_out > 0
    assert set(seen.values()) == {1}


def test_retry_comes_again_and_reject_goes_to_dead_letter(client: fairway.Client, subject: str) -> None:
    client.send_many(subject, [b"retry", b"reject", b"ack"]).result(WAIT_S)
    with client.consumer(subject, group="hotel") as consumer:
        for message in islice(consumer, 3):
            if message.payload == b"retry":
                message.retry(after=timedelta(milliseconds=1), reason="not yet")
            elif message.payload == b"reject":
                message.reject("no such order")
            else:
                message.ack()
        again = consumer.poll(WAIT_S)
        assert again is not None
        assert (again.payload, again.attempt) == (b"retry", 2)
        again.ack()
        with pytest.raises(fairway.Misuse, match="acked before"):
            again.ack()
    with client.consumer(f"dead:hotel:{subject}", group="coroner") as dead:
        letter = dead.poll(WAIT_S)
        assert letter is not None
        assert letter.payload == b"reject"
        assert letter.headers["fairway.dead.reason"] == "no such order"
        letter.ack()
    assert client.redrive(subject, "hotel").count == 1
    with client.consumer(subject, group="hotel") as consumer:
        back = consumer.poll(WAIT_S)
        assert back is not None
        assert back.payload == b"reject"
        back.ack()


def test_leaving_hands_back_at_once_what_was_not_acked(client: fairway.Client, subject: str) -> None:
    client.send_many(subject, [b"%d" % number for number in range(1_000)]).result(WAIT_S)
    with client.consumer(subject, group="hotel") as first:
        for message in first:
            if message.payload == b"500":
                break
            message.ack()
    with client.consumer(subject, group="hotel") as second:  # the lease is 15 s: it was not that which ended
        assert sorted(map(int, drained(second, 500))) == list(range(500, 1_000))
        assert second.poll(0) is None


def test_a_loop_that_was_left_goes_on_where_it_was(client: fairway.Client, subject: str) -> None:
    client.send_many(subject, [b"%d" % number for number in range(100)]).result(WAIT_S)
    with client.consumer(subject, group="hotel") as consumer:
        assert drained(consumer, 10) + drained(consumer, 90) == [b"%d" % number for number in range(100)]


def test_several_threads_share_one_consumer(client: fairway.Client, subject: str) -> None:
    seen: list[bytes] = []

    def work() -> None:
        for message in consumer:
            seen.append(message.payload)
            message.ack()

    with client.consumer(subject, group="hotel") as consumer:
        workers = [threading.Thread(target=work) for _ in range(4)]
        for worker in workers:
            worker.start()
        client.send_many(subject, [b"%d" % number for number in range(5_000)]).result(WAIT_S)
        assert client._link.wait(lambda: len(seen) == 5_000, WAIT_S)
    for worker in workers:
        worker.join(WAIT_S)
        assert not worker.is_alive()
    assert len(set(seen)) == 5_000


def test_a_callback_is_told_and_may_send(client: fairway.Client, subject: str) -> None:
    told = threading.Event()
    receipts: list[fairway.Receipt] = []

    def on_done(pending: Pending) -> None:
        receipts.append(pending.receipt())
        client.send(subject, b"second").add_done_callback(lambda _: told.set())

    client.send(subject, b"first").add_done_callback(on_done)
    assert told.wait(WAIT_S)
    assert [receipt.sequence for receipt in receipts] == [0]
    with client.consumer(subject, group="hotel") as consumer:
        assert drained(consumer, 2) == [b"first", b"second"]


def test_a_callback_must_not_wait_for_the_thread_that_runs_it(client: fairway.Client, subject: str) -> None:
    told = threading.Event()
    problems: list[BaseException] = []

    def on_done(_: object) -> None:
        try:
            client.send(subject, b"second").result(WAIT_S)
        except fairway.Misuse as problem:
            problems.append(problem)
        told.set()

    client.send(subject, b"first").add_done_callback(on_done)
    assert told.wait(WAIT_S)
    assert "must not wait" in str(problems[0])
    client.flush(WAIT_S)


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda c: c.send("a", "text"), TypeError, r"\.encode\(\)"),
        (lambda c: c.send_many("a", ["text"]), TypeError, r"\.encode\(\)"),
        (lambda c: c.send_many("a", b"text"), TypeError, "list of bytes"),
        (lambda c: c.send_many("a", [b"a", b"b"], keys=["k"]), fairway.Misuse, "1 keys for 2 payloads"),
        (lambda c: c.send("no spaces", b"a"), fairway.BadName, "bad subject name"),
        (lambda c: c.send("a", b"a", tags="paid"), TypeError, "one collection per message"),
        (lambda c: c.consumer("a", group="no spaces"), fairway.BadName, "bad group name"),
        (lambda c: c.seek("a", "g", "yesterday"), fairway.Misuse, "'earliest', 'latest'"),
        (lambda c: c.seek("a", "g", datetime(2026, 1, 1)), fairway.Misuse, "time zone"),  # noqa: DTZ001
        (lambda c: c.weight("a", "g", 0), fairway.Misuse, "above 0"),
        (lambda c: c.ask(Hello(1, 1, [], "", 0)), fairway.Misuse, "not a request"),
    ],
)
def test_mistakes_are_named_where_they_are_made(
    client: fairway.Client, call: object, kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        call(client)  # type: ignore[operator]
    client.flush(WAIT_S)  # and the client lives on


def test_looking_and_steering(client: fairway.Client, subject: str) -> None:
    client.send_many(subject, [b"%d" % number for number in range(10)]).result(WAIT_S)
    with client.consumer(subject, group="hotel", consumer="ann") as consumer:
        drained(consumer, 10)
        assert consumer.flush()
        [state] = client.describe(subject, "hotel", depth=Depth.CONSUMERS).subjects[0].groups
        assert (state.cursor, state.lag, [each.name for each in state.consumers]) == (10, 0, ["ann"])
        assert not client.pause(subject, "hotel").was_on
        assert client.seek(subject, "hotel", 5).was == 10
        assert client.resume(subject, "hotel").was_on
        assert drained(consumer, 5) == [b"5", b"6", b"7", b"8", b"9"]
        client.weight(subject, "hotel", 2)
        assert client.describe(subject, "hotel").subjects[0].groups[0].weight == 2
    pages = list(client.scan(subject, start=2, end=8))
    assert [page.first_sequence for page in pages] == [0]
    assert pages[0].batch.payloads == [b"%d" % number for number in range(10)]
    assert list(client.scan(subject, "latest")) == []
    assert isinstance(client.ask(Describe(Depth.SUBJECTS)), Described)


def test_a_refusal_reaches_its_caller(client: fairway.Client, subject: str) -> None:
    with pytest.raises(fairway.Refused, match=r"NO_SUCH_GROUP|NO_SUCH_SUBJECT"):
        client.seek(subject, "nobody", "earliest")


def test_a_group_is_configured_before_it_is_used(client: fairway.Client, subject: str) -> None:
    client.send(subject, b"a").result(WAIT_S)
    config = encode(GroupConfig(version=1, attempts_max=2, backoff=Backoff(first_ms=1, cap_ms=2)))
    assert client.configure(subject, "hotel", config, expected_version=0).version == 1
    with client.consumer(subject, group="hotel") as consumer:
        for attempt in (1, 2):
            message = consumer.poll(WAIT_S)
            assert message is not None
            assert message.attempt == attempt
            message.retry()
        assert consumer.flush()
    with client.consumer(f"dead:hotel:{subject}", group="coroner") as dead:
        assert drained(dead, 1) == [b"a"]


def test_a_new_group_may_begin_at_the_end(client: fairway.Client, subject: str) -> None:
    client.send(subject, b"before").result(WAIT_S)
    with client.consumer(subject, group="hotel", start="latest") as consumer:
        assert consumer.poll(0.2) is None
        client.send(subject, b"after").result(WAIT_S)
        assert drained(consumer, 1) == [b"after"]


def test_settings_are_those_of_the_session(client: fairway.Client, subject: str) -> None:
    session = {field.name for field in dataclasses.fields(fairway.ConsumerOptions)}
    assert session == ConsumerSettings.__optional_keys__ | {"subject", "group"}
    with pytest.raises(fairway.Misuse, match="'earliest' or 'latest'"):
        client.consumer(subject, group="hotel", start="yesterday")  # type: ignore[arg-type]


def test_a_paused_consumer_takes_nothing_until_it_resumes(client: fairway.Client, subject: str) -> None:
    with client.consumer(subject, group="hotel") as consumer:
        consumer.pause()
        client.send(subject, b"a").result(WAIT_S)
        assert consumer.take(10, 0.2) == []
        consumer.resume()
        assert drained(consumer, 1) == [b"a"]


def test_what_is_closed_says_so(broker: Running, subject: str) -> None:
    client = fairway.connect(broker.url)
    consumer = client.consumer(subject, group="hotel")
    client.close()
    client.close()
    assert consumer.poll(0) is None
    with pytest.raises(fairway.Misuse, match="closed"):
        client.send(subject, b"a")
    with pytest.raises(fairway.Misuse, match="closed"):
        client.describe()
