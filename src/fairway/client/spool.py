"""The spool: what cannot go to the broker now goes to this host's disk, and from there to the broker, in order.

    fw = fairway.connect("fairway://127.0.0.1:20880", spool="/var/lib/app/spool")

It begins when a batch has waited for its receipt for too long (time), when too many messages wait (count), when the
broker cannot be reached (absence), or when the buffer is full and `when_full="spool"` was chosen. From then on every
message of the client goes through it, until it is empty again: so order is kept. A message that is in it has a
`SpoolReceipt`: synced here, not yet at the broker.

The directory may be shared by any number of processes of the host. Each has a journal of its own there; that of a
process which died is drained by whoever lives, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from fairway import limits
from fairway.batch import MessageId
from fairway.client.spool_drain import SpoolDrain
from fairway.client.spool_journal import Journal
from fairway.client.spool_record import HEADER_BYTES
from fairway.client.spool_way import SpoolPolicy
from fairway.errors import DiskFull, FairwayError, Misuse, StorageFault
from fairway.protocol.backoff import NS_PER_MS
from fairway.protocol.diversion import Buffer, Handed, SendPath
from fairway.protocol.pending import SpoolBatchReceipt
from fairway.world.clock import Clock
from fairway.world.host import can_serve
from fairway.world.rng import Rng

if TYPE_CHECKING:
    from fairway.world.yard import SharedDirectory

_FULL_MS = 1_000  # after the disk was full, until it is tried again
_ENTRY_BYTES = HEADER_BYTES + 64 + 2 * limits.NAME_CHARS_MAX  # at most, beside the batch itself


@dataclass(frozen=True, slots=True)
class SpoolOptions:
    """Where the spool is, and when it is used."""

    directory: str
    after_ms: int = 1_000  # a batch that has waited so long for its receipt is spooled, and all that follows
    buffer_messages: int = 100_000  # the same where more than so many messages wait
    bytes_max: int = 1 * limits.GIB  # on disk, of this client; then the buffer fills, and `when_full` says what next
    messages_max: int = 10_000_000
    is_synced: bool = True  # False: a receipt survives the death of the process, not that of the machine
    adopt_ms: int = 5_000  # how often to look for what dead processes left behind

    def __post_init__(self) -> None:
        if not self.directory:
            raise Misuse("a spool needs a directory: spool='/var/lib/app/spool'")
        for name in ("buffer_messages", "bytes_max", "messages_max", "adopt_ms"):
            if getattr(self, name) < 1:
                raise Misuse(f"{name} of a spool is {getattr(self, name)}: it is 1 or more")
        if self.after_ms < 0:
            raise Misuse(f"after_ms of a spool is {self.after_ms}: it is 0 or more")


class SpoolState(msgspec.Struct, frozen=True):
    """How a client's spool stands."""

    is_in_use: bool  # messages go through it now
    messages: int  # in it, not yet at the broker; those of dead processes that this one drains are among them
    size_bytes: int  # on disk
    delivered: int  # messages, since the client was made
    duplicates: int  # of them, those that the broker had stored before
    set_aside: int  # messages that the broker will never take: `fairway spool status`
    trouble: str  # why it does not go on, for people; empty where it does


def options_of(spool: str | SpoolOptions | None, chosen: SpoolOptions | None) -> SpoolOptions | None:
    """What `connect(spool=...)` says, or else the client's options."""
    if spool is None or isinstance(spool, SpoolOptions):
        return spool or chosen
    if not isinstance(spool, str):
        raise Misuse(f"spool= is the name of a directory, or SpoolOptions, not {type(spool).__name__}")
    return SpoolOptions(spool)


def yard_at(directory: str, *, post: Callable[..., object] | None = None) -> SharedDirectory:
    """The directory that processes share; `Misuse` where the machine has no locks for that."""
    if not can_serve():
        raise Misuse("a spool needs the file locks of Linux or macOS: connect without one here")
    from fairway.world.yard import SharedDirectory

    return SharedDirectory(directory, post=post)


class Keeping:
    """A client's own journal, and what it has room for."""

    def __init__(self, options: SpoolOptions, own: Journal, clock: Clock) -> None:
        self.options = options
        self.own = own
        self.busy = 0  # calls whose batches are on their way to it
        self.full_until_ns = 0
        self.full_sentence = ""  # why nothing more is kept now
        self._clock = clock

    def check(self) -> StorageFault | None:
        """Why nothing will ever be kept again."""
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
    """One client's. Called under the face's lock, or on its loop, but for `close`."""

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
        """`on_finished`: a journal of a dead process is empty, and may go."""
        self.options = options
        self.draining = SpoolDrain(rng, on_change=on_change, on_success=on_success)
        self.fault: FairwayError | None = None
        self._keeping = Keeping(options, own, clock)
        self._choice = SpoolPolicy(options, self)
        self._is_connected = is_connected
        self._on_finished = on_finished
        self._own = own  # drained once it is known what goes before it
        self._before: list[Journal] = []  # of the dead, from before our first message: they go first
        self._others: list[Journal] = []  # found later
        self._has_looked_round = False

    # --- Diversion ---------------------------------------------------------------------------------------------------

    @property
    def way(self) -> SendPath:
        return self._choice.way

    @property
    def stream_key(self) -> bytes:
        return self._own.key

    def look(self, buffer: Buffer, now_ns: int) -> None:
        """Choose the way: see `diversion`."""
        self._let_go()
        self.fault = self.fault or self._keeping.check()
        before = self.way
        self._choice.look(buffer, now_ns)
        if before is SendPath.HOLD and self.way is SendPath.DIRECT:
            self._own.forget_streams()

    def next_look_ns(self) -> int | None:
        if self.way is SendPath.DIVERT:
            return self._keeping.full_until_ns or None
        return self._choice.next_look_ns()

    @property
    def trouble(self) -> str:
        """Why nothing more is kept now."""
        return self._keeping.full_sentence

    def room_for(self, messages: int, size_bytes: int) -> bool:
        return self._keeping.room_for(messages, size_bytes) and self.fault is None

    def keep(self, handed: Sequence[Handed], done: Callable[[FairwayError | None], None]) -> None:
        self._keeping.keep(handed, done)

    def receipt(self, subject: str, count: int, first_id: MessageId) -> SpoolBatchReceipt:
        return self._keeping.receipt(subject, count, first_id)

    # --- how it stands -----------------------------------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        return self._is_connected()

    @property
    def must_divert(self) -> bool:
        return False  # there is but one way, and all goes behind what is kept

    @property
    def may_hold(self) -> bool:
        return self._has_looked_round and not self._keeping.busy and self.draining.is_nearly_done

    @property
    def may_go(self) -> bool:
        return self._has_looked_round and self.is_empty

    # --- figures -----------------------------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left of what must arrive before our next message."""
        return self._own.is_empty and not self._before and not self._keeping.busy

    @property
    def is_drained(self) -> bool:
        """Whether nothing is left at all, of ours or of the dead."""
        return self._has_looked_round and not self._keeping.busy and not self.messages

    @property
    def is_going_on(self) -> bool:
        """Whether it drains by itself just now."""
        return bool(self.messages) and self.is_connected and self.draining.trouble is None

    @property
    def messages(self) -> int:
        return sum(each.messages for each in self.journals)

    def state(self) -> SpoolState:
        draining, refused = self.draining, self.draining.trouble
        faults = [str(each.fault) for each in self.journals if each.fault is not None]
        return SpoolState(
            self.way is SendPath.DIVERT or not self.is_empty,
            self.messages,
            sum(each.size_bytes for each in self.journals),
            draining.messages,
            draining.duplicates,
            draining.asides,
            "; ".join([*faults, *filter(None, [self._keeping.full_sentence, "" if refused is None else str(refused)])]),
        )

    # --- journals of the dead ----------------------------------------------------------------------------------------

    def adopt(self, journals: Sequence[Journal]) -> None:
        """What was found by a look round; the first time it goes before our own."""
        is_first = not self._has_looked_round
        self._has_looked_round = True
        for journal in journals:
            (self._before if is_first else self._others).append(journal)
            self.draining.add(journal)
        if is_first:
            self.draining.add(self._own)

    def _let_go(self) -> None:
        """Those that are empty by now."""
        for journals in (self._before, self._others):
            for journal in [each for each in journals if each.is_empty and not each.is_busy]:
                journals.remove(journal)
                self.draining.remove(journal)
                self._on_finished(journal)

    @property
    def journals(self) -> list[Journal]:
        """All that this client has."""
        return [self._own, *self._before, *self._others]
