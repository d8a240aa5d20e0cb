"""The threaded link: a connection for programs that have no event loop.

A link drives a core (bytes in, bytes out, deadlines; it knows no socket) from any number of threads of the caller and
one daemon thread of its own:

    the caller   changes the core under `lock`, then calls `pump`, which writes what the core has to say
    the reader   dials, reads until the core's next deadline, feeds the core, and pumps what that brought about

`lock` guards the core and is never held during a call on the socket. The socket does not block: what it does not take
is left for the reader to write as soon as it can. So nobody ever waits in a write while the answers that would free
the other side lie unread; a broker that reads slowly fills the core's own bounded buffer, and its users wait there.

A forked child has no reader and shares the parent's socket, which would garble the parent's conversation: the link
closes its copy, and is an orphan in the child; whoever owns it makes another. When the interpreter ends, those links
that nobody has closed are asked for their last words while their readers still run.
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
from fairway.world.buffers import Bytes
from fairway.world.clock import Clock
from fairway.world.dialing import Address, Dialer, silence
from fairway.world.gate import Gate

READ_BYTES = 1 << 18  # one answer of a pull; larger ones come in a few reads
PARTS_MAX = 512  # of one gathering write: systems refuse more than 1,024
NEVER_NS = 1 << 63
NOBODY = "nobody is known who could be connected to"
# After somebody has stirred the reader, it looks again after so long without being woken: to wake it costs the caller a
# system call and its turn, and who settles one message will soon settle the next (bench/client_rates).
NAP_NS = 1_000_000


class LinkCore(Protocol):
    """What a link carries (`protocol.line`). Called under the link's lock, by whichever thread; no call blocks."""

    def dial_due(self) -> int | None:
        """When to dial, on the monotonic clock in ns; None: not now (it is connected), or never again."""

    def moves_on(self) -> bool:
        """Whether to begin with the next address, because the last one is of no use. Said once."""

    def move(self, now_ns: int) -> None:
        """The addresses are others now: end the connection, if there is one, and dial again at once."""

    def connected(self, now_ns: int) -> None:
        """Somebody accepted."""

    def unreachable(self, sentence: str, now_ns: int) -> None:
        """Nobody accepted, at any address."""

    def lost(self, sentence: str, now_ns: int) -> None:
        """The connection is gone."""

    def feed(self, data: bytes, now_ns: int) -> None:
        """What arrived."""

    def take(self, now_ns: int) -> Sequence[Bytes]:
        """What is to be written now; also does what is due."""

    def is_over(self) -> bool:
        """The conversation has ended: close the connection, once what was taken is written."""

    def next_deadline(self) -> int | None:
        """When `take` is to be called although nothing happens; None: never."""

    def errands(self) -> Sequence[Callable[[], None]]:
        """What is to be called without the lock, in order: callbacks of users."""


class LinkFailed(FairwayError):
    """The thread that reads has ended by a bug of ours; the cause is attached."""


class Link:
    """One connection to one of several addresses, found again whenever it is lost."""

    def __init__(
        self,
        core: LinkCore,
        addresses: Sequence[Address],
        clock: Clock,
        *,
        at_exit: Callable[[], None],
    ) -> None:
        """`at_exit` is called when the interpreter ends before `close`: it says what there is to say, and closes."""
        self.core = core
        self.lock = threading.Lock()
        self._changed = threading.Condition(self.lock)
        self._addresses = list(addresses)
        self._redirected: list[Address] | None = None  # to be dialed instead from now on; under `lock`
        self._address: Address | None = None  # that is connected, or was last
        self._clock = clock
        self.at_exit = at_exit
        self._writing = threading.Lock()
        self._unsent: deque[memoryview] = deque()  # taken from the core, not yet by the socket; under `_writing`
        self._socket: socket.socket | None = None
        self._is_full = False  # the socket takes no more: the reader waits until it does
        self._errands: list[Callable[[], None]] = []  # for the reader; under `lock`
        self._asleep_until_ns = 0  # what the reader waits for; 0 while it is awake
        self._selector: selectors.BaseSelector = selectors.DefaultSelector()
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._is_ending = False
        self._dialer = Dialer(clock, self._bell, lambda: self._is_ending or self._redirected is not None)
        self._is_stirred = False  # somebody without the lock wants `pump` called
        self._is_napping = False  # the reader looks at `_is_stirred` soon, by itself
        self.is_orphan = False
        self._failure: BaseException | None = None
        self._gates: set[Gate] = set()  # of those who wait to be told
        self._finalizer: Any = None
        self._reader = threading.Thread(target=self._run, name="fairway-link", daemon=True)

    def start(self) -> None:
        """Begin: from now on the core is called by the reader, too."""
        _links.add(self)
        pools = sys.modules.get("multiprocessing.util")
        if pools is not None:  # its children end without atexit
            self._finalizer = pools.Finalize(None, self.at_exit, exitpriority=0)
        self._reader.start()

    # --- for callers -------------------------------------------------------------------------------------------------

    @property
    def in_reader(self) -> bool:
        """Whether the caller is a callback in the reader's own thread, which must not wait for the reader."""
        return threading.current_thread() is self._reader

    def check(self) -> None:
        """Raise if this link will never carry anything again."""
        if self.is_orphan:
            raise Misuse("this was made before the process forked and belongs to the parent: make another here")
        if self._failure is not None:
            raise LinkFailed("the thread that reads from the broker has failed") from self._failure

    def wait(self, is_ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until something that the core was told makes it so; False: it took too long.

        Call it without the lock; `is_ready` is called with it.
        """
        if self.in_reader:
            raise Misuse("a callback runs in the thread that reads: it must not wait for what that thread brings")
        with self._changed:
            is_so = self._changed.wait_for(lambda: is_ready() or self._is_dead, timeout_s)
        self.check()
        return is_so

    def wait_told(self, register: Callable[[Callable[[], None]], None], timeout_s: float | None = None) -> bool:
        """Wait to be told; False: nobody did in time. `register` is called with the lock and given what to call.

        For what many threads wait for at once, each for something else: one that is told wakes no other.
        """
        if self.in_reader:
            raise Misuse("a callback runs in the thread that reads: it must not wait for what that thread brings")
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
    def _is_dead(self) -> bool:
        return self.is_orphan or self._failure is not None

    def announce(self) -> None:
        """Let those who wait look again: for a change that no bytes brought about. Call it with the lock."""
        self._changed.notify_all()

    def pump(self) -> None:
        """Write what the core has to say, as far as the socket takes it. Call it without the lock, after a change."""
        with self._writing:  # not for long: nobody who has it waits for anything but the lock
            try:
                self._write_out()
            except BaseException:  # a KeyboardInterrupt, say, between taking bytes and writing them
                self._cut()
                raise

    def schedule(self) -> None:
        """See that the reader wakes up for the core's next deadline. Call it with the lock, after a change."""
        deadline_ns = self.core.next_deadline()
        if deadline_ns is not None and deadline_ns < self._asleep_until_ns:
            self._asleep_until_ns = 0
            self._ring()

    def stir(self) -> None:
        """Have the reader pump soon. From any thread, with or without the lock."""
        self._is_stirred = True
        if self._asleep_until_ns and not self._is_napping:
            self._ring()

    def redirect(self, addresses: Sequence[Address], leader: Address | None) -> None:
        """Dial these from now on. Who is connected to another than the leader leaves at once; None: nobody knows who
        leads. From any thread, without the lock."""
        with self._writing, self.lock:
            self._redirected = [*addresses]
            if leader is not None and (self._socket is None or self._address != leader):
                self.core.move(self._clock.monotonic_ns())
                self._cut()
            self._changed.notify_all()
        self._ring()

    def close(self, timeout_s: float) -> None:
        """End the reader and with it the connection. What the core still had to say should be said by now."""
        self._is_ending = True
        self._ring()
        if not self.in_reader:
            self._reader.join(timeout_s)
        _links.discard(self)
        if self._finalizer is not None:
            self._finalizer.cancel()

    # --- writing -----------------------------------------------------------------------------------------------------

    def _write_out(self) -> None:
        """Under `_writing`. Takes although the socket may be full: what is due must be done, and cores have bounds."""
        while True:
            with self.lock:
                if self._socket is None:
                    self._do_due()
                    return
                self._unsent.extend(map(memoryview, self.core.take(self._clock.monotonic_ns())))
                self._changed.notify_all()  # what had its time has ended by it
                self._errands += self.core.errands()
                self.schedule()
            if self._errands and not self.in_reader:
                self.stir()
            if not self._unsent:
                return
            while self._unsent:
                if self._is_full or not self._send_some():
                    return

    def _do_due(self) -> None:
        """With the lock, not connected: there is nowhere to write, but something may be due, or may go elsewhere."""
        self.core.take(self._clock.monotonic_ns())
        self._changed.notify_all()
        self._errands += self.core.errands()
        if self._errands:
            self.stir()
        self.schedule()

    def _cut(self) -> None:
        """What was taken from the core may be lost: end the connection, and the core says it all again on the next."""
        self._unsent.clear()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _send_some(self) -> bool:
        """False: the socket takes no more for now, or is gone."""
        connection, unsent = self._socket, self._unsent
        if connection is None:
            unsent.clear()
            return False
        try:
            sent = _send(connection, [unsent[at] for at in range(min(len(unsent), PARTS_MAX))])
        except (BlockingIOError, InterruptedError):
            self._is_full = True
            self._ring()
            return False
        except OSError:  # the reader sees the same, and says so to the core
            unsent.clear()
            return False
        while unsent and sent >= len(unsent[0]):
            sent -= len(unsent.popleft())
        if sent:
            unsent[0] = unsent[0][sent:]
        return True

    def _ring(self) -> None:
        """Wake the reader."""
        with contextlib.suppress(OSError):  # full: it has been rung often enough; closed: it has ended
            self._ringer.send(b"\0")

    # --- the reader --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_ending:
                if self._socket is None:
                    self._seek()
                else:
                    self._listen()
                self._do_errands()
            self._do_errands()  # of whoever has just closed it
        except BaseException as error:  # a bug: whoever waits must hear of it
            self._failure = error
        finally:
            self._hang_up()
            with self.lock:
                self._changed.notify_all()
                if self._failure is not None:
                    for gate in tuple(self._gates):
                        gate.open()
            if not self.is_orphan:
                self._close_all()

    def _listen(self) -> None:
        """One wait for bytes, for room, or for the next deadline; and what follows."""
        connection = self._socket
        if connection is None:
            return
        ready = self._sleep(connection, self._deadline_s())
        if ready & selectors.EVENT_WRITE:
            self._is_full = False
        if ready & selectors.EVENT_READ:
            self._read(connection)
        self.pump()
        with self.lock:
            is_over = self.core.is_over()
        if is_over and (self._is_full or not self._unsent):  # last words are not waited for where nobody reads
            self._drop("the conversation is over")

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as problem:
            self._drop(f"the connection was cut: {problem.strerror or problem}")
            return
        if not data:
            self._drop("the other side closed the connection")
            return
        with self.lock:
            self.core.feed(data, self._clock.monotonic_ns())
            self._changed.notify_all()

    def _drop(self, sentence: str) -> None:
        """The connection is gone, or no longer wanted."""
        self._hang_up()
        with self.lock:
            self.core.lost(sentence, self._clock.monotonic_ns())
            self._changed.notify_all()

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
        """How long to wait; from here on whoever sets an earlier deadline rings."""
        now_ns = self._clock.monotonic_ns()
        with self.lock:
            dues_ns = (self.core.next_deadline(), self.core.dial_due())
            due_ns = min((each for each in dues_ns if each is not None), default=NEVER_NS)
            if self._is_napping:
                due_ns = min(due_ns, now_ns + NAP_NS)
            self._asleep_until_ns = due_ns
        if self._is_stirred and not self._is_napping:  # before it could be seen that we sleep
            return 0
        return None if due_ns == NEVER_NS else max(due_ns - now_ns, 0) / 1e9

    def _sleep(self, connection: socket.socket | None, timeout_s: float | None) -> int:
        """Wait; what the connection is ready for, as a mask."""
        if connection is not None:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._is_full else 0)
            if self._selector.get_key(connection).events != wanted:
                self._selector.modify(connection, wanted)
        mask = 0
        for key, events in self._selector.select(timeout_s):
            if key.fileobj is self._bell:
                silence(self._bell)
            else:
                mask |= events
        self._asleep_until_ns = 0
        self._is_napping, self._is_stirred = self._is_stirred, False  # before the core is looked at: see `stir`
        return mask

    # --- dialing -----------------------------------------------------------------------------------------------------

    def _seek(self) -> None:
        """Wait until it is time to dial, and do."""
        with self.lock:
            due_ns = self.core.dial_due()
            is_time = due_ns is not None and due_ns <= self._clock.monotonic_ns()
            if not is_time:
                self.core.take(self._clock.monotonic_ns())  # there is nowhere to write, but something may be due
                self._changed.notify_all()
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
            self._changed.notify_all()

    def _to_dial(self) -> tuple[Address, ...]:
        with self.lock:
            moves_on = self.core.moves_on()
            if self._redirected is not None:
                self._addresses, self._redirected = self._redirected, None
            elif moves_on and self._addresses:
                self._addresses.append(self._addresses.pop(0))
        return tuple(self._addresses)

    def _begin(self, connection: socket.socket) -> None:
        self._selector.register(connection, selectors.EVENT_READ)
        with self.lock:
            self._socket = connection
            self.core.connected(self._clock.monotonic_ns())
            self._changed.notify_all()
        self.pump()

    # --- the rest ----------------------------------------------------------------------------------------------------

    def _do_errands(self) -> None:
        with self.lock:
            errands, self._errands = [*self._errands, *self.core.errands()], []
        for errand in errands:
            try:
                errand()
            except Exception as error:  # a user's callback: reported like the end of a thread, and the link lives on
                threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, self._reader)))

    def _close_all(self) -> None:
        self._selector.close()
        self._bell.close()
        self._ringer.close()

    def orphan(self) -> None:
        """In a forked child: nothing here works any more, and no lock can be trusted to be free."""
        self.is_orphan = True
        self.lock = threading.Lock()
        self._changed = threading.Condition(self.lock)
        self._writing = threading.Lock()
        if self._socket is not None:
            self._socket.close()  # our copy: the parent's conversation goes on
            self._socket = None
        self._close_all()


def _send(connection: socket.socket, parts: list[memoryview]) -> int:
    if hasattr(connection, "sendmsg"):
        return connection.sendmsg(parts)
    return connection.send(parts[0])  # Windows has no gathering write


_links: weakref.WeakSet[Link] = weakref.WeakSet()  # those that run


def _after_fork() -> None:
    links = list(_links)
    _links.clear()
    for link in links:
        link.orphan()


def _at_exit() -> None:
    for link in list(_links):
        try:
            link.at_exit()
        except Exception as problem:  # nobody is left to catch it: shown as the end of a program shows errors, in full
            sys.excepthook(type(problem), problem, problem.__traceback__)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
