"""The simulated loop: what asyncio guarantees holds, what it leaves open the seed decides, nothing fails in silence."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairway.errors import Misuse
from fairway.runtime.clock import SIMULATED_START_MS, SimClock
from fairway.runtime.rng import SeededRng
from fairway.simulation.loop import Deadlock, NotSimulated, SealedLoop, SimLoop, SimulationFailed, StepLimit

T = TypeVar("T")

HOUR_S = 3_600
YEAR_S = 365 * 24 * HOUR_S


@pytest.fixture
def loop() -> Iterator[SimLoop]:
    loop = SimLoop(SeededRng(1), steps_max=2_000_000)
    yield loop
    loop.shutdown()


def run(main: Coroutine[Any, Any, T], seed: int = 1, **options: Any) -> T:
    loop = SimLoop(SeededRng(seed), **options)
    try:
        return loop.run_until_complete(main)
    finally:
        loop.shutdown()


# --- order -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_call_soon_is_first_in_first_out(seed: int) -> None:
    async def main() -> list[int]:
        order: list[int] = []
        for number in range(100):
            asyncio.get_running_loop().call_soon(order.append, number)
        await asyncio.sleep(0.001)
        return order

    assert run(main(), seed) == list(range(100))


async def order_of_a_tie() -> tuple[int, ...]:
    order: list[int] = []
    for number in range(10):
        asyncio.get_running_loop().call_later(1, order.append, number)
    await asyncio.sleep(2)
    return tuple(order)


def test_timers_that_tie_run_in_an_order_that_the_seed_decides() -> None:
    orders = [run(order_of_a_tie(), seed) for seed in range(20)]
    assert orders == [run(order_of_a_tie(), seed) for seed in range(20)]
    assert len(set(orders)) > 15
    assert all(sorted(order) == list(range(10)) for order in orders)


def test_a_sum_of_floats_ties_with_the_number_it_stands_for() -> None:
    async def main() -> tuple[str, ...]:
        order: list[str] = []
        loop = asyncio.get_running_loop()
        loop.call_later(0.3, order.append, "0.3")
        await asyncio.sleep(0.1)
        loop.call_later(0.2, order.append, "0.1 + 0.2")
        await asyncio.sleep(1)
        return tuple(order)

    assert {run(main(), seed) for seed in range(20)} == {("0.3", "0.1 + 0.2"), ("0.1 + 0.2", "0.3")}


def test_timers_run_in_order_of_time() -> None:
    async def main() -> list[int]:
        order: list[int] = []
        for number in (3, 1, 2):
            asyncio.get_running_loop().call_later(number / 1e6, order.append, number)
        await asyncio.sleep(1)
        return order

    assert run(main()) == [1, 2, 3]


# --- time ------------------------------------------------------------------------------------------------------------


def test_three_years_of_timers_pass_quickly(loop: SimLoop) -> None:
    async def every_hour(ticks: list[float]) -> None:
        while True:
            await asyncio.sleep(HOUR_S)
            ticks.append(loop.time())

    async def main() -> list[float]:
        ticks: list[float] = []
        ticking = loop.create_task(every_hour(ticks))
        for _ in range(6):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(HOUR_S / 7):
                    await asyncio.sleep(YEAR_S / 2)
            await asyncio.sleep(YEAR_S / 2)
        ticking.cancel()
        return ticks

    ticks = loop.run_until_complete(main())
    assert loop.time() > 3 * YEAR_S
    assert len(ticks) >= 3 * YEAR_S / HOUR_S
    assert ticks == [HOUR_S * (number + 1) for number in range(len(ticks))], "an hour is an hour, with no drift"
    assert loop.steps < 4 * len(ticks)


@pytest.mark.parametrize("start_s", [0, 0.1, YEAR_S / 2, 3 * YEAR_S + 0.3])
def test_a_loop_that_waits_for_a_deadline_ends(loop: SimLoop, start_s: float) -> None:
    async def main() -> int:
        await asyncio.sleep(start_s)
        turns = 0
        deadline = loop.time() + 0.7
        while loop.time() < deadline:
            await asyncio.sleep(deadline - loop.time())
            turns += 1
        return turns

    assert loop.run_until_complete(main()) <= 2


@given(st.lists(st.integers(0, 3 * YEAR_S * 10**6), min_size=1, max_size=20), st.integers(0, 5_000))
def test_no_timer_is_early(delays_us: list[int], step_ns_max: int) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        async with asyncio.TaskGroup() as group:
            for delay_us in delays_us:
                group.create_task(sleep_at_least(loop, delay_us))

    async def sleep_at_least(loop: SimLoop, delay_us: int) -> None:
        start_ns = loop.now_ns()
        await asyncio.sleep(delay_us / 1e6)
        between_floats_ns = 4 * math.ulp(loop.time()) * 1e9 if start_ns % 1_000 else 0  # 60 ns after three years
        assert loop.now_ns() - start_ns >= delay_us * 1_000 - between_floats_ns

    run(main(), step_ns_max=step_ns_max)


@pytest.mark.parametrize("start_s", [0, YEAR_S / 3, 3 * YEAR_S + 0.3])
def test_time_does_not_drift(loop: SimLoop, start_s: float) -> None:
    async def main() -> int:
        await asyncio.sleep(start_s)
        start_ns = loop.now_ns()
        for _ in range(10_000):
            await asyncio.sleep(0.100_123)  # no multiple of the distance between floats
        return loop.now_ns() - start_ns

    assert loop.run_until_complete(main()) == 10_000 * 100_123_000


def test_a_timer_set_for_the_next_float_moves_time(loop: SimLoop) -> None:
    async def main() -> None:
        await asyncio.sleep(3 * YEAR_S)
        when = math.nextafter(loop.time(), math.inf)
        fired = loop.create_future()
        loop.call_at(when, fired.set_result, None)
        await fired
        assert loop.time() >= when

    loop.run_until_complete(main())


def test_a_timer_in_the_past_runs_at_once_and_time_stands(loop: SimLoop) -> None:
    async def main() -> None:
        await asyncio.sleep(5)
        fired = loop.create_future()
        loop.call_at(1, fired.set_result, None)
        await fired

    loop.run_until_complete(main())
    assert loop.now_ns() == 5_000_000_000


def test_time_stands_still_while_anything_is_ready(loop: SimLoop) -> None:
    async def main() -> None:
        loop.call_later(1e-6, lambda: None)
        for _ in range(1_000):
            await asyncio.sleep(0)

    loop.run_until_complete(main())
    assert loop.now_ns() == 0


def test_steps_may_cost_a_seeded_time() -> None:
    async def main() -> int:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        fired = loop.create_future()
        loop.call_later(1e-6, fired.set_result, None)
        turns = 0
        while not fired.done():
            await asyncio.sleep(0)
            turns += 1
        return turns

    turns = [run(main(), seed, step_ns_max=500) for seed in range(20)]
    assert turns == [run(main(), seed, step_ns_max=500) for seed in range(20)]
    assert len(set(turns)) > 3


def test_a_step_that_spends_time_makes_others_late(loop: SimLoop) -> None:
    async def main() -> float:
        late = loop.create_future()
        loop.call_later(1, lambda: late.set_result(loop.time()))
        loop.spend(3_000_000_000)
        fired_at: float = await late
        return fired_at

    assert loop.run_until_complete(main()) == 3
    with pytest.raises(Misuse):
        loop.spend(-1)


def test_cancelled_timers_do_not_pile_up(loop: SimLoop) -> None:
    async def main() -> int:
        for _ in range(10_000):
            loop.call_later(YEAR_S, lambda: None).cancel()
        return len(loop._timers)

    assert loop.run_until_complete(main()) < 200
    assert loop.now_ns() == 0


def test_the_clock_follows_the_loop_and_its_wall_may_jump(loop: SimLoop) -> None:
    clock = SimClock(loop.now_ns)
    loop.run_until_complete(asyncio.sleep(1.5))
    assert (clock.wall_ms(), clock.monotonic_ns()) == (SIMULATED_START_MS + 1_500, 1_500_000_000)
    clock.jump(-60_000)
    assert (clock.wall_ms(), clock.monotonic_ns()) == (SIMULATED_START_MS - 58_500, 1_500_000_000)


# --- what asyncio is made of -----------------------------------------------------------------------------------------


def test_task_groups_queues_events_and_locks_work(loop: SimLoop) -> None:
    async def produce(queue: asyncio.Queue[int], ready: asyncio.Event) -> None:
        await ready.wait()
        for number in range(50):
            await queue.put(number)

    async def consume(queue: asyncio.Queue[int], lock: asyncio.Lock, seen: list[int]) -> None:
        for _ in range(25):
            async with lock:
                seen.append(await queue.get())
                await asyncio.sleep(0.001)

    async def main() -> list[int]:
        queue: asyncio.Queue[int] = asyncio.Queue(maxsize=3)
        ready, lock, seen = asyncio.Event(), asyncio.Lock(), list[int]()
        async with asyncio.TaskGroup() as group:
            group.create_task(consume(queue, lock, seen))
            group.create_task(consume(queue, lock, seen))
            group.create_task(produce(queue, ready), name="producer")
            loop.call_later(10, ready.set)
        return seen

    assert loop.run_until_complete(main()) == list(range(50))
    assert loop.time() == pytest.approx(10.05)


def test_wait_for_and_timeout_cut_short(loop: SimLoop) -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(YEAR_S), timeout=2)
        async with asyncio.timeout(YEAR_S):
            await asyncio.sleep(1)

    loop.run_until_complete(main())
    assert loop.now_ns() == 3_000_000_000


def test_a_failing_member_cancels_its_task_group(loop: SimLoop) -> None:
    async def fail() -> None:
        await asyncio.sleep(1)
        raise LookupError("planted")

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(YEAR_S))
            group.create_task(fail())

    with pytest.raises(ExceptionGroup) as caught:
        loop.run_until_complete(main())
    assert isinstance(caught.value.exceptions[0], LookupError)
    assert loop.time() == 1


def test_context_variables_are_kept_apart(loop: SimLoop) -> None:
    variable: ContextVar[str] = ContextVar("variable", default="outside")

    async def work(name: str) -> str:
        variable.set(name)
        await asyncio.sleep(1)
        return variable.get()

    async def main() -> list[str]:
        return [*await asyncio.gather(work("a"), work("b")), variable.get()]

    assert loop.run_until_complete(main()) == ["a", "b", "outside"]


def test_async_generators_are_closed_wherever_they_were_left(loop: SimLoop) -> None:
    closed: list[str] = []

    async def numbers(name: str) -> AsyncGenerator[int, None]:
        try:
            for number in range(10):
                await asyncio.sleep(1)
                yield number
        finally:
            await asyncio.sleep(1)
            closed.append(name)

    async def main() -> AsyncGenerator[int, None]:
        assert [number async for number in numbers("read to the end")] == list(range(10))
        async for _ in numbers("dropped"):
            break
        await asyncio.sleep(5)
        kept = numbers("kept")
        await anext(kept)
        return kept

    kept = loop.run_until_complete(main())
    assert closed == ["read to the end", "dropped"]
    loop.shutdown()
    assert closed == ["read to the end", "dropped", "kept"]
    del kept


def test_call_soon_threadsafe_serves_the_own_thread_only(loop: SimLoop) -> None:
    async def main() -> None:
        here = loop.create_future()
        loop.call_soon_threadsafe(here.set_result, None)
        await here
        caught: list[BaseException] = []
        thread = threading.Thread(target=lambda: caught.append(raised_by(loop.call_soon_threadsafe, print)))
        thread.start()
        thread.join()
        assert isinstance(caught[0], NotSimulated)

    loop.run_until_complete(main())


def raised_by(call: Callable[..., object], *args: object) -> BaseException:
    try:
        call(*args)
    except BaseException as problem:
        return problem
    raise AssertionError("nothing was raised")


def test_the_garbage_collector_runs_at_fixed_steps_and_is_given_back(loop: SimLoop) -> None:
    async def main() -> bool:
        return gc.isenabled()

    assert gc.isenabled()
    assert loop.run_until_complete(main()) is False
    assert gc.isenabled()


# --- what is refused -------------------------------------------------------------------------------------------------


def test_whatever_a_loop_can_do_is_simulated_or_refused_by_name(loop: SimLoop) -> None:
    public = {name for name in vars(asyncio.AbstractEventLoop) if not name.startswith("_")}
    assert public - set(vars(SimLoop)) - set(vars(SealedLoop)) == set()
    for name in sorted(public & set(vars(SealedLoop))):
        with pytest.raises(NotSimulated, match=rf"^{name}\(\) reaches outside the simulation"):
            getattr(loop, name)()


def test_threads_and_sockets_are_refused_through_asyncio_too(loop: SimLoop) -> None:
    async def main() -> None:
        with pytest.raises(NotSimulated, match="run_in_executor"):
            await asyncio.to_thread(print)
        with pytest.raises(NotSimulated, match="create_connection"):
            await asyncio.open_connection("localhost", 1)

    loop.run_until_complete(main())


def test_a_closed_loop_and_a_loop_within_a_loop_are_refused(loop: SimLoop) -> None:
    async def main() -> None:
        other = SimLoop(SeededRng(2))
        with pytest.raises(RuntimeError, match="another loop is running"):
            other.run_forever()
        with pytest.raises(Misuse, match="cannot be closed"):
            loop.close()

    loop.run_until_complete(main())
    assert not loop.is_running()
    loop.shutdown()
    assert loop.is_closed()
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_soon(print)


# --- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_deadlock_names_who_waits_where(loop: SimLoop) -> None:
    async def take(queue: asyncio.Queue[int]) -> None:
        await queue.get()

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(take(asyncio.Queue()), name="the-consumer")

    with pytest.raises(Deadlock, match=r"(?s)task-1 in .*main:\d+ .*; the-consumer in .*take:\d+ > Queue\.get:\d+"):
        loop.run_until_complete(main())


def test_a_run_that_goes_in_circles_meets_its_step_limit() -> None:
    loop = SimLoop(SeededRng(1), steps_max=1_000)

    async def going_in_circles() -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0)

    with pytest.raises(StepLimit, match="going_in_circles"):
        loop.run_until_complete(going_in_circles())
    loop.close()


def fail_in_a_callback() -> None:
    raise KeyError("planted")


def test_an_exception_in_a_callback_fails_the_run(loop: SimLoop) -> None:
    async def main() -> None:
        loop.call_later(1, fail_in_a_callback)
        await asyncio.sleep(2)

    with pytest.raises(ExceptionGroup) as caught:
        loop.run_until_complete(main())
    assert [type(each) for each in caught.value.exceptions] == [KeyError]


async def fail_in_the_background() -> None:
    raise LookupError("planted")


def test_an_exception_in_a_task_that_nobody_awaits_fails_the_run(loop: SimLoop) -> None:
    async def main() -> None:
        _ = loop.create_task(fail_in_the_background())
        await asyncio.sleep(1)
        del _
        await asyncio.sleep(1)

    with pytest.raises(ExceptionGroup) as caught:
        loop.run_until_complete(main())
    assert [str(each) for each in caught.value.exceptions] == ["planted"]


def test_an_exception_in_a_task_that_somebody_holds_is_raised_at_the_end() -> None:
    loop = SimLoop(SeededRng(1))
    held = []

    async def main() -> None:
        held.append(loop.create_task(fail_in_the_background()))
        await asyncio.sleep(1)

    loop.run_until_complete(main())
    with pytest.raises(ExceptionGroup) as caught:
        loop.shutdown()
    assert [str(each) for each in caught.value.exceptions] == ["planted"]


def test_what_failed_before_is_noted_on_what_ended_the_run(loop: SimLoop) -> None:
    async def main() -> None:
        loop.call_soon(fail_in_a_callback)
        await loop.create_future()

    with pytest.raises(Deadlock) as caught:
        loop.run_until_complete(main())
    assert caught.value.__notes__ == ["before it, nobody handled KeyError: 'planted'"]


def test_a_handler_that_was_set_takes_the_exceptions(loop: SimLoop) -> None:
    contexts: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: contexts.append(context))
    assert loop.get_exception_handler() is not None

    async def main() -> None:
        loop.call_soon(fail_in_a_callback)
        await asyncio.sleep(1)

    loop.run_until_complete(main())
    assert isinstance(contexts[0]["exception"], KeyError)


def test_a_stopped_run_says_so(loop: SimLoop) -> None:
    async def main() -> None:
        loop.call_later(1, loop.stop)
        await asyncio.sleep(2)

    with pytest.raises(SimulationFailed, match="stopped before"):
        loop.run_until_complete(main())


def test_shutdown_cancels_what_still_runs_oldest_first() -> None:
    loop = SimLoop(SeededRng(1))
    ended: list[int] = []
    tasks: list[asyncio.Task[None]] = []

    async def work(number: int) -> None:
        try:
            await asyncio.sleep(YEAR_S)
        finally:
            ended.append(number)

    async def main() -> None:
        tasks.extend(loop.create_task(work(number)) for number in range(50))
        await asyncio.sleep(1)

    loop.run_until_complete(main())
    loop.shutdown()
    assert ended == list(range(50))
    assert loop.now_ns() == 1_000_000_000


# --- the trace -------------------------------------------------------------------------------------------------------


def test_notes_and_names_are_in_the_trace() -> None:
    events: list[tuple[int, str]] = []
    loop = SimLoop(SeededRng(1), listener=lambda now_ns, label: events.append((now_ns, label)))

    async def work() -> None:
        await asyncio.sleep(1)
        loop.note("half-way")

    before = loop.trace_hash()
    loop.run_until_complete(work())
    loop.shutdown()
    assert loop.trace_hash() != before
    assert (1_000_000_000, "note half-way") in events
    labels = [label for _, label in events]
    assert labels[0] == f"task-1 {work.__qualname__}"
    assert not any("0x" in label for label in labels)
