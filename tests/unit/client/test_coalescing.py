"""Equal requests of threads: one works, one waits, the others are spared; and what happens to one that never ends."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

import fairway
from fairway.client.coalescing import HOTTEST_KEYS
from fairway.errors import Misuse, Refused
from fairway.runtime.clock import ManualClock
from tests.unit.client.broker import WAIT_S, Running

Coordinator = fairway.QueueCoordinator[str]
ACCEPTED, WAITING, DECLINED = (
    fairway.RequestStatus.ACCEPTED,
    fairway.RequestStatus.WAITING,
    fairway.RequestStatus.DECLINED,
)


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def ended(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_first_works_second_waits_third_is_declined() -> None:
    coordinator = Coordinator()
    turns = [coordinator.acquire("k") for _ in range(4)]
    assert [turn.status for turn in turns] == [ACCEPTED, WAITING, DECLINED, DECLINED]
    assert coordinator.acquire("another").status is ACCEPTED
    assert turns[0].release()
    assert turns[1].is_mine
    assert turns[1].wait()
    assert turns[1].release()
    assert coordinator.statistics().keys == 1  # the other key's


def test_one_that_waits_is_woken_when_the_head_ends() -> None:
    coordinator = Coordinator()
    head, told = coordinator.acquire("k"), list[bool]()
    tail = coordinator.acquire("k")
    waiter = in_thread(lambda: told.append(tail.wait()))
    assert head.release()
    ended(waiter)
    assert told == [True]


def test_release_by_one_that_is_not_the_head_does_nothing() -> None:
    coordinator = Coordinator()
    head, tail, third = (coordinator.acquire("k") for _ in range(3))
    assert not tail.release()
    assert not third.release()
    assert (head.status, tail.status) == (ACCEPTED, WAITING)
    assert head.release()
    assert not head.release()
    assert tail.is_mine


def test_dead_head_is_evicted_by_the_one_that_waits() -> None:
    coordinator = Coordinator(timeout=0.05)
    dead, told = coordinator.acquire("k"), list[bool]()
    tail = coordinator.acquire("k")
    ended(in_thread(lambda: told.append(tail.wait())))
    assert told == [True]
    assert dead.status is fairway.RequestStatus.EVICTED
    assert not dead.release()  # it was only slow: the one that has its place keeps it
    assert tail.is_mine
    assert coordinator.statistics().evicted == 1


def test_dead_head_is_evicted_by_the_next_that_comes() -> None:
    clock = ManualClock()
    coordinator = Coordinator(timeout=10, clock=clock)
    coordinator.acquire("k")
    clock.advance(9_999)
    assert coordinator.acquire("k").status is WAITING
    clock.advance(1)
    assert coordinator.acquire("k").status is WAITING  # the one that waited is the head now
    clock.advance(10_000)
    assert coordinator.acquire("k").status is WAITING
    clock.advance(30_000)
    assert coordinator.statistics().evicted == 2


def test_head_that_takes_long_by_its_nature_renews() -> None:
    clock = ManualClock()
    coordinator = Coordinator(timeout=10, clock=clock)
    head = coordinator.acquire("k")
    for _ in range(5):
        clock.advance(9_000)
        assert head.renew()
    assert coordinator.acquire("k").status is WAITING
    clock.advance(10_000)
    assert coordinator.acquire("k").status is WAITING
    assert head.status is fairway.RequestStatus.EVICTED
    assert not head.renew()


def test_waiting_has_a_limit_if_one_is_given() -> None:
    coordinator = Coordinator()
    head, tail = coordinator.acquire("k"), coordinator.acquire("k")
    assert not tail.wait(0.01)
    assert tail.status is fairway.RequestStatus.WITHDRAWN
    assert coordinator.acquire("k").status is WAITING  # the place is free
    assert head.release()
    assert not tail.is_mine


def test_latest_waits_instead_of_the_one_that_waited() -> None:
    coordinator = Coordinator(keep="latest")
    head, second = coordinator.acquire("k"), coordinator.acquire("k")
    told = list[bool]()
    waiter = in_thread(lambda: told.append(second.wait()))
    third = coordinator.acquire("k")
    ended(waiter)
    assert told == [False]
    assert (second.status, third.status) == (DECLINED, WAITING)
    assert head.release()
    assert third.is_mine


def test_with_waits_and_releases_whatever_happens() -> None:
    coordinator = Coordinator()
    with pytest.raises(ZeroDivisionError), coordinator.acquire("k"):
        _ = 1 / 0
    assert coordinator.statistics().keys == 0
    head, _tail = coordinator.acquire("k"), coordinator.acquire("k")
    with coordinator.acquire("k") as turn:
        assert not turn.is_mine
    assert head.is_mine  # leaving what one never had changes nothing


def test_memory_is_bounded_though_heads_die_and_nobody_asks_again() -> None:
    clock = ManualClock()
    coordinator = Coordinator(timeout=10, keys_max=100, clock=clock)
    for number in range(100):
        coordinator.acquire(f"dead-{number}")
        clock.advance(1)
    with pytest.raises(Refused, match="BUSY: 100 keys are in process at once") as refused:
        coordinator.acquire("one-more")
    assert refused.value.retry_after_ms == 9_900
    assert coordinator.acquire("dead-5").status is WAITING  # a key that is there needs no room
    clock.advance(9_900)
    assert coordinator.acquire("one-more").is_mine
    clock.advance(100_000)
    assert coordinator.sweep() == 100  # dead-5's second one, too
    assert coordinator.statistics().keys == 1
    assert coordinator.sweep() == 0


def test_sweeps_by_itself_about_once_per_timeout() -> None:
    clock = ManualClock()
    coordinator = Coordinator(timeout=10, clock=clock)
    for number in range(50):
        coordinator.acquire(f"dead-{number}")
    clock.advance(20_000)
    coordinator.acquire("alive")
    assert coordinator.statistics().keys == 1


def test_statistics_add_up_and_name_the_hottest_keys() -> None:
    coordinator = Coordinator()
    turns = [coordinator.acquire(key) for key in ("a", "b", "a", "c", "a", "b", "a")]
    for turn in turns:
        turn.release()
    told = coordinator.statistics()
    assert (told.accepted, told.waited, told.declined, told.promoted) == (3, 2, 2, 2)
    assert told.hottest == (("a", 3), ("b", 1))


def test_hottest_keys_are_found_among_many_in_bounded_memory() -> None:
    coordinator = Coordinator()
    for number in range(1_000):
        for key in ("hot", f"cold-{number % 200}"):
            with coordinator.acquire(key):
                tail = coordinator.acquire(key)
            tail.release()
    hottest = coordinator.statistics().hottest
    assert hottest[0][0] == "hot"
    assert len(hottest) == HOTTEST_KEYS


def test_each_key_is_worked_on_by_one_thread_at_a_time() -> None:
    coordinator = Coordinator()
    at_work = {key: threading.Lock() for key in "abc"}
    clashes, done = list[str](), dict.fromkeys("abc", 0)

    def work() -> None:
        for number in range(300):
            key = "abc"[number % 3]
            with coordinator.acquire(key) as turn:
                if not turn.is_mine:
                    continue
                if not at_work[key].acquire(blocking=False):
                    clashes.append(key)
                    continue
                done[key] += 1
                at_work[key].release()

    ended(*[in_thread(work) for _ in range(8)])
    told = coordinator.statistics()
    assert not clashes
    assert told.accepted + told.waited + told.declined == 8 * 300
    assert told.accepted + told.promoted == sum(done.values())
    assert (told.keys, told.evicted) == (0, 0)


def test_listener_coalesces_and_every_message_is_settled(broker: Running, client: fairway.Client, subject: str) -> None:
    """Thirty requests for one entry: a change that was there before the last request is always seen."""
    coordinator = fairway.QueueCoordinator[str](timeout=WAIT_S)
    app = fairway.App(broker.url)
    handled, entered, go = list[bytes](), threading.Event(), threading.Event()

    @app.listener(subject, group="cache", concurrency=4)
    @coordinator.coalesced(lambda message: message.key)
    def refresh(message: fairway.Message) -> None:
        handled.append(message.payload)
        entered.set()
        go.wait(WAIT_S)

    for number in range(30):
        client.send(subject, b"%d" % number, key="basket-7").result(WAIT_S)
    app.start()
    try:
        assert entered.wait(WAIT_S)
        waiter = threading.Event()
        for _ in range(int(WAIT_S / 0.02)):  # one at work, one waits, two workers spare themselves the rest
            if coordinator.statistics().declined == 28:
                break
            waiter.wait(0.02)
        assert coordinator.statistics().declined == 28
        go.set()
    finally:
        go.set()
        app.stop()
    assert len(handled) == 2
    assert not client.consumer(subject, group="cache", wait_ms=0).take(30, 0.2)


def test_messages_without_a_key_are_not_the_same() -> None:
    coordinator = Coordinator()

    @coordinator.coalesced(lambda request: request["key"])
    def handle(request: dict[str, str | None]) -> str:
        """What it does."""
        inner = handle({"key": None}) if request["key"] is not None else ""
        return f"{request['key']}{inner}"

    assert handle({"key": "k"}) == "kNone"
    assert handle.__doc__ == "What it does."
    assert coordinator.statistics().accepted == 1
    with pytest.raises(Misuse, match="a key of None names nothing"):
        coordinator.acquire(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"timeout": 0}, "every head would be dead at once"),
        ({"keep": "last"}, "'first' may wait, or the 'latest'"),
        ({"keys_max": 0}, "at least 1"),
    ],
)
def test_what_cannot_be_right_is_said(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(Misuse, match=sentence):
        Coordinator(**options)  # type: ignore[arg-type]
