"""What `client.consumer(...)` takes beside subject and group, in both faces; `ConsumerOptions` explains each."""

from __future__ import annotations

from typing import Literal, TypeAlias, TypedDict

from fairway.batch import MessageId
from fairway.errors import Misuse
from fairway.protocol.consumption import ConsumerOptions
from fairway.protocol.messages import Whence
from fairway.protocol.terms import CoalescePolicy, OrderPolicy, WantedTags

Start: TypeAlias = Literal["earliest", "latest"] | Whence

_STARTS = {"earliest": Whence.EARLIEST, "latest": Whence.LATEST}


class ConsumerSettings(TypedDict, total=False):
    """All of them may be left out."""

    consumer: str
    start: Start
    is_broadcast: bool
    config_version: int
    wanted: WantedTags | None
    order: OrderPolicy | None
    coalesce: CoalescePolicy | None
    rate_per_s: float | None
    rate_per_key: float | None
    prefetch_messages: int
    prefetch_bytes: int
    decoded_bytes_max: int
    linger_ms: float
    settle_messages: int
    wait_ms: int | None


def options_of(subject: str, group: str, settings: ConsumerSettings) -> ConsumerOptions:
    """The options of a consumer's session."""
    given = dict(settings)
    start = given.pop("start", Whence.EARLIEST)
    if not isinstance(start, Whence):
        if start not in _STARTS:
            raise Misuse(f"a new group starts at 'earliest' or 'latest', not at {start!r}; seek afterwards")
        start = _STARTS[str(start)]
    return ConsumerOptions(subject, group, start=start, **given)  # type: ignore[arg-type]


def id_of(given: MessageId | str) -> MessageId:
    """An explicit id, also where it was given as text."""
    return MessageId.parse(given) if isinstance(given, str) else given
