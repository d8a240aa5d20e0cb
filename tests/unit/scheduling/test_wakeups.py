"""No lost wake-up: every interleaving of a few pulls, messages, suspensions and turns of the loop, tried one by one.

A message may also come in the middle of a look: before the pull registers, between registering and looking, and after
it has looked. Planted bugs in the processor and in the scheduler show that the search finds what it is for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from itertools import product

import pytest

from fairway.runtime.clock import ManualClock
from fairway.scheduling import Actor, Expiry, Scheduler, SchedulerOptions, TurnResult
from fairway.scheduling.actor import RUNNING

STEPS = 5
KEY = "group"


class Callbacks:
    """A loop that runs one callback when told to. No time passes, so no timer ever rings."""

    def __init__(self) -> None:
        self.ready: deque[Callable[[], None]] = deque()

    def call_soon(self, callback: Callable[[], None], /) -> None:
        self.ready.append(callback)

    def call_later(self, delay: float, callback: Callable[[], None], /) -> Callbacks:
        return self

    def cancel(self) -> None:
        pass


@dataclass(eq=False, slots=True)
class Pull:
    """`news` says at which point of its first look a message comes in."""

    wait_until_ns: int
    news: int = -1
    deadline_ns: int = 1 << 60
    is_cancelled: bool = False
    account: None = None
    ends: list[str] = field(default_factory=list)


class Broker:
    """A shelf of messages, who wants to hear of new ones, and the steps that the search combines."""

    def __init__(self, make_scheduler: Callable[..., Scheduler] = Scheduler) -> None:
        self.loop = Callbacks()
        # One slice per turn and one request per slice: the most interleavings that a loop can give.
        options = SchedulerOptions(slice_ns=2_000, floor_ns=2_000, turn_slices_max=1)
        self.scheduler = make_scheduler(ManualClock(), self.loop, options)
        self.messages = 0
        self.registered = False
        self.pulls: list[Pull] = []
        self.suspended: list[Actor] = []

    # --- steps -------------------------------------------------------------------------------------------------------

    def pull(self, news: int = -1) -> None:
        self._dispatch(Pull(wait_until_ns=1 << 50, news=news))

    def peek(self) -> None:
        self._dispatch(Pull(wait_until_ns=0))

    def put(self) -> None:
        self.messages += 1
        if self.registered:
            self.registered = False
            self.scheduler.wake(KEY)

    def suspend(self) -> None:
        actor = self.scheduler.find(KEY)
        if actor is not None:
            actor.suspend()
            self.suspended.append(actor)

    def resume(self) -> None:
        if self.suspended:
            self.scheduler.resume(self.suspended.pop())

    def turn(self) -> None:
        if self.loop.ready:
            self.loop.ready.popleft()()

    def _dispatch(self, pull: Pull) -> None:
        self.pulls.append(pull)
        self.scheduler.dispatch(KEY, pull, self)

    # --- the processor -----------------------------------------------------------------------------------------------

    def process(self, request: Pull, actor: Actor) -> TurnResult:
        self._news(request, 0)
        self.registered = True
        self._news(request, 1)
        found = self._look(request)
        self._news(request, 2)
        return TurnResult.DONE if found else TurnResult.WAIT

    def expire(self, request: Pull, expiry: Expiry) -> None:
        request.ends.append(expiry.value)

    def fail(self, request: Pull, error: Exception) -> None:
        raise error

    def _look(self, request: Pull) -> bool:
        if not self.messages:
            return False
        self.messages -= 1
        request.ends.append("done")
        return True

    def _news(self, request: Pull, point: int) -> None:
        if request.news == point:
            request.news = -1
            self.put()

    # --- what must hold ----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Lift what is suspended and let everything run that can."""
        while self.suspended:
            self.resume()
        turns = 0
        while self.loop.ready:
            self.turn()
            turns += 1
            assert turns < 1_000, "it never comes to rest"

    def complaint(self) -> str:
        hungry = [pull for pull in self.pulls if not pull.ends]
        if self.messages and hungry:
            return f"{self.messages} messages lie there and {len(hungry)} pulls wait"
        if any(pull.wait_until_ns == 0 for pull in hungry):
            return "a pull that waits for nothing has no answer"
        if any(len(pull.ends) > 1 for pull in self.pulls):
            return "a pull has two answers"
        return ""


class LooksThenRegisters(Broker):
    def process(self, request: Pull, actor: Actor) -> TurnResult:
        self._news(request, 0)
        found = self._look(request)
        self._news(request, 1)
        self.registered = True
        self._news(request, 2)
        return TurnResult.DONE if found else TurnResult.WAIT


class DeafWhileRunning(Scheduler):
    def wake(self, key: Hashable) -> None:
        actor = self.find(key)
        if actor is not None and actor.run is not RUNNING:
            super().wake(key)


class DeafWhileSuspended(Scheduler):
    def wake(self, key: Hashable) -> None:
        actor = self.find(key)
        if actor is not None and not actor.suspensions:
            super().wake(key)


class ForgetsToRunAfterResume(Scheduler):
    def resume(self, actor: Actor) -> None:
        actor.lift()


def step(broker: Broker, name: str) -> None:
    verb, _, point = name.partition(" ")
    if point:
        broker.pull(int(point))
    else:
        getattr(broker, verb)()


ALPHABET = ("pull", "pull 0", "pull 1", "pull 2", "peek", "put", "suspend", "resume", "turn")


def complaints(make_broker: Callable[[], Broker], steps: int) -> Iterator[str]:
    for names in product(ALPHABET, repeat=steps):
        broker = make_broker()
        for name in names:
            step(broker, name)
        broker.settle()
        if complaint := broker.complaint():
            yield f"{', '.join(names)}: {complaint}"


def test_no_interleaving_loses_a_wake_up() -> None:
    """Those with fewer steps are prefixes of these: a step may find nothing to do."""
    assert next(complaints(Broker, STEPS), "") == ""


@pytest.mark.parametrize(
    "make_broker",
    [
        LooksThenRegisters,
        lambda: Broker(DeafWhileRunning),
        lambda: Broker(DeafWhileSuspended),
        lambda: Broker(ForgetsToRunAfterResume),
    ],
    ids=["looks, then registers", "deaf while running", "deaf while suspended", "forgets to run after resume"],
)
def test_search_finds_a_planted_bug(make_broker: Callable[[], Broker]) -> None:
    assert next(complaints(make_broker, STEPS), "") != ""
