"""Messages on their way into a row: checked when they are given, sealed into batches when their transaction commits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import count, pairwise
from typing import Final, NamedTuple, Protocol

from fairway import batch, limits
from fairway.batch import Codec, MessageId
from fairway.client.core import Duration
from fairway.client.delaying import due_of, is_far
from fairway.errors import Misuse
from fairway.names import Subject
from fairway.protocol.filling import MessageColumns, check_extras, check_size
from fairway.sql.streams import OutboxStream, StreamRoute, Streams
from fairway.world.clock import Clock
from fairway.world.rng import Rng

BATCH_BYTES_MAX: Final = 1 * limits.MIB  # a larger message has a batch of its own
UNSTAMPED: Final = (1, 0)  # in the body of a batch whose stream a relay chooses


class OutboxMessage(NamedTuple):
    """One message."""

    route: StreamRoute
    is_alone: bool  # it may be refused: nobody else is to be refused with it
    payload: bytes
    key: str | None
    tags: tuple[str, ...]
    headers: dict[str, str] | None
    id: MessageId
    due_ms: int


class Lone(NamedTuple):
    """A message that has a row to itself, and its place: several that follow one another may travel together."""

    letter: OutboxMessage
    stream: int
    place: int
    created_ms: int

    def is_followed_by(self, other: Lone) -> bool:
        return self.stream == other.stream and self.place + 1 == other.place


class OutboxRow:
    """One batch, as it stands in the table."""

    __slots__ = (
        "body", "created_ms", "error", "group", "id", "is_due", "lone", "messages", "place", "secret", "stream",
        "subject", "wake_ms",
    )  # fmt: skip

    def __init__(
        self,
        id: str,
        wake_ms: int,
        subject: str,
        messages: int,
        created_ms: int,
        stream: int | None,
        place: int | None,
        body: bytes,
        error: str | None = None,
        group: str | None = None,
        secret: str | None = None,
    ) -> None:
        self.id = id
        self.wake_ms = wake_ms
        self.subject = subject
        self.messages = messages
        self.created_ms = created_ms
        self.stream = stream
        self.place = place
        self.body = body
        self.error = error
        self.group = group  # of brokers, in a cluster
        self.secret = secret  # of its stream
        self.lone: Lone | None = None  # what it was made of, where it was made here
        self.is_due = batch.is_delayed(body)

    @property
    def values(self) -> tuple[str, int, str, int, int, int | None, int | None, bytes]:
        """In the order of `tables.COLUMNS`."""
        return (
            self.id, self.wake_ms, self.subject, self.messages, self.created_ms, self.stream, self.place, self.body
        )  # fmt: skip

    @property
    def route(self) -> StreamRoute:
        return StreamRoute(self.subject, self.is_due)

    @property
    def shown(self) -> bytes:
        """What a broker is shown of its stream. Something else than hexadecimal digits is no secret of ours."""
        try:
            return bytes.fromhex(self.secret or "")
        except ValueError:
            return b""

    def key(self) -> str | None:
        """Of its first message."""
        return batch.decode(self.body).key(0)

    @property
    def stamped(self) -> bytes:
        """The bytes to send: those in the table, under the stream that the table names."""
        if self.stream is None or self.place is None:
            raise Misuse(f"the row {self.id} has no place in a stream yet: a relay gives it one")
        return batch.restamp(self.body, producer_id=self.stream, first_sequence=self.place)


class Origin:
    """Whom the ids of messages come from: one for each process and outbox."""

    __slots__ = ("_numbers", "_producer_id")

    def __init__(self, rng: Rng) -> None:
        self._producer_id = rng.bits(64) or 1
        self._numbers = count()

    def next_id(self) -> MessageId:
        return MessageId(self._producer_id, next(self._numbers))


def letter(
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
    """A message that can be sent; raises BadName, TypeError or Misuse, with the remedy."""
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


_routes: dict[str, StreamRoute] = {}  # by subjects that were parsed before; a program has a few hundred at most


def _new_route(subject: str) -> StreamRoute:
    name = str(Subject.parse(subject))
    route = StreamRoute(name, False)
    if len(_routes) < limits.SUBJECTS_MAX:
        _routes[name] = route
    return route


# --- sealing ----------------------------------------------------------------------------------------------------------


class Picker(Protocol):
    """Who knows in a cluster where messages go."""

    def pick(self, route: StreamRoute) -> str | None:
        """A group of brokers that takes messages of that subject now; None: nobody knows one."""

    def home(self, route: StreamRoute, key: Callable[[], str | None]) -> str | None:
        """The one that a key belongs to, in a subject whose keys have their places."""

    def is_lost(self, route: StreamRoute, group: str) -> bool:
        """Whether the cluster no longer has a group that may have something."""


class Nobody:
    """Knows nothing: a relay is to find out."""

    def pick(self, route: StreamRoute) -> str | None:
        return None

    def home(self, route: StreamRoute, key: Callable[[], str | None]) -> str | None:
        return None

    def is_lost(self, route: StreamRoute, group: str) -> bool:
        return False


def sealed(
    letters: Sequence[OutboxMessage], streams: Streams, created_ms: int, wake_ms: int
) -> list[tuple[OutboxRow, OutboxStream]]:
    """Rows for the messages of one transaction, each with the stream it is given a place in.

    The streams are the caller's until the outcome is known; each is given to as many rows as there are.
    """
    if len(letters) == 1:  # nearly every transaction
        [only] = letters
        stream = streams.take(only.route)
        row = _alone(only, created_ms, wake_ms, stream.producer_id, stream.next)
        row.secret = stream.secret
        return [(row, stream)]
    found: list[tuple[OutboxRow, OutboxStream]] = []
    taken: dict[StreamRoute, tuple[OutboxStream, int]] = {}
    for route, part in _parts(letters):
        stream, place = taken.get(route) or (streams.take(route), -1)
        if place < 0:
            place = stream.next
        row = _row(route, part, created_ms, wake_ms, stream.producer_id, place)
        row.secret = stream.secret
        taken[route] = stream, place + row.messages
        found.append((row, stream))
    return found


def placed(
    letters: Sequence[OutboxMessage], streams: Streams, created_ms: int, wake_ms: int, picker: Picker
) -> list[tuple[OutboxRow, OutboxStream | None]]:
    """The same in a cluster: each row has a group of brokers too. Without a stream: a relay chooses, when it can."""
    by_group: dict[str | None, list[OutboxMessage]] = {}
    picked: dict[StreamRoute, str | None] = {}  # what has no place of its own stays together
    for each in letters:
        group = None if each.key is None else picker.home(each.route, partial(_itself, each.key))
        if group is None:
            if each.route not in picked:
                picked[each.route] = picker.pick(each.route)
            group = picked[each.route]
        is_alone = each.is_alone or (group is None and each.key is not None)  # it may turn out to have one
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


def _itself(key: str | None) -> str | None:
    return key


def _alone(only: OutboxMessage, created_ms: int, wake_ms: int, producer_id: int, place: int) -> OutboxRow:
    """A row of one message: half the time of what is made for many."""
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
    """One batch of messages that follow one another: what their rows hold, each at the same place."""
    first, columns = some[0], _columns([each.letter for each in some])
    deltas_ms = [each.created_ms - first.created_ms for each in some]
    return batch.encode(
        columns.payloads, producer_id=first.stream, first_sequence=first.place, created_ms=first.created_ms,
        keys=columns.keys, tags=columns.tags, headers=columns.headers, ids=columns.ids, created_deltas_ms=deltas_ms,
    )  # fmt: skip


def together_again(rows: Sequence[OutboxRow]) -> bytes | None:
    """The batch that these rows made, each of one message, if they travelled as one; None: they cannot have."""
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


def unstamped(letters: Sequence[OutboxMessage], created_ms: int) -> list[OutboxRow]:
    """The same for rows whose stream is a relay's affair."""
    return [_row(route, part, created_ms, created_ms, None, None) for route, part in _parts(letters)]


def _row(
    route: StreamRoute, part: MessageColumns, created_ms: int, wake_ms: int, stream: int | None, place: int | None
) -> OutboxRow:
    producer_id, first = UNSTAMPED if stream is None or place is None else (stream, place)
    ids = part.ids or ()
    body = part.encode(producer_id, first, created_ms, Codec.NONE)
    return OutboxRow(str(ids[0]), wake_ms, route.subject, len(part.payloads), created_ms, stream, place, body)


def _parts(letters: Sequence[OutboxMessage]) -> Iterator[tuple[StreamRoute, MessageColumns]]:
    """The batches, in the order in which their first messages were given."""
    if len(letters) == 1:
        yield letters[0].route, _columns(letters)
        return
    by_route: dict[tuple[StreamRoute, int], list[OutboxMessage]] = {}
    for number, each in enumerate(letters):
        by_route.setdefault((each.route, number if each.is_alone else -1), []).append(each)
    for (route, _), of_route in by_route.items():
        for part in _columns(of_route).parts(limits.LOT_MESSAGES_MAX, BATCH_BYTES_MAX):
            yield route, part


def _columns(letters: Sequence[OutboxMessage]) -> MessageColumns:
    """What nobody has is left out."""
    _, _, payloads, keys, tags, headers, ids, dues = zip(*letters, strict=True)
    return MessageColumns(
        payloads,
        None if keys.count(None) == len(keys) else keys,
        tags if any(tags) else None,
        headers if any(headers) else None,
        ids,
        dues if letters[0].route.is_due else None,
    )
