"""The settings that `client.consumer(...)` takes beside subject and group, and stretches of time such as `90s`.

`ConsumerOptions` describes each setting. People write stretches of time as `90s`, `15m`, `2h` or `3d`.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Final, Literal, TypeAlias, TypedDict

from fairway.batch import MessageId
from fairway.errors import Misuse
from fairway.protocol.consumer_options import ConsumerOptions
from fairway.protocol.messages import CoalescePolicy, OrderPolicy, WantedTags, Whence

HELP: Final = "90s, 15m, 2h, 3d"
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_SPAN: Final = re.compile(r"(\d+(?:\.\d+)?)([smhd])", re.ASCII)


def as_span(text: str) -> timedelta | None:
    """Parse a stretch of time; None: the text is not one."""
    found = _SPAN.fullmatch(text)
    try:
        return None if found is None else timedelta(**{_UNITS[found[2]]: float(found[1])})
    except OverflowError:
        raise Misuse(f"{text} is longer than there is time") from None


def span(text: str) -> timedelta:
    """Parse a stretch of time. Raises `Misuse` with examples."""
    found = as_span(text)
    if found is None:
        raise Misuse(f"{text!r} is no stretch of time: write {HELP}")
    return found


Start: TypeAlias = Literal["earliest", "latest"] | Whence

_STARTS = {"earliest": Whence.EARLIEST, "latest": Whence.LATEST}


class ConsumerSettings(TypedDict, total=False):
    """The settings of a consumer, all optional."""

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
    """The `ConsumerOptions` for these settings."""
    given = dict(settings)
    start = given.pop("start", Whence.EARLIEST)
    if not isinstance(start, Whence):
        if start not in _STARTS:
            raise Misuse(f"a new group starts at 'earliest' or 'latest', not at {start!r}; seek afterwards")
        start = _STARTS[str(start)]
    return ConsumerOptions(subject, group, start=start, **given)  # type: ignore[arg-type]


def id_of(given: MessageId | str) -> MessageId:
    """A message id, parsed if it is text."""
    return MessageId.parse(given) if isinstance(given, str) else given
