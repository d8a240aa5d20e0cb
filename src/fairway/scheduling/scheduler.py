"""Turns and slices: which actor runs, for how long, and what it is charged.

A turn of the loop picks ready actors one after the other until a slice's time is used up, then lets the loop's other
callbacks run: a heartbeat waits for one slice and the request that overran it. One actor with much to do has the whole
turn; many with little share it, because each turn of a loop costs a poll of the system (bench/scheduling).

The charge of a slice is `max(elapsed, floor × requests) + what the actor owes`, in the order's own terms. The floor is
there so that a thousand requests too short for the clock are not free. What it owes is work that others did on its
behalf (a cold read in a thread, charged when it ends) and the bytes of its responses. It is taken before the actor is
let in again as a sleeper: time used elsewhere is used, not slept.

An actor whose requests all come from those who send too much at a time (`is_hasty`) gives way: while others are at
work it has a slice every now and then, and the loop is free for them in between. Else every step of every other request
would wait for a slice of theirs, and there are ten such steps from a send to its ack (bench/hostile).

Every path is bounded: requests per actor, actors, weights; and full has an answer.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import NoReturn, Protocol, TypeVar

from fairway.errors import Code, Misuse, Refused
from fairway.scheduling.actor import IDLE, READY, RUNNING, Actor
from fairway.scheduling.alarms import Alarms, Timer, TimerLoop
from fairway.scheduling.courtesy import Courtesy
from fairway.scheduling.mailbox import NEVER_NS, Letter
from fairway.scheduling.order import Order, VirtualTime
from fairway.scheduling.processor import Expiry, Processor, Request, Verdict
from fairway.world.clock import Clock

RequestT = TypeVar("RequestT", bound=Request)

DONE, WAIT, AGAIN = Verdict  # bound here for the same reason as the run states

WEIGHT_MIN = 0.01
WEIGHT_MAX = 100.0
SWEEP_EVERY_NS = 10_000_000  # a sweep looks at every request of an actor: two thousand take 1 ms,
SWEEP_SHARE = 50  # so the next one waits until so many times as long have passed
PAUSE_NS_MIN = 1_000_000  # between their slices then: the shortest time that all loops can tell
PAUSE_SHARE = 2  # or so many times as long as their last turn took
PAUSE_NS_MAX = 20_000_000  # and no longer, whatever it was that they did


class Loop(TimerLoop, Protocol):
    """The part of an asyncio loop that the scheduler needs."""

    def call_soon(self, callback: Callable[[], None], /) -> object:
        """Call it in the loop's next turn. What it raises goes to the loop's exception handler."""


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """What an operator may set."""

    slice_ns: int = 200_000  # half the wait of 0.5 ms, for 1 to 3 % of the loop's time (docs/adr/0005, bench/slices)
    turn_slices_max: int = 256  # actors with one short request each; one per turn would poll the system for each
    floor_ns: int = 2_000  # the least a request is charged: about what one costs that finds nothing
    byte_cost_ns: float = 0.25  # of a response: copying it out goes at about 4 GB/s
    mailbox_requests_max: int = 2_000  # a thousand consumers with two requests each
    answer_margin_ns: int = 5_000_000  # a request with less left than this cannot be answered in time
    idle_ns_max: int = 60_000_000_000  # then the actor is removed; a sleeper loses nothing by it
    actors_max: int = 50_000  # with something to do in the last minute; about 2 KiB each
    weights_max: int = 10_000  # other than 1, of actors present or absent
    retry_after_ms: int = 50  # a full mailbox has been through a hundred slices by then


@dataclass(slots=True)
class Tally:
    """How requests ended."""

    done: int = 0
    failed: int = 0
    refused: int = 0
    expired: dict[Expiry, int] = field(default_factory=lambda: dict.fromkeys(Expiry, 0))


class Scheduler:
    """All actors of one loop. Not for several threads: everything is called on the loop's own."""

    def __init__(
        self, clock: Clock, loop: Loop, options: SchedulerOptions | None = None, order: Order | None = None
    ) -> None:
        self._now_ns = clock.monotonic_ns
        self._loop = loop
        self._options = options if options is not None else SchedulerOptions()
        self._order: Order = order if order is not None else VirtualTime()
        # A slice ends by what it is charged: on a clock that stands still, too.
        slice_requests = self._options.slice_ns // max(1, self._options.floor_ns)
        self._slice_requests_max = max(1, min(slice_requests, self._order.slice_requests_max))
        self._alarms = Alarms(clock, loop, self._options.slice_ns, self._on_alarm)
        self._actors: dict[Hashable, Actor] = {}
        self._weights: dict[Hashable, float] = {}  # those other than 1
        self._ready: list[tuple[float, int, Actor]] = []  # a heap; a READY actor is here or held, any other never
        self._held: list[Actor] = []  # READY, hasty, and not in the heap
        self._held_timer: Timer | None = None
        self._pause_ns = PAUSE_NS_MIN
        self._is_their_turn = False  # whose that were held
        self._numbers = count()
        self._crowded_until_ns = 0
        self._is_kicked = False
        self._is_closed = False
        self.busy_ns = 0  # when an actor that is not in the background last had a slice
        self.tally = Tally()
        self.courtesy = Courtesy()

    def __len__(self) -> int:
        return len(self._actors)

    def __iter__(self) -> Iterator[Actor]:
        return iter(list(self._actors.values()))

    def find(self, key: Hashable) -> Actor | None:
        """The actor of that key, if it has had something to do of late."""
        return self._actors.get(key)

    # --- from outside ------------------------------------------------------------------------------------------------

    def dispatch(
        self, key: Hashable, request: RequestT, processor: Processor[RequestT], *, is_hasty: bool = False
    ) -> None:
        """Put a request into an actor's mailbox. `Refused` where there is no room: then the caller answers it.

        `is_hasty`: from somebody who sends too much at a time.
        """
        actor = self._actors.get(key)
        if actor is None:
            actor = self._add_actor(key)
        elif len(actor.mailbox) >= self._options.mailbox_requests_max:
            self._refuse_full(actor)
        late_ns = request.deadline_ns - self._options.answer_margin_ns
        actor.mailbox.put(Letter(request, processor, next(self._numbers), late_ns, is_hasty=is_hasty))
        if late_ns < actor.alarm_ns:
            self._alarms.set(actor, late_ns)
        if actor.is_held and not is_hasty:
            self._let_in(actor)
        if actor.run is IDLE:
            self._make_ready(actor)

    def wake(self, key: Hashable) -> None:
        """Something may be there for requests that wait. Cheap, harmless when it is not so, never lost."""
        actor = self._actors.get(key)
        if actor is not None and not actor.mailbox.is_woken:
            actor.mailbox.is_woken = True
            self._make_ready(actor)

    def resume(self, actor: Actor) -> None:
        """Lift one suspension."""
        actor.lift()
        self._make_ready(actor)

    def set_weight(self, key: Hashable, weight: float) -> None:
        """Twice the weight gets twice the time, from the next slice on. Holds for an actor to come, too."""
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
            actor.weight = float(weight)

    def close(self) -> None:
        """Tell every request that it is over, and take no more. Raises what processors raise, when all were told."""
        self._is_closed = True
        self._alarms.close()
        letters = [letter for actor in self for letter in actor.mailbox.empty()]
        self._actors.clear()
        self._ready.clear()
        self._held.clear()
        if self._held_timer is not None:
            self._held_timer.cancel()
        errors = []
        for letter in letters:
            try:
                self._expire(letter, Expiry.STOPPED)
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
        self._alarms.set(actor, now_ns + self._options.idle_ns_max)
        return actor

    def _make_room(self, now_ns: int) -> bool:
        """Remove every actor that has nothing to do. It looks at all of them, so at most once per retry."""
        if now_ns >= self._crowded_until_ns:
            self._crowded_until_ns = now_ns + self._options.retry_after_ms * 1_000_000
            for actor in self:
                if self._is_removable(actor):
                    self._remove(actor)
        return len(self._actors) < self._options.actors_max

    def _refuse_full(self, actor: Actor) -> NoReturn:
        """Refuse, and once in a while clear out what nobody waits for any more, so that a retry finds room."""
        now_ns = self._now_ns()
        sweep_ns = max(now_ns + SWEEP_EVERY_NS, actor.swept_until_ns)
        if actor.alarm_ns > sweep_ns:
            self._alarms.set(actor, sweep_ns)
        self._refuse("too many requests of this group are waiting")

    def _refuse(self, sentence: str) -> NoReturn:
        self.tally.refused += 1
        raise Refused(Code.BUSY, sentence, retry_after_ms=self._options.retry_after_ms)

    def _is_removable(self, actor: Actor) -> bool:
        return actor.run is IDLE and not actor.mailbox and not actor.suspensions

    def _remove(self, actor: Actor) -> None:
        del self._actors[actor.key]
        actor.alarm_ns = NEVER_NS  # or it would ring for the next actor of this key

    def _on_alarm(self, actor: Actor, now_ns: int) -> None:
        due_ns = actor.mailbox.sweep(now_ns)
        actor.sweep_ns += self._now_ns() - now_ns
        if due_ns is None:
            self._alarms.set(actor, now_ns)
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
        self._alarms.set(actor, max(min(due_ns, idle_since_ns + idle_ns_max), actor.swept_until_ns))
        self._make_ready(actor)

    # --- turns -------------------------------------------------------------------------------------------------------

    def _make_ready(self, actor: Actor) -> None:
        if actor.run is IDLE and actor.may_run and not self._is_closed:
            self._settle(actor)
            self._order.enter(actor)
            self._enqueue(actor)
            self._kick()

    def _enqueue(self, actor: Actor) -> None:
        actor.run = READY
        heapq.heappush(self._ready, (self._order.rank(actor), next(self._numbers), actor))

    def _kick(self) -> None:
        if self._ready and not self._is_kicked:
            self._is_kicked = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        began_ns = now_ns = self._now_ns()
        end_ns = now_ns + self._options.slice_ns
        try:
            for _ in range(self._options.turn_slices_max):
                if not self._ready or now_ns >= end_ns:
                    break
                now_ns = self._run_next(now_ns, end_ns)
        finally:
            if self._is_their_turn:
                self._is_their_turn = False
                self._pause_ns = min(max(PAUSE_NS_MIN, PAUSE_SHARE * (now_ns - began_ns)), PAUSE_NS_MAX)
            self._is_kicked = False
            self._kick()

    def _hold(self, actor: Actor) -> None:
        """Let it give way for a while."""
        actor.is_held = True
        self._held.append(actor)
        if self._held_timer is None:
            self._held_timer = self._loop.call_later(self._pause_ns / 1e9, self._let_on)

    def _let_on(self) -> None:
        """Those that gave way have a turn."""
        self._held_timer = None
        self._is_their_turn = bool(self._held)
        for actor in list(self._held):
            self._let_in(actor)

    def _let_in(self, actor: Actor) -> None:
        """It gives way no longer."""
        self._held.remove(actor)
        actor.is_held = False
        self._enqueue(actor)
        self._kick()

    def _run_next(self, now_ns: int, end_ns: int) -> int:
        """A slice for the actor that is next; the time after it."""
        _, _, actor = heapq.heappop(self._ready)
        if actor.owed_ns and self._has_lost_its_place(actor):
            self._enqueue(actor)
            return now_ns
        if not actor.mailbox.is_hasty:
            if not actor.is_background:
                self.courtesy.polite_ns = now_ns
        elif self.courtesy.is_due(now_ns) and not self._is_their_turn:
            self._hold(actor)
            return now_ns
        actor.run = RUNNING
        handled = 0
        started_ns = now_ns
        try:
            while actor.may_run and handled < self._slice_requests_max:
                handled += 1
                goes_on = self._handle(actor, now_ns)
                now_ns = self._now_ns()
                if now_ns >= end_ns or not goes_on:
                    break
        except BaseException:
            now_ns = self._now_ns()
            raise
        finally:
            self._end_slice(actor, started_ns, now_ns, handled)
        return now_ns

    def _has_lost_its_place(self, actor: Actor) -> bool:
        self._settle(actor)
        return bool(self._ready) and self._order.rank(actor) > self._ready[0][0]

    def _end_slice(self, actor: Actor, started_ns: int, now_ns: int, handled: int) -> None:
        elapsed_ns = now_ns - started_ns
        floor_ns = handled * self._options.floor_ns
        actor.slices += 1
        actor.served_ns += elapsed_ns
        self._order.charge(actor, actor.owed_ns + max(elapsed_ns, floor_ns))
        actor.owed_ns = 0.0
        actor.run = IDLE
        actor.idle_since_ns = now_ns
        if not actor.is_background:
            self.busy_ns = now_ns
        if actor.may_run:
            self._enqueue(actor)
        if self._ready:
            self._order.advance(self._ready[0][0])

    def _settle(self, actor: Actor) -> None:
        if actor.owed_ns:
            self._order.charge(actor, actor.owed_ns)
            actor.owed_ns = 0.0

    # --- requests ----------------------------------------------------------------------------------------------------

    def _handle(self, actor: Actor, now_ns: int) -> bool:
        """One request; whether the slice goes on."""
        if actor.mailbox.overdue:
            self._expire(*actor.mailbox.overdue.pop())
            return True
        letter = actor.mailbox.take()
        request, processor = letter.request, letter.processor
        if now_ns >= letter.late_ns or request.is_cancelled:
            actor.mailbox.look_on(letter)
            self._expire(letter, letter.expiry())
            return True
        try:
            verdict = processor.process(request, actor)
        except Exception as error:
            actor.mailbox.look_on(letter)
            self.tally.failed += 1
            processor.fail(request, error)
            return True
        if verdict is DONE:
            if letter.has_waited:  # most have not
                actor.mailbox.look_on(letter)
            self.tally.done += 1
        elif self._is_closed:
            self._expire(letter, Expiry.STOPPED)
        elif verdict is WAIT:
            self._wait(actor, letter, now_ns)
        else:
            actor.mailbox.again(letter)
        return verdict is not AGAIN

    def _wait(self, actor: Actor, letter: Letter, now_ns: int) -> None:
        if letter.request.wait_until_ns <= now_ns:
            self._expire(letter, Expiry.WAITED)
            return
        actor.mailbox.wait(letter)
        due_ns = letter.due_ns()
        if due_ns < actor.alarm_ns:
            self._alarms.set(actor, due_ns)

    def _expire(self, letter: Letter, expiry: Expiry) -> None:
        self.tally.expired[expiry] += 1
        letter.processor.expire(letter.request, expiry)
