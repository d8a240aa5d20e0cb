"""A deterministic event loop: a whole cluster runs in one process, on virtual time, and replays from one seed.

`SimLoop` stops time while anything is ready to run, then jumps to the next timer: three years cost what their events
cost. The guarantees of a real loop hold (`call_soon` is first in, first out; a timer is never early). The seed decides
what a real loop leaves open: the order of timers that fall together, and with them every arrival of the simulated net
and disk.

Time is kept in integer nanoseconds, and timers fall on whole microseconds. asyncio counts time in float seconds, and
after three years those are 15 ns apart. On a finer grid a deadline could lie forever between two floats, and rounding,
not the seed, would order two timers that were meant to fall together.

No failure is silent. An exception that nobody handles fails the run. A run in which nothing can happen any more says
who waits for what. `SealedLoop` refuses every call that would reach a thread, a socket or a signal: product code goes
through `fairway.runtime`, and a call around it would escape the seed.

`Trace` is the hash of a run: the same seed must give the same hash on every machine, in every process. Every step adds
its virtual time and a label. A label consists of qualified names and of the loop's own task numbers: never `id()`,
`hash()` or a `repr`, which differ between processes. When two runs that should agree do not, listen to the events of
both: the first difference is the culprit.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import hashlib
import heapq
import math
import sys
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from contextvars import Context
from types import FrameType
from typing import Any, NoReturn, TypeAlias, TypeVar, TypeVarTuple

from fairway.errors import FairwayError, Misuse
from fairway.runtime.rng import SeededRng
from fairway.runtime.threads import thread_id

EVENTS_AT_ONCE = 256  # hashed together: to hash each alone costs as much again as to record it
RECENT_EVENTS = 16  # kept for error messages: enough to see the cycle that a run is caught in

TraceListener: TypeAlias = Callable[[int, str], None]


class Trace:
    """A running hash over (virtual nanoseconds, label)."""

    def __init__(self, listener: TraceListener | None = None) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._listener = listener
        self._recent: deque[tuple[int, str]] = deque(maxlen=RECENT_EVENTS)
        self._unhashed: list[str] = []

    def add(self, now_ns: int, label: str) -> None:
        self._unhashed.append(f"{now_ns} {label}\n")
        self._recent.append((now_ns, label))
        if len(self._unhashed) == EVENTS_AT_ONCE:
            self._digest()
        if self._listener is not None:
            self._listener(now_ns, label)

    def hexdigest(self) -> str:
        self._digest()
        return self._hash.hexdigest()

    def recent(self) -> str:
        """The last events, one per line, for an error message."""
        return "\n".join(f"  {now_ns} ns  {label}" for now_ns, label in self._recent)

    def _digest(self) -> None:
        self._hash.update("".join(self._unhashed).encode())
        self._unhashed.clear()


def label_of(callback: Callable[..., object]) -> str:
    """A name for a callback that is the same in every process."""
    while isinstance(callback, functools.partial):
        callback = callback.func
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return f"{owner.get_name()} {_qualified_name(owner.get_coro())}"
    return _qualified_name(callback)


def describe_task(task: asyncio.Task[Any]) -> str:
    """The task's name and the chain of awaits in which it is suspended, innermost last."""
    chain = []
    awaited: Any = task.get_coro()
    while (frame := _frame_of(awaited)) is not None:
        chain.append(f"{_qualified_name(awaited)}:{frame.f_lineno}")
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "ag_await", None)
    return f"{task.get_name()} in {' > '.join(chain) or _qualified_name(task.get_coro())}"


def _qualified_name(thing: object) -> str:
    name = getattr(thing, "__qualname__", None)
    return name if isinstance(name, str) else type(thing).__qualname__


def _frame_of(awaited: object) -> FrameType | None:
    frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "ag_frame", None)
    return frame if isinstance(frame, FrameType) else None


T = TypeVar("T")
Ts = TypeVarTuple("Ts")
ExceptionContext: TypeAlias = dict[str, Any]
ExceptionHandler: TypeAlias = Callable[[asyncio.AbstractEventLoop, ExceptionContext], object]

RESOLUTION_NS = 1_000
FLOAT_ERROR_ULPS = 3  # reading the time, adding a delay and scaling to ns each round by half a step or a whole one
COLLECT_EVERY_STEPS = 4_096  # the youngest generation; every 16th time the middle one, every 256th time all
CANCELLED_TIMERS_MIN = 64  # a heap with fewer cancelled timers is not worth rebuilding


class SimulationFailed(FairwayError):
    """The run cannot continue, or ended with an unhandled exception."""


class Deadlock(SimulationFailed):
    """Nothing is ready, no timer is set, and the run is not done; the message names the pending tasks."""


class StepLimit(SimulationFailed):
    """The run took more steps than allowed; the message shows the last ones."""


class SimTimer(asyncio.TimerHandle):
    """A timer that can only be cancelled: code for all loops may rely on nothing else."""

    def when(self) -> float:
        raise NotSimulated(
            "TimerHandle.when(): uvloop returns a plain handle for less than 0.5 ms; keep the time yourself"
        )


class NotSimulated(Misuse):
    """A call that would reach outside the simulation."""


def _refused(name: str) -> Any:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise NotSimulated(f"{name}() reaches outside the simulation: go through fairway.runtime instead")

    call: Callable[..., NoReturn] = refuse
    return call


class SealedLoop(asyncio.AbstractEventLoop):
    """The calls that a simulated loop refuses. Typed as Any, because nobody needs the signatures of refusals."""

    run_in_executor: Any = _refused("run_in_executor")
    set_default_executor: Any = _refused("set_default_executor")
    set_task_factory: Any = _refused("set_task_factory")

    add_signal_handler: Any = _refused("add_signal_handler")
    remove_signal_handler: Any = _refused("remove_signal_handler")
    subprocess_exec: Any = _refused("subprocess_exec")
    subprocess_shell: Any = _refused("subprocess_shell")
    connect_read_pipe: Any = _refused("connect_read_pipe")
    connect_write_pipe: Any = _refused("connect_write_pipe")

    getaddrinfo: Any = _refused("getaddrinfo")
    getnameinfo: Any = _refused("getnameinfo")
    create_connection: Any = _refused("create_connection")
    create_server: Any = _refused("create_server")
    create_datagram_endpoint: Any = _refused("create_datagram_endpoint")
    create_unix_connection: Any = _refused("create_unix_connection")
    create_unix_server: Any = _refused("create_unix_server")
    connect_accepted_socket: Any = _refused("connect_accepted_socket")
    start_tls: Any = _refused("start_tls")
    sendfile: Any = _refused("sendfile")

    add_reader: Any = _refused("add_reader")
    remove_reader: Any = _refused("remove_reader")
    add_writer: Any = _refused("add_writer")
    remove_writer: Any = _refused("remove_writer")
    sock_accept: Any = _refused("sock_accept")
    sock_connect: Any = _refused("sock_connect")
    sock_recv: Any = _refused("sock_recv")
    sock_recv_into: Any = _refused("sock_recv_into")
    sock_recvfrom: Any = _refused("sock_recvfrom")
    sock_recvfrom_into: Any = _refused("sock_recvfrom_into")
    sock_sendall: Any = _refused("sock_sendall")
    sock_sendfile: Any = _refused("sock_sendfile")
    sock_sendto: Any = _refused("sock_sendto")


class SimLoop(SealedLoop):
    """The deterministic loop. One thread; the same seed gives the same run.

    With `step_ns_max` every step takes a seeded time up to that, so that timers also fall between the steps of a task
    that never waits; 0 keeps virtual time exact.
    """

    def __init__(
        self,
        rng: SeededRng,
        *,
        steps_max: int | None = None,
        step_ns_max: int = 0,
        listener: TraceListener | None = None,
    ) -> None:
        self._ties = rng.child("ties")
        self._costs = rng.child("costs")
        self._steps_max = steps_max
        self._step_ns_max = step_ns_max
        self._trace = Trace(listener)
        self._now_ns = 0
        self.steps = 0  # how many callbacks and task steps have run
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[int, int, int, asyncio.TimerHandle]] = []  # due, tie, number, handle: a heap
        self._timers_made = 0
        self._timers_cancelled = 0
        self._tasks: weakref.WeakValueDictionary[int, asyncio.Task[Any]] = weakref.WeakValueDictionary()
        self._tasks_made = 0
        self._generators: weakref.WeakValueDictionary[int, AsyncGenerator[Any, Any]] = weakref.WeakValueDictionary()
        self._generators_made = 0
        self._failures: list[BaseException] = []
        self._exception_handler: ExceptionHandler | None = None
        self._thread: int | None = None  # the thread that runs the loop, while it runs
        self._stopping = False
        self._closed = False
        self._debug = False

    # --- time and trace ----------------------------------------------------------------------------------------------

    def time(self) -> float:
        return self._now_ns / 1e9

    def now_ns(self) -> int:
        """Virtual nanoseconds since the loop was made."""
        return self._now_ns

    def spend(self, ns: int) -> None:
        """Let the running step take this long: timers that fall due meanwhile are late, as on a real machine."""
        if ns < 0:
            raise Misuse("time does not go back: spend 0 ns or more")
        self._now_ns += ns

    def note(self, text: str) -> None:
        """Add a line to the trace. It must not depend on addresses or on the order of a set."""
        self._trace.add(self._now_ns, f"note {text}")

    def trace_hash(self) -> str:
        """The hash of everything that has run so far."""
        return self._trace.hexdigest()

    # --- scheduling --------------------------------------------------------------------------------------------------

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        self._check_open()
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        if self._thread not in (None, thread_id()):
            raise NotSimulated("call_soon_threadsafe() from another thread: a simulation has one thread")
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        self._check_open()
        handle = SimTimer(when, callback, args, self, context)
        self._timers_made += 1
        due_ns = self._due_ns(when)
        heapq.heappush(self._timers, (due_ns, self._ties.bits(32), self._timers_made, handle))
        return handle

    def _due_ns(self, when: float) -> int:
        """The first microsecond not before `when`, as far as floats can tell; later than now whenever `when` is."""
        due_ns = _microseconds_up(round(when * 1e9) - int(FLOAT_ERROR_ULPS * math.ulp(when) * 1e9))
        if due_ns <= self._now_ns and when > self.time():
            return _microseconds_up(self._now_ns + 1)
        return due_ns

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Called by a timer's `cancel`. Cancelled timers never outnumber the others by much."""
        self._timers_cancelled += 1
        if self._timers_cancelled > max(CANCELLED_TIMERS_MIN, len(self._timers) // 2):
            self._timers = [timer for timer in self._timers if not timer[-1].cancelled()]
            heapq.heapify(self._timers)
            self._timers_cancelled = 0

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Coroutine[Any, Any, T] | Generator[Any, None, T],
        *,
        name: str | None = None,
        context: Context | None = None,
        **options: Any,  # task options of later Pythons
    ) -> asyncio.Task[T]:
        self._check_open()
        self._tasks_made += 1  # asyncio numbers its tasks per process, which is no name for a trace
        name = name or f"task-{self._tasks_made}"
        task: asyncio.Task[T] = asyncio.Task(coro, loop=self, name=name, context=context, **options)  # type: ignore[arg-type,unused-ignore]
        self._tasks[self._tasks_made] = task
        return task

    # --- running -----------------------------------------------------------------------------------------------------

    def run_until_complete(self, future: Generator[Any, None, T] | Awaitable[T]) -> T:
        """Run to the result. Raises unhandled exceptions, unless an exception handler was set."""
        result = self._run_to_result(future)
        self.raise_failures()
        return result

    def _run_to_result(self, future: Generator[Any, None, T] | Awaitable[T]) -> T:
        self._check_can_run()
        main: asyncio.Future[T] = asyncio.ensure_future(future, loop=self)  # type: ignore[arg-type]
        main.add_done_callback(self._stop_when_done)
        try:
            self.run_forever()
            if not main.done():
                raise SimulationFailed("the loop was stopped before the run was done")
            return main.result()
        except BaseException as problem:
            for failure in self._take_failures():
                problem.add_note(f"before it, nobody handled {type(failure).__name__}: {failure}")
            raise
        finally:
            main.remove_done_callback(self._stop_when_done)

    def run_forever(self) -> None:
        self._check_can_run()
        collecting = gc.isenabled()
        hooks = sys.get_asyncgen_hooks()
        try:
            gc.disable()  # finalizers run product code: at steps that the seed decides, not when memory happens to fill
            sys.set_asyncgen_hooks(self._generator_started, self._generator_dropped)
            asyncio._set_running_loop(self)
            self._thread = thread_id()
            while not self._stopping:
                self._run_ready()
        finally:
            self._stopping = False
            self._thread = None
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)
            if collecting:
                gc.enable()

    def _stop_when_done(self, _: asyncio.Future[Any]) -> None:
        self.stop()

    def stop(self) -> None:
        self._stopping = True

    def _run_ready(self) -> None:
        """One turn: wake the timers that are due, then run what is ready now; newly ready handles wait a turn."""
        self._wake_timers()
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if not handle.cancelled():
                self._step(handle)

    def _wake_timers(self) -> None:
        timers = self._timers
        while timers:
            due_ns, _, _, handle = timers[0]
            if handle.cancelled():
                self._timers_cancelled -= 1
            elif due_ns <= self._now_ns:
                self._ready.append(handle)
            elif not self._ready:
                self._now_ns = due_ns
                continue
            else:
                return
            heapq.heappop(timers)
        if not self._ready:
            pending = "; ".join(map(describe_task, self._live_tasks())) or "no task"
            raise Deadlock(f"nothing can happen any more at {self._now_ns} ns; pending: {pending}")

    def _step(self, handle: asyncio.Handle) -> None:
        self.steps += 1
        if self._steps_max is not None and self.steps > self._steps_max:
            raise StepLimit(f"more than {self._steps_max} steps; the last ones:\n{self._trace.recent()}")
        self._trace.add(self._now_ns, label_of(handle._callback))  # type: ignore[attr-defined]
        handle._run()
        if self._step_ns_max:
            self._now_ns += self._costs.below(self._step_ns_max + 1)
        if self.steps % COLLECT_EVERY_STEPS == 0:
            count = self.steps // COLLECT_EVERY_STEPS
            gc.collect(2 if count % 256 == 0 else 1 if count % 16 == 0 else 0)

    def _live_tasks(self) -> list[asyncio.Task[Any]]:
        """Tasks that are not done, oldest first."""
        return [task for _, task in sorted(self._tasks.items()) if not task.done()]

    # --- ending ------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Cancel the remaining tasks, oldest first, wait for them, close; then raise unhandled exceptions."""
        if self._closed:
            return
        try:
            for task in self._live_tasks():
                task.cancel()
            while tasks := self._live_tasks():
                self._run_to_result(_settle(tasks))
            self._run_to_result(self.shutdown_asyncgens())
            self._collect_unseen_exceptions()
        finally:
            self.close()
        self.raise_failures()

    async def shutdown_asyncgens(self) -> None:
        for _, generator in sorted(self._generators.items()):
            await generator.aclose()

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ASYNC109
        """There is no executor."""

    def close(self) -> None:
        if self.is_running():
            raise Misuse("a running loop cannot be closed: stop it first")
        self._closed = True
        self._ready.clear()
        self._timers.clear()

    def is_running(self) -> bool:
        return self._thread is not None

    def is_closed(self) -> bool:
        return self._closed

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("Event loop is closed")  # asyncio's own type and words, which its callers expect

    def _check_can_run(self) -> None:
        self._check_open()
        if self.is_running() or asyncio._get_running_loop() is not None:
            raise RuntimeError("Cannot run the event loop while another loop is running")

    def _generator_started(self, generator: AsyncGenerator[Any, Any]) -> None:
        self._generators_made += 1
        self._generators[self._generators_made] = generator

    def _generator_dropped(self, generator: AsyncGenerator[Any, Any]) -> None:
        if not self._closed:
            self.call_soon(self._close_generator, generator)

    def _close_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        _ = self.create_task(_closing(generator))  # its first step is in the queue, which keeps the task

    # --- unhandled exceptions ----------------------------------------------------------------------------------------

    def get_exception_handler(self) -> ExceptionHandler | None:
        return self._exception_handler

    def set_exception_handler(self, handler: ExceptionHandler | None) -> None:
        self._exception_handler = handler

    def call_exception_handler(self, context: ExceptionContext) -> None:
        if self._exception_handler is None:
            self.default_exception_handler(context)
            return
        try:
            self._exception_handler(self, context)
        except Exception as failure:
            self._failures.append(failure)

    def default_exception_handler(self, context: ExceptionContext) -> None:
        """Keep the exception: the run raises it at its end."""
        message = str(context.get("message", "unhandled"))
        failure = context.get("exception")
        if isinstance(failure, BaseException):
            failure.add_note(message)
        else:
            failure = SimulationFailed(message)
        self._failures.append(failure)

    def raise_failures(self) -> None:
        """Raise, as one group, the unhandled exceptions since the last call."""
        if failures := self._take_failures():
            raise BaseExceptionGroup("nobody handled these in the simulation", failures)

    def _take_failures(self) -> list[BaseException]:
        failures, self._failures = self._failures, []
        return failures

    def _collect_unseen_exceptions(self) -> None:
        """Collect the exceptions of finished tasks that nobody will look at any more."""
        for _, task in sorted(self._tasks.items()):
            if task.done() and not task.cancelled() and task._log_traceback:
                failure = task.exception()
                message = f"nobody looked at the outcome of {task.get_name()}"
                self.default_exception_handler({"message": message, "exception": failure})

    # --- modes -------------------------------------------------------------------------------------------------------

    def get_debug(self) -> bool:
        return self._debug

    def set_debug(self, enabled: bool) -> None:
        self._debug = enabled

    def get_task_factory(self) -> None:
        return None


def _microseconds_up(ns: int) -> int:
    return -(-ns // RESOLUTION_NS) * RESOLUTION_NS


async def _settle(tasks: list[asyncio.Task[Any]]) -> None:
    """Wait for cancelled tasks. Their exceptions are found when unseen exceptions are collected."""
    for task in tasks:
        waiter = asyncio.get_running_loop().create_future()
        task.add_done_callback(lambda _, waiter=waiter: waiter.set_result(None))  # type: ignore[misc]
        await waiter


async def _closing(generator: AsyncGenerator[Any, Any]) -> None:
    await generator.aclose()
