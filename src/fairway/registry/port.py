"""The port: a small tree of nodes with versions, sessions whose ephemeral nodes go with them, and watches.

It is what ZooKeeper offers, less what nobody here needs. What a caller may rely on:

- Every change is compare-and-set, and all sessions see all changes in one order.
- `AnswerLost` means that nobody knows whether a change was made: read back before anything is concluded from it.
- A read is at least as new as every change that this session was told of, and `fresh=True` as every change that any
  session was told of before the read began.
- A watch is called on the loop after its node or the list of its children has changed: once or several times for one
  change, perhaps late, perhaps for nothing, never never. After trouble with the session all watches are called.
- A tree watch is called with the path of each node below its own that was made, changed or removed, under the same
  terms. When it begins, and after trouble with the session, it is called with its own path: anything below may have
  changed.
- A session that ends is followed by a new one, by itself; the ephemeral nodes of the old one are gone by then or soon
  after, and it is for their owners to make them again (`on_session`).
- `certain_until_ns` is on the monotonic clock: up to then no other session can have seen this one end, whatever happens
  to the network. Whoever acts by right of an ephemeral node stops there.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from fairway.errors import FairwayError


class Node(NamedTuple):
    """A node as it was."""

    path: str
    value: bytes
    version: int  # 0 when it was made, one more with each change
    owner: int  # the session whose end ends it; 0: it stays


class RegistryError(FairwayError):
    """Base of what can go wrong; the sentence names the node."""


class Exists(RegistryError):
    """There is such a node already. Nothing was changed."""


class Missing(RegistryError):
    """There is no such node. Nothing was changed."""


class VersionMismatch(RegistryError):
    """The node has another version than was expected. Nothing was changed."""


class NotAllowed(RegistryError):
    """The tree does not allow it: to remove a node that has children, to make one below a node that goes with a
    session. Nothing was changed."""


class AnswerLost(RegistryError):
    """No answer came: whether the change was made is not known."""


class SessionOver(RegistryError):
    """The session had ended before the change was made: it was not."""


class Unsupported(RegistryError):
    """The servers of the registry are too old for the request. Nothing was changed."""


class SessionState(enum.Enum):
    OPEN = "open"  # and everything is well; after OVER it is a new one
    SUSPENDED = "suspended"  # no connection: it may be ending
    OVER = "over"  # its ephemeral nodes are gone


class Watch(Protocol):
    def cancel(self) -> None: ...


class Registry(Protocol):
    """One session at a registry. Lives on one loop; paths are like `/fairway/groups/g1`."""

    on_session: Callable[[SessionState], None]

    @property
    def session_id(self) -> int:
        """0 while there is none."""

    def certain_until_ns(self) -> int:
        """Until when this session certainly lives; in the past while there is none."""

    async def get(self, path: str, *, fresh: bool = False) -> Node | None: ...

    async def get_many(self, paths: Sequence[str]) -> list[Node | None]:
        """As `get`, for many nodes in few questions. They need not be of one moment."""

    async def children(self, path: str) -> list[str]:
        """Their names, sorted; none where the node is missing."""

    async def create(
        self, path: str, value: bytes = b"", *, is_ephemeral: bool = False, is_numbered: bool = False
    ) -> Node:
        """Make a node, and those above it; `Exists`. A numbered one gets ten digits behind its name."""

    async def put(self, path: str, value: bytes, version: int) -> Node:
        """Change it; `Missing`, `VersionMismatch`."""

    async def remove(self, path: str, version: int | None = None) -> None:
        """Remove a node without children; `Missing`, `VersionMismatch`. None: whatever its version."""

    def watch(self, path: str, changed: Callable[[], None]) -> Watch: ...

    def watch_tree(self, path: str, changed: Callable[[str], None]) -> Watch:
        """One watch for everything below a node; what it costs does not depend on how much that is."""

    async def close(self) -> None:
        """End the session; its ephemeral nodes go."""
