"""Producer streams of the outbox, and the sealing of messages into rows.

A broker stores a batch once, even if the batch is sent twice under the same place in the same stream. The broker
refuses a batch behind a gap. So each batch gets its place when its row is written, in the same transaction, and a
rollback must not leave a gap. Therefore a stream belongs to one transaction at a time, from just before the commit
until the outcome is known:

- After a commit, the next transaction continues behind it.
- After a rollback, the next transaction takes the same place.
- If the outcome is unknown, or a broker refused a batch, the stream is never used again.

A process has as many streams as transactions that commit at the same moment: a handful.

`new_message` checks a message when the program gives it. `sealed`, `placed` and `unstamped` make rows of the messages
when their transaction commits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import count, pairwise
from typing import Final, NamedTuple

from fairway import batch, limits
from fairway.batch import Codec, MessageId
from fairway.batch.identity import new_secret
from fairway.client.core import Duration
from fairway.client.delayed_messages import due_of, is_far
from fairway.errors import Misuse
from fairway.names import Subject
from fairway.protocol.batch_builder import MessageColumns, check_extras, check_size
from fairway.runtime.clock import Clock
from fairway.runtime.rng import Rng

IDLE_NS_MAX: Final = 3_600 * 1_000_000_000  # an hour: long before a broker forgets a stream


class StreamRoute(NamedTuple):
    """What all batches of one stream have in common."""

    subject: str
    is_due: bool  # delayed messages are stored elsewhere, and so have streams of their own
    group: str = ""  # the broker group in a cluster; each group knows only its own streams


@dataclass(slots=True, eq=False)
class OutboxStream:
    """One producer id, with places from 0 on. `secret` proves to a broker who owns the stream; hexadecimal digits."""

    route: StreamRoute
    producer_id: int
    secret: str | None = None
    next: int = 0
    used_ns: int = 0
    is_left: bool = False  # never to be used again


class Streams:
    """The streams of one process, for any number of threads: the deque gives each stream to one of them only."""

    def __init__(self, clock: Clock, rng: Rng, *, has_secrets: Callable[[], bool] = lambda: False) -> None:
        """`has_secrets`: whether the table has a column for secrets."""
        self._clock = clock
        self._rng = rng
        self._has_secrets = has_secrets
        self._idle: dict[StreamRoute, deque[OutboxStream]] = {}

    def take(self, route: StreamRoute) -> OutboxStream:
        """A stream that no other transaction has."""
        idle = self._idle.get(route)
        oldest_ns = self._clock.monotonic_ns() - IDLE_NS_MAX
        while idle:
            try:
                stream = idle.pop()  # the one used last; the others may be forgotten
            except IndexError:  # another thread was faster
                break
            if not stream.is_left and stream.used_ns > oldest_ns:
                return stream
        secret = new_secret(self._rng).hex() if self._has_secrets() else None
        return OutboxStream(route, self._rng.bits(63) or 1, secret)  # 63 bits: BIGINT has a sign

    def give_back(self, stream: OutboxStream, messages: int) -> None:
        """Return a stream after its transaction committed so many messages, or was certainly rolled back with none."""
        stream.next += messages
        stream.used_ns = self._clock.monotonic_ns()
        idle = self._idle.get(stream.route)
        if idle is None:
            idle = self._idle.setdefault(stream.route, deque())
        idle.append(stream)

    def leave(self, producer_ids: Collection[int | None]) -> None:
        """Never use these streams again, as far as they are idle here: a batch of theirs was not stored."""
        for idle in self._idle.values():
            for stream in list(idle):
                stream.is_left = stream.is_left or stream.producer_id in producer_ids


BATCH_BYTES_MAX: Final = 1 * limits.MIB  # a larger message has a batch of its own
UNSTAMPED: Final = (1, 0)  # producer id and sequence in the body of a batch whose stream a relay chooses


class OutboxMessage(NamedTuple):
    """A message between `send` and the commit."""

    route: StreamRoute
    is_alone: bool  # gets a batch of its own: if a broker refuses the message, no other is refused with it
    payload: bytes
    key: str | None
    tags: tuple[str, ...]
    headers: dict[str, str] | None
    id: MessageId
    due_ms: int


class Lone(NamedTuple):
    """A message in a row of its own, with its place. Consecutive ones may travel as one batch."""

    message: OutboxMessage
    stream: int
    place: int
    created_ms: int

    def is_followed_by(self, other: Lone) -> bool:
        return self.stream == other.stream and self.place + 1 == other.place


@dataclass(slots=True, eq=False)
class OutboxRow:
    """A row of the table: one batch."""

    id: str
    wake_ms: int
    subject: str
    messages: int
    created_ms: int
    stream: int | None
    place: int | None
    body: bytes
    error: str | None = None
    group: str | None = None  # the broker group, in a cluster
    secret: str | None = None  # of its stream
    lone: Lone | None = None  # the message, if this process made the row of one
    is_due: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_due = batch.is_delayed(self.body)

    @property
    def values(self) -> tuple[str, int, str, int, int, int | None, int | None, bytes]:
        """In the order of `outbox_table.COLUMNS`."""
        return (
            self.id, self.wake_ms, self.subject, self.messages, self.created_ms, self.stream, self.place, self.body
        )  # fmt: skip

    @property
    def route(self) -> StreamRoute:
        return StreamRoute(self.subject, self.is_due)

    @property
    def shown(self) -> bytes:
        """The stream's secret for the broker. A column without hexadecimal digits holds no secret of ours."""
        try:
            return bytes.fromhex(self.secret or "")
        except ValueError:
            return b""

    def key(self) -> str | None:
        """The key of the first message."""
        return batch.decode(self.body).key(0)

    @property
    def stamped(self) -> bytes:
        """The bytes to send: the body, with the stream and the place of the row."""
        if self.stream is None or self.place is None:
            raise Misuse(f"the row {self.id} has no place in a stream yet: a relay gives it one")
        return batch.restamp(self.body, producer_id=self.stream, first_sequence=self.place)


class Origin:
    """Makes message ids. One for each process and outbox."""

    __slots__ = ("_numbers", "_producer_id")

    def __init__(self, rng: Rng) -> None:
        self._producer_id = rng.bits(64) or 1
        self._numbers = count()

    def next_id(self) -> MessageId:
        return MessageId(self._producer_id, next(self._numbers))


def new_message(
    id: MessageId,
    clock: Clock,
    subject: str,
    payload: bytes,
    key: str | None,
    tags: Collection[str],
    headers: Mapping[str, str] | None,
    after: Duration | None,
    at: datetime | None,
    bytes_max: int | None = None,
) -> OutboxMessage:
    """Check a message, and make it ready for sealing. Raises BadName, TypeError or Misuse, with the remedy."""
    data = payload if type(payload) is bytes else batch.as_bytes(payload)
    due_ms = 0 if after is None and at is None else due_of(after, at, clock)
    own_tags = tuple(tags) if tags else ()
    own_headers = dict(headers) if headers else None
    size_bytes = len(data)
    if key is not None or tags or headers:
        size_bytes += check_extras((key, own_tags, own_headers, None, due_ms), tags)
    check_size(size_bytes)
    if bytes_max is not None and size_bytes > bytes_max:
        raise Misuse(
            f"a message of {size_bytes:,} bytes: the database takes at most {bytes_max:,} in one row; send a reference "
            "to it, or have its administrator allow more (max_allowed_packet)"
        )
    route = _routes.get(subject) or _new_route(subject)
    if due_ms:
        return OutboxMessage(
            route._replace(is_due=True), is_far(due_ms, clock), data, key, own_tags, own_headers, id, due_ms
        )  # fmt: skip
    return OutboxMessage(route, False, data, key, own_tags, own_headers, id, 0)


_routes: dict[str, StreamRoute] = {}  # by subjects parsed before; a program has a few hundred at most


def _new_route(subject: str) -> StreamRoute:
    name = str(Subject.parse(subject))
    route = StreamRoute(name, False)
    if len(_routes) < limits.SUBJECTS_MAX:
        _routes[name] = route
    return route


# --- sealing ----------------------------------------------------------------------------------------------------------


class Picker:
    """Knows where messages go in a cluster. This one knows no broker group: relays choose later."""

    def pick(self, route: StreamRoute) -> str | None:
        """A broker group that takes messages of that subject now; None: no group is known."""
        return None

    def home(self, route: StreamRoute, key: Callable[[], str | None]) -> str | None:
        """The broker group of a key, in a subject whose keys are bound to groups; else None."""
        return None

    def is_lost(self, route: StreamRoute, group: str) -> bool:
        """Whether the cluster no longer has a group that may have stored something."""
        return False


def sealed(
    messages: Sequence[OutboxMessage], streams: Streams, created_ms: int, wake_ms: int
) -> list[tuple[OutboxRow, OutboxStream]]:
    """Rows for the messages of one transaction, each with its stream.

    The streams belong to the caller until the outcome is known. Several rows may have the same stream.
    """
    if len(messages) == 1:  # nearly every transaction
        [only] = messages
        stream = streams.take(only.route)
        row = _alone(only, created_ms, wake_ms, stream.producer_id, stream.next)
        row.secret = stream.secret
        return [(row, stream)]
    found: list[tuple[OutboxRow, OutboxStream]] = []
    taken: dict[StreamRoute, tuple[OutboxStream, int]] = {}
    for route, part in _parts(messages):
        stream, place = taken.get(route) or (streams.take(route), -1)
        if place < 0:
            place = stream.next
        row = _row(route, part, created_ms, wake_ms, stream.producer_id, place)
        row.secret = stream.secret
        taken[route] = stream, place + row.messages
        found.append((row, stream))
    return found


def placed(
    messages: Sequence[OutboxMessage], streams: Streams, created_ms: int, wake_ms: int, picker: Picker
) -> list[tuple[OutboxRow, OutboxStream | None]]:
    """`sealed` for a cluster: each row also has a broker group. A row without a stream is left to a relay's choice."""
    by_group: dict[str | None, list[OutboxMessage]] = {}
    picked: dict[StreamRoute, str | None] = {}  # one group for all messages that are not bound to one
    for each in messages:
        group = None if each.key is None else picker.home(each.route, partial(str, each.key))
        if group is None:
            if each.route not in picked:
                picked[each.route] = picker.pick(each.route)
            group = picked[each.route]
        is_alone = each.is_alone or (group is None and each.key is not None)  # its key may turn out to be bound
        route = each.route if group is None else each.route._replace(group=group)
        by_group.setdefault(group, []).append(each._replace(route=route, is_alone=is_alone))
    found: list[tuple[OutboxRow, OutboxStream | None]] = []
    for group, some in by_group.items():
        if group is None:
            found += [(row, None) for row in unstamped(some, created_ms)]
            continue
        for row, stream in sealed(some, streams, created_ms, wake_ms):
            row.group = group
            found.append((row, stream))
    return found


def _alone(only: OutboxMessage, created_ms: int, wake_ms: int, producer_id: int, place: int) -> OutboxRow:
    """A row of one message, in half the time that `_row` takes."""
    (subject, is_due, _), _, payload, key, tags, headers, born, due_ms = only
    body = batch.encode(
        (payload,), producer_id=producer_id, first_sequence=place, created_ms=created_ms, ids=(born,),
        keys=None if key is None else (key,), tags=(tags,) if tags else None,
        headers=None if headers is None else (headers,), due_ms=(due_ms,) if is_due else None,
    )  # fmt: skip
    row = OutboxRow(str(born), wake_ms, subject, 1, created_ms, producer_id, place, body)
    if not is_due:
        row.lone = Lone(only, producer_id, place, created_ms)
    return row


def together(some: Sequence[Lone]) -> bytes:
    """One batch of consecutive messages, each at the place that its row names."""
    first, columns = some[0], _columns([each.message for each in some])
    deltas_ms = [each.created_ms - first.created_ms for each in some]
    return batch.encode(
        columns.payloads, producer_id=first.stream, first_sequence=first.place, created_ms=first.created_ms,
        keys=columns.keys, tags=columns.tags, headers=columns.headers, ids=columns.ids, created_deltas_ms=deltas_ms,
    )  # fmt: skip


def together_again(rows: Sequence[OutboxRow]) -> bytes | None:
    """The batch that these rows made if they travelled as one; None: they cannot have."""
    some: list[Lone] = []
    for row in rows:
        if row.messages != 1 or row.is_due or row.stream is None or row.place is None:
            return None
        opened = batch.decode(row.body)
        made = OutboxMessage(
            row.route, False, opened.payloads[0], opened.key(0), tuple(opened.tags(0)), opened.headers(0) or None,
            opened.id(0), 0,
        )  # fmt: skip
        some.append(Lone(made, row.stream, row.place, opened.created_ms(0)))
    is_row = all(one.is_followed_by(other) for one, other in pairwise(some))
    return together(some) if len(some) > 1 and is_row else None


def unstamped(messages: Sequence[OutboxMessage], created_ms: int) -> list[OutboxRow]:
    """Rows whose stream a relay chooses."""
    return [_row(route, part, created_ms, created_ms, None, None) for route, part in _parts(messages)]


def _row(
    route: StreamRoute, part: MessageColumns, created_ms: int, wake_ms: int, stream: int | None, place: int | None
) -> OutboxRow:
    producer_id, first = UNSTAMPED if stream is None or place is None else (stream, place)
    ids = part.ids or ()
    body = part.encode(producer_id, first, created_ms, Codec.NONE)
    return OutboxRow(str(ids[0]), wake_ms, route.subject, len(part.payloads), created_ms, stream, place, body)


def _parts(messages: Sequence[OutboxMessage]) -> Iterator[tuple[StreamRoute, MessageColumns]]:
    """The batches, in the order of their first messages."""
    if len(messages) == 1:
        yield messages[0].route, _columns(messages)
        return
    by_route: dict[tuple[StreamRoute, int], list[OutboxMessage]] = {}
    for number, each in enumerate(messages):
        by_route.setdefault((each.route, number if each.is_alone else -1), []).append(each)
    for (route, _), of_route in by_route.items():
        for part in _columns(of_route).parts(limits.LOT_MESSAGES_MAX, BATCH_BYTES_MAX):
            yield route, part


def _columns(messages: Sequence[OutboxMessage]) -> MessageColumns:
    """The columns of a batch; a column that no message uses is left out."""
    _, _, payloads, keys, tags, headers, ids, dues = zip(*messages, strict=True)
    return MessageColumns(
        payloads,
        None if keys.count(None) == len(keys) else keys,
        tags if any(tags) else None,
        headers if any(headers) else None,
        ids,
        dues if messages[0].route.is_due else None,
    )
