"""Careers and their candidates. A `Career` is the class that a user writes, in three parts. One instance in the whole
cluster leads at a time.

    class Billing(fairway.Career):
        name = "billing"

        def inaugurate(self) -> None: ...           begin to lead: open what is needed
        def execute(self, token: int) -> bool: ...  one piece of work, again and again
        def hand_over(self) -> None: ...            stop leading in order

`execute` returns True to be called again at once; with nothing to do, it waits a little itself. It returns False to let
another candidate have a turn. `token` grows with every term. `execute` shows the token to a fence in the same
transaction as its effect (`fairway.sql.Fence`), and the fence refuses a deposed leader. Nothing else can promise that:
a process may be paused between any check and its effect.

`in_hand` says what happens to the work in hand when the leadership is suspended or about to end while `execute` runs.
With "finish" the work is finished, since a fence protects its effect, and the next leader waits. With "abort" the work
is aborted, and the leadership changes at once; this is right for work in one transaction. A plain function cannot be
interrupted: it calls `self.leadership.check()` where it can stop, and that raises `Deposed`. A coroutine is cancelled.

If a part raises an error, the candidate hands over and resigns, and `elect` raises the error. `Deposed` is not such an
error: it ends the term, and the candidate campaigns again.

There are two kinds of candidates: `Candidacy` in the thread that calls `run`, `AioCandidacy` on the loop that does.

Both ask `CandidateCore` for the next duty and carry it out. The core is the state machine with a lock, a clock, and a
callback to wake the candidate. The election calls the core from any thread when something changes.

Only a coroutine can be interrupted: if a career says `in_hand = "abort"`, `AioCandidacy` cancels its `execute` as soon
as the leadership is in doubt or ends. If the leadership is lost, `AioCandidacy` cancels the `execute` of any career.

`elect` and `elect_async` (`fairway.elect`, `fairway.aio.elect`) take a career and an election, and run the candidate.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, ClassVar

from fairway.career.election import FOLDER, Election
from fairway.career.state_machine import CareerStateMachine, Confirmation, Duty, Hold, InHand, Intention
from fairway.career.zookeeper_election import SESSION_MS, ZooKeeperElection
from fairway.errors import Deposed, Misuse
from fairway.names import GroupName
from fairway.runtime.clock import Clock, RealClock
from fairway.runtime.host import Ending
from fairway.runtime.threads import Lock, Wakeup


class _Named:
    name: ClassVar[str] = ""
    """The name of the career, not of the candidate. All candidates of one career share the name, and a fence knows them
    by it."""
    in_hand: ClassVar[InHand] = "finish"
    """What happens to the work in hand when the leadership is in doubt or about to end."""

    _leadership: Leadership | None = None

    @property
    def leadership(self) -> Leadership:
        """The leadership of this term, from `inaugurate` to the end of `hand_over`."""
        if self._leadership is None:
            raise Misuse(f"career {self.name or type(self).__name__} is not in office: only its three parts may ask")
        return self._leadership


class Career(_Named):
    """A career of plain functions. `fairway.elect` runs it in the calling thread."""

    def inaugurate(self) -> None:
        """Begin to lead. Nobody else leads: every earlier leader has handed over or is deposed."""

    def execute(self, token: int) -> bool:
        """Do one piece of work. True: call again; False: let another candidate have a turn."""
        raise NotImplementedError(f"{type(self).__name__}.execute(token) is what a career is for")

    def hand_over(self) -> None:
        """Stop leading. Called after every `inaugurate` that succeeded, even if the leadership is lost already."""


class AioCareer(_Named):
    """A career of coroutines. `fairway.aio.elect` runs it on the calling loop."""

    async def inaugurate(self) -> None:
        """Begin to lead. Nobody else leads: every earlier leader has handed over or is deposed."""

    async def execute(self, token: int) -> bool:
        """Do one piece of work. True: call again; False: let another candidate have a turn."""
        raise NotImplementedError(f"{type(self).__name__}.execute(token) is what a career is for")

    async def hand_over(self) -> None:
        """Stop leading. Called after every `inaugurate` that succeeded, even if the leadership is lost already."""


def name_of(career: Career | AioCareer) -> str:
    if not career.name:
        raise Misuse(f'{type(career).__name__} has no name: give the class one, as in name = "billing"')
    return career.name


def checked(career: Career | AioCareer, is_more: object) -> bool:
    """Check the result of `execute`. None would silently end every term after one piece of work."""
    if not isinstance(is_more, bool):
        raise Misuse(f"{type(career).__name__}.execute returned {is_more!r}: it says True to go on, or False")
    return is_more


_TICK_S = 0.25  # how soon a signal is noticed while nothing else happens
_CLOSE_S = 30.0  # to leave an election; a session that has not ended by then expires by itself
# How long a candidate waits to campaign again after a fence refused it. An election that was set up again counts from
# the beginning, and every leadership would end at once.
_REST_NS = 1_000_000_000

_log = logging.getLogger("fairway.career")


class Leadership:
    """The leadership of one term, for code in `execute` to check. Any thread may use it."""

    def __init__(self, office: CandidateCore, token: int) -> None:
        self._core = office
        self.token = token

    @property
    def holds(self) -> bool:
        """Whether it is certain now that nobody else leads."""
        return self._core.holds(self.token)

    def check(self) -> None:
        """Raise `Deposed` if the work in hand must not go on: the leadership is lost. For a career that aborts its
        work, also if the leadership is suspended or about to end."""
        self._core.check(self.token)

    def step_down(self) -> None:
        """Hand over when this `execute` has ended, so that another candidate has a turn."""
        self._core.ask(Intention.YIELD, self.token)


class CandidateCore:
    """One candidate, as its election and its career see it."""

    def __init__(self, name: str, in_hand: InHand, clock: Clock, ending: Ending, wake: Callable[[], None]) -> None:
        """The core calls `wake` when `next` may have another answer, from any thread and without the lock. The core
        polls `ending` instead of listening to it: a signal may arrive while this thread holds the lock."""
        if in_hand not in ("finish", "abort"):
            raise Misuse(f"in_hand={in_hand!r} of career {name}: what is in hand is 'finish'ed, or 'abort'ed")
        self.name = str(GroupName.parse(name))  # the alphabet of a fence and of a path
        self._state_machine = CareerStateMachine(in_hand)
        self._lock = Lock()
        self._clock = clock
        self._ending = ending
        self._wake = wake
        self.is_closed = False
        self._rests_until_ns = 0
        self.failure: BaseException | None = None

    # --- for the election --------------------------------------------------------------------------------------------

    def elected(self, confirmation: Confirmation) -> None:
        _log.info("career %s: elected, token %d", self.name, confirmation.token)
        with self._lock:
            self._state_machine.elected(confirmation)
        self._wake()

    def confirmed(self, confirmation: Confirmation) -> None:
        with self._lock:
            self._state_machine.confirmed(confirmation, self._clock.monotonic_ns())
        self._wake()

    def suspended(self) -> None:
        _log.warning("career %s: the session is suspended, nothing new is begun", self.name)
        with self._lock:
            self._state_machine.suspended()
        self._wake()

    def lost(self, token: int) -> None:
        _log.warning("career %s: the office is lost, token %d", self.name, token)
        with self._lock:
            self._state_machine.lost(token)
        self._wake()

    def resigned(self) -> None:
        with self._lock:
            self._state_machine.resigned()
        self._wake()

    def failed(self, error: Exception) -> None:
        """The election can never elect this candidate: end with this error."""
        with self._lock:
            self._end(error)
            if self._state_machine.token is not None:
                self._state_machine.lost(self._state_machine.token)
        self._wake()

    def closed(self) -> None:
        self.is_closed = True
        self._wake()

    # --- for the career ----------------------------------------------------------------------------------------------

    def holds(self, token: int) -> bool:
        with self._lock:
            return (
                token == self._state_machine.token and self._state_machine.hold(self._clock.monotonic_ns()) is Hold.HELD
            )

    def check(self, token: int) -> None:
        with self._lock:
            now_ns = self._now_ns()
            is_current = token == self._state_machine.token
            hold = self._state_machine.hold(now_ns) if is_current else Hold.LOST
            if is_current and self._state_machine.may_go_on(now_ns):
                return
        why = {Hold.HELD: "it is to step down", Hold.SUSPENDED: "the session is suspended"}
        raise Deposed(self.name, token, why.get(hold, "the office is lost"))

    def ask(self, intention: Intention, token: int | None = None) -> None:
        """Ask to yield or to end; with a token, only if that term still lasts."""
        with self._lock:
            if token is None or token == self._state_machine.token:
                self._state_machine.ask(intention)
        self._wake()

    # --- for the candidate -------------------------------------------------------------------------------------------

    def next(self) -> tuple[Duty, float | None]:
        """The next duty, which begins with this call; with WAIT, how long to wait at most, in seconds."""
        with self._lock:
            now_ns = self._now_ns()
            duty = self._state_machine.duty(now_ns)
            if duty is Duty.CAMPAIGN and now_ns < self._rests_until_ns:
                return Duty.WAIT, (self._rests_until_ns - now_ns) / 1e9
            self._state_machine.begin(duty)
            due_ns = self._state_machine.next_deadline(now_ns)
        return duty, None if due_ns is None else (due_ns - now_ns) / 1e9

    def leadership(self) -> Leadership:
        """The leadership of the term that has begun."""
        with self._lock:
            return Leadership(self, self._state_machine.token or 0)

    def abort_due_s(self) -> float | None:
        """How long the work in hand may go on, as far as known; None: no end is known."""
        with self._lock:
            now_ns = self._now_ns()
            if not self._state_machine.may_go_on(now_ns):
                return 0.0
            due_ns = self._state_machine.next_deadline(now_ns)
        return None if due_ns is None else (due_ns - now_ns) / 1e9

    def done(self, *, is_more: bool = True) -> None:
        with self._lock:
            self._state_machine.done(is_more=is_more)

    def stumbled(self, error: BaseException) -> None:
        """The duty ended with an error. `Deposed` does not end the candidacy. Either the state machine knows the reason
        already, or a fence raised the error; then the leadership is lost, whatever the election believes."""
        with self._lock:
            is_news = self._state_machine.may_go_on(self._now_ns())
            self._state_machine.broken_off()
            if not isinstance(error, Deposed):
                self._end(error)
            elif is_news:
                _log.warning("career %s: %s", self.name, error)
                self._state_machine.lost(error.token)
                self._rests_until_ns = self._clock.monotonic_ns() + _REST_NS

    def give_up(self, error: BaseException) -> None:
        """The program was interrupted: hand over, resign, and raise this error."""
        with self._lock:
            self._end(error)

    def _end(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self._state_machine.ask(Intention.END)

    def _now_ns(self) -> int:
        """The time. Reading the time also notices a request to end."""
        if self._ending.is_asked:
            self._state_machine.ask(Intention.END)
        return self._clock.monotonic_ns()


class _BaseCandidacy:
    """What both kinds of candidates have in common."""

    def __init__(
        self, career: Career | AioCareer, election: Election, clock: Clock | None, wake: Callable[[], None]
    ) -> None:
        self._election = election
        self._ending = Ending()
        self._wake = wake
        self._core = CandidateCore(name_of(career), career.in_hand, clock or RealClock(), self._ending, wake)

    def stop(self) -> None:
        """Finish or abort the work in hand, hand over and resign. Any thread may call this; the call returns at
        once."""
        self._ending.ask()
        self._wake()


class Candidacy(_BaseCandidacy):
    """One candidate for one career. Most programs call `elect`; this class is for programs that stop the candidate
    themselves.

    `run` returns after `stop` or a signal, and raises what the career raised."""

    def __init__(self, career: Career, election: Election, *, clock: Clock | None = None) -> None:
        if not isinstance(career, Career):
            raise Misuse(f"a career is a fairway.Career, not {type(career).__name__}; coroutines: fairway.aio.elect")
        self._career = career
        self._wakeup = Wakeup()
        super().__init__(career, election, clock, self._wakeup.signal)

    def run(self) -> None:
        """Be a candidate, and lead when elected, until `stop`, SIGTERM or SIGINT."""
        leave = self._ending.on_signals()
        try:
            self._election.open(self._core)
            try:
                while self._step():
                    pass
            finally:
                self._election.close()
                self._await_closed()
        finally:
            leave()
        if self._core.failure is not None:
            raise self._core.failure

    def _step(self) -> bool:
        """Carry out the next duty. False: the candidacy has ended."""
        duty, wait_s = self._core.next()
        match duty:
            case Duty.WAIT:
                self._wait(wait_s)
            case Duty.CAMPAIGN:
                self._election.campaign()
            case Duty.INAUGURATE:
                self._career._leadership = self._core.leadership()
                self._have(self._inaugurate)
            case Duty.EXECUTE:
                self._have(lambda: checked(self._career, self._career.execute(self._career.leadership.token)))
            case Duty.HAND_OVER:
                self._have(self._hand_over)
            case Duty.RESIGN:
                self._career._leadership = None
                self._election.resign()
        return duty is not Duty.END

    def _wait(self, wait_s: float | None) -> None:
        try:
            self._wakeup.wait(_TICK_S if wait_s is None else min(wait_s, _TICK_S))
        except KeyboardInterrupt as error:  # the second Ctrl-C: a leader still hands over
            self._core.give_up(error)

    def _have(self, part: Callable[[], bool]) -> None:
        try:
            is_more = part()
        except BaseException as error:
            self._core.stumbled(error)
        else:
            self._core.done(is_more=is_more)

    def _inaugurate(self) -> bool:
        self._career.inaugurate()
        return True

    def _hand_over(self) -> bool:
        self._career.hand_over()
        return True

    def _await_closed(self) -> None:
        for _ in range(int(_CLOSE_S / _TICK_S)):
            if self._core.is_closed:
                return
            self._wakeup.wait(_TICK_S)


class AioCandidacy(_BaseCandidacy):
    """One candidate for one career. `run` returns after `stop` or a signal, and raises what the career raised.

    If its task is cancelled, the candidate hands over and resigns first. If cancelled again, it ends at once."""

    def __init__(self, career: AioCareer, election: Election, *, clock: Clock | None = None) -> None:
        if not isinstance(career, AioCareer):
            raise Misuse(f"a career on a loop is a fairway.aio.Career, not {type(career).__name__}")
        self._career = career
        self._loop: asyncio.AbstractEventLoop | None = None
        self._rung = asyncio.Event()
        super().__init__(career, election, clock, self._ring)

    async def run(self) -> None:
        """Be a candidate, and lead when elected, until `stop`, SIGTERM or SIGINT."""
        self._loop = asyncio.get_running_loop()
        leave = self._ending.on_signals()
        try:
            self._election.open(self._core)
            try:
                while await self._step():
                    pass
            finally:
                self._election.close()
                await self._await_closed()
        finally:
            leave()
            self._loop = None
        if self._core.failure is not None:
            raise self._core.failure

    def _ring(self) -> None:
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._rung.set)

    async def _step(self) -> bool:
        """Carry out the next duty. False: the candidacy has ended."""
        self._rung.clear()
        duty, wait_s = self._core.next()
        match duty:
            case Duty.WAIT:
                await self._wait(wait_s)
            case Duty.CAMPAIGN:
                self._election.campaign()
            case Duty.INAUGURATE:
                self._career._leadership = self._core.leadership()
                await self._have(self._inaugurate())
            case Duty.EXECUTE:
                await self._have(self._execute())
            case Duty.HAND_OVER:
                await self._have(self._hand_over(), is_breakable=False)
            case Duty.RESIGN:
                self._career._leadership = None
                self._election.resign()
        return duty is not Duty.END

    async def _wait(self, wait_s: float | None) -> None:
        try:
            await self._listen(wait_s)
        except asyncio.CancelledError as error:
            self._give_up(error)

    async def _listen(self, wait_s: float | None) -> None:
        """Wait for the event, at most so long."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._rung.wait(), _TICK_S if wait_s is None else min(wait_s, _TICK_S))
        self._rung.clear()

    async def _have(self, part: Coroutine[Any, Any, bool], *, is_breakable: bool = True) -> None:
        """Run a part of the career in a task of its own, so that the part can be cancelled without this task."""
        task = asyncio.get_running_loop().create_task(part)
        while not task.done():
            try:
                await self._attend(task, is_breakable=is_breakable)
            except asyncio.CancelledError as error:  # of this task, not of the part's
                if is_breakable or self._is_cancelled:
                    task.cancel()
                self._give_up(error)
        self._note(task)

    async def _attend(self, task: asyncio.Task[bool], *, is_breakable: bool) -> None:
        """Wait until the task is done, or something may have changed. Cancel the task if it must not go on."""
        left_s = self._core.abort_due_s() if is_breakable else None
        if left_s == 0.0:
            task.cancel()
            await asyncio.wait([task])
            return
        self._rung.clear()
        listening = asyncio.get_running_loop().create_task(self._listen(left_s))
        try:
            await asyncio.wait([task, listening], return_when=asyncio.FIRST_COMPLETED)
        finally:
            listening.cancel()

    def _note(self, task: asyncio.Task[bool]) -> None:
        if task.cancelled():
            token = self._career.leadership.token
            self._core.stumbled(Deposed(self._core.name, token, "it was broken off"))
        elif (error := task.exception()) is not None:
            self._core.stumbled(error)
        else:
            self._core.done(is_more=task.result())

    def _give_up(self, error: asyncio.CancelledError) -> None:
        """This task was cancelled: go on until the hand-over. The second time, raise."""
        if self._is_cancelled:
            raise error
        self._core.give_up(error)

    @property
    def _is_cancelled(self) -> bool:
        return isinstance(self._core.failure, asyncio.CancelledError)

    async def _inaugurate(self) -> bool:
        await self._career.inaugurate()
        return True

    async def _execute(self) -> bool:
        return checked(self._career, await self._career.execute(self._career.leadership.token))

    async def _hand_over(self) -> bool:
        await self._career.hand_over()
        return True

    async def _await_closed(self) -> None:
        for _ in range(int(_CLOSE_S / _TICK_S)):
            if self._core.is_closed:
                return
            await self._listen(None)


def elect(
    career: Career,
    *,
    zookeeper: str = "",
    path: str = "",
    session_ms: int = SESSION_MS,
    client_options: Mapping[str, Any] | None = None,
    election: Election | None = None,
) -> None:
    """Be a candidate for a career, and lead when elected, until SIGTERM or SIGINT; then hand over, and return.

    `zookeeper` as "one:2181,two:2181"; `path` is the folder of the candidates' queue, by default
    `/fairway/careers/<name>`. A leader that vanishes is replaced after `session_ms`. `client_options` go to kazoo's
    client. Any other `election` may be given instead."""
    Candidacy(career, _election(career, zookeeper, path, session_ms, client_options, election)).run()


async def elect_async(
    career: AioCareer,
    *,
    zookeeper: str = "",
    path: str = "",
    session_ms: int = SESSION_MS,
    client_options: Mapping[str, Any] | None = None,
    election: Election | None = None,
) -> None:
    """Do as `fairway.elect` does, for a career of coroutines. A cancellation hands over, too."""
    await AioCandidacy(career, _election(career, zookeeper, path, session_ms, client_options, election)).run()


def _election(
    career: Career | AioCareer,
    zookeeper: str,
    path: str,
    session_ms: int,
    client_options: Mapping[str, Any] | None,
    election: Election | None,
) -> Election:
    if bool(zookeeper) == (election is not None):
        raise Misuse("say where the election is held: zookeeper='host:2181', or election=..., and not both")
    if election is not None:
        return election
    place = path or f"{FOLDER}/{name_of(career)}"
    return ZooKeeperElection(zookeeper, place, session_ms=session_ms, client_options=client_options)
