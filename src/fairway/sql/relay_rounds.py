"""The rounds of a relay: take rows whose time has come, and settle each by the outcome of its sending.

    stored      the rows are deleted, all in one statement
    later       the row is tried again a little later, however often that happens
    gap         the batch before the row in its stream is not stored, or the broker does not know the stream. If another
                row can fill the gap, the relay takes the stream in order from now on (`StreamRepair`). If no row is
                left that could, and the broker repeats its refusal afterwards, the gap is permanent. Nothing more can
                be stored in that stream, and the rest of its rows get another. (If the broker has forgotten the stream,
                it may have stored a message already; then it stores the message twice, under the same id)
    taken       something is at the row's place, or the stream belongs to another sender: see below
    refused     the row is set aside with the reason

`judge_taken` decides about rows whose place is taken. A row may have travelled with others in one batch, right after
their commits (`outbox_batches`). When a relay later sends the row by itself, the broker has another batch at a part of
the same places, and names that batch:

- All rows of that batch are in the table: `judge_taken` makes the batch again. The same range and the same checksum
  prove that all of them are stored. Nothing else proves that.
- Some of the rows are gone: they were stored, and a process deleted them that may be about to delete the others. Look
  at the row once more, a little later.
- Everything else: send the row in another stream, with the message ids that it has always had, and log that. (If the
  broker cannot tell what it has there, it may have the row already; then it stores the messages twice, under the same
  ids)

In a cluster a row also names the broker group that it is sent to. The name is written before the row is first sent, and
stays until that group has answered that the row is not stored. A row without a group goes to a group that takes
messages of its subject now. If the cluster no longer has the row's group, no broker can tell whether the row is stored:
the relay sets the row aside.

Relays need not know of one another. A row that two relays send is stored once, because both send it under the place
that the row names. A lease keeps them from doing the same work twice.

`StreamRepair` takes the rows of a disordered stream in the order of their places. A relay normally takes rows as their
time comes, which at first is the order of writing. Relays that die and brokers that go away mix that order up, and a
broker refuses a row that arrives before its predecessors. A relay that takes the whole stream at once has no problem.
But among thousands of rows in random order, a batch of a thousand holds hardly two neighbours: a relay that took them
as they come would store two rows a second.

So the relay remembers a stream in which a row met a gap that another row can fill. Every other round takes rows of
these streams, from the first on, whatever their time; rows of these streams that come up in the usual way are put off.
A stream rests for a while if its first row is held by another process, or could not be stored. The rest keeps the relay
from asking about one stream all the time, and other streams from waiting for it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import islice
from typing import Final, NamedTuple, TypeAlias

from sqlalchemy import Connection

from fairway import batch
from fairway.errors import Misuse, RemoteProtocolError, StoredRange
from fairway.protocol.resend import SendOutcome
from fairway.runtime.clock import Clock
from fairway.runtime.host import forks
from fairway.runtime.rng import Rng
from fairway.sql.outbox_batches import OUTBOX_BATCH_BYTES_MAX, OutboxBatch
from fairway.sql.outbox_encoding import OutboxRow, OutboxStream, Picker, StreamRoute, Streams, together_again
from fairway.sql.outbox_rows import Before, Claimed, OutboxRows
from fairway.sql.outbox_table import PARKED_MS

STREAMS_MAX: Final = 1_000  # looked up at once
IDS_MAX: Final = 10_000  # found at once: each lookup reads the whole table


class StreamRepair:
    """The disordered streams that one relay has met."""

    def __init__(self, rows: OutboxRows, rest_ms: int) -> None:
        self._rows = rows
        self._rest_ms = rest_ms
        self._until_ms: dict[int, int] = {}  # for each stream: until when it rests
        self._next: deque[tuple[str, int]] = deque()  # the rows to take, and their streams

    def __contains__(self, stream: object) -> bool:
        return stream in self._until_ms

    def add(self, stream: int) -> None:
        self._until_ms.setdefault(stream, 0)

    def is_busy(self, now_ms: int) -> bool:
        """Whether there is something to take, as far as is known."""
        return any(until_ms <= now_ms for until_ms in self._until_ms.values())

    def begin_again(self, streams: Collection[int | None]) -> None:
        """Drop the rows queued in these streams: a row there was not stored, and the next would meet a gap."""
        if not self._until_ms.keys().isdisjoint(streams):
            self._next = deque(each for each in self._next if each[1] not in streams)

    def rest(self, streams: Collection[int | None], now_ms: int) -> None:
        """Leave these streams alone for a while: their rows cannot be stored just now."""
        for stream in self._until_ms.keys() & streams:
            self._until_ms[stream] = now_ms + self._rest_ms

    def take(self, connection: Connection, now_ms: int, lease_ms: int, rows_max: int, bytes_max: int) -> Claimed:
        """Lease the next rows of these streams, in the caller's transaction."""
        if not self._next:
            self._look(connection, now_ms)
        some = [self._next.popleft() for _ in range(min(rows_max, len(self._next)))]
        found = self._rows.claim_those(connection, [row_id for row_id, _ in some], now_ms, lease_ms, bytes_max)
        if len(found.rows) < len(some):  # too large, or another relay was faster
            self.begin_again({stream for _, stream in some})
        return found

    def _look(self, connection: Connection, now_ms: int) -> None:
        awake = (stream for stream, until_ms in self._until_ms.items() if until_ms <= now_ms)
        streams = list(islice(awake, STREAMS_MAX))
        found = self._rows.in_order(connection, streams, now_ms, IDS_MAX) if streams else []
        free: set[int] = set()
        held: set[int] = set()  # streams with a held row: the rows behind it wait
        for row_id, stream, is_held in found:
            if is_held:
                held.add(stream)
            if stream not in held:
                free.add(stream)
                self._next.append((row_id, stream))
        is_all = len(found) < IDS_MAX
        for stream in streams:
            del self._until_ms[stream]
            if stream in free or not is_all or stream in held:
                self._until_ms[stream] = now_ms + self._rest_ms if stream in held - free else 0


log = logging.getLogger("fairway.outbox")

_DAY_S: Final = 86_400
_ROWS_MAX: Final = 10_000  # SQLite takes 32,766 parameters in a statement
GAP: Final = "a batch before it in its stream is not stored yet"
HOLE: Final = "a batch before it in its stream is not stored, and there is no row for it"
UNANSWERED: Final = "no broker has answered"
HOMELESS: Final = "no group of brokers takes it"


@dataclass(frozen=True, slots=True)
class RelayOptions:
    """How relays behave, and the sending after a commit."""

    grace_s: float = 10.0  # after a commit, for the committing process to send by itself
    poll_s: float = 1.0  # between two looks at an idle table
    rows_max: int = 1_000  # taken at a time
    lease_s: float = 20.0  # keeps rows from other relays; a relay that dies delays its rows for so long
    answer_s: float = 10.0  # for a broker to answer anything
    retry_s: float = 1.0  # until a row that was refused for now is tried again
    send_linger_s: float = 0.1  # for which a message that soon follows another waits, to share a request
    delete_linger_s: float = 1.0  # for which sent rows wait, to share a DELETE
    delete_rows_max: int = 1_000  # in one statement

    def __post_init__(self) -> None:
        for name in ("grace_s", "poll_s", "lease_s", "answer_s", "retry_s", "send_linger_s", "delete_linger_s"):
            if not 0 <= getattr(self, name) <= _DAY_S:
                raise Misuse(f"{name} is {getattr(self, name)}: 0 to {_DAY_S} seconds are allowed")
        for name in ("rows_max", "delete_rows_max"):
            if not 1 <= getattr(self, name) <= _ROWS_MAX:
                raise Misuse(f"{name} is {getattr(self, name)}: 1 to {_ROWS_MAX} are allowed")


@dataclass
class RelayCounts:
    """Counts of this process."""

    sent: int = 0  # messages that a broker has stored
    repeats: int = 0  # of those: messages that the broker had stored before
    set_aside: int = 0
    restarted: int = 0  # batches that got another stream
    rounds: int = 0

    def add(self, other: RelayCounts) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass
class Work:
    """The rows of one round, and the batches made of them."""

    rows: list[OutboxRow]
    broken: list[tuple[OutboxRow, str]]  # cannot be sent by anybody
    homeless: list[OutboxRow]  # no broker group takes them now
    put_off: list[OutboxRow]  # earlier rows of their stream come first
    is_full: bool  # there may be more
    outbox_batches: list[OutboxBatch] = field(init=False)

    def __post_init__(self) -> None:
        self.outbox_batches = [
            OutboxBatch(row.subject, row.stamped, group=row.group or "", secret=row.shown) for row in self.rows
        ]

    @property
    def unanswered(self) -> int:
        return sum(1 for outbox_batch in self.outbox_batches if outbox_batch.fate is None)

    def __len__(self) -> int:
        return len(self.rows) + len(self.broken) + len(self.homeless) + len(self.put_off)


class RelayRounds:
    """The steps of a relay's round. The caller runs each step in a transaction of its own."""

    def __init__(self, rows: OutboxRows, clock: Clock, rng: Rng, options: RelayOptions) -> None:
        self.counts = RelayCounts()
        self.options = options
        self._rows = rows
        self._clock = clock
        self._rng = rng
        self._start()

    def _start(self) -> None:
        self._forks = forks()
        self._streams = Streams(self._clock, self._rng, has_secrets=lambda: self._rows.keeps_secrets)
        self._stream_repair = StreamRepair(self._rows, int(self.options.retry_s * 1_000))
        self._in_order = False  # whether the last round took disordered streams
        self._settled = RelayCounts()
        self._taken: dict[OutboxStream, int] = {}  # messages that the open transaction has placed in each stream

    # --- taking ------------------------------------------------------------------------------------------------------

    def take(self, connection: Connection, picker: Picker | None = None) -> Work:
        """Lease rows whose time has come, and give a stream to rows that have none. After the commit the caller calls
        `taken`. `picker`: in a cluster, chooses broker groups."""
        if self._forks != forks():
            self._start()
        self._taken = {}
        found, is_full = self._claim(connection, self._clock.wall_ms())
        put_off: list[OutboxRow] = []
        if not self._in_order:
            put_off = [row for row in found if row.stream in self._stream_repair]
            found = [row for row in found if row.stream not in self._stream_repair]
        broken = [(row, problem) for row in found if (problem := _problem(row, picker))]
        unsound = {row.id for row, _ in broken}
        sound = [row for row in found if row.id not in unsound]
        fresh = [row for row in sound if row.stream is None or row.place is None]
        homeless: list[OutboxRow] = []
        if picker is not None:
            for row in fresh:
                row.group = picker.home(row.route, row.key) or picker.pick(row.route)
            homeless = [row for row in fresh if row.group is None]
            fresh = [row for row in fresh if row.group is not None]
        if fresh:
            self._stamp(fresh)
            self._rows.stamp(connection, fresh)
        sound = [row for row in sound if row.stream is not None]
        sound.sort(key=lambda row: (row.stream, row.place))  # the order of their streams, or there would be gaps
        return Work(sound, broken, homeless, put_off, is_full)

    def _claim(self, connection: Connection, now_ms: int) -> tuple[list[OutboxRow], bool]:
        """Lease rows of disordered streams and rows whose time has come, by turns; and whether there may be more."""
        self._rows.begin(connection)
        bounds = now_ms, int(self.options.lease_s * 1_000), self.options.rows_max, OUTBOX_BATCH_BYTES_MAX
        self._in_order = not self._in_order
        if self._in_order:
            found = self._stream_repair.take(connection, *bounds)
            if found.rows:
                return found.rows, True
            self._in_order = False
        found = self._rows.claim(connection, *bounds)
        is_full = len(found.rows) == self.options.rows_max or found.is_cut or self._stream_repair.is_busy(now_ms)
        return found.rows, is_full

    def _stamp(self, rows: Sequence[OutboxRow]) -> None:
        streams: dict[StreamRoute, OutboxStream] = {}
        for row in rows:
            route = StreamRoute(row.subject, row.is_due, row.group or "")
            stream = streams.get(route) or streams.setdefault(route, self._streams.take(route))
            row.stream, row.place = stream.producer_id, stream.next + self._taken.get(stream, 0)
            row.secret = stream.secret
            self._taken[stream] = self._taken.get(stream, 0) + row.messages

    def taken(self) -> None:
        """Continue the streams behind the rows, whose transaction has committed. Without this call the streams are
        never used again."""
        for stream, messages in self._taken.items():
            self._streams.give_back(stream, messages)
        self._taken = {}

    # --- settling ----------------------------------------------------------------------------------------------------

    def settle(self, connection: Connection, work: Work) -> None:
        """Write down how each batch ended. A batch without an answer counts as `later`."""
        self._rows.begin(connection)
        now_ms = self._clock.wall_ms()
        counts = RelayCounts(rounds=1)
        by_fate: dict[SendOutcome, list[tuple[OutboxRow, OutboxBatch]]] = {fate: [] for fate in SendOutcome}
        for row, outbox_batch in zip(work.rows, work.outbox_batches, strict=True):
            by_fate[outbox_batch.fate or SendOutcome.LATER].append((row, outbox_batch))
        taken = judge_taken(by_fate.pop(SendOutcome.TAKEN), partial(self._rows.at, connection))
        stored = by_fate.pop(SendOutcome.STORED)
        if stored or taken.stored:
            self._rows.delete(connection, [*(row.id for row, _ in stored), *taken.stored])
            counts.repeats = sum(row.messages for row, outbox_batch in stored if outbox_batch.is_repeat) + len(
                taken.stored
            )
            counts.sent = sum(row.messages for row, _ in stored) + len(taken.stored)
        if taken.moved:
            left = self._rows.leave_streams(connection, [row for row, _ in taken.moved], now_ms)
            counts.restarted += len(left)
            _log_moved([(row, outbox_batch) for row, outbox_batch in taken.moved if row.id in left])
        unsent = {row.stream for some in [*by_fate.values(), taken.moved] for row, _ in some}
        self._streams.leave(unsent)  # the next batch would meet a gap
        self._stream_repair.begin_again(unsent)
        self._stream_repair.rest({row.stream for row, _ in by_fate[SendOutcome.LATER]}, now_ms)
        gaps, broken = self._judge_gaps(connection, [row for row, _ in by_fate[SendOutcome.GAP]], now_ms)
        aside = [(row, PARKED_MS, outbox_batch.sentence) for row, outbox_batch in by_fate[SendOutcome.REFUSED]]
        aside += [(row, PARKED_MS, problem) for row, problem in work.broken]
        counts.set_aside = sum(row.messages for row, _, _ in aside)
        gaps += taken.doubtful
        self._rows.note(connection, [*aside, *self._put_off(work, by_fate[SendOutcome.LATER], gaps, now_ms)])
        for stream in broken:
            restarted = self._rows.abandon(connection, stream, now_ms)
            counts.restarted += restarted
            log.warning(
                "%d batches have another stream now: what came before them was set aside, or forgotten", restarted
            )
        self._settled = counts

    def settled(self) -> None:
        """Add the counts of `settle`, whose transaction has committed."""
        self.counts.add(self._settled)

    def _put_off(
        self,
        work: Work,
        later: Sequence[tuple[OutboxRow, OutboxBatch]],
        gaps: Sequence[tuple[OutboxRow, str]],
        now_ms: int,
    ) -> Iterator[tuple[OutboxRow, int, str]]:
        """Rows to try again: until when they wait, and why. Rows of disordered streams wait a lease: `StreamRepair`
        takes them before."""
        again_ms = now_ms + int(self.options.retry_s * 1_000)
        in_order_ms = now_ms + int(self.options.lease_s * 1_000)
        for row, outbox_batch in later:
            yield row, again_ms, outbox_batch.sentence or UNANSWERED
        for row in work.homeless:
            yield row, again_ms, HOMELESS
        for row, sentence in [*gaps, *((row, GAP) for row in work.put_off)]:
            yield row, in_order_ms if row.stream in self._stream_repair else again_ms, sentence

    def _judge_gaps(
        self, connection: Connection, rows: Sequence[OutboxRow], now_ms: int
    ) -> tuple[list[tuple[OutboxRow, str]], list[int]]:
        """Rows that wait, each with the reason; and streams in which nothing can be stored any more.

        The order matters. First the relay finds no row that could fill the gap, then it asks the broker once more. In
        the other order another process could fill the gap in between. The judgement holds for the first row of a
        stream alone: rows behind it may have met a gap because of it.
        """
        waiting: list[tuple[OutboxRow, str]] = []
        broken: list[int] = []
        seen: set[int] = set()
        for row in rows:  # in the order of their streams
            if row.stream is None or row.stream in broken:
                continue
            if row.stream in seen:
                waiting.append((row, GAP))
            elif row.error == _hole(row):
                broken.append(row.stream)
            else:
                before = self._rows.before(connection, row, now_ms)
                waiting.append((row, _hole(row) if before is Before.NOTHING else GAP))
                if before is Before.FREE:
                    self._stream_repair.add(row.stream)
            seen.add(row.stream)
        return waiting, broken


RowsAt: TypeAlias = Callable[[int, int, int], Sequence[OutboxRow]]  # by stream, first place and end of the places
SOME: Final = "a batch of several is at its place, and some of their rows are gone"


class TakenRows(NamedTuple):
    """What to do with the rows."""

    stored: list[str]  # ids of rows that are stored, in one batch with others
    doubtful: list[tuple[OutboxRow, str]]  # to look at once more
    moved: list[tuple[OutboxRow, OutboxBatch]]  # to send in another stream


def judge_taken(found: Sequence[tuple[OutboxRow, OutboxBatch]], rows_at: RowsAt) -> TakenRows:
    """Decide for each row whether the batch at its place is one that the row travelled in."""
    taken = TakenRows([], [], [])
    for row, outbox_batch in found:
        if row.id in taken.stored or row.stream is None or row.place is None:
            continue
        end = row.place + row.messages
        there = next((each for each in outbox_batch.stored or () if each.first <= row.place and end <= each.end), None)
        neighbours = [] if there is None else rows_at(row.stream, there.first, there.end)
        if there is not None and _range_of(neighbours) == there:
            taken.stored.extend(each.id for each in neighbours)
        elif there is not None and sum(each.messages for each in neighbours) < there.messages and row.error != SOME:
            taken.doubtful.append((row, SOME))
        else:
            taken.moved.append((row, outbox_batch))
    return taken


def _range_of(neighbours: Sequence[OutboxRow]) -> StoredRange | None:
    """The range of the batch that these rows make together."""
    made = together_again(neighbours)
    if made is None:
        return None
    header = batch.peek(made)
    return StoredRange(header.first_sequence, header.count, header.crc)


def _log_moved(moved: Sequence[tuple[OutboxRow, OutboxBatch]]) -> None:
    """Warn people that places were taken that should have been free."""
    if not moved:
        return
    row, outbox_batch = moved[0]
    log.warning(
        "%d batches have another stream now, because something else is at their place, or nobody knows what is (the "
        "first: %016x+%d to %s, %s): was this database, or a broker, restored from a backup?",
        len(moved), row.stream, row.place, row.subject, outbox_batch.sentence,
    )  # fmt: skip


def _hole(row: OutboxRow) -> str:
    """The note names the place, because a slow relay may write it after the row has moved to another place."""
    return f"{HOLE} ({row.stream:x}+{row.place})"


def _problem(row: OutboxRow, picker: Picker | None) -> str:
    """Why a row cannot be sent; empty: no problem."""
    if picker is not None and row.group is not None and picker.is_lost(row.route, row.group):
        return (
            f"broker group {row.group}, which alone can tell whether it is stored, is not in this cluster any more: "
            "`fairway outbox retry` sends it to another, perhaps for the second time"
        )
    # What is wrong with the row's bytes. A broker would end the connection for them, and fail the
    # other batches too.
    try:
        header = batch.decode(row.body).header
    except RemoteProtocolError as error:
        return f"the row's body is damaged: {error}"
    if header.count != row.messages:
        return f"the row's body holds {header.count} messages, and the row says {row.messages}"
    return ""
