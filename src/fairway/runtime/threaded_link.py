"""The threaded link: a connection for programs that have no event loop.

A link drives a core (`LinkCore`: bytes in, bytes out, deadlines; no socket) from any number of threads of the caller
and one daemon thread of its own:

    the caller   changes the core under `lock`, then calls `pump`, which writes the core's output
    the reader   dials, reads until the core's next deadline, feeds the core, and pumps its output

To wake the reader costs a caller a system call and its turn. So a caller writes itself, unless the reader will look
soon anyway. The reader naps for a millisecond after a stir, and after it has woken a thread, which soon has something
to send.

`lock` guards the core and is never held during a call on the socket. The socket does not block: the reader writes what
the socket refused, as soon as the socket is ready. So nobody waits in a write while answers lie unread that would free
the other side. If a broker reads slowly, the core's own bounded buffer fills, and the core's users wait there.

A forked child has no reader and shares the parent's socket. Its use would garble the parent's conversation, so the link
closes the child's copy and is an orphan there; its owner makes another link. When the interpreter ends, `at_exit` of
every open link is called while the readers still run.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import socket
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from fairway.errors import FairwayError, Misuse
from fairway.runtime.buffers import Bytes
from fairway.runtime.clock import Clock
from fairway.runtime.dialer import Dialer, silence
from fairway.runtime.net import Address
from fairway.runtime.threads import Gate

READ_BYTES = 1 << 18  # one answer of a pull; larger answers come in a few reads
JOINED_BYTES = 2_048  # parts that are this small on average are joined
PARTS_MAX = 512  # of one gathering write: systems refuse more than 1,024
NEVER_NS = 1 << 63
NOBODY = "nobody is known who could be connected to"
# After a stir, the reader looks again after this time without being woken. To wake the reader costs the caller a system
# call and its turn, and a caller that settles one message will soon settle the next (bench/client_rates).
NAP_NS = 1_000_000


class LinkCore(Protocol):
    """The protocol side of a link (`protocol.line`). Called under the link's lock, by any thread; no call blocks."""

    def dial_due(self) -> int | None:
        """When to dial, on the monotonic clock in ns; None: not now (it is connected), or never again."""

    def moves_on(self) -> bool:
        """Whether to begin with the next address, because the last one is of no use. True once."""

    def move(self, now_ns: int) -> None:
        """The addresses have changed: end the connection, if there is one, and dial again at once."""

    def connected(self, now_ns: int) -> None:
        """The connection is made."""

    def unreachable(self, sentence: str, now_ns: int) -> None:
        """No address accepted a connection."""

    def lost(self, sentence: str, now_ns: int) -> None:
        """The connection is lost."""

    def feed(self, data: bytes, now_ns: int) -> None:
        """Bytes have arrived."""

    def take(self, now_ns: int) -> Sequence[Bytes]:
        """The parts to write now; also does what is due."""

    def is_over(self) -> bool:
        """Whether the conversation has ended: close the connection once the taken parts are written."""

    def next_deadline(self) -> int | None:
        """When to call `take` even if nothing happens; None: never."""

    def callbacks(self) -> Sequence[Callable[[], None]]:
        """Callbacks of users, to be called in order and without the lock."""


class ThreadWaiters:
    """The threads that wait for a change in a part of a link's core. Whoever announces a change wakes only those whose
    wait is over: to wake a thread costs more than to look for it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._waiting: dict[Gate, Callable[[], bool]] = {}  # under the link's lock

    def announce(self) -> None:
        """Wake the threads whose wait is over. Call it with the lock."""
        if self._waiting:
            is_over = self._link.is_dead
            for gate, is_ready in self._waiting.items():
                if is_over or is_ready():
                    gate.open()
                    self._link.expect()

    def wait(self, is_ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until a change makes `is_ready` true; False after the timeout.

        Call it without the lock; `is_ready` is called with the lock, by any thread.
        """
        link, gate = self._link, Gate()
        link.refuse_reader()
        with link.lock:
            if link.is_dead or is_ready():
                gate.open()
            else:
                self._waiting[gate] = is_ready
        try:
            is_told = gate.wait(timeout_s)
        finally:
            with link.lock:
                self._waiting.pop(gate, None)
                is_so = is_ready()
        link.check()
        return is_told or is_so


class LinkFailed(FairwayError):
    """A bug ended the reader thread; the cause is attached."""


class Link:
    """One connection to one of several addresses, dialed again whenever it is lost."""

    def __init__(
        self,
        core: LinkCore,
        addresses: Sequence[Address],
        clock: Clock,
        *,
        at_exit: Callable[[], None],
    ) -> None:
        """`at_exit` is called if the interpreter ends before `close`: it flushes the core and closes."""
        self.core = core
        self.lock = threading.Lock()
        self._changed = ThreadWaiters(self)
        self._others: weakref.WeakSet[ThreadWaiters] = weakref.WeakSet()  # that a failure must wake, too
        self._addresses = list(addresses)
        self._redirected: list[Address] | None = None  # to be dialed instead from now on; under `lock`
        self._address: Address | None = None  # of the current connection, or the last one
        self._clock = clock
        self.at_exit = at_exit
        self._writing = threading.Lock()
        self._unsent: deque[memoryview] = deque()  # taken from the core, not yet by the socket; under `_writing`
        self._socket: socket.socket | None = None
        self._is_over = False  # the conversation has ended, as of the last `pump`
        self._is_full = False  # the socket takes no more now: the reader waits until it does
        self._callbacks: list[Callable[[], None]] = []  # callbacks for the reader to call; under `lock`
        self._asleep_until_ns = 0  # the end of the reader's wait; 0 while it is awake
        self._selector: selectors.BaseSelector = selectors.DefaultSelector()
        self._read_view = memoryview(bytearray(READ_BYTES))  # new memory for each read would cost 13 µs
        self._wanted = 0  # what the selector watches the connection for
        self._wakeup, self._waker = socket.socketpair()
        self._wakeup.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._is_ending = False
        self._dialer = Dialer(clock, self._wakeup, lambda: self._is_ending or self._redirected is not None)
        self._is_left = False  # a caller has left its writing to the reader
        self._is_stirred = False  # somebody wants the reader to call `pump`
        self._is_expecting = False  # a thread will change the core soon
        self._is_napping = False  # the reader looks at `_is_stirred` soon, by itself
        self.is_orphan = False
        self._failure: BaseException | None = None
        self._gates: set[Gate] = set()  # of the callers in `wait_told`
        self._finalizer: Any = None
        self._reader = threading.Thread(target=self._run, name="fairway-link", daemon=True)

    def start(self) -> None:
        """Start the reader, which calls the core from now on, too."""
        _links.add(self)
        pools = sys.modules.get("multiprocessing.util")
        if pools is not None:  # children of multiprocessing end without atexit
            self._finalizer = pools.Finalize(None, self.at_exit, exitpriority=0)
        self._reader.start()

    # --- for callers -------------------------------------------------------------------------------------------------

    @property
    def in_reader(self) -> bool:
        """Whether the caller is a callback in the reader's own thread, which must not wait for the reader."""
        return threading.current_thread() is self._reader

    def check(self) -> None:
        """Raise if this link can never carry anything again."""
        if self.is_orphan:
            raise Misuse("this was made before the process forked and belongs to the parent: make another here")
        if self._failure is not None:
            raise LinkFailed("the thread that reads from the broker has failed") from self._failure

    def refuse_reader(self) -> None:
        if self.in_reader:
            raise Misuse("a callback runs in the thread that reads: it must not wait for what that thread brings")

    def new_waiters(self) -> ThreadWaiters:
        """Waiters for a part of the core, whose owner announces its changes. The link wakes them if it fails."""
        waiters = ThreadWaiters(self)
        with self.lock:
            self._others.add(waiters)
        return waiters

    def wait(self, is_ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until a change of the core makes `is_ready` true; False after the timeout. See `ThreadWaiters.wait`."""
        return self._changed.wait(is_ready, timeout_s)

    def wait_told(self, register: Callable[[Callable[[], None]], None], timeout_s: float | None = None) -> bool:
        """Wait until the registered callback is called; False after the timeout. `register` is called with the lock,
        and gets that callback.

        For many threads that wait at once for different things: each callback wakes only its own thread.
        """
        self.refuse_reader()
        gate = Gate()
        with self.lock:
            self.check()
            self._gates.add(gate)
            register(gate.open)
        try:
            is_told = gate.wait(timeout_s)
        finally:
            self._gates.discard(gate)
        self.check()
        return is_told

    @property
    def is_dead(self) -> bool:
        """Whether there will be no change any more."""
        return self.is_orphan or self._failure is not None

    def announce(self) -> None:
        """Wake the waiting callers, after a change without any bytes. Call it with the lock."""
        self._changed.announce()

    def pump(self, data: bytes = b"") -> None:
        """Write the core's output, as far as the socket takes it. Call it without the lock, after a change. The reader
        first feeds the core the `data` that arrived."""
        with self._writing:  # not for long: its holder waits for nothing but the lock
            try:
                self._write_out(data)
            except BaseException:  # for example a KeyboardInterrupt between taking bytes and writing them
                self._cut()
                raise

    def pump_soon(self) -> None:
        """Have the core's output written within `NAP_NS`, by the reader if that is awake by then. Many changes are
        written together. Call it without the lock, after a change."""
        self._is_left = self._is_expecting = True  # before the look: the reader looks at them before it sleeps
        if self._asleep_until_ns > self._clock.monotonic_ns() + NAP_NS:
            self.pump()

    def schedule(self) -> None:
        """Make the reader wake up for the core's next deadline. Call it with the lock, after a change."""
        deadline_ns = self.core.next_deadline()
        if deadline_ns is not None and deadline_ns < self._asleep_until_ns:
            self._asleep_until_ns = 0
            self._wake()

    def stir(self) -> None:
        """Make the reader pump soon. From any thread, with or without the lock."""
        self._is_stirred = True
        if self._asleep_until_ns and not self._is_napping:
            self._wake()

    def expect(self) -> None:
        """A thread was woken, and will soon change the core: the reader naps, so that the thread need not wake it. A
        handler that is done soon has its ack written by its own thread."""
        self._is_expecting = True

    def redirect(self, addresses: Sequence[Address], leader: Address | None) -> None:
        """Dial these addresses from now on. A connection to another address than the leader's ends at once; None: the
        leader is unknown. From any thread, without the lock."""
        with self._writing, self.lock:
            self._redirected = [*addresses]
            if leader is not None and (self._socket is None or self._address != leader):
                self.core.move(self._clock.monotonic_ns())
                self._cut()
            self._changed.announce()
        self._wake()

    def close(self, timeout_s: float) -> None:
        """End the reader and with it the connection. The caller has flushed the core before."""
        self._is_ending = True
        self._wake()
        if not self.in_reader:
            self._reader.join(timeout_s)
        _links.discard(self)
        if self._finalizer is not None:
            self._finalizer.cancel()

    # --- writing -----------------------------------------------------------------------------------------------------

    def _write_out(self, data: bytes) -> None:
        """Call under `_writing`. Takes from the core even if the socket is full: due work must be done, and cores have
        bounds. Not connected, nothing can be written, but work may be due, or go elsewhere."""
        with self.lock:
            self._is_left = self._is_stirred = False  # whatever was stirred before is taken now
            now_ns = self._clock.monotonic_ns()
            if data:
                self.core.feed(data, now_ns)
            parts = self.core.take(now_ns)
            self._changed.announce()  # requests whose time is over have ended
            self._callbacks += self.core.callbacks()
            self.schedule()
            is_connected = self._socket is not None
            self._is_over = self.core.is_over()
        if self._callbacks and not self.in_reader:
            self.stir()
        if is_connected:
            self._unsent.extend(_joined(parts))
            while self._unsent and not self._is_full and self._send_some():
                pass

    def _cut(self) -> None:
        """End the connection, because taken bytes may be lost: the core sends everything again on the next one."""
        self._unsent.clear()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _send_some(self) -> bool:
        """Write some parts. False: the socket takes no more for now, or is gone."""
        connection, unsent = self._socket, self._unsent
        if connection is None:
            unsent.clear()
            return False
        try:
            sent = _send(connection, [unsent[at] for at in range(min(len(unsent), PARTS_MAX))])
        except (BlockingIOError, InterruptedError):
            self._is_full = True
            self._wake()
            return False
        except OSError:  # the reader gets the same error, and tells the core
            unsent.clear()
            return False
        while unsent and sent >= len(unsent[0]):
            sent -= len(unsent.popleft())
        if sent:
            unsent[0] = unsent[0][sent:]
        return True

    def _wake(self) -> None:
        """Wake the reader."""
        with contextlib.suppress(OSError):  # full: it has wake-ups enough; closed: the reader has ended
            self._waker.send(b"\0")

    # --- the reader --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_ending:
                if self._socket is None:
                    self._seek()
                else:
                    self._listen()
                self._run_callbacks()
            self._run_callbacks()  # of the caller that has just closed the link
        except BaseException as error:  # a bug: waiting callers must learn of it
            self._failure = error
        finally:
            self._hang_up()
            with self.lock:
                for waiters in (self._changed, *self._others):
                    waiters.announce()
                if self._failure is not None:
                    for gate in tuple(self._gates):
                        gate.open()
            if not self.is_orphan:
                self._close_all()

    def _listen(self) -> None:
        """Wait once for bytes, for room in the socket, or for the next deadline; then handle what came."""
        connection = self._socket
        if connection is None:
            return
        ready = self._sleep(connection, self._deadline_s())
        if ready & selectors.EVENT_WRITE:
            self._is_full = False
        data = self._read(connection) if ready & selectors.EVENT_READ else b""
        if data is None:
            return
        self.pump(data)
        if self._is_over and (self._is_full or not self._unsent):  # do not wait for a peer that does not read
            self._drop("the conversation is over")

    def _read(self, connection: socket.socket) -> bytes | None:
        """The bytes that have arrived; None: the connection is gone."""
        try:
            data = bytes(self._read_view[: connection.recv_into(self._read_view)])
        except (BlockingIOError, InterruptedError):
            return b""
        except OSError as problem:
            self._drop(f"the connection was cut: {problem.strerror or problem}")
            return None
        if not data:
            self._drop("the other side closed the connection")
        return data or None

    def _drop(self, sentence: str) -> None:
        """The connection is gone, or no longer wanted."""
        self._hang_up()
        with self.lock:
            self.core.lost(sentence, self._clock.monotonic_ns())
            self._changed.announce()

    def _hang_up(self) -> None:
        with self._writing, self.lock:
            connection, self._socket = self._socket, None
            self._unsent.clear()
            self._is_full = False
        if connection is not None and not self.is_orphan:
            with contextlib.suppress(KeyError):
                self._selector.unregister(connection)
            connection.close()

    def _deadline_s(self) -> float | None:
        """How long to wait. From here on, a caller that sets an earlier deadline wakes the reader."""
        now_ns = self._clock.monotonic_ns()
        with self.lock:
            if self._is_expecting:
                self._is_napping, self._is_expecting = True, False
            dues_ns = (self.core.next_deadline(), self.core.dial_due())
            due_ns = min((each for each in dues_ns if each is not None), default=NEVER_NS)
            if self._is_napping:
                due_ns = min(due_ns, now_ns + NAP_NS)
            self._asleep_until_ns = due_ns
        if self._is_left or (self._is_stirred and not self._is_napping):  # before the caller could see the sleep
            return 0
        return None if due_ns == NEVER_NS else max(due_ns - now_ns, 0) / 1e9

    def _sleep(self, connection: socket.socket | None, timeout_s: float | None) -> int:
        """Wait; return a mask of what the connection is ready for."""
        if connection is not None:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._is_full else 0)
            if self._wanted != wanted:
                self._selector.modify(connection, wanted)
                self._wanted = wanted
        mask = 0
        for key, events in self._selector.select(timeout_s):
            if key.fileobj is self._wakeup:
                silence(self._wakeup)
            else:
                mask |= events
        self._asleep_until_ns = 0
        self._is_napping, self._is_stirred = self._is_stirred, False  # before a look at the core: see `stir`
        return mask

    # --- dialing -----------------------------------------------------------------------------------------------------

    def _seek(self) -> None:
        """Wait until it is time to dial, then dial."""
        with self.lock:
            due_ns = self.core.dial_due()
            is_time = due_ns is not None and due_ns <= self._clock.monotonic_ns()
            if not is_time:
                self.core.take(self._clock.monotonic_ns())  # nothing can be written, but work may be due
                self._changed.announce()
        if is_time:
            self._dial()
        else:
            self._sleep(None, self._deadline_s())

    def _dial(self) -> None:
        """Try every address once, beginning with the one that answered last, unless that one does not lead."""
        problems = []
        for address in self._to_dial():
            try:
                connection = self._dialer.connect(address)
            except OSError as problem:
                problems.append(f"{address[0]}:{address[1]}: {problem.strerror or problem}")
                self._addresses.append(self._addresses.pop(0))
                continue
            if connection is not None:
                self._address = address
                self._begin(connection)
            return
        with self.lock:
            sentence = f"cannot connect to {'; '.join(problems)}" if problems else NOBODY
            self.core.unreachable(sentence, self._clock.monotonic_ns())
            self._changed.announce()

    def _to_dial(self) -> tuple[Address, ...]:
        with self.lock:
            moves_on = self.core.moves_on()
            if self._redirected is not None:
                self._addresses, self._redirected = self._redirected, None
            elif moves_on and self._addresses:
                self._addresses.append(self._addresses.pop(0))
        return tuple(self._addresses)

    def _begin(self, connection: socket.socket) -> None:
        self._wanted = selectors.EVENT_READ
        self._selector.register(connection, self._wanted)
        with self.lock:
            self._socket = connection
            self.core.connected(self._clock.monotonic_ns())
            self._changed.announce()
        self.pump()

    # --- the rest ----------------------------------------------------------------------------------------------------

    def _run_callbacks(self) -> None:
        with self.lock:
            callbacks, self._callbacks = [*self._callbacks, *self.core.callbacks()], []
        for callback in callbacks:
            try:
                callback()
            except Exception as error:  # of a user's callback: reported like the end of a thread; the link goes on
                threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, self._reader)))

    def _close_all(self) -> None:
        self._selector.close()
        self._wakeup.close()
        self._waker.close()

    def orphan(self) -> None:
        """Disable this link in a forked child, where no lock can be trusted to be free."""
        self.is_orphan = True
        self.lock = threading.Lock()
        self._changed = ThreadWaiters(self)
        self._writing = threading.Lock()
        if self._socket is not None:
            self._socket.close()  # the child's copy: the parent's conversation goes on
            self._socket = None
        self._close_all()


def _joined(parts: Sequence[Bytes]) -> Sequence[memoryview]:
    """The parts; many small ones as one, because to copy them costs less than to write them apart."""
    if len(parts) > 2 and sum(map(len, parts)) < len(parts) * JOINED_BYTES:
        parts = [b"".join(parts)]
    return [memoryview(part) for part in parts]


def _send(connection: socket.socket, parts: list[memoryview]) -> int:
    if hasattr(connection, "sendmsg"):
        return connection.sendmsg(parts)
    return connection.send(parts[0])  # Windows has no gathering write


_links: weakref.WeakSet[Link] = weakref.WeakSet()  # started and not closed


def _after_fork() -> None:
    links = list(_links)
    _links.clear()
    for link in links:
        link.orphan()


def _at_exit() -> None:
    for link in list(_links):
        try:
            link.at_exit()
        except Exception as problem:  # nobody is left to catch it: show it as Python shows errors at exit
            sys.excepthook(type(problem), problem, problem.__traceback__)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
