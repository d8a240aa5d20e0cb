"""The queue of cold reads: a few at a time, in turn, charged, and bounded in what they leave behind."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from fairway.broker import cold_reads
from fairway.broker.cold_reads import Begin, ColdReads, FetchCache, KeepBytes
from fairway.errors import Code, Refused, StorageFault
from fairway.limits import MIB
from fairway.runtime.clock import ManualClock
from fairway.runtime.disk import ReadCompletion
from fairway.scheduling import Actor, Scheduler
from fairway.storage.log import Damaged
from tests.unit.runtime.timers import Timers

MS = 1_000_000


class Loop(Timers):
    """Callbacks that are due at once, and timers."""

    def call_soon(self, callback: object, /) -> None:
        """Nothing is dispatched in these tests, so nothing runs."""


@dataclass
class Device:
    """Answers when told to."""

    under_way: list[tuple[str, ReadCompletion]] = field(default_factory=list)

    def read(self, name: str) -> Begin:
        return lambda fetched: self.under_way.append((name, fetched))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.under_way]

    def answer(self, found: bytes | StorageFault = b"x") -> None:
        self.under_way.pop(0)[1](found)


@dataclass
class Stage:
    clock: ManualClock = field(default_factory=ManualClock)
    device: Device = field(default_factory=Device)

    def __post_init__(self) -> None:
        self.clock.advance(1_000)  # nobody else has been served for a second
        self.loop = Loop()
        self.scheduler = Scheduler(self.clock, self.loop)
        self.fetches = ColdReads(self.scheduler, self.clock, self.loop.call_later, at_once=2)

    def actor(self, key: str) -> Actor:
        return Actor(key, 1.0, 0.0, 0)

    def reads(self, fetch_cache: FetchCache, *names: str) -> list[tuple[Begin, KeepBytes]]:
        return [(self.device.read(name), lambda data: fetch_cache.keep(0, len(data), data)) for name in names]

    def start(self, actor: Actor, *names: str) -> None:
        fetch_cache = FetchCache()
        self.fetches.start(actor, fetch_cache, self.reads(fetch_cache, *names))


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_a_few_at_a_time_and_each_actor_in_turn(stage: Stage) -> None:
    actors = {name: stage.actor(name) for name in "abc"}
    stage.start(actors["a"], "a1", "a2", "a3")
    stage.start(actors["b"], "b1")
    stage.start(actors["c"], "c1", "c2")
    order = []
    while stage.device.under_way:
        assert len(stage.device.under_way) <= 2
        order.append(stage.device.names[0])
        stage.device.answer()
    assert order == ["a1", "b1", "c1", "a2", "c2", "a3"]
    assert all(actor.suspensions == 0 for actor in actors.values())


def test_the_time_under_way_is_charged_and_the_time_in_the_queue_is_not(stage: Stage) -> None:
    first, second, third = (stage.actor(name) for name in "abc")
    for actor in (first, second, third):
        stage.start(actor, "read")
    stage.clock.advance(0.005)
    stage.device.answer()
    stage.clock.advance(0.002)
    stage.device.answer()
    stage.device.answer()
    assert (first.elsewhere_ns, second.elsewhere_ns, third.elsewhere_ns) == (5_000, 7_000, 2_000)


def test_the_actor_is_suspended_until_all_is_there(stage: Stage) -> None:
    actor = stage.actor("a")
    stage.start(actor, "one", "two")
    stage.device.answer()
    assert actor.suspensions == 1
    assert stage.fetches.fetch_cache(actor) is None
    stage.device.answer()
    assert actor.suspensions == 0
    fetch_cache = stage.fetches.fetch_cache(actor)
    assert fetch_cache is not None
    assert len(fetch_cache.pieces) == 2


def test_a_fault_ends_the_fetch_and_is_reported_once(stage: Stage) -> None:
    actor = stage.actor("a")
    stage.start(actor, "one", "two")
    stage.device.answer(StorageFault("the device is on fire"))
    assert stage.device.under_way == []
    assert actor.suspensions == 0
    with pytest.raises(Refused, match="on fire") as refused:
        stage.fetches.fetch_cache(actor)
    assert refused.value.code is Code.BUSY
    assert stage.fetches.fetch_cache(actor) is None


def test_what_is_gone_when_its_turn_comes_counts_as_read(stage: Stage) -> None:
    def gone(_fetched: ReadCompletion) -> None:
        raise Damaged(7, "missing")

    actor, fetch_cache = stage.actor("a"), FetchCache()
    stage.fetches.start(actor, fetch_cache, [(gone, lambda data: fetch_cache.keep(7, 100, data))])
    assert actor.suspensions == 0
    piece = fetch_cache.piece(7, 100)
    assert piece is not None
    assert (piece.size, piece.data) == (100, b"")


def test_while_others_are_at_work_it_rests_between_fetches(stage: Stage) -> None:
    actor = stage.actor("a")
    stage.start(actor, "one")
    stage.clock.advance(1)
    stage.device.answer()
    stage.clock.advance(1)
    actor.served_ns += MS  # the answers that are made of it, and the next request
    stage.scheduler.busy_ns = stage.clock.monotonic_ns()
    stage.start(actor, "two")
    assert stage.device.names == []
    stage.clock.advance(2 * cold_reads.REST_FACTOR)
    stage.loop.ring_all()
    assert stage.device.names == ["two"]


def test_while_others_are_at_work_it_rests_between_answers(stage: Stage) -> None:
    actor = stage.actor("a")
    stage.start(actor, "one")
    stage.device.answer()
    stage.clock.advance(1)
    actor.served_ns += MS  # an answer was made of it
    stage.scheduler.busy_ns = stage.clock.monotonic_ns()
    stage.fetches.rest(actor)
    assert actor.suspensions == 1
    assert stage.fetches.fetch_cache(actor) is not None
    stage.clock.advance(cold_reads.REST_FACTOR)
    stage.loop.ring_all()
    assert actor.suspensions == 0


def test_with_weight_it_rests_the_less(stage: Stage) -> None:
    actor = stage.actor("a")
    actor.weight = 4.0
    stage.start(actor, "one")
    stage.device.answer()
    stage.clock.advance(1)
    actor.served_ns += 4 * MS
    stage.scheduler.busy_ns = stage.clock.monotonic_ns()
    stage.fetches.rest(actor)
    assert actor.suspensions == 1
    stage.clock.advance(cold_reads.REST_FACTOR)
    stage.loop.ring_all()
    assert actor.suspensions == 0


def test_alone_it_does_not_rest_between_answers(stage: Stage) -> None:
    actor = stage.actor("a")
    stage.start(actor, "one")
    stage.device.answer()
    stage.clock.advance(1)
    actor.served_ns += MS
    stage.fetches.rest(actor)
    assert actor.suspensions == 0


def test_waiting_for_the_device_or_for_a_turn_is_no_reason_to_rest(stage: Stage) -> None:
    actor = stage.actor("a")
    stage.start(actor, "one")
    stage.clock.advance(20)
    stage.device.answer()
    stage.clock.advance(20)
    actor.served_ns += MS // (2 * cold_reads.REST_FACTOR)
    stage.scheduler.busy_ns = stage.clock.monotonic_ns()
    stage.fetches.rest(actor)
    assert actor.suspensions == 0


def test_the_rests_of_short_answers_add_up(stage: Stage) -> None:
    actor = stage.actor("a")
    stage.start(actor, "one")
    stage.device.answer()
    rests = 0
    for _ in range(2 * cold_reads.REST_FACTOR * 10):
        actor.served_ns += MS // 10 // cold_reads.REST_FACTOR
        stage.scheduler.busy_ns = stage.clock.monotonic_ns()
        stage.fetches.rest(actor)
        if actor.suspensions:
            rests += 1
            stage.clock.advance(2)
            stage.loop.ring_all()
    assert rests == pytest.approx(2 * cold_reads.REST_FACTOR, abs=1)


def test_it_stands_aside_where_somebody_was_served_just_now_but_not_for_ever(stage: Stage) -> None:
    actor = stage.actor("a")
    stage.scheduler.busy_ns = stage.clock.monotonic_ns()
    stage.start(actor, "one")
    waited_ms = 0
    while not stage.device.under_way:
        assert waited_ms < 10
        stage.loop.ring_one()  # the timer,
        stage.clock.advance(1)
        waited_ms += 1
        stage.scheduler.busy_ns = stage.clock.monotonic_ns()  # somebody is served,
        stage.loop.ring_one()  # and then it looks again
    assert waited_ms > 1


def test_one_that_has_what_it_wants_does_not_wait_for_the_device(stage: Stage) -> None:
    slow, slower, sated = (stage.actor(name) for name in "abc")
    stage.start(sated, "read")
    stage.device.answer()
    for actor in (slow, slower):
        stage.start(actor, "hangs")
    stage.clock.advance(1)
    stage.scheduler.busy_ns = stage.clock.monotonic_ns()
    stage.fetches.rest(sated)
    stage.clock.advance(cold_reads.REST_FACTOR + 1)
    stage.loop.ring_all()
    assert (sated.suspensions, slow.suspensions, slower.suspensions) == (0, 1, 1)


def test_nobody_reads_ahead_after_a_fault_or_where_the_shelves_are_full(stage: Stage) -> None:
    assert stage.fetches.ahead_bytes(MIB) == MIB
    for number in range(16):
        stage.start(stage.actor(str(number)), "read")
        stage.device.answer()
    assert stage.fetches.ahead_bytes(MIB) < MIB
    assert stage.fetches.ahead_bytes(1) == 1
    stage.start(stage.actor("unlucky"), "read")
    stage.device.answer(StorageFault("the device is on fire"))
    assert stage.fetches.ahead_bytes(1) == 0
    stage.clock.advance(100_000)
    assert stage.fetches.ahead_bytes(1) == 1


def test_alone_it_does_not_rest(stage: Stage) -> None:
    actor = stage.actor("a")
    for name in ("one", "two", "three"):
        stage.start(actor, name)
        assert stage.device.names == [name]
        stage.clock.advance(1)
        stage.device.answer()


def test_shelves_that_nobody_comes_for_are_cleared(stage: Stage) -> None:
    actors = [stage.actor(str(number)) for number in range(40)]
    for actor in actors:
        stage.start(actor, "read")
        stage.device.answer(bytes(MIB))
    kept = [actor.key for actor in actors if stage.fetches.fetch_cache(actor) is not None]
    assert kept == [str(number) for number in range(40 - cold_reads.CACHES_BYTES_MAX // MIB, 40)]


def test_one_that_is_larger_than_all_shelves_is_kept(stage: Stage) -> None:
    actor = stage.actor("a")
    stage.start(actor, "read")
    stage.device.answer(bytes(cold_reads.CACHES_BYTES_MAX + 1))
    assert stage.fetches.fetch_cache(actor) is not None
    stage.fetches.clear(actor)
    assert stage.fetches.fetch_cache(actor) is None


def test_a_piece_is_found_from_any_place_in_it() -> None:
    fetch_cache = FetchCache()
    fetch_cache.keep(100, 10, b"0123456789")
    fetch_cache.keep(200, 10, b"short")
    assert fetch_cache.piece(100, 4) == (100, 4, b"0123456789")
    assert fetch_cache.piece(103, 4) == (103, 4, b"3456")
    assert fetch_cache.piece(106, 9) == (106, 4, b"6789")
    assert fetch_cache.piece(203, 7) == (203, 7, b"rt")
    assert fetch_cache.piece(99, 1) is None
    assert fetch_cache.piece(110, 1) is None
