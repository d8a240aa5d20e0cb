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

`SpoolPolicy` chooses the send path. Users set `SpoolOptions` and read `SpoolState`. `Keeping` writes to the client's
own journal within its bounds, and `Spool` puts them together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from fairway import limits
from fairway.batch import MessageId
from fairway.client.spool.drain import SpoolDrain
from fairway.client.spool.journal import Journal
from fairway.client.spool.journal_record import HEADER_BYTES
from fairway.errors import DiskFull, FairwayError, Misuse, StorageFault
from fairway.protocol.line import NS_PER_MS
from fairway.protocol.receipts import SpoolBatchReceipt
from fairway.protocol.spool_port import Buffer, Handed, SendPath
from fairway.runtime.clock import Clock
from fairway.runtime.host import can_serve
from fairway.runtime.rng import Rng

if TYPE_CHECKING:
    from fairway.runtime.shared_directory import SharedDirectory


_GRACE_NS = 1_000 * NS_PER_MS  # after a drain, the direct path gets so long even if too many messages wait


class SpoolStatus(Protocol):
    """The facts about the journals and the broker that `SpoolPolicy` decides by."""

    @property
    def is_connected(self) -> bool: ...

    @property
    def must_divert(self) -> bool:
        """Whether the journals hold messages, unknown until now, that must arrive before the next one."""

    @property
    def may_hold(self) -> bool:
        """Whether everything that was kept is on its way, so that new batches wait instead of being diverted."""

    @property
    def may_go(self) -> bool:
        """Whether nothing is left that must arrive before the next message."""


class SpoolPolicy:
    """Chooses the send path of one producer's batches: to the broker, to the spool, or neither for now."""

    def __init__(self, options: SpoolOptions, status: SpoolStatus) -> None:
        self.send_path = SendPath.HOLD  # until the journals of dead processes are known
        self._options = options
        self._status = status
        self._after_ns = options.after_ms * NS_PER_MS
        self._has_diverted = False
        self._look_ns: int | None = None  # when some batch may have waited too long
        self._direct_ns = -self._after_ns  # when batches last began to go to the broker again

    def look(self, buffer: Buffer, now_ns: int) -> None:
        """Choose the send path."""
        status = self._status
        if self.send_path is SendPath.DIVERT:
            if status.is_connected and status.may_hold:
                self.send_path = SendPath.HOLD
                self._look_ns = None
        elif self.send_path is SendPath.HOLD and status.is_connected and status.may_go:
            self.send_path = SendPath.DIRECT
            if self._has_diverted:
                self._direct_ns = now_ns
        elif status.must_divert or self._must_divert(buffer, now_ns):
            self.send_path = SendPath.DIVERT
            self._has_diverted = True

    def _must_divert(self, buffer: Buffer, now_ns: int) -> bool:
        """Whether to divert: because of failures, the number of messages, or a batch's age.

        After a drain the direct path gets a while, however many messages wait: a batch that is too large for the spool
        must get through some day.
        """
        if not buffer.messages:
            self._look_ns = None
            return False
        if buffer.is_failing and not self._status.is_connected:
            return True
        if buffer.is_crammed or buffer.messages > self._options.buffer_messages:
            self._look_ns = self._direct_ns + min(self._after_ns, _GRACE_NS)
        elif self._look_ns is None or now_ns >= self._look_ns:
            oldest_ns = buffer.oldest_ns()
            self._look_ns = None if oldest_ns is None else max(oldest_ns, self._direct_ns) + self._after_ns
        return self._look_ns is not None and now_ns >= self._look_ns

    def next_look_ns(self) -> int | None:
        """When to look again. None while batches go to the spool, or if nothing waits."""
        return None if self.send_path is SendPath.DIVERT else self._look_ns


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


class Keeping:
    """Writes batches to the client's own journal, within the bounds of its options."""

    def __init__(self, options: SpoolOptions, own: Journal, clock: Clock) -> None:
        self.options = options
        self.own = own
        self.busy = 0  # calls of `keep` that the journal has not answered
        self.full_until_ns = 0
        self.full_sentence = ""  # why the spool takes nothing more now
        self._clock = clock

    def check(self) -> StorageFault | None:
        """The fault that has ended the journal for good; None while it works."""
        if self.own.fault is None:
            return None
        fault = StorageFault(f"the spool {self.options.directory} has failed: {self.own.fault}")
        fault.__cause__ = self.own.fault
        return fault

    def room_for(self, messages: int, size_bytes: int) -> bool:
        options, own = self.options, self.own
        if self.full_until_ns and self._clock.monotonic_ns() < self.full_until_ns:
            return False
        self.full_until_ns = 0
        self.full_sentence = ""
        used = own.size_bytes + size_bytes + _ENTRY_BYTES
        if own.messages + messages > options.messages_max or used > options.bytes_max:
            self.full_sentence = (
                f"the spool {options.directory} is full: {own.messages} messages of {options.messages_max}, "
                f"{own.size_bytes} bytes of {options.bytes_max}"
            )
            return False
        return True

    def keep(self, handed: Sequence[Handed], done: Callable[[FairwayError | None], None]) -> None:
        def kept(fault: StorageFault | None) -> None:
            self.busy -= 1
            if isinstance(fault, DiskFull):
                self.full_until_ns = self._clock.monotonic_ns() + _FULL_MS * NS_PER_MS
                self.full_sentence = f"the spool has no room: {fault}"
            done(fault)

        self.busy += 1
        self.own.keep(handed, kept)

    def receipt(self, subject: str, count: int, first_id: MessageId) -> SpoolBatchReceipt:
        return SpoolBatchReceipt.of(subject, count, first_id, self.options.directory, self._clock.wall_ms())


class Spool:
    """The spool of one client. The caller holds the client's lock, or calls on its loop."""

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
        """`on_finished` is called when the journal of a dead process is empty and may go."""
        self.options = options
        self.draining = SpoolDrain(rng, on_change=on_change, on_success=on_success)
        self.fault: FairwayError | None = None
        self._keeping = Keeping(options, own, clock)
        self._choice = SpoolPolicy(options, self)
        self._is_connected = is_connected
        self._on_finished = on_finished
        self._own = own  # drained only after the first look for journals of dead processes
        self._before: list[Journal] = []  # of dead processes, found before our first message: they drain first
        self._others: list[Journal] = []  # of dead processes, found later
        self._has_looked_round = False  # the first look is done

    # --- SpoolPort ---------------------------------------------------------------------------------------------------

    @property
    def send_path(self) -> SendPath:
        return self._choice.send_path

    @property
    def stream_key(self) -> bytes:
        return self._own.key

    def look(self, buffer: Buffer, now_ns: int) -> None:
        """Choose the send path, as `SpoolPolicy` decides."""
        self._let_go()
        self.fault = self.fault or self._keeping.check()
        before = self.send_path
        self._choice.look(buffer, now_ns)
        if before is SendPath.HOLD and self.send_path is SendPath.DIRECT:
            self._own.forget_streams()

    def next_look_ns(self) -> int | None:
        if self.send_path is SendPath.DIVERT:
            return self._keeping.full_until_ns or None
        return self._choice.next_look_ns()

    @property
    def trouble(self) -> str:
        """Why the spool takes nothing more now; empty if there is room."""
        return self._keeping.full_sentence

    def room_for(self, messages: int, size_bytes: int) -> bool:
        return self._keeping.room_for(messages, size_bytes) and self.fault is None

    def keep(self, handed: Sequence[Handed], done: Callable[[FairwayError | None], None]) -> None:
        self._keeping.keep(handed, done)

    def receipt(self, subject: str, count: int, first_id: MessageId) -> SpoolBatchReceipt:
        return self._keeping.receipt(subject, count, first_id)

    # --- SpoolStatus -------------------------------------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        return self._is_connected()

    @property
    def must_divert(self) -> bool:
        return False  # there is one path to the broker, and every message goes behind what is kept

    @property
    def may_hold(self) -> bool:
        return self._has_looked_round and not self._keeping.busy and self.draining.is_nearly_done

    @property
    def may_go(self) -> bool:
        return self._has_looked_round and self.is_empty

    # --- state -------------------------------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left that must arrive before our next message."""
        return self._own.is_empty and not self._before and not self._keeping.busy

    @property
    def is_drained(self) -> bool:
        """Whether nothing is left, of this client or of dead processes."""
        return self._has_looked_round and not self._keeping.busy and not self.messages

    @property
    def is_going_on(self) -> bool:
        """Whether the spool is draining now."""
        return bool(self.messages) and self.is_connected and self.draining.trouble is None

    @property
    def messages(self) -> int:
        return sum(each.messages for each in self.journals)

    def state(self) -> SpoolState:
        draining, refused = self.draining, self.draining.trouble
        faults = [str(each.fault) for each in self.journals if each.fault is not None]
        return SpoolState(
            self.send_path is SendPath.DIVERT or not self.is_empty,
            self.messages,
            sum(each.size_bytes for each in self.journals),
            draining.messages,
            draining.duplicates,
            draining.asides,
            "; ".join([*faults, *filter(None, [self._keeping.full_sentence, "" if refused is None else str(refused)])]),
        )

    # --- journals of dead processes ----------------------------------------------------------------------------------

    def adopt(self, journals: Sequence[Journal]) -> None:
        """Drain the journals that the thread has found. Those of the first look go before our own."""
        is_first = not self._has_looked_round
        self._has_looked_round = True
        for journal in journals:
            (self._before if is_first else self._others).append(journal)
            self.draining.add(journal)
        if is_first:
            self.draining.add(self._own)

    def _let_go(self) -> None:
        """Let go of the adopted journals that are empty by now."""
        for journals in (self._before, self._others):
            for journal in [each for each in journals if each.is_empty and not each.is_busy]:
                journals.remove(journal)
                self.draining.remove(journal)
                self._on_finished(journal)

    @property
    def journals(self) -> list[Journal]:
        """All journals that this client has."""
        return [self._own, *self._before, *self._others]
