"""The batch builder: columns of messages that become one batch, and the checks of a message before it is added.

The producer checks each message when it is added. So a mistake raises for its own caller, and never fails other
messages of the batch. Usual messages are checked here in a few instructions. For the rest, `batch.encode` checks that
one message, so that the rules are written once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import TypeAlias

from fairway import batch, limits
from fairway.batch import Codec, MessageId
from fairway.batch.layout import TIME_MS_MAX
from fairway.errors import Misuse
from fairway.protocol.receipts import PendingBatch

MESSAGE_BYTES_MAX = limits.BATCH_RAW_BYTES_MAX - 4 * limits.KIB  # the rest is for the batch around its only message


# The optional parts of a message: key, tags, headers, explicit id, due time.
Extras: TypeAlias = tuple[str | None, tuple[str, ...], dict[str, str] | None, MessageId | None, int]
NOTHING: Extras = (None, (), None, None, 0)


def check_extras(extras: Extras, tags: Collection[str]) -> int:
    """The bytes of the extras, for the buffer; raises if they are not valid. `tags` are as the caller gave them."""
    key, own_tags, headers, message_id, due_ms = extras
    size_bytes = 0
    is_plain = headers is None and message_id is None and type(due_ms) is int and 0 <= due_ms <= TIME_MS_MAX
    if key is not None:
        if type(key) is str and key.isascii() and len(key) <= limits.KEY_BYTES_MAX:
            size_bytes = len(key)
        else:
            is_plain = False
    if own_tags and not _are_plain(tags):
        is_plain = False
    if not is_plain:
        _judge(extras, tags)
        size_bytes = len(key or "")
        if headers is not None:
            size_bytes += sum(map(len, chain(headers, headers.values())))
    return size_bytes + sum(map(len, own_tags)) if own_tags else size_bytes


def _are_plain(tags: Collection[str]) -> bool:
    """Whether the tags are valid at a glance: a few short ASCII words."""
    if type(tags) is not tuple or len(tags) > limits.BATCH_TAGS_MAX:
        return False
    try:
        return all(map(str.isascii, tags)) and max(map(len, tags)) <= limits.TAG_BYTES_MAX
    except TypeError:  # not all are text
        return False


def _judge(extras: Extras, tags: Collection[str]) -> None:
    """Raise if an extra is not valid."""
    key, _, headers, message_id, due_ms = extras
    if key is not None and not isinstance(key, str):
        raise TypeError(f"a key is a str, not {type(key).__name__}")
    batch.encode(
        [b""], producer_id=1, first_sequence=0, created_ms=0,
        keys=[key], tags=[tags], headers=[headers], ids=[message_id], due_ms=[due_ms],
    )  # fmt: skip


class BatchBuilder:
    """A batch that still takes messages."""

    __slots__ = ("created_ms", "extras", "opened_ns", "payloads", "pending", "size_bytes")

    def __init__(self, pending: PendingBatch, opened_ns: int, created_ms: int) -> None:
        self.pending = pending
        self.opened_ns = opened_ns
        self.created_ms = created_ms
        self.payloads: list[bytes] = []
        self.size_bytes = 0
        self.extras: list[Extras] | None = None  # one per payload, as soon as some message has any

    def enrich(self, extras: Extras | None) -> None:
        """Add the extras of the message whose payload was just added."""
        if self.extras is None:
            self.extras = [NOTHING] * (len(self.payloads) - 1)
        self.extras.append(NOTHING if extras is None else extras)

    def encode(self, producer_id: int, first_sequence: int, codec: Codec) -> bytes:
        """The bytes of the batch, which takes no more messages from here on."""
        pending = self.pending
        pending.count = len(self.payloads)
        if self.extras is None:
            return batch.encode(
                self.payloads, producer_id=producer_id, first_sequence=first_sequence, created_ms=self.created_ms,
                codec=codec,
            )  # fmt: skip
        keys, tags, headers, ids, due_ms = zip(*self.extras, strict=True)
        pending.ids = ids if any(ids) else None
        return batch.encode(
            self.payloads, producer_id=producer_id, first_sequence=first_sequence, created_ms=self.created_ms,
            keys=keys, tags=tags, headers=headers, ids=ids, due_ms=due_ms, codec=codec,
        )  # fmt: skip


class MessageColumns:
    """The columns of many messages, as the caller gave them."""

    __slots__ = ("due_ms", "headers", "ids", "keys", "payloads", "size_bytes", "tags")

    def __init__(
        self,
        payloads: Sequence[bytes],
        keys: Sequence[str | None] | None,
        tags: Sequence[Collection[str] | None] | None,
        headers: Sequence[Mapping[str, str] | None] | None,
        ids: Sequence[MessageId | None] | None,
        due_ms: Sequence[int] | None,
    ) -> None:
        self.payloads = payloads
        self.keys = keys
        self.tags = tags
        self.headers = headers
        self.ids = ids
        self.due_ms = due_ms
        for name in ("keys", "tags", "headers", "ids", "due_ms"):
            column = getattr(self, name)
            if column is not None and len(column) != len(payloads):
                raise Misuse(f"{len(column)} {name} for {len(payloads)} payloads: give one for each, or None for all")
        self.size_bytes = sum(map(len, payloads)) + self._extra_bytes()

    def _extra_bytes(self) -> int:
        """The bytes of keys, tags and headers. A wrong type counts 0 here; `batch.encode` reports it."""
        try:
            total = sum(map(len, filter(None, self.keys or ())))
            total += sum(map(len, chain.from_iterable(filter(None, self.tags or ()))))
            for header in filter(None, self.headers or ()):
                total += sum(map(len, chain(header, header.values())))
        except (TypeError, AttributeError):
            return 0
        return total

    def parts(self, messages_max: int, bytes_max: int) -> Iterator[MessageColumns]:
        """Cut into parts, in order, each full by count or by bytes of payload; a larger message is a part of its
        own."""
        most = len(self.payloads)
        if 0 < most <= messages_max and self.size_bytes <= bytes_max:
            yield self
            return
        ends = list(accumulate(map(len, self.payloads), initial=0))
        begin = 0
        while begin < most:
            by_bytes = bisect_right(ends, ends[begin] + bytes_max) - 1
            end = min(max(by_bytes, begin + 1), begin + messages_max, most)
            yield self._part(slice(begin, end))
            begin = end

    def _part(self, part: slice) -> MessageColumns:
        return MessageColumns(
            self.payloads[part],
            None if self.keys is None else self.keys[part],
            None if self.tags is None else self.tags[part],
            None if self.headers is None else self.headers[part],
            None if self.ids is None else self.ids[part],
            None if self.due_ms is None else self.due_ms[part],
        )

    def encode(self, producer_id: int, first_sequence: int, created_ms: int, codec: Codec) -> bytes:
        """Encode all as one batch; raises if any message is not valid."""
        return batch.encode(
            self.payloads, producer_id=producer_id, first_sequence=first_sequence, created_ms=created_ms,
            keys=self.keys, tags=self.tags, headers=self.headers, ids=self.ids, due_ms=self.due_ms, codec=codec,
        )  # fmt: skip


def check_size(size_bytes: int) -> None:
    """Raise if the message does not fit into a batch of its own."""
    if size_bytes > MESSAGE_BYTES_MAX:
        raise Misuse(
            f"a message of {size_bytes} bytes: at most {MESSAGE_BYTES_MAX} are allowed; send a reference to it"
        )
