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
from fairway.client.spool_drain import Draining
from fairway.client.spool_journal import Journal
from fairway.client.spool_record import HEADER_BYTES
from fairway.errors import DiskFull, FairwayError, Misuse, StorageFault
from fairway.protocol.backoff import NS_PER_MS
from fairway.protocol.diversion import Buffer, Handed, Way
from fairway.protocol.pending import SpoolBatchReceipt
from fairway.world.clock import Clock
from fairway.world.host import can_serve
from fairway.world.rng import Rng

if TYPE_CHECKING:
    from fairway.world.yard import Yard

_GRACE_NS = 1_000 * NS_PER_MS  # for the direct way, after a drain, although too many wait
_FULL_MS = 1_000  # after the disk was full, until it is tried again
_ENTRY_BYTES = HEADER_BYTES + 64 + limits.NAME_CHARS_MAX  # at most, beside the batch itself


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


def yard_at(directory: str, *, post: Callable[..., object] | None = None) -> Yard:
    """The directory that processes share; `Misuse` where the machine has no locks for that."""
    if not can_serve():
        raise Misuse("a spool needs the file locks of Linux or macOS: connect without one here")
    from fairway.world.yard import Yard

    return Yard(directory, post=post)


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
        self.draining = Draining(rng, on_change=on_change, on_success=on_success)
        self.way = Way.HOLD  # until it is known what dead processes left behind
        self.fault: FairwayError | None = None
        self._clock = clock
        self._is_connected = is_connected
        self._on_finished = on_finished
        self._after_ns = options.after_ms * NS_PER_MS
        self._own = own  # drained once it is known what goes before it
        self._before: list[Journal] = []  # of the dead, from before our first message: they go first
        self._others: list[Journal] = []  # found later
        self._has_looked_round = False
        self._has_diverted = False
        self._is_keeping = False  # batches are on their way to our journal
        self._look_ns: int | None = None  # when some batch may have waited too long
        self._direct_ns = -self._after_ns  # since when batches go to the broker, after they did not
        self._full_until_ns = 0
        self._full_sentence = ""

    # --- Diversion ---------------------------------------------------------------------------------------------------

    def look(self, buffer: Buffer, now_ns: int) -> None:
        """Choose the way: see `diversion`."""
        self._let_go()
        if self._own.fault is not None and self.fault is None:
            self.fault = StorageFault(f"the spool {self.options.directory} has failed: {self._own.fault}")
            self.fault.__cause__ = self._own.fault
        if self.way is Way.DIVERT:
            is_at_rest = self._has_looked_round and not self._is_keeping
            if is_at_rest and self._is_connected() and self.draining.is_nearly_done:
                self.way = Way.HOLD
                self._look_ns = None
        elif self.way is Way.HOLD and self._has_looked_round and self.is_empty and self._is_connected():
            self._own.forget_streams()
            self.way = Way.DIRECT
            if self._has_diverted:
                self._direct_ns = now_ns
        elif self._must_divert(buffer, now_ns):
            self.way = Way.DIVERT
            self._has_diverted = True

    def _must_divert(self, buffer: Buffer, now_ns: int) -> bool:
        """By absence, count or time. After a drain the direct way is tried for a while, whatever waits: a batch that is
        too large for the spool must get through some day."""
        if not buffer.messages:
            self._look_ns = None
            return False
        if buffer.is_failing and not self._is_connected():
            return True
        if buffer.is_crammed or buffer.messages > self.options.buffer_messages:
            self._look_ns = self._direct_ns + min(self._after_ns, _GRACE_NS)
        elif self._look_ns is None or now_ns >= self._look_ns:
            oldest_ns = buffer.oldest_ns()
            self._look_ns = None if oldest_ns is None else max(oldest_ns, self._direct_ns) + self._after_ns
        return self._look_ns is not None and now_ns >= self._look_ns

    def next_look_ns(self) -> int | None:
        if self.way is Way.DIVERT:
            return self._full_until_ns or None
        return self._look_ns

    @property
    def trouble(self) -> str:
        """Why nothing more is kept now."""
        return self._full_sentence

    def room_for(self, messages: int, size_bytes: int) -> bool:
        options, own = self.options, self._own
        if self._full_until_ns and self._clock.monotonic_ns() < self._full_until_ns:
            return False
        self._full_until_ns = 0
        self._full_sentence = ""
        used = own.size_bytes + size_bytes + _ENTRY_BYTES
        if own.messages + messages > options.messages_max or used > options.bytes_max:
            self._full_sentence = (
                f"the spool {self.options.directory} is full: {own.messages} messages of {options.messages_max}, "
                f"{own.size_bytes} bytes of {options.bytes_max}"
            )
            return False
        return self.fault is None

    def keep(self, handed: Sequence[Handed], done: Callable[[FairwayError | None], None]) -> None:
        def kept(fault: StorageFault | None) -> None:
            self._is_keeping = False
            if isinstance(fault, DiskFull):
                self._full_until_ns = self._clock.monotonic_ns() + _FULL_MS * NS_PER_MS
                self._full_sentence = f"the spool has no room: {fault}"
            done(fault)

        self._is_keeping = True
        self._own.keep(handed, kept)

    def receipt(self, subject: str, count: int, first_id: MessageId) -> SpoolBatchReceipt:
        return SpoolBatchReceipt.of(subject, count, first_id, self.options.directory, self._clock.wall_ms())

    # --- figures -----------------------------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left of what must arrive before our next message."""
        return self._own.is_empty and not self._before and not self._is_keeping

    @property
    def is_drained(self) -> bool:
        """Whether nothing is left at all, of ours or of the dead."""
        return self._has_looked_round and not self._is_keeping and not self.messages

    @property
    def messages(self) -> int:
        return sum(each.messages for each in self.journals)

    def state(self) -> SpoolState:
        draining, refused = self.draining, self.draining.trouble
        faults = [str(each.fault) for each in self.journals if each.fault is not None]
        return SpoolState(
            self.way is Way.DIVERT or not self.is_empty,
            self.messages,
            sum(each.size_bytes for each in self.journals),
            draining.messages,
            draining.duplicates,
            draining.asides,
            "; ".join([*faults, *filter(None, [self._full_sentence, "" if refused is None else str(refused)])]),
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
