"""What a relay does with rows, whoever runs it: take those whose time has come, and settle them by how they fared.

    stored      deleted, all in one statement
    later       woken again a little later; a broker that is away takes none of their patience
    gap         the batch before it in its stream is not stored, or the broker knows nothing of the stream. If a row can
                fill the gap, the stream is taken in order from now on (`untangling`). If no row is left that could, and
                the broker still says so afterwards, the gap is there for ever: nothing more can be stored in that
                stream, and what is left of it may have another. (If the broker has forgotten the stream, something may
                be stored already: then it is twice, under the id that it has always had)
    taken       something is at its place, or the stream is somebody else's. If a batch is there that was made of this
                row and others, and those are here to prove it, all of them are stored. Otherwise nothing is dropped:
                the row is given another stream, and logged. (If the broker cannot tell what it has there, the row may
                be stored already: then it is twice, under the id that it has always had)
    refused     set aside with the reason

In a cluster a row also names the group of brokers that it is sent to, from before it is first sent until that group has
said that it is not stored. One that has none goes to a group that takes messages of its subject now. If its group is in
the cluster no more, nobody can tell whether it is stored, and it is set aside as such.

Relays need not know of one another. A row that two of them send is stored once, because both send it under the place
that the row names; a lease keeps them from doing the same work twice.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Final

from sqlalchemy import Connection

from fairway import batch
from fairway.errors import Misuse, RemoteProtocolError
from fairway.sql.letters import OutboxRow, Picker
from fairway.sql.posting import PARCEL_BYTES_MAX, OutboxBatch, SendOutcome
from fairway.sql.rows import Before, OutboxRows
from fairway.sql.streams import OutboxStream, StreamRoute, Streams
from fairway.sql.tables import PARKED_MS
from fairway.sql.taken_places import judge_taken, log_moved
from fairway.sql.untangling import StreamRepair
from fairway.world.clock import Clock
from fairway.world.lineage import forks
from fairway.world.rng import Rng

log = logging.getLogger("fairway.outbox")

_DAY_S: Final = 86_400
_ROWS_MAX: Final = 10_000  # SQLite takes 32,766 parameters in a statement
GAP: Final = "a batch before it in its stream is not stored yet"
HOLE: Final = "a batch before it in its stream is not stored, and there is no row for it"
UNANSWERED: Final = "no broker has answered"
HOMELESS: Final = "no group of brokers takes it"


@dataclass(frozen=True, slots=True)
class RelayOptions:
    """How relays, and the sending after a commit, behave."""

    grace_s: float = 10.0  # after a commit, for the process that committed to send by itself
    poll_s: float = 1.0  # between two looks at a table with nothing to do
    rows_max: int = 1_000  # taken at a time
    lease_s: float = 20.0  # for which rows are kept from other relays: as long as a relay that died delays its rows
    answer_s: float = 10.0  # for a broker to answer anything
    retry_s: float = 1.0  # until a row that was refused for now is tried again
    send_linger_s: float = 0.1  # that a message which comes soon after another waits for company
    delete_linger_s: float = 1.0  # that rows which were sent wait for company before they are deleted
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
    """Of this process."""

    sent: int = 0  # messages that a broker has stored
    repeats: int = 0  # of them, those that it had stored before
    set_aside: int = 0
    restarted: int = 0  # batches that were given another stream
    rounds: int = 0

    def add(self, other: RelayCounts) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass
class Work:
    """Rows that were taken, and their parcels."""

    rows: list[OutboxRow]
    broken: list[tuple[OutboxRow, str]]  # that nobody can send
    homeless: list[OutboxRow]  # that no group takes now
    put_off: list[OutboxRow]  # that others of their stream come before
    is_full: bool  # there may be more
    parcels: list[OutboxBatch] = field(init=False)

    def __post_init__(self) -> None:
        self.parcels = [
            OutboxBatch(row.subject, row.stamped, group=row.group or "", secret=row.shown) for row in self.rows
        ]

    @property
    def to_post(self) -> list[tuple[OutboxBatch, bool]]:
        return [(parcel, row.is_due) for parcel, row in zip(self.parcels, self.rows, strict=True)]

    @property
    def unanswered(self) -> int:
        return sum(1 for parcel in self.parcels if parcel.fate is None)

    def __len__(self) -> int:
        return len(self.rows) + len(self.broken) + len(self.homeless) + len(self.put_off)


class RelayRounds:
    """The steps of a relay. Each is done in a transaction of its own, by whoever runs it."""

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
        self._untangling = StreamRepair(self._rows, int(self.options.retry_s * 1_000))
        self._in_order = False  # how rows were taken last
        self._settled = RelayCounts()
        self._taken: dict[OutboxStream, int] = {}  # by the transaction that is under way, and how many messages

    # --- taking ------------------------------------------------------------------------------------------------------

    def take(self, connection: Connection, picker: Picker | None = None) -> Work:
        """Rows whose time has come; those that have no stream yet are given one. `taken` is called after the commit.
        `picker`: in a cluster, who knows where they go."""
        if self._forks != forks():
            self._start()
        self._taken = {}
        found, is_full = self._claim(connection, self._clock.wall_ms())
        put_off: list[OutboxRow] = []
        if not self._in_order:
            put_off = [row for row in found if row.stream in self._untangling]
            found = [row for row in found if row.stream not in self._untangling]
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
        sound.sort(key=lambda row: (row.stream, row.place))  # in the order of their streams, or there would be gaps
        return Work(sound, broken, homeless, put_off, is_full)

    def _claim(self, connection: Connection, now_ms: int) -> tuple[list[OutboxRow], bool]:
        """Rows of streams that are taken in order, and those whose time has come, by turns; and whether there may be
        more."""
        self._rows.begin(connection)
        bounds = now_ms, int(self.options.lease_s * 1_000), self.options.rows_max, PARCEL_BYTES_MAX
        self._in_order = not self._in_order
        if self._in_order:
            found = self._untangling.take(connection, *bounds)
            if found.rows:
                return found.rows, True
            self._in_order = False
        found = self._rows.claim(connection, *bounds)
        is_full = len(found.rows) == self.options.rows_max or found.is_cut or self._untangling.is_busy(now_ms)
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
        """The transaction in which rows were taken has committed: its streams go on behind them. Where this is not
        called, they are never used again."""
        for stream, messages in self._taken.items():
            self._streams.give_back(stream, messages)
        self._taken = {}

    # --- settling ----------------------------------------------------------------------------------------------------

    def settle(self, connection: Connection, work: Work) -> None:
        """Write down how the parcels fared; one without an answer is treated as lost."""
        self._rows.begin(connection)
        now_ms = self._clock.wall_ms()
        counts = RelayCounts(rounds=1)
        by_fate: dict[SendOutcome, list[tuple[OutboxRow, OutboxBatch]]] = {fate: [] for fate in SendOutcome}
        for row, parcel in zip(work.rows, work.parcels, strict=True):
            by_fate[parcel.fate or SendOutcome.LATER].append((row, parcel))
        taken = judge_taken(by_fate.pop(SendOutcome.TAKEN), partial(self._rows.at, connection))
        stored = by_fate.pop(SendOutcome.STORED)
        if stored or taken.stored:
            self._rows.delete(connection, [*(row.id for row, _ in stored), *taken.stored])
            counts.repeats = sum(row.messages for row, parcel in stored if parcel.is_repeat) + len(taken.stored)
            counts.sent = sum(row.messages for row, _ in stored) + len(taken.stored)
        if taken.moved:
            left = self._rows.leave_streams(connection, [row for row, _ in taken.moved], now_ms)
            counts.restarted += len(left)
            log_moved([(row, parcel) for row, parcel in taken.moved if row.id in left])
        unsent = {row.stream for some in [*by_fate.values(), taken.moved] for row, _ in some}
        self._streams.leave(unsent)  # what comes behind would meet a gap
        self._untangling.begin_again(unsent)
        self._untangling.rest({row.stream for row, _ in by_fate[SendOutcome.LATER]}, now_ms)
        gaps, broken = self._judge_gaps(connection, [row for row, _ in by_fate[SendOutcome.GAP]], now_ms)
        aside = [(row, PARKED_MS, parcel.sentence) for row, parcel in by_fate[SendOutcome.REFUSED]]
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
        """The transaction in which that was written down has committed."""
        self.counts.add(self._settled)

    def _put_off(
        self,
        work: Work,
        later: Sequence[tuple[OutboxRow, OutboxBatch]],
        gaps: Sequence[tuple[OutboxRow, str]],
        now_ms: int,
    ) -> Iterator[tuple[OutboxRow, int, str]]:
        """Until when, and why. What is to be taken in order need not come up by itself before a lease would end."""
        again_ms = now_ms + int(self.options.retry_s * 1_000)
        in_order_ms = now_ms + int(self.options.lease_s * 1_000)
        for row, parcel in later:
            yield row, again_ms, parcel.sentence or UNANSWERED
        for row in work.homeless:
            yield row, again_ms, HOMELESS
        for row, sentence in [*gaps, *((row, GAP) for row in work.put_off)]:
            yield row, in_order_ms if row.stream in self._untangling else again_ms, sentence

    def _judge_gaps(
        self, connection: Connection, rows: Sequence[OutboxRow], now_ms: int
    ) -> tuple[list[tuple[OutboxRow, str]], list[int]]:
        """Rows that wait, and what is known of them; and streams in which nothing can be stored any more.

        The order matters: first nobody is found who could fill the gap, then the broker is asked once more. The other
        way round, somebody may have filled it in between. And it is known of the first row alone: those behind it may
        have found a gap because of that one.
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
                    self._untangling.add(row.stream)
            seen.add(row.stream)
        return waiting, broken


def _hole(row: OutboxRow) -> str:
    """With its place, because a relay that was slow may say so when the row has another one already."""
    return f"{HOLE} ({row.stream:x}+{row.place})"


def _problem(row: OutboxRow, picker: Picker | None) -> str:
    """Why nobody can send a row."""
    if picker is not None and row.group is not None and picker.is_lost(row.route, row.group):
        return (
            f"broker group {row.group}, which alone can tell whether it is stored, is not in this cluster any more: "
            "`fairway outbox retry` sends it to another, perhaps for the second time"
        )
    return _damage(row)


def _damage(row: OutboxRow) -> str:
    """What is wrong with the bytes in a row: a broker would end the connection for it, and take the others along."""
    try:
        header = batch.decode(row.body).header
    except RemoteProtocolError as error:
        return f"the row's body is damaged: {error}"
    if header.count != row.messages:
        return f"the row's body holds {header.count} messages, and the row says {row.messages}"
    return ""
