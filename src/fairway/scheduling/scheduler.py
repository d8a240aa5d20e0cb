"""Turns and slices: which actor runs, for how long, and what it is charged.

A turn of the loop picks ready actors one after the other until a slice's time is used up, then lets the loop's other
callbacks run: a heartbeat waits for one slice and the request that overran it. One actor with much to do has the whole
turn; many with little share it, because each turn of a loop costs a poll of the system (bench/scheduling).

The charge of a slice is `max(elapsed, floor × requests) + what the actor owes`, in the order's own terms. The floor is
there so that a thousand requests too short for the clock are not free. What it owes is work that others did on its
behalf (a cold read in a thread, charged when it ends) and the bytes of its responses. It is taken before the actor is
let in again as a sleeper: time used elsewhere is used, not slept.

What a request cost is charged to its connection as well, and an actor's place among the ready depends on both accounts
(`order`).

Every path is bounded: requests per actor, actors, weights; and full has an answer.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import NoReturn, Protocol, TypeVar

from fairway.errors import Code, Misuse, Refused
from fairway.scheduling.account import Account
from fairway.scheduling.actor import IDLE, READY, RUNNING, Actor
from fairway.scheduling.alarms import ActorTimers, TimerLoop
from fairway.scheduling.mailbox import NEVER_NS, MailboxItem
from fairway.scheduling.order import RunOrder, VirtualTime
from fairway.scheduling.processor import Expiry, Processor, Request, TurnResult
from fairway.world.clock import Clock

RequestT = TypeVar("RequestT", bound=Request)

DONE, WAIT, AGAIN = TurnResult  # bound here for the same reason as the run states

WEIGHT_MIN = 0.01
WEIGHT_MAX = 100.0
SWEEP_EVERY_NS = 10_000_000  # a sweep looks at every request of an actor: two thousand take 1 ms,
SWEEP_SHARE = 50  # so the next one waits until so many times as long have passed


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
class SchedulerCounters:
    """How requests ended."""

    done: int = 0
    failed: int = 0
    refused: int = 0
    expired: dict[Expiry, int] = field(default_factory=lambda: dict.fromkeys(Expiry, 0))


class Scheduler:
    """All actors of one loop. Not for several threads: everything is called on the loop's own."""

    def __init__(
        self,
        clock: Clock,
        loop: Loop,
        options: SchedulerOptions | None = None,
        order: RunOrder | None = None,
        after_turn: Callable[[], None] = lambda: None,
    ) -> None:
        """`after_turn` is called at the end of each turn, for what the turn's requests have begun together."""
        self._now_ns = clock.monotonic_ns
        self._loop = loop
        self._options = options if options is not None else SchedulerOptions()
        self._order: RunOrder = order if order is not None else VirtualTime()
        # A slice ends by what it is charged: on a clock that stands still, too.
        slice_requests = self._options.slice_ns // max(1, self._options.floor_ns)
        self._slice_requests_max = max(1, min(slice_requests, self._order.slice_requests_max))
        self._alarms = ActorTimers(clock, loop, self._options.slice_ns, self._on_alarm)
        self._actors: dict[Hashable, Actor] = {}
        self._weights: dict[Hashable, float] = {}  # those other than 1
        self._ready: list[tuple[float, int, Actor]] = []  # a heap; of a READY actor the entry `place` is meant
        self._ready_weight = 0.0  # of the READY actors, each once
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
        """The actor of that key, if it has had something to do of late."""
        return self._actors.get(key)

    # --- from outside ------------------------------------------------------------------------------------------------

    def dispatch(self, key: Hashable, request: RequestT, processor: Processor[RequestT]) -> None:
        """Put a request into an actor's mailbox. `Refused` where there is no room: then the caller answers it."""
        actor = self._actors.get(key)
        if actor is None:
            actor = self._add_actor(key)
        elif len(actor.mailbox) >= self._options.mailbox_requests_max:
            self._refuse_full(actor)
        late_ns = request.deadline_ns - self._options.answer_margin_ns
        letter = MailboxItem(request, processor, next(self._numbers), late_ns, request.account)
        self._order.place(letter)
        actor.mailbox.put(letter)
        if late_ns < actor.alarm_ns:
            self._alarms.set(actor, late_ns)
        self._make_ready(actor)

    def call_first(self, callback: Callable[[], None]) -> None:
        """Call it in the loop's next turn, before any actor runs in it: an answer should not wait for a slice."""
        self._first.append(callback)
        self._loop.call_soon(self._call_first)

    def _call_first(self) -> None:
        while self._first:
            self._first.pop()()

    @property
    def ready_weight(self) -> float:
        """Of all actors that are ready."""
        return self._ready_weight

    def charge(self, account: Account, elapsed_ns: int, ready_weight: float) -> None:
        """Charge time that was used for a connection outside of any actor. `ready_weight`: when that time began. The
        connection's own requests made actors ready since then. If these counted, a connection that has the loop to
        itself would seem to take time from others, and would have to wait as soon as others come."""
        self._order.charge_account(account, elapsed_ns)
        least_rank = self._ready[0][0] if self._ready and ready_weight else None
        self._order.advance_beside(elapsed_ns, ready_weight, least_rank)

    def is_ahead(self, account: Account) -> bool:
        """Whether a connection has used more than its share, or has asked for it already."""
        return self._order.is_ahead(account)

    def wake(self, key: Hashable) -> None:
        """Something may be there for requests that wait. Cheap, harmless when it is not so, never lost."""
        actor = self._actors.get(key)
        if actor is not None and not actor.mailbox.is_woken:
            actor.mailbox.is_woken = True
            self._make_ready(actor)

    def sweep_soon(self, key: Hashable) -> None:
        """Some of an actor's requests may be cancelled: look at all of them soon, and let go of those."""
        actor = self._actors.get(key)
        if actor is not None:
            self._sweep_soon(actor)

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
            if actor.run is READY:
                self._ready_weight += weight - actor.weight
            actor.weight = float(weight)

    def close(self) -> None:
        """Tell every request that it is over, and take no more. Raises what processors raise, when all were told."""
        self._is_closed = True
        self._alarms.close()
        letters = [letter for actor in self for letter in actor.mailbox.empty()]
        self._actors.clear()
        self._ready.clear()
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
        self._sweep_soon(actor)
        self._refuse("too many requests of this group are waiting")

    def _sweep_soon(self, actor: Actor) -> None:
        sweep_ns = max(self._now_ns() + SWEEP_EVERY_NS, actor.swept_until_ns)
        if actor.alarm_ns > sweep_ns:
            self._alarms.set(actor, sweep_ns)

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
        """Something has come for it."""
        if actor.run is READY:
            rank = self._rank(actor)
            if rank < actor.rank:  # it starts earlier than all that were there
                self._place(actor, rank)
        elif actor.run is IDLE and actor.may_run and not self._is_closed:
            self._settle(actor)
            self._order.enter(actor)
            self._enqueue(actor)
            self._kick()

    def _enqueue(self, actor: Actor) -> None:
        actor.run = READY
        self._ready_weight += actor.weight
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

    def _next_actor(self) -> Actor | None:
        """The first of the ready, which stays where it is. Its next request may start later than when it was placed, if
        its connection was served elsewhere meanwhile."""
        ready = self._ready
        placed: set[Actor] = set()
        while ready:
            _, place, actor = ready[0]
            is_meant = actor.run is READY and actor.place == place
            if is_meant and not actor.owed_ns and (actor in placed or self._rank(actor) <= actor.rank):
                return actor
            heapq.heappop(ready)
            if is_meant:
                self._settle(actor)
                self._place(actor, self._rank(actor))
                placed.add(actor)
        return None

    def _run(self, actor: Actor, now_ns: int, end_ns: int) -> int:
        """A slice for the first of the ready; the time after it."""
        heapq.heappop(self._ready)
        weight = max(self._ready_weight, actor.weight)
        self._ready_weight -= actor.weight
        actor.run = RUNNING
        handled = 0
        started_ns = now_ns
        try:
            while actor.may_run and handled < self._slice_requests_max:
                handled += 1
                owed_ns = actor.owed_ns
                goes_on = self._handle(actor, now_ns)
                began_ns, now_ns = now_ns, self._now_ns()
                elapsed_ns = max(now_ns - began_ns, self._options.floor_ns)
                self._charge_letter(actor, self._handled, elapsed_ns + actor.owed_ns - owed_ns)
                if now_ns >= end_ns or not goes_on or not self._may_follow(actor):
                    break
        except BaseException:
            now_ns = self._now_ns()
            raise
        finally:
            self._end_slice(actor, weight, started_ns, now_ns, handled)
        return now_ns

    def _may_follow(self, actor: Actor) -> bool:
        """Whether the next request belongs into this slice. The request of a connection that is far ahead does not: a
        connection would get as much as it likes wherever others are served."""
        return not actor.may_run or self._rank(actor) <= actor.rank + self._options.slice_ns

    def _end_slice(self, actor: Actor, weight: float, started_ns: int, now_ns: int, handled: int) -> None:
        elapsed_ns = now_ns - started_ns
        floor_ns = handled * self._options.floor_ns
        self._handled = None  # or a request with all its batches would stay until the next one comes
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
        """Charge what was done elsewhere, for the request that comes next: it has waited for that."""
        if actor.owed_ns:
            self._order.charge(actor, actor.owed_ns)
            self._charge_letter(actor, actor.mailbox.first(), actor.owed_ns)
            actor.owed_ns = 0.0

    def _charge_letter(self, actor: Actor, letter: MailboxItem | None, charge_ns: float) -> None:
        """An actor of twice the weight has twice the time, also if all of it is one connection's. One of less weight
        costs its connections no more: they may have other business."""
        if letter is not None:
            self._order.settle(letter, charge_ns if actor.weight <= 1 else charge_ns / actor.weight)

    # --- requests ----------------------------------------------------------------------------------------------------

    def _handle(self, actor: Actor, now_ns: int) -> bool:
        """One request; whether the slice goes on."""
        if actor.mailbox.overdue:
            letter, expiry = actor.mailbox.overdue.pop()
            self._handled = letter
            self._expire(letter, expiry)
            return True
        letter = actor.mailbox.take()
        self._handled = letter
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

    def _wait(self, actor: Actor, letter: MailboxItem, now_ns: int) -> None:
        if letter.request.wait_until_ns <= now_ns:
            self._expire(letter, Expiry.WAITED)
            return
        actor.mailbox.wait(letter)
        due_ns = letter.due_ns()
        if due_ns < actor.alarm_ns:
            self._alarms.set(actor, due_ns)

    def _expire(self, letter: MailboxItem, expiry: Expiry) -> None:
        self.tally.expired[expiry] += 1
        letter.processor.expire(letter.request, expiry)
