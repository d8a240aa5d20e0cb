"""The scheduler: picks the actor that runs next, ends its slice, and charges its time.

A turn of the loop picks ready actors one after the other until a slice's time is used up. Then the loop's other
callbacks run: a heartbeat waits for one slice and for the request that overran it. One actor with much to do gets the
whole turn. Many actors with little to do share it, because each turn of a loop costs a poll of the system
(bench/scheduling).

A slice costs `max(elapsed, floor × requests) + what the actor owes`, in the terms of the run order. The floor charges
requests that are too short for the clock. An actor owes time for work done elsewhere (a cold read in a thread, charged
when it ends) and for the bytes of its responses. The scheduler charges this before an idle actor becomes ready again:
time used elsewhere does not count as sleep.

The cost of a request is charged to its connection as well. An actor's rank among the ready actors depends on both
accounts (`virtual_time`).

Requests per actor, actors and weights all have a bound, and the scheduler refuses what exceeds it.

Each actor has one alarm, for the time when a wait or a deadline ends, or when the actor has been idle for long.
`ActorTimers` has all alarms share one timer of the loop. An alarm may be early, because its request is already done:
then the scheduler looks at the actor and sets the next alarm. So a request that is handled in time costs a comparison,
and no timer of its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import NoReturn, Protocol, TypeVar

from fairway.errors import Code, Misuse, Refused
from fairway.runtime.clock import Clock, Timer
from fairway.scheduling.actor import (
    IDLE,
    NEVER_NS,
    READY,
    RUNNING,
    Account,
    Actor,
    Expiry,
    MailboxItem,
    Processor,
    Request,
    TurnResult,
)
from fairway.scheduling.virtual_time import VirtualTime

RequestT = TypeVar("RequestT", bound=Request)

DONE, WAIT, AGAIN = TurnResult  # bound here for the same reason as the run states in `actor`

WEIGHT_MIN = 0.01
WEIGHT_MAX = 100.0
SWEEP_EVERY_NS = 10_000_000  # a sweep looks at every request of an actor: 2,000 take 1 ms,
SWEEP_SHARE = 50  # so the next sweep waits for this many times as long
SLACK_S = 0.001  # uvloop rounds timers to milliseconds: without the slack they would fire early, and again at once
STALE_MIN = 64  # a smaller heap with stale entries is not worth a rebuild


class Loop(Protocol):
    """The part of an asyncio loop that the scheduler needs."""

    def call_soon(self, callback: Callable[[], None], /) -> object:
        """Call the callback in the loop's next turn. Its exceptions go to the loop's exception handler."""

    def call_later(self, delay: float, callback: Callable[[], None], /) -> Timer:
        """Call the callback once, that many seconds from now."""


class ActorTimers:
    """Calls `ring(actor, now_ns)` when an actor's alarm is due, for at most `turn_ns` at a time."""

    def __init__(self, clock: Clock, loop: Loop, turn_ns: int, ring: Callable[[Actor, int], None]) -> None:
        self._clock = clock
        self._loop = loop
        self._turn_ns = turn_ns
        self._ring = ring
        self._heap: list[tuple[int, int, Actor]] = []  # an entry is stale if the actor's alarm is at another time
        self._numbers = count()
        self._rebuild_at = STALE_MIN
        self._timer: Timer | None = None
        self._timer_ns = NEVER_NS

    def set(self, actor: Actor, due_ns: int) -> None:
        """Set the actor's alarm in place of its current one."""
        actor.alarm_ns = due_ns
        heapq.heappush(self._heap, (due_ns, next(self._numbers), actor))
        if len(self._heap) > self._rebuild_at:
            self._heap = [entry for entry in self._heap if entry[0] == entry[2].alarm_ns]
            heapq.heapify(self._heap)
            self._rebuild_at = max(STALE_MIN, 2 * len(self._heap))
        if due_ns < self._timer_ns:
            self._arm(due_ns)

    def close(self) -> None:
        """Fire no more alarms."""
        self._heap.clear()
        self._disarm()

    def _arm(self, due_ns: int) -> None:
        self._disarm()
        self._timer_ns = due_ns
        delay_ns = max(0, due_ns - self._clock.monotonic_ns())
        self._timer = self._loop.call_later(delay_ns / 1e9 + SLACK_S, self._ring_due)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._timer_ns = NEVER_NS

    def _ring_due(self) -> None:
        self._timer = None
        self._timer_ns = 0  # alarms set meanwhile are armed at the end
        started_ns = now_ns = self._clock.monotonic_ns()
        try:
            while self._heap and self._heap[0][0] <= now_ns and now_ns - started_ns < self._turn_ns:
                due_ns, _, actor = heapq.heappop(self._heap)
                if actor.alarm_ns == due_ns:
                    actor.alarm_ns = NEVER_NS
                    self._ring(actor, now_ns)
                    now_ns = self._clock.monotonic_ns()
        finally:
            self._timer_ns = NEVER_NS
            if self._heap:
                self._arm(self._heap[0][0])


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """The options of the scheduler that an operator may set."""

    slice_ns: int = 200_000  # half the wait of 0.5 ms, for 1 to 3 % of the loop's time (ADR 0005, bench/slices)
    # actors with one short request each; with one slice per turn, each would cost a poll of the system
    turn_slices_max: int = 256
    floor_ns: int = 2_000  # the least charge of a request: about the cost of a request that finds nothing
    byte_cost_ns: float = 0.25  # of a response: copying it out runs at about 4 GB/s
    mailbox_requests_max: int = 2_000  # 1,000 consumers with two requests each
    answer_margin_ns: int = 5_000_000  # the scheduler cannot answer a request in time that has less left
    idle_ns_max: int = 60_000_000_000  # then the actor is removed; a sleeping actor loses nothing by that
    actors_max: int = 50_000  # that had work in the last minute; about 2 KiB each
    weights_max: int = 10_000  # other than 1, of actors present or absent
    retry_after_ms: int = 50  # a full mailbox has had a hundred slices by then


@dataclass(slots=True)
class SchedulerCounters:
    """How requests ended."""

    done: int = 0
    failed: int = 0
    refused: int = 0
    expired: dict[Expiry, int] = field(default_factory=lambda: dict.fromkeys(Expiry, 0))


class Scheduler:
    """All actors of one loop. Every method runs on the loop's own thread."""

    def __init__(
        self,
        clock: Clock,
        loop: Loop,
        options: SchedulerOptions | None = None,
        order: VirtualTime | None = None,
        after_turn: Callable[[], None] = lambda: None,
    ) -> None:
        """`after_turn` is called at the end of each turn, for work that the turn's requests have begun together."""
        self._now_ns = clock.monotonic_ns
        self._loop = loop
        self._options = options if options is not None else SchedulerOptions()
        self._order: VirtualTime = order if order is not None else VirtualTime()
        # A slice ends by its charge, so that it also ends on a clock that stands still.
        slice_requests = self._options.slice_ns // max(1, self._options.floor_ns)
        self._slice_requests_max = max(1, min(slice_requests, self._order.slice_requests_max))
        self._timers = ActorTimers(clock, loop, self._options.slice_ns, self._on_alarm)
        self._actors: dict[Hashable, Actor] = {}
        self._weights: dict[Hashable, float] = {}  # those other than 1
        self._ready: list[tuple[float, int, Actor]] = []  # a heap; a READY actor's valid entry has the number `place`
        self.ready_weight = 0.0  # of the READY actors, each once
        self._handled: MailboxItem | None = None  # the request that was handled last
        self._numbers = count()
        self._crowded_until_ns = 0
        self._after_turn = after_turn
        self._first: list[Callable[[], None]] = []
        self._is_kicked = False
        self._is_closed = False
        self.busy_ns = 0  # when an actor that is not in the background last had a slice
        self.tally = SchedulerCounters()

    def __len__(self) -> int:
        return len(self._actors)

    def __iter__(self) -> Iterator[Actor]:
        return iter(list(self._actors.values()))

    def find(self, key: Hashable) -> Actor | None:
        """The actor of that key, if it has had work of late."""
        return self._actors.get(key)

    # --- calls from outside ------------------------------------------------------------------------------------------

    def dispatch(self, key: Hashable, request: RequestT, processor: Processor[RequestT]) -> None:
        """Put a request into an actor's mailbox. `Refused` where there is no room: then the caller answers the
        request."""
        actor = self._actors.get(key)
        if actor is None:
            actor = self._add_actor(key)
        elif len(actor.mailbox) >= self._options.mailbox_requests_max:
            self._refuse_full(actor)
        late_ns = request.deadline_ns - self._options.answer_margin_ns
        item = MailboxItem(request, processor, next(self._numbers), late_ns, request.account)
        self._order.place(item)
        actor.mailbox.put(item)
        if late_ns < actor.alarm_ns:
            self._timers.set(actor, late_ns)
        self._make_ready(actor)

    def call_first(self, callback: Callable[[], None]) -> None:
        """Call the callback at the end of this turn, or in the loop's next turn before any actor runs: an answer should
        not wait for a slice."""
        self._first.append(callback)
        self._loop.call_soon(self._call_first)

    def _call_first(self) -> None:
        while self._first:
            self._first.pop()()

    def charge(self, account: Account, elapsed_ns: int, ready_weight: float) -> bool:
        """Charge time that a connection used outside of any actor, such as the time to read its requests. Returns
        whether the connection has now used more than its share, or has already asked for more.

        `ready_weight` is the weight when that time began. The connection's own requests have made actors ready since
        then. If these counted, a connection alone on the loop would seem to take time from others, and would wait as
        soon as others come.
        """
        self._order.charge_account(account, elapsed_ns)
        least_rank = self._ready[0][0] if self._ready and ready_weight else None
        self._order.advance_beside(elapsed_ns, ready_weight, least_rank)
        return self._order.is_ahead(account)

    def wake(self, key: Hashable) -> None:
        """Let the actor's waiting requests look again: something may be there. A wake-up is cheap, never lost, and
        harmless when nothing is there."""
        actor = self._actors.get(key)
        if actor is not None and not actor.mailbox.is_woken:
            actor.mailbox.is_woken = True
            self._make_ready(actor)

    def sweep_soon(self, key: Hashable) -> None:
        """Sweep the actor's mailbox soon, and expire its cancelled requests."""
        actor = self._actors.get(key)
        if actor is not None:
            self._sweep_soon(actor)

    def resume(self, actor: Actor) -> None:
        """Lift one suspension."""
        actor.lift()
        self._make_ready(actor)

    def set_weight(self, key: Hashable, weight: float) -> None:
        """Set the weight of an actor, from its next slice on. Twice the weight gets twice the time. The actor need not
        exist yet."""
        if not WEIGHT_MIN <= weight <= WEIGHT_MAX:  # a NaN is not, either
            raise Misuse(f"a weight of {weight}: choose one from {WEIGHT_MIN} to {WEIGHT_MAX:g}")
        if weight == 1:
            self._weights.pop(key, None)
        elif key in self._weights or len(self._weights) < self._options.weights_max:
            self._weights[key] = float(weight)
        else:
            raise Refused(Code.BUSY, f"{len(self._weights)} weights are set: set another back to 1 first")
        actor = self._actors.get(key)
        if actor is not None:
            if actor.run is READY:
                self.ready_weight += weight - actor.weight
            actor.weight = float(weight)

    def close(self) -> None:
        """Expire every request, and take no more. Raises what processors raise, after all requests have expired."""
        self._is_closed = True
        self._timers.close()
        items = [item for actor in self for item in actor.mailbox.empty()]
        self._actors.clear()
        self._ready.clear()
        errors = []
        for item in items:
            try:
                self._expire(item, Expiry.STOPPED)
            except Exception as error:
                errors.append(error)
        if errors:
            raise ExceptionGroup("requests that could not be told that the scheduler stops", errors)

    # --- room --------------------------------------------------------------------------------------------------------

    def _add_actor(self, key: Hashable) -> Actor:
        now_ns = self._now_ns()
        if self._is_closed or (len(self._actors) >= self._options.actors_max and not self._make_room(now_ns)):
            self._refuse("the broker is stopping" if self._is_closed else "too many groups are busy")
        actor = Actor(key, self._weights.get(key, 1.0), self._options.byte_cost_ns, now_ns)
        self._actors[key] = actor
        self._timers.set(actor, now_ns + self._options.idle_ns_max)
        return actor

    def _make_room(self, now_ns: int) -> bool:
        """Remove every actor that has nothing to do. This looks at all actors, so it runs at most once per
        retry-after."""
        if now_ns >= self._crowded_until_ns:
            self._crowded_until_ns = now_ns + self._options.retry_after_ms * 1_000_000
            for actor in self:
                if self._is_removable(actor):
                    self._remove(actor)
        return len(self._actors) < self._options.actors_max

    def _refuse_full(self, actor: Actor) -> NoReturn:
        """Refuse, and sweep the mailbox soon, so that a retry may find room."""
        self._sweep_soon(actor)
        self._refuse("too many requests of this group are waiting")

    def _sweep_soon(self, actor: Actor) -> None:
        sweep_ns = max(self._now_ns() + SWEEP_EVERY_NS, actor.swept_until_ns)
        if actor.alarm_ns > sweep_ns:
            self._timers.set(actor, sweep_ns)

    def _refuse(self, sentence: str) -> NoReturn:
        self.tally.refused += 1
        raise Refused(Code.BUSY, sentence, retry_after_ms=self._options.retry_after_ms)

    def _is_removable(self, actor: Actor) -> bool:
        return actor.run is IDLE and not actor.mailbox and not actor.suspensions

    def _remove(self, actor: Actor) -> None:
        del self._actors[actor.key]
        actor.alarm_ns = NEVER_NS  # otherwise its timer would fire for the next actor of this key

    def _on_alarm(self, actor: Actor, now_ns: int) -> None:
        due_ns = actor.mailbox.sweep(now_ns)
        actor.sweep_ns += self._now_ns() - now_ns
        if due_ns is None:
            self._timers.set(actor, now_ns)
            self._make_ready(actor)
            return
        actor.swept_until_ns = now_ns + max(SWEEP_EVERY_NS, SWEEP_SHARE * actor.sweep_ns)
        actor.sweep_ns = 0
        idle_ns_max = self._options.idle_ns_max
        idle_since_ns = now_ns
        if self._is_removable(actor):
            idle_since_ns = actor.idle_since_ns
            if now_ns - idle_since_ns >= idle_ns_max:
                self._remove(actor)
                return
        self._timers.set(actor, max(min(due_ns, idle_since_ns + idle_ns_max), actor.swept_until_ns))
        self._make_ready(actor)

    # --- turns -------------------------------------------------------------------------------------------------------

    def _make_ready(self, actor: Actor) -> None:
        """Make the actor ready: it has work."""
        if actor.run is READY:
            rank = self._rank(actor)
            if rank < actor.rank:  # the new request starts earlier than all that were there
                self._place(actor, rank)
        elif actor.run is IDLE and actor.may_run and not self._is_closed:
            if actor.owed_ns:
                self._settle(actor)
            self._order.enter(actor)
            self._enqueue(actor)
            self._kick()

    def _enqueue(self, actor: Actor) -> None:
        actor.run = READY
        self.ready_weight += actor.weight
        self._place(actor, self._rank(actor))

    def _rank(self, actor: Actor) -> float:
        mailbox = actor.mailbox
        if mailbox.is_woken and mailbox.waiting and not mailbox.waiting[0].is_placed:
            self._order.place(mailbox.waiting[0])
        return self._order.rank(actor)

    def _place(self, actor: Actor, rank: float) -> None:
        actor.rank = rank
        actor.place = next(self._numbers)
        heapq.heappush(self._ready, (rank, actor.place, actor))

    def _kick(self) -> None:
        if self._ready and not self._is_kicked:
            self._is_kicked = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        if self._first:
            self._call_first()
        now_ns = self._now_ns()
        end_ns = now_ns + self._options.slice_ns
        try:
            for _ in range(self._options.turn_slices_max):
                actor = self._next_actor()
                if actor is None or now_ns >= end_ns:
                    break
                now_ns = self._run(actor, now_ns, end_ns)
        finally:
            self._is_kicked = False
            self._kick()
            self._after_turn()
            if self._first:
                self._call_first()

    def _next_actor(self) -> Actor | None:
        """The first ready actor, which stays in the heap. Its next request may start later than when the actor was
        placed, if the connection was served elsewhere meanwhile."""
        ready = self._ready
        placed: set[Actor] = set()
        while ready:
            _, place, actor = ready[0]
            is_meant = actor.run is READY and actor.place == place
            if is_meant and not actor.owed_ns and (actor in placed or self._rank(actor) <= actor.rank):
                return actor
            heapq.heappop(ready)
            if is_meant:
                if actor.owed_ns:
                    self._settle(actor)
                self._place(actor, self._rank(actor))
                placed.add(actor)
        return None

    def _run(self, actor: Actor, now_ns: int, end_ns: int) -> int:
        """Run a slice of the first ready actor. Returns the time after it."""
        heapq.heappop(self._ready)
        weight = max(self.ready_weight, actor.weight)
        self.ready_weight -= actor.weight
        actor.run = RUNNING
        handled = 0
        started_ns = now_ns
        try:
            while actor.may_run and handled < self._slice_requests_max:
                # A request of a connection that is far ahead does not belong into this slice: otherwise the connection
                # would get more than its share wherever others are served.
                if handled and self._rank(actor) > actor.rank + self._options.slice_ns:
                    break
                handled += 1
                owed_ns = actor.owed_ns
                goes_on = self._handle(actor, now_ns)
                began_ns, now_ns = now_ns, self._now_ns()
                elapsed_ns = max(now_ns - began_ns, self._options.floor_ns)
                self._charge_item(actor, self._handled, elapsed_ns + actor.owed_ns - owed_ns)
                if now_ns >= end_ns or not goes_on:
                    break
        except BaseException:
            now_ns = self._now_ns()
            raise
        finally:
            self._end_slice(actor, weight, started_ns, now_ns, handled)
        return now_ns

    def _end_slice(self, actor: Actor, weight: float, started_ns: int, now_ns: int, handled: int) -> None:
        elapsed_ns = now_ns - started_ns
        floor_ns = handled * self._options.floor_ns
        # otherwise a request would stay in memory, with all its batches, until the next request comes
        self._handled = None
        actor.slices += 1
        actor.served_ns += elapsed_ns
        charge_ns = actor.owed_ns + max(elapsed_ns, floor_ns)
        self._order.charge(actor, charge_ns)
        actor.owed_ns = 0.0
        actor.run = IDLE
        actor.idle_since_ns = now_ns
        if not actor.is_background:
            self.busy_ns = now_ns
        if actor.may_run:
            self._enqueue(actor)
        self._order.advance(charge_ns, weight, self._ready[0][0] if self._ready else None)

    def _settle(self, actor: Actor) -> None:
        """Charge work done elsewhere to the next request, which has waited for that work."""
        self._order.charge(actor, actor.owed_ns)
        self._charge_item(actor, actor.mailbox.first(), actor.owed_ns)
        actor.owed_ns = 0.0

    def _charge_item(self, actor: Actor, item: MailboxItem | None, charge_ns: float) -> None:
        """Charge the request's connection. An actor of twice the weight gets twice the time even if one connection uses
        all of it. An actor of less weight costs its connections no more: they may have other business."""
        if item is not None:
            self._order.settle(item, charge_ns if actor.weight <= 1 else charge_ns / actor.weight)

    # --- requests ----------------------------------------------------------------------------------------------------

    def _handle(self, actor: Actor, now_ns: int) -> bool:
        """Handle one request. Returns whether the slice goes on."""
        if actor.mailbox.overdue:
            item, expiry = actor.mailbox.overdue.pop()
            self._handled = item
            self._expire(item, expiry)
            return True
        item = actor.mailbox.take()
        self._handled = item
        request, processor = item.request, item.processor
        if now_ns >= item.late_ns or request.is_cancelled:
            actor.mailbox.look_on(item)
            self._expire(item, item.expiry())
            return True
        try:
            verdict = processor.process(request, actor)
        except Exception as error:
            actor.mailbox.look_on(item)
            self.tally.failed += 1
            processor.fail(request, error)
            return True
        if verdict is DONE:
            if item.has_waited:  # most have not
                actor.mailbox.look_on(item)
            self.tally.done += 1
        elif self._is_closed:
            self._expire(item, Expiry.STOPPED)
        elif verdict is WAIT:
            self._wait(actor, item, now_ns)
        else:
            actor.mailbox.again(item)
        return verdict is not AGAIN

    def _wait(self, actor: Actor, item: MailboxItem, now_ns: int) -> None:
        if item.request.wait_until_ns <= now_ns:
            self._expire(item, Expiry.WAITED)
            return
        actor.mailbox.wait(item)
        due_ns = item.due_ns()
        if due_ns < actor.alarm_ns:
            self._timers.set(actor, due_ns)

    def _expire(self, item: MailboxItem, expiry: Expiry) -> None:
        self.tally.expired[expiry] += 1
        item.processor.expire(item.request, expiry)
