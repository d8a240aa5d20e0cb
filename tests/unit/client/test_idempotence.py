"""Handlers whose effect happens once: what is the same message, what is remembered, and when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from datetime import timedelta

import pytest

import fairway
from fairway.client.app import App
from fairway.client.idempotence import REPLAY_ID, plain
from fairway.runtime.clock import ManualClock
from fairway.testing import AsyncMemoryStore, MemoryBroker, MemoryStore
from tests.unit.client.broker import WAIT_S, Running
from tests.unit.client.test_app import running, until

SUBJECT, GROUP = "order.paid", "ledger"
ID = fairway.MessageId(7, 7)


class Ledger:
    """What a handler has done, in memory."""

    def __init__(self, broker: MemoryBroker, inbox: fairway.MemoryInbox | fairway.ExpiringInbox) -> None:
        self.app = App(broker.url)
        self.broker = broker
        self.booked: list[bytes] = []
        self.failures: list[Exception] = []
        self.fw = broker.connect()
        self.app.listener(SUBJECT, group=GROUP, idempotent=inbox)(self.book)

    def book(self, message: fairway.Message) -> None:
        if self.failures:
            raise self.failures.pop()
        self.booked.append(message.payload)

    def send(self, payload: bytes = b"5", headers: dict[str, str] | None = None, key: str | None = None) -> None:
        self.fw.send(SUBJECT, payload, key, headers=headers, id=ID).result()
        self.broker.handle(self.app)

    def status(self) -> tuple[int, int, int]:
        state = self.fw.describe(SUBJECT, GROUP).subjects[0].groups[0]
        return state.lag, state.retrying, state.dead


def test_what_comes_again_is_acked_and_not_handled(fairway_broker: MemoryBroker) -> None:
    ledger = Ledger(fairway_broker, fairway.MemoryInbox())
    for _ in range(3):
        ledger.send()
    assert ledger.booked == [b"5"]
    assert ledger.status() == (0, 0, 0)


@pytest.mark.parametrize("failure", [ValueError("no such account"), fairway.Retry("not now", after=1)])
def test_what_failed_is_not_remembered(fairway_broker: MemoryBroker, failure: Exception) -> None:
    ledger = Ledger(fairway_broker, fairway.MemoryInbox())
    ledger.failures.append(failure)
    ledger.send()
    assert ledger.booked == []
    fairway_broker.clock.advance(seconds=20)
    fairway_broker.handle(ledger.app)
    assert ledger.booked == [b"5"]
    ledger.send()
    assert ledger.booked == [b"5"]


def test_what_was_rejected_is_handled_when_it_is_redriven(fairway_broker: MemoryBroker) -> None:
    ledger = Ledger(fairway_broker, fairway.MemoryInbox())
    ledger.failures.append(fairway.Reject("no such account"))
    ledger.send()
    assert (ledger.booked, ledger.status()) == ([], (0, 0, 1))
    assert ledger.fw.redrive(SUBJECT, GROUP).count == 1
    fairway_broker.handle(ledger.app)
    assert ledger.booked == [b"5"]


def test_what_was_done_is_not_done_again_when_it_is_redriven(fairway_broker: MemoryBroker) -> None:
    inbox = fairway.MemoryInbox()
    ledger = Ledger(fairway_broker, inbox)
    ledger.fw.send(SUBJECT, b"5", id=ID).result()
    with ledger.fw.consumer(SUBJECT, group=GROUP) as consumer:
        [message] = consumer.take(1, timeout=5)
        inbox.guard(ledger.book, is_async=False, is_batch=False)([message])
        message.reject("its acks were lost until all attempts were used up")
    fairway_broker.clock.advance(seconds=1)
    assert ledger.fw.redrive(SUBJECT, GROUP).count == 1
    assert fairway_broker.handle(ledger.app) == 1
    assert (ledger.booked, ledger.status()[0]) == ([b"5"], 0)


def test_a_replay_is_handled_again_and_once(fairway_broker: MemoryBroker) -> None:
    ledger = Ledger(fairway_broker, fairway.MemoryInbox())
    for replay in (None, "march", "march", "april", None):
        ledger.send(headers=None if replay is None else {REPLAY_ID: replay})
    assert len(ledger.booked) == 3


def test_a_replay_may_be_meant_for_what_is_missing_only(fairway_broker: MemoryBroker) -> None:
    ledger = Ledger(fairway_broker, fairway.MemoryInbox(replays=False))
    ledger.send()
    ledger.send(headers={REPLAY_ID: "march"})
    assert len(ledger.booked) == 1


@pytest.mark.parametrize("by", ["key", lambda message: message.payload.decode().partition(":")[0]])
def test_a_key_of_the_business_may_say_what_is_the_same(fairway_broker: MemoryBroker, by: str) -> None:
    app, booked, fw = App(fairway_broker.url), list[bytes](), fairway_broker.connect()

    @app.listener(SUBJECT, group=GROUP, idempotent=fairway.MemoryInbox(by=by))
    def book(message: fairway.Message) -> None:
        booked.append(message.payload)

    for name, sum_ in (("o-1", 5), ("o-2", 6), ("o-1", 5)):
        fw.send(SUBJECT, f"{name}:{sum_}".encode(), name).result()
    fairway_broker.handle(app)
    assert booked == [b"o-1:5", b"o-2:6"]


def test_a_message_without_the_key_goes_to_dead_letter(fairway_broker: MemoryBroker) -> None:
    ledger = Ledger(fairway_broker, fairway.MemoryInbox(by="key"))
    ledger.send()
    assert (ledger.booked, ledger.status()) == ([], (0, 0, 1))
    dead = next(iter(ledger.fw.scan(f"dead:{GROUP}:{SUBJECT}")))
    assert "no key to tell it apart by" in dead.batch.headers(0)["fairway.dead.reason"]


def test_names_are_exact_whatever_the_key_is() -> None:
    assert plain("o-42") == "o-42"
    assert plain("o-42", "march") == "o-42+march"
    odd = ["o-42 ", "ö", "O" * 256, "sha256:o", "", "a\nb", "o-42+march", "\ud800"]
    assert len({plain(name) for name in odd}) == len(odd)
    assert all(plain(name).startswith("sha256:") and len(plain(name)) == 71 for name in odd)
    assert len({plain("a+", "b"), plain("a", "+b"), plain("a+b"), plain("a", "b"), plain("a++b")}) == 5


# --- batches ---------------------------------------------------------------------------------------------------------


def test_of_a_list_only_what_is_new_is_handled(fairway_broker: MemoryBroker) -> None:
    app, lists, fw = App(fairway_broker.url), list[list[bytes]](), fairway_broker.connect()

    @app.listener(SUBJECT, group=GROUP, batch=True, idempotent=fairway.MemoryInbox(by="key"))
    def book(messages: Sequence[fairway.Message]) -> None:
        lists.append([message.payload for message in messages])

    for keys in (["a", "b", "a"], ["b"], ["c", "a"]):
        fw.send_many(SUBJECT, [key.encode() for key in keys], keys=keys).result()
        fairway_broker.handle(app)
    assert lists == [[b"a", b"b"], [b"c"]]
    assert fw.describe(SUBJECT, GROUP).subjects[0].groups[0].lag == 0


def test_of_a_list_what_was_handed_back_is_not_remembered(fairway_broker: MemoryBroker) -> None:
    app, lists, fw = App(fairway_broker.url), list[list[bytes]](), fairway_broker.connect()

    @app.listener(SUBJECT, group=GROUP, batch=True, idempotent=fairway.MemoryInbox(by="key"))
    def book(messages: Sequence[fairway.Message]) -> None:
        lists.append([message.payload for message in messages])
        for message in messages:
            if len(lists) == 1 and message.payload == b"b":
                message.retry(after=1)
            else:
                message.ack()
                with pytest.raises(fairway.Misuse, match="was acked before"):
                    message.reject()

    fw.send_many(SUBJECT, [b"a", b"b", b"b"], keys=["a", "b", "b"]).result()
    fairway_broker.handle(app)
    fairway_broker.clock.advance(seconds=20)
    fairway_broker.handle(app)
    assert lists == [[b"a", b"b"], [b"b"]]
    assert fw.describe(SUBJECT, GROUP).subjects[0].groups[0].lag == 0


# --- threads and tasks -----------------------------------------------------------------------------------------------


def test_a_message_in_process_is_waited_for(broker: Running, client: fairway.Client, subject: str) -> None:
    app, begun, go_on, seen = App(broker.url), threading.Event(), threading.Event(), list[str]()

    @app.listener(subject, group=GROUP, concurrency=4, idempotent=fairway.MemoryInbox())
    def book(message: fairway.Message) -> None:
        seen.append("begun")
        begun.set()
        assert go_on.wait(WAIT_S)
        if seen.count("begun") == 1:
            raise fairway.Retry(after=0)
        seen.append("done")

    for _ in range(4):
        client.send(subject, b"5", id=ID).result()
    with running(app):
        assert begun.wait(WAIT_S)
        until(lambda: client.describe(subject, GROUP).subjects[0].groups[0].in_flight == 4)
        assert seen == ["begun"]  # the others wait
        go_on.set()
        until(lambda: client.describe(subject, GROUP).subjects[0].groups[0].lots == 0)
    assert seen == ["begun", "begun", "done"]


def test_tasks_wait_too(broker: Running, client: fairway.Client, subject: str) -> None:
    app, seen = App(broker.url), list[str]()

    @app.listener(subject, group=GROUP, concurrency=4, idempotent=fairway.MemoryInbox())
    async def book(message: fairway.Message) -> None:
        seen.append("begun")
        await asyncio.sleep(0.05)
        if seen.count("begun") == 1:
            raise fairway.Retry(after=0)
        seen.append("done")

    for _ in range(4):
        client.send(subject, b"5", id=ID).result()
    with running(app):
        until(lambda: "done" in seen and client.describe(subject, GROUP).subjects[0].groups[0].lots == 0)
    assert seen == ["begun", "begun", "done"]


def test_memory_is_bounded_by_count_and_by_time(fairway_broker: MemoryBroker) -> None:
    clock = ManualClock()
    inbox = fairway.MemoryInbox(2, timedelta(minutes=5), by="key", clock=clock)
    app, booked, fw = App(fairway_broker.url), list[bytes](), fairway_broker.connect()

    @app.listener(SUBJECT, group=GROUP, idempotent=inbox)
    def book(message: fairway.Message) -> None:
        booked.append(message.payload)

    def send(key: str) -> bool:
        before = len(booked)
        fw.send(SUBJECT, key.encode(), key).result()
        fairway_broker.handle(app)
        return len(booked) > before

    assert [send(key) for key in "abbacd"] == [True, True, False, False, True, True]
    assert len(inbox) <= 3
    assert send("a")  # it was the oldest
    assert not send("d")
    clock.advance(5 * 60_000)
    assert send("d")


# --- stores that expire ----------------------------------------------------------------------------------------------


def test_a_store_remembers_for_all_who_share_it(fairway_broker: MemoryBroker) -> None:
    store = MemoryStore()
    first = Ledger(fairway_broker, fairway.ExpiringInbox(store))
    first.send()
    second = Ledger(fairway_broker, fairway.ExpiringInbox(store))
    second.failures.append(AssertionError("it was done before"))
    second.send()
    assert (first.booked, second.booked) == ([b"5"], [])


def test_what_failed_leaves_no_claim(fairway_broker: MemoryBroker) -> None:
    ledger = Ledger(fairway_broker, fairway.ExpiringInbox(MemoryStore()))
    ledger.failures.append(fairway.Retry(after=1))
    ledger.send()
    fairway_broker.clock.advance(seconds=2)
    fairway_broker.handle(ledger.app)
    assert ledger.booked == [b"5"]


def test_what_another_is_at_is_put_off_until_its_claim_runs_out(fairway_broker: MemoryBroker) -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    ledger = Ledger(fairway_broker, fairway.ExpiringInbox(store, hold=60, keep=3_600))
    store.claim(f"{SUBJECT}/{GROUP}/{ID}", "one that has died", 60_000)
    ledger.send()
    assert (ledger.booked, ledger.status()) == ([], (0, 1, 0))
    clock.advance(60_000)
    fairway_broker.clock.advance(seconds=20)
    fairway_broker.handle(ledger.app)
    assert ledger.booked == [b"5"]
    clock.advance(3_600_000)
    ledger.send()
    assert len(ledger.booked) == 2  # nobody remembers


def test_a_store_for_coroutines(fairway_broker: MemoryBroker) -> None:
    app, booked, fw = App(fairway_broker.url), list[bytes](), fairway_broker.connect()

    @app.listener(SUBJECT, group=GROUP, batch=True, idempotent=fairway.ExpiringInbox(AsyncMemoryStore()))
    async def book(messages: Sequence[fairway.Message]) -> None:
        booked.extend(message.payload for message in messages)
        if len(booked) == 1:
            raise fairway.Retry(after=1)

    for _ in range(2):
        fw.send(SUBJECT, b"5", id=ID).result()
        fairway_broker.handle(app)
    assert booked == [b"5", b"5"]
    fairway_broker.clock.advance(seconds=2)
    fairway_broker.handle(app)
    assert booked == [b"5", b"5"]


# --- misuse ----------------------------------------------------------------------------------------------------------


def test_misuse_is_told_when_the_listener_is_declared() -> None:
    app = App("fairway://127.0.0.1:20880")

    def two(message: fairway.Message, session: object) -> None: ...

    def one(message: fairway.Message) -> None: ...

    async def task(message: fairway.Message) -> None: ...

    listen = app.listener(SUBJECT, group=GROUP, idempotent=fairway.MemoryInbox())
    with pytest.raises(fairway.Misuse, match=r"two takes \(message, session\).*the message alone"):
        listen(two)
    with pytest.raises(fairway.Misuse, match=r"task is `async def`.*AsyncExpiringStore"):
        app.listener(SUBJECT, group=GROUP, idempotent=fairway.ExpiringInbox(MemoryStore()))(task)
    with pytest.raises(fairway.Misuse, match=r"one is `def`.*ExpiringStore"):
        app.listener(SUBJECT, group=GROUP, idempotent=fairway.ExpiringInbox(AsyncMemoryStore()))(one)
    with pytest.raises(fairway.Misuse, match="by='id'"):
        fairway.MemoryInbox(by="id")
    with pytest.raises(fairway.Misuse, match="hold is at most a day"):
        fairway.ExpiringInbox(MemoryStore(), hold=timedelta(days=2))
    with pytest.raises(fairway.Misuse, match="at least 1"):
        fairway.MemoryInbox(0)
    assert app.listeners == []
