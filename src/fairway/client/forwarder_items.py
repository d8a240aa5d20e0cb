"""What a forwarder takes in and sends on, and how it behaves: the same for both faces."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Generic, Literal, TypeAlias, TypeVar

import msgspec

from fairway import limits
from fairway.batch import MessageId
from fairway.client.core import Duration, seconds_of
from fairway.client.spool_journal import Journal
from fairway.errors import Misuse

ItemT = TypeVar("ItemT")

MESSAGES_PER_ITEM_MAX = 1 << 16  # their ids follow from the item's


class Outgoing(msgspec.Struct, frozen=True):
    """A message that `process` makes of an item; the fields are those of `Client.send`."""

    subject: str
    payload: bytes
    key: str | None = None
    tags: Collection[str] = ()
    headers: Mapping[str, str] | None = None
    after: Duration | None = None
    at: datetime | None = None


Made: TypeAlias = Outgoing | Iterable[Outgoing] | None


@dataclass(frozen=True, slots=True)
class ForwarderOptions(Generic[ItemT]):
    """How a forwarder behaves."""

    workers: int = 4
    capacity: int = 10_000  # items in memory
    when_full: Literal["block", "raise", "spool"] = "block"  # "spool": to the journal
    block: Duration = 60.0  # how long `accept` waits for room; then BufferFull
    journal: str | None = None  # the directory where items are kept that wait
    persist_after: Duration = 1.0  # an item that has waited so long is written down, and all before it
    persist_items: int = 1_000  # the same where more than so many wait
    journal_bytes_max: int = 1 * limits.GIB
    encode: Callable[[ItemT], bytes] | None = None  # for the journal; bytes need none
    decode: Callable[[bytes], ItemT] | None = None
    attempts: int = 5  # of `process` and of sending what it made
    backoff_first_ms: int = 100
    backoff_most_ms: int = 5_000

    def __post_init__(self) -> None:
        for name in ("workers", "capacity", "attempts", "journal_bytes_max", "backoff_first_ms"):
            if getattr(self, name) < 1:
                raise Misuse(f"{name} of a forwarder is {getattr(self, name)}: it is 1 or more")
        if self.when_full not in ("block", "raise", "spool"):
            raise Misuse(f"when_full={self.when_full!r}: it is 'block', 'raise' or 'spool'")
        if self.when_full == "spool" and self.journal is None:
            raise Misuse("when_full='spool' needs a journal: journal='/var/lib/app/spool'")
        if (self.encode is None) != (self.decode is None):
            raise Misuse("encode= and decode= go together: what one writes the other reads")
        if self.persist_items < 0 or self.backoff_most_ms < self.backoff_first_ms:
            raise Misuse("persist_items is 0 or more, and backoff_most_ms at least backoff_first_ms")
        seconds_of(self.persist_after)
        seconds_of(self.block)

    def to_bytes(self, value: ItemT) -> bytes:
        data = value if self.encode is None else self.encode(value)
        if not isinstance(data, bytes):
            raise TypeError(
                f"an item for the journal is bytes, not {type(data).__name__}: give encode= and decode= (or no journal)"
            )
        return data

    def from_bytes(self, data: bytes) -> ItemT:
        return data if self.decode is None else self.decode(data)  # type: ignore[return-value]


class ForwarderCounts(msgspec.Struct, frozen=True):
    """How a forwarder stands."""

    accepted: int = 0
    forwarded: int = 0  # items of which every message has a receipt
    messages: int = 0  # that were sent
    waiting: int = 0  # items in memory, those at work among them
    on_disk: int = 0  # items in the journal, some of which are in memory too
    retries: int = 0
    set_aside: int = 0  # items that failed for good


class FailedItem(msgspec.Struct, Generic[ItemT], frozen=True):
    """An item that failed every time."""

    item: ItemT
    error: Exception


class Item(Generic[ItemT]):
    """One that was accepted."""

    __slots__ = ("attempts", "entry", "is_finished", "is_keeping", "number", "owner", "since_ns", "value")

    def __init__(self, value: ItemT, owner: int, number: int, since_ns: int) -> None:
        self.value = value
        self.owner = owner  # the forwarder that accepted it, and its number there: so its messages have lasting ids
        self.number = number
        self.since_ns = since_ns
        self.attempts = 0
        self.entry: tuple[Journal, int] | None = None  # in the journal: which one, and its number there
        self.is_keeping = False  # on its way there
        self.is_finished = False

    def messages(self, made: Made) -> Iterator[tuple[Outgoing, MessageId]]:
        """What `process` made of it, with ids that are the same whenever it is made again."""
        if made is None:
            return
        for index, each in enumerate([made] if isinstance(made, Outgoing) else made):
            _check(each, index)
            yield each, MessageId(self.owner, self.number * MESSAGES_PER_ITEM_MAX + index)


def _check(made: object, index: int) -> None:
    if not isinstance(made, Outgoing) or index >= MESSAGES_PER_ITEM_MAX:
        raise Misuse(
            f"process() gives fairway.Outgoing, several of them (up to {MESSAGES_PER_ITEM_MAX}), or None; not "
            f"{type(made).__name__}"
        )


def lost_items(left: int, timeout: Duration) -> TimeoutError:
    """What `stop` raises where nothing can keep them."""
    return TimeoutError(f"{left} items are not sent on after {timeout} s, and are lost: a journal would keep them")
