"""A scheduler on virtual time, with requests that cost what they are told to, and a ledger of how each one ended."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from fairway.errors import Refused
from fairway.runtime.clock import SimClock
from fairway.runtime.rng import SeededRng
from fairway.scheduling import Account, Actor, Expiry, Scheduler, SchedulerOptions, TurnResult, VirtualTime
from fairway.simulation.loop import ExceptionContext, SimLoop

FAR_NS = 1 << 60

Work = Callable[["Ask", Actor], TurnResult]


class Planted(Exception):
    """What a processor of these tests throws."""


@dataclass(eq=False, slots=True)
class Ask:
    """A request, what handling it costs, and what became of it."""

    key: Hashable
    cost_ns: int = 10_000
    work: Work | None = None
    deadline_ns: int = FAR_NS
    wait_until_ns: int = 0
    is_cancelled: bool = False
    account: Account | None = None
    throws_when_told: bool = False
    looks: int = 0
    fates: list[str] = field(default_factory=list)
    ended_ns: int = -1


@dataclass(frozen=True, slots=True)
class Served:
    """One call of `process`."""

    key: Hashable
    started_ns: int
    ended_ns: int


class Stage:
    """The loop, the scheduler, and a processor for every `Ask`."""

    def __init__(
        self, options: SchedulerOptions | None = None, order: VirtualTime | None = None, seed: int | str = 1
    ) -> None:
        self.rng = SeededRng(seed)
        self.loop = SimLoop(self.rng.child("loop"))
        self.loop.set_exception_handler(self._note_error)
        self.scheduler = Scheduler(SimClock(self.loop.now_ns), self.loop, options, order)
        self.served: list[Served] = []
        self.errors: list[object] = []
        self.asked: list[Ask] = []

    @property
    def now_ns(self) -> int:
        return self.loop.now_ns()

    def ask(self, key: Hashable, cost_ns: int = 10_000, **fields: object) -> Ask:
        """Dispatch a request; a refusal is one of its fates."""
        return self.send(Ask(key, cost_ns, **fields))  # type: ignore[arg-type]

    def send(self, ask: Ask) -> Ask:
        self.asked.append(ask)
        try:
            self.scheduler.dispatch(ask.key, ask, self)
        except Refused:
            self._end(ask, "refused")
        return ask

    def run(self, ns: int) -> None:
        """Let so much virtual time pass."""
        self.loop.call_later(ns / 1e9, self.loop.stop)
        self.loop.run_forever()

    def actor(self, key: Hashable) -> Actor:
        actor = self.scheduler.find(key)
        assert actor is not None
        return actor

    def time_of(self, key: Hashable, since_ns: int = 0) -> int:
        """How long its requests were handled, from a moment on."""
        return sum(max(0, one.ended_ns - max(one.started_ns, since_ns)) for one in self.served if one.key == key)

    # --- the processor -----------------------------------------------------------------------------------------------

    def process(self, request: Ask, actor: Actor) -> TurnResult:
        started_ns = self.now_ns
        request.looks += 1
        self.loop.spend(request.cost_ns)
        self.served.append(Served(request.key, started_ns, self.now_ns))
        verdict = request.work(request, actor) if request.work is not None else TurnResult.DONE
        if verdict is TurnResult.DONE:
            self._end(request, "done")
        return verdict

    def expire(self, request: Ask, expiry: Expiry) -> None:
        self._end(request, expiry.value)

    def fail(self, request: Ask, error: Exception) -> None:
        self._end(request, "failed")

    def _end(self, request: Ask, fate: str) -> None:
        request.fates.append(fate)
        request.ended_ns = self.now_ns
        if request.throws_when_told and fate != "done":
            raise Planted(f"when told: {fate}")

    def _note_error(self, _: object, context: ExceptionContext) -> None:
        self.errors.append(context.get("exception"))


def throw(_: Ask, __: Actor) -> TurnResult:
    raise Planted("while processing")


def nothing_there(_: Ask, __: Actor) -> TurnResult:
    return TurnResult.WAIT


class Group:
    """Consumers that always have a request in the mailbox: each one answered is followed by the next at once."""

    def __init__(self, stage: Stage, key: Hashable, consumers: int, cost_ns: int, size_bytes: int = 0) -> None:
        self._stage = stage
        self._rng = stage.rng.child(f"costs of {key}")
        self.key = key
        self._cost_ns = cost_ns
        self._size_bytes = size_bytes
        self.is_on = True
        for _ in range(consumers):
            self._next()

    def _next(self) -> None:
        cost_ns = int(self._cost_ns * (0.5 + self._rng.uniform()))
        self._stage.ask(self.key, cost_ns, work=self._follow)

    def _follow(self, _: Ask, actor: Actor) -> TurnResult:
        actor.charge(size_bytes=self._size_bytes)
        if self.is_on:
            self._next()
        return TurnResult.DONE
