"""The observations of a program with the public clients, written down for the model, and how the model reads them.

A program is not told when its client pulled what it is given, nor when its lease was renewed. It knows bounds, and the
model uses those. A client holds `PREFETCH` messages at most, so it asked for this message after it had handed over the
message `PREFETCH` places before. A message that comes when the client had none left has arrived since.

So there is one more reason why a message may be seen twice, or after somebody else's ack:

    overtaken   it lay in the client's hand, unseen, when the broker crashed or the lease ran out; somebody else was
                given it meanwhile, and perhaps acked it

A process may stand still: it was stopped, or the machine had no time for it. An answer of the broker then waits in its
socket, also when the program finds its hand empty right afterwards. So an empty hand says nothing until the process
has run for a while (`Pulse`), and the answer is dated by what was known before.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from fairway import Message
from fairway.runtime.clock import Clock, RealClock
from tests.crash.broker_witness import Reading, Scribe
from tests.simulation.broker_truth import Holder, Owner, Promise, Truth

PREFETCH = 40  # messages
SLACK_NS = 500_000_000  # what was on its way to a hand that was empty is here by then, if the process runs
TICK_S = 0.02
STANDSTILL_NS = (
    SLACK_NS // 2
)  # between two ticks: the process did not run, and shorter stalls leave enough of the slack


class ClientScribe(Scribe):
    """Writes what only programs say, too."""

    def note_begun(self) -> None:
        """It minds its signals from now on."""
        self._write("begun")

    def note_claim(self, payloads: Sequence[bytes]) -> None:
        self._write("claim", [payload.decode("latin-1") for payload in payloads])

    def note_confirmed(self, owner: Owner, sequences: Sequence[int], now_ns: int) -> None:
        self._write("confirmed", owner.group, owner.subject, sequences, now_ns)

    def note_standstill(self, began_ns: int, ended_ns: int) -> None:
        """This process did not run."""
        self._write("standstill", began_ns, ended_ns)


class Pulse:
    """Notices when this process stands still: a thread ticks, and a tick that comes late ends a standstill."""

    def __init__(self, clock: Clock, on_standstill: Callable[[int, int], None]) -> None:
        self._now_ns = clock.monotonic_ns
        self._on_standstill = on_standstill
        self._ticked_ns = self._now_ns()
        self._ended_ns = 0  # of the last standstill

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(TICK_S)
            self.tick()

    def tick(self) -> None:
        now_ns, before_ns = self._now_ns(), self._ticked_ns
        if now_ns - before_ns >= STANDSTILL_NS:
            self._ended_ns = now_ns
            self._on_standstill(before_ns, now_ns)
        self._ticked_ns = now_ns  # last: who looks meanwhile sees that the tick is late, or that it was

    def has_run_since(self, since_ns: int) -> bool:
        """Whether the process has not stood still since; a tick that is overdue is a standstill that nobody has seen
        end."""
        ticked_ns = self._ticked_ns  # first: a tick that comes now is seen by its end
        return self._now_ns() - ticked_ns < STANDSTILL_NS and self._ended_ns <= since_ns


class Diary:
    """Of one member of a group: any of its threads may write."""

    def __init__(
        self,
        owner: Owner,
        holder: str,
        *,
        is_back: bool,
        clock: Clock | None = None,
        write: Callable[[bytes], object] | None = None,
    ) -> None:
        clock = clock or RealClock()
        self._scribe = ClientScribe(clock, write)
        self.pulse = Pulse(clock, self._scribe.note_standstill)
        self._owner = owner
        self._holder = Holder(holder)
        self._now_ns = clock.monotonic_ns
        self._lock = threading.Lock()
        self._acked_ns = 0
        self.begin()
        if is_back:
            self._scribe.note_asked(owner, self._holder, None, "forgot")

    def begin(self) -> None:
        """Its client is new: it has nothing in hand, and will not say what became of earlier acks."""
        self._unconfirmed: list[int] = []
        self._empty_ns = self._now_ns()
        self._handed: deque[int] = deque([self._empty_ns], maxlen=2 * PREFETCH)  # twice: what is settled makes room

    # --- messages ----------------------------------------------------------------------------------------------------

    def note_nothing(self) -> None:
        """Nothing came for a while: the hand is empty. Unless the process has stood still: then the client has had no
        time to look."""
        since_ns = self._now_ns() - SLACK_NS
        if self.pulse.has_run_since(since_ns):
            self._empty_ns = max(self._empty_ns, since_ns)

    def note_messages(self, messages: Sequence[Message]) -> None:
        """Just handed over."""
        found = {message.sequence: message.payload for message in messages}
        with self._lock:
            now_ns, asked_ns = self._now_ns(), max(self._handed[0], self._empty_ns)
            self._handed.extend([now_ns] * len(messages))
            self._scribe.note_contact(self._owner, self._holder, asked_ns=asked_ns, now_ns=now_ns)
            self._scribe.note_delivery(self._owner, self._holder, found, asked_ns=asked_ns, now_ns=now_ns)
        for message in messages:
            name = message.payload.partition(b":")[0].decode()
            if message.key != name or message.headers != {"name": name} or message.tags != (name.partition("/")[0],):
                said = f"{message.key}, {message.headers}, {message.tags}"
                self._scribe.blame(Promise.RENAMED, f"{name} came with what belongs to another: {said}")

    def note_handing_back(self, messages: Sequence[Message] | None, reason: str) -> None:
        """About to; None: all that it has."""
        sequences = None if messages is None else [message.sequence for message in messages]
        self._scribe.note_asked(self._owner, self._holder, sequences, reason)

    # --- acks --------------------------------------------------------------------------------------------------------

    def note_acking(self, messages: Sequence[Message]) -> None:
        """About to."""
        sequences = [message.sequence for message in messages]
        self._scribe.note_acking(self._owner, sequences)
        self._unconfirmed += sequences
        self._acked_ns = self._now_ns()

    def note_confirmed(self, *, is_stale: bool = False) -> None:
        """The broker has confirmed all that was acked so far; stale: some of it was not ours to ack."""
        if not is_stale:
            now_ns = self._now_ns()
            self._scribe.note_confirmed(self._owner, self._unconfirmed, now_ns)
            self._scribe.note_contact(self._owner, self._holder, asked_ns=self._acked_ns, now_ns=now_ns)
        self._unconfirmed = []

    @property
    def is_owed(self) -> bool:
        """Whether acks wait for the broker's word."""
        return bool(self._unconfirmed)


class ClientTruth(Truth):
    """The model, of programs that see messages later than their client does."""

    def __init__(self) -> None:
        super().__init__()
        self.standstills = 0  # of all programs

    def note_standstill(self, began_ns: int, ended_ns: int) -> None:
        """A program did not run; what it says of its messages allows for that."""
        self.standstills += 1

    def note_confirmed(self, owner: Owner, sequences: Sequence[int], now_ns: int) -> None:
        self.tick = now_ns
        self.note_acked(owner, sequences)

    def note_claim(self, payloads: Sequence[bytes]) -> None:
        """A producer says that these are stored, and not where."""
        for payload in payloads:
            self.acknowledged += not self.sent[payload].is_acknowledged
            self.sent[payload].is_acknowledged = True

    def note_delivery(
        self, owner: Owner, holder: Holder, found: Mapping[int, bytes], *, asked_ns: int, now_ns: int
    ) -> None:
        if self.crashed_ns >= asked_ns or now_ns - holder.contact_ns >= owner.lease_ns:
            for sequence in found:
                self._excuse(owner, sequence, asked_ns)
        super().note_delivery(owner, holder, found, asked_ns=asked_ns, now_ns=now_ns)

    def _excuse(self, owner: Owner, sequence: int, asked_ns: int) -> None:
        handed = owner.handed.get(sequence)
        if handed is not None:
            handed.reason = handed.reason or "overtaken"
        if sequence in owner.acked and owner.acked_at[sequence] >= asked_ns:
            owner.acked.discard(sequence)
            owner.doubted.add(sequence)
            self.reasons["of them after another's ack"] += 1


class ClientReading(Reading):
    """Tells it what the diaries say."""

    def __init__(self, truth: ClientTruth, lease_ms: int) -> None:
        super().__init__(truth, lease_ms)
        self._tell["begun"] = lambda: None
        self._tell["standstill"] = truth.note_standstill
        self._tell["claim"] = lambda texts: truth.note_claim([text.encode("latin-1") for text in texts])
        self._tell["confirmed"] = lambda group, subject, sequences, now_ns: truth.note_confirmed(
            self._owner(group, subject), sequences, now_ns
        )
