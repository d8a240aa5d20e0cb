"""What a consumer must know of its group's configuration: how messages are settled, which are wanted, and how
often one may fail.

The rest of the configuration is the broker's affair. `Joined` carries all of it, as a MessagePack map. A program may
state policies that it counts on: a group that is new is made with them, and one that has others is an error.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, TypeAlias

import msgspec

from fairway.errors import RemoteProtocolError

OrderPolicy: TypeAlias = Literal["none", "key", "strict"]
CoalescePolicy: TypeAlias = Literal["none", "decline", "latest"]


class WantedTags(msgspec.Struct, frozen=True, array_like=True):
    """Messages with any, or with all, of these tags; without tags, every message."""

    tags: tuple[str, ...] = ()
    is_all: bool = False

    def accepts(self, tags: Collection[str]) -> bool:
        if not self.tags:
            return True
        has = (tag in tags for tag in self.tags)
        return all(has) if self.is_all else any(has)

    def means(self, other: WantedTags) -> bool:
        """Whether both want the same messages."""
        is_same_way = self.is_all == other.is_all or len(set(self.tags)) < 2
        return set(self.tags) == set(other.tags) and is_same_way

    def __str__(self) -> str:
        word = " and " if self.is_all else " or "
        return word.join(self.tags) if self.tags else "every message"


class Policies(msgspec.Struct, frozen=True, omit_defaults=True):
    """Fields of a group's configuration, by the same names; None: whatever holds."""

    order: OrderPolicy | None = None
    coalesce: CoalescePolicy | None = None
    rate_per_s: float | None = None
    rate_per_key: float | None = None

    @property
    def encoded(self) -> bytes | None:
        """As JOIN has them; None: nothing is stated."""
        is_stated = any(value is not None for value in msgspec.structs.asdict(self).values())
        return msgspec.msgpack.encode(self) if is_stated else None

    def difference(self, terms: Terms) -> str:
        """What is stated here and holds otherwise, for people; nothing: all of it holds."""
        stated = msgspec.structs.asdict(self).items()
        return ", ".join(
            f"its {name} is {getattr(terms, name)!r} and not {value!r}"
            for name, value in stated
            if value is not None and value != getattr(terms, name)
        )


class Terms(msgspec.Struct, frozen=True):
    """Of the configuration in force."""

    mode: Literal["at_least_once", "at_most_once"] = "at_least_once"
    tags: WantedTags = WantedTags()
    order: OrderPolicy = "none"
    coalesce: CoalescePolicy = "none"
    rate_per_s: float = 0.0
    rate_per_key: float = 0.0
    attempts_max: int = 16  # a message that fails so often is a dead letter

    @property
    def is_at_most_once(self) -> bool:
        return self.mode == "at_most_once"


def read(config: bytes) -> Terms:
    try:
        return msgspec.msgpack.decode(config, type=Terms)
    except msgspec.DecodeError as error:
        raise RemoteProtocolError(f"a group's configuration cannot be read: {error}") from error
