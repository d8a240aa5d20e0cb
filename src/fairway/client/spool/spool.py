"""The spool of a client with one broker: batches that the broker cannot take now wait on this host's disk, in order.

    fw = fairway.connect("fairway://127.0.0.1:20880", spool="/var/lib/app/spool")

A client starts to divert to the spool when
- a batch has waited for its receipt for too long (`after_ms`),
- too many messages wait (`buffer_messages`),
- the broker has failed again and again, and the connection is down, or
- the buffer is full and the program chose `when_full="spool"`.

From then on every message of the client goes through the spool, until the spool is empty again. So order is kept. A
message in the spool has a `SpoolReceipt`: the message is synced on this host, and not yet at the broker.

Any number of processes of the host may share the directory. Each has a journal of its own there. When a process dies,
one of the others drains its journal.

`SpoolPolicy` chooses the send path. Users set `SpoolOptions` and read `SpoolState`. `ClientSpool` writes to the own
journal within its bounds, for `Spool` and for a cluster client's spool.

A client holds a `SpoolHandle`: its spool with a `SpoolThread`, which looks for journals that dead processes left behind
and removes empty ones. Reading a large journal takes long, and the thread keeps senders from waiting for that.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from fairway import limits
from fairway.batch import MessageId
from fairway.batch.identity import new_secret
from fairway.client.spool.drain import JournalDrain, SpoolDrain
from fairway.client.spool.journal import Journal
from fairway.client.spool.journal_files import HEADER_BYTES
from fairway.errors import DiskFull, FairwayError, Misuse, StorageFault
from fairway.protocol.line import NS_PER_MS
from fairway.protocol.receipts import SpoolBatchReceipt
from fairway.protocol.spool_port import Buffer, Handed, SendPath
from fairway.runtime.clock import Clock
from fairway.runtime.host import Ending, can_serve
from fairway.runtime.rng import Rng
from fairway.runtime.threads import Workers

if TYPE_CHECKING:
    from fairway.client.core import ClientCore
    from fairway.runtime.real_disk import RealDisk
    from fairway.runtime.shared_directory import SharedDirectory


_GRACE_NS = 1_000 * NS_PER_MS  # after a drain, the direct path gets so long even if too many messages wait


class SpoolPolicy(ABC):
    """Chooses the send path of one producer's batches: to the broker, to the spool, or neither for now.

    The subclass states the facts about the journals and the broker.
    """

    must_divert = False  # the journals hold messages, unknown until now, that must arrive before the next one

    def __init__(self, spool: ClientSpool) -> None:
        self.send_path = SendPath.HOLD  # until the journals of dead processes are known
        self._spool = spool
        self._after_ns = spool.options.after_ms * NS_PER_MS
        self._has_diverted = False
        self._look_ns: int | None = None  # when some batch may have waited too long
        self._direct_ns = -self._after_ns  # when batches last began to go to the broker again

    @property
    @abstractmethod
    def is_connected(self) -> bool: ...

    @property
    @abstractmethod
    def may_hold(self) -> bool:
        """Whether everything that was kept is on its way, so that new batches wait instead of being diverted."""

    @property
    @abstractmethod
    def may_go(self) -> bool:
        """Whether nothing is left that must arrive before the next message."""

    def look(self, buffer: Buffer, now_ns: int) -> None:
        """Choose the send path."""
        if self.send_path is SendPath.DIVERT:
            if self.is_connected and self.may_hold:
                self.send_path = SendPath.HOLD
                self._look_ns = None
        elif self.send_path is SendPath.HOLD and self.is_connected and self.may_go:
            self.send_path = SendPath.DIRECT
            if self._has_diverted:
                self._direct_ns = now_ns
        elif self.must_divert or self._is_time_to_divert(buffer, now_ns):
            self.send_path = SendPath.DIVERT
            self._has_diverted = True

    def _is_time_to_divert(self, buffer: Buffer, now_ns: int) -> bool:
        """Whether to divert: because of failures, the number of messages, or a batch's age.

        After a drain the direct path gets a while, however many messages wait: a batch that is too large for the spool
        must get through some day.
        """
        if not buffer.messages:
            self._look_ns = None
            return False
        if buffer.is_failing and not self.is_connected:
            return True
        if buffer.is_crammed or buffer.messages > self._spool.options.buffer_messages:
            self._look_ns = self._direct_ns + min(self._after_ns, _GRACE_NS)
        elif self._look_ns is None or now_ns >= self._look_ns:
            oldest_ns = buffer.oldest_ns()
            self._look_ns = None if oldest_ns is None else max(oldest_ns, self._direct_ns) + self._after_ns
        return self._look_ns is not None and now_ns >= self._look_ns

    def next_look_ns(self) -> int | None:
        """When to look again; None: when something happens."""
        return (self._spool.full_until_ns or None) if self.send_path is SendPath.DIVERT else self._look_ns


_FULL_MS = 1_000  # from a full disk to the next attempt
_ENTRY_BYTES = HEADER_BYTES + 64 + 2 * limits.NAME_CHARS_MAX  # at most, beside the batch's bytes


@dataclass(frozen=True, slots=True)
class SpoolOptions:
    """Where the spool is, and when the client uses it."""

    directory: str
    after_ms: int = 1_000  # spool when a batch has waited so long for its receipt
    buffer_messages: int = 100_000  # spool when more messages than this wait
    bytes_max: int = 1 * limits.GIB  # on disk, of this client; beyond, the buffer fills, and `when_full` decides
    messages_max: int = 10_000_000
    is_synced: bool = True  # False: a receipt survives the death of the process, not of the machine
    adopt_ms: int = 5_000  # time between two looks for the journals of dead processes

    def __post_init__(self) -> None:
        if not self.directory:
            raise Misuse("a spool needs a directory: spool='/var/lib/app/spool'")
        for name in ("buffer_messages", "bytes_max", "messages_max", "adopt_ms"):
            if getattr(self, name) < 1:
                raise Misuse(f"{name} of a spool is {getattr(self, name)}: it is 1 or more")
        if self.after_ms < 0:
            raise Misuse(f"after_ms of a spool is {self.after_ms}: it is 0 or more")


class SpoolState(msgspec.Struct, frozen=True):
    """The state of a client's spool."""

    is_in_use: bool  # messages go through it now
    messages: int  # in the spool, not yet at the broker; including those of dead processes that this one drains
    size_bytes: int  # on disk
    delivered: int  # messages, since the client was made
    duplicates: int  # of the delivered: those that the broker had stored before
    set_aside: int  # messages that were set aside; `fairway spool status` lists them
    trouble: str  # why the spool does not drain, or takes nothing more, for people; empty if all is well


def options_of(spool: str | SpoolOptions | None, chosen: SpoolOptions | None) -> SpoolOptions | None:
    """The options of `connect(spool=...)`, or else the client's options."""
    if spool is None or isinstance(spool, SpoolOptions):
        return spool or chosen
    if not isinstance(spool, str):
        raise Misuse(f"spool= is the name of a directory, or SpoolOptions, not {type(spool).__name__}")
    return SpoolOptions(spool)


def shared_directory_at(directory: str, *, post: Callable[..., object] | None = None) -> SharedDirectory:
    """The directory that processes share. Raises `Misuse` if the machine has no file locks."""
    if not can_serve():
        raise Misuse("a spool needs the file locks of Linux or macOS: connect without one here")
    from fairway.runtime.shared_directory import SharedDirectory

    return SharedDirectory(directory, post=post)


class ClientSpool(ABC):
    """What the spools of all clients share: the client's own journal within its bounds, and those of dead processes."""

    def __init__(
        self,
        options: SpoolOptions,
        own: Journal,
        clock: Clock,
        drain: JournalDrain,
        on_finished: Callable[[Journal], None],
    ) -> None:
        """`on_finished` is called when the journal of a dead process is empty and may go."""
        self.options = options
        self.fault: FairwayError | None = None
        self.trouble = ""  # why the spool takes nothing more now; empty if there is room
        self.full_until_ns = 0
        self._busy = 0  # calls of `_write` that the journal has not answered
        self._clock = clock
        self._drain = drain
        self._on_finished = on_finished
        self._own = own  # drained only after the first look for journals of dead processes
        self._before: list[Journal] = []  # of dead processes, found before our first message: they drain first
        self._others: list[Journal] = []  # of dead processes, found later
        self._has_looked_round = False  # the first look is done

    # --- keeping -----------------------------------------------------------------------------------------------------

    @property
    def stream_key(self) -> bytes:
        """One key for all connections of a client: their batches lie in one journal."""
        return self._own.key

    def _check(self) -> None:
        """Note the fault that has ended the own journal for good, if there is one."""
        if self.fault is None and self._own.fault is not None:
            self.fault = StorageFault(f"the spool {self.options.directory} has failed: {self._own.fault}")
            self.fault.__cause__ = self._own.fault

    def room_for(self, messages: int, size_bytes: int) -> bool:
        options, own = self.options, self._own
        if self.full_until_ns and self._clock.monotonic_ns() < self.full_until_ns:
            return False
        self.full_until_ns = 0
        self.trouble = ""
        used = own.size_bytes + size_bytes + _ENTRY_BYTES
        if own.messages + messages > options.messages_max or used > options.bytes_max:
            self.trouble = (
                f"the spool {options.directory} is full: {own.messages} messages of {options.messages_max}, "
                f"{own.size_bytes} bytes of {options.bytes_max}"
            )
        return not self.trouble and self.fault is None

    def _write(self, handed: Sequence[Handed], done: Callable[[FairwayError | None], None]) -> None:
        """Write batches to the own journal."""

        def kept(fault: StorageFault | None) -> None:
            self._busy -= 1
            if isinstance(fault, DiskFull):
                self.full_until_ns = self._clock.monotonic_ns() + _FULL_MS * NS_PER_MS
                self.trouble = f"the spool has no room: {fault}"
            done(fault)

        self._busy += 1
        self._own.keep(handed, kept)

    def receipt(self, subject: str, count: int, first_id: MessageId) -> SpoolBatchReceipt:
        return SpoolBatchReceipt.of(subject, count, first_id, self.options.directory, self._clock.wall_ms())

    # --- journals ----------------------------------------------------------------------------------------------------

    @property
    def journals(self) -> list[Journal]:
        """All journals that this client has."""
        return [self._own, *self._before, *self._others]

    @property
    def messages(self) -> int:
        return sum(each.messages for each in self.journals)

    @property
    def is_drained(self) -> bool:
        """Whether nothing is left, of this client or of dead processes."""
        return self._has_looked_round and not self._busy and not self.messages

    @property
    @abstractmethod
    def is_in_use(self) -> bool:
        """Whether messages go through the spool now."""

    @property
    @abstractmethod
    def is_going_on(self) -> bool:
        """Whether the spool is draining now."""

    def state(self) -> SpoolState:
        drain, journals = self._drain, self.journals
        faults = [str(each.fault) for each in journals if each.fault is not None]
        return SpoolState(
            self.is_in_use,
            self.messages,
            sum(each.size_bytes for each in journals),
            drain.messages,
            drain.duplicates,
            drain.asides,
            "; ".join(filter(None, [*faults, self.trouble, drain.trouble])),
        )

    def adopt(self, journals: Sequence[Journal]) -> None:
        """Drain the journals that the thread has found. Those of the first look go before our own."""
        is_first = not self._has_looked_round
        self._has_looked_round = True
        for journal in journals:
            (self._before if is_first else self._others).append(journal)
            self._drain.add(journal)
        if is_first:
            self._drain.add(self._own)

    def _let_go(self) -> None:
        """Let go of the adopted journals that are empty by now."""
        for journals in (self._before, self._others):
            for journal in [each for each in journals if each.is_empty and not each.is_busy]:
                journals.remove(journal)
                self._drain.remove(journal)
                self._on_finished(journal)

    def end(self) -> None:  # noqa: B027  the one broker's drain ends with its connection
        """Stop draining. Called without the lock."""


class Spool(ClientSpool, SpoolPolicy):
    """The spool of a client with one broker. The caller holds the client's lock, or calls on its loop."""

    def __init__(
        self,
        options: SpoolOptions,
        own: Journal,
        clock: Clock,
        rng: Rng,
        *,
        is_connected: Callable[[], bool],
        on_change: Callable[[], None],
        on_success: Callable[[], None],
        on_finished: Callable[[Journal], None],
    ) -> None:
        self.draining = SpoolDrain(rng, on_change=on_change, on_success=on_success)
        ClientSpool.__init__(self, options, own, clock, self.draining, on_finished)
        SpoolPolicy.__init__(self, self)
        self._is_connected = is_connected

    def look(self, buffer: Buffer, now_ns: int) -> None:
        self._let_go()
        self._check()
        before = self.send_path
        super().look(buffer, now_ns)
        if before is SendPath.HOLD and self.send_path is SendPath.DIRECT:
            self._own.forget_streams()

    def keep(self, handed: Sequence[Handed], done: Callable[[FairwayError | None], None]) -> None:
        self._write(handed, done)

    @property
    def is_connected(self) -> bool:
        return self._is_connected()

    @property
    def may_hold(self) -> bool:
        return self._has_looked_round and not self._busy and self.draining.is_nearly_done

    @property
    def may_go(self) -> bool:
        return self._has_looked_round and self.is_empty

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left that must arrive before our next message."""
        return self._own.is_empty and not self._before and not self._busy

    @property
    def is_in_use(self) -> bool:
        return self.send_path is SendPath.DIVERT or not self.is_empty

    @property
    def is_going_on(self) -> bool:
        return bool(self.messages) and self.is_connected and not self.draining.trouble


_STOP_S = 5.0  # how long `stop` waits for the thread to end


class SpoolThread:
    """The thread that looks for journals of dead processes and removes empty ones."""

    def __init__(
        self,
        options: SpoolOptions,
        shared_directory: SharedDirectory,
        clock: Clock,
        post: Callable[..., object],
        *,
        is_cluster: bool = False,
    ) -> None:
        """`is_cluster`: adopt the journals of cluster clients; otherwise adopt all others."""
        self._options = options
        self._is_cluster = is_cluster
        self._shared_directory = shared_directory
        self._clock = clock
        self._post = post
        self._ending = Ending()
        self._workers = Workers()
        self._passed_over: set[str] = set()  # unreadable, of another kind of client, or with nothing to drain
        self._finished: list[Journal] = []

    def make(self, rng: Rng) -> Journal:
        """Make this client's own journal."""
        number, disk = self._shared_directory.make(rng)
        is_synced, is_cluster = self._options.is_synced, self._is_cluster
        return Journal(disk, number, self._clock, is_synced=is_synced, is_cluster=is_cluster, key=new_secret(rng))

    def start(self, adopt: Callable[[Sequence[Journal]], None]) -> None:
        self._workers.start("fairway-spool", lambda: self._run(adopt))

    def _run(self, adopt: Callable[[Sequence[Journal]], None]) -> None:
        is_first = True
        while not self._ending.is_asked:
            with contextlib.suppress(StorageFault):  # the directory cannot be listed now: try again next time
                self._clear()
                found = self._orphans()
                if found or is_first:
                    with contextlib.suppress(RuntimeError):  # the loop is closed, and so is the client
                        self._post(adopt, found)
                is_first = False
            self._ending.wait(self._options.adopt_ms / 1_000)

    def _orphans(self) -> list[Journal]:
        found: list[Journal] = []
        for name in self._shared_directory.names():
            if name in self._passed_over or self._ending.is_asked:
                continue
            disk = self._shared_directory.claim(name)
            if disk is None:
                continue
            try:
                journal = Journal.open(disk, int(name, 16), self._clock, is_synced=self._options.is_synced)
            except FairwayError:  # `fairway spool status` shows the reason
                self._passed_over.add(name)
                disk.close()
                continue
            if journal.is_empty:
                self._part(name, disk)
            elif journal.is_cluster is not self._is_cluster:  # only a client of the same kind knows where entries went
                self._passed_over.add(name)
                disk.close()
            else:
                found.append(journal)
        return sorted(found, key=lambda journal: journal.since_ms)  # the oldest drains first

    def finished(self, journal: Journal) -> None:
        """Remove an empty journal at the next turn of the thread."""
        self._finished.append(journal)

    def _clear(self) -> None:
        while self._finished:
            journal = self._finished.pop()
            self._part(journal.name, journal.disk)  # type: ignore[arg-type]  # a disk of `SharedDirectory`

    def _part(self, name: str, disk: RealDisk) -> None:
        if not self._shared_directory.discard(name, disk):
            self._passed_over.add(name)

    def stop(self, journals: Callable[[], Sequence[Journal]]) -> None:
        """End the thread, close every journal, remove the empty ones."""
        self._ending.ask()
        self._workers.join(_STOP_S)
        # `journals` is called only now, and the dict counts each journal once: a disk that completes meanwhile moves
        # its journal to `_finished`.
        left = {journal.name: journal for journal in (*journals(), *self._finished)}
        for journal in left.values():
            self._part(journal.name, journal.disk)  # type: ignore[arg-type]
        self._shared_directory.close()


class SpoolHandle:
    """A client's spool, of one broker or of a cluster, with its thread."""

    def __init__(self, spool: ClientSpool, thread: SpoolThread) -> None:
        self.spool = spool
        self._thread = thread

    def start(self) -> None:
        """Start the thread that adopts the journals of dead processes."""
        self._thread.start(self.spool.adopt)

    def close(self) -> None:
        """Close the spool when nothing is sent through it any more. The caller holds no lock that `post` needs."""
        self.spool.end()
        self._thread.stop(lambda: self.spool.journals)


def open_spool(
    options: SpoolOptions,
    core: ClientCore,  # type: ignore[type-arg]  # of the blocking or the asyncio client
    clock: Clock,
    rng: Rng,
    *,
    post: Callable[..., object],
    on_change: Callable[[], None],
) -> SpoolHandle:
    """Open the spool of a client with one broker. Raises if the directory cannot be used.

    `post` carries calls from the disk's threads to the core's lock or loop.
    """
    thread = SpoolThread(options, shared_directory_at(options.directory, post=post), clock, post)
    spool = Spool(
        options,
        thread.make(rng),
        clock,
        rng,
        is_connected=lambda: core.line.is_open,
        on_change=on_change,
        on_success=core.producing.note_success,
        on_finished=thread.finished,
    )
    core.producing.divert(spool)
    core.line.add(spool.draining, clock.monotonic_ns())
    return SpoolHandle(spool, thread)
