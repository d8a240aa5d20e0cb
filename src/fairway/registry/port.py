"""Interface of a registry: a small tree of nodes with versions, sessions with ephemeral nodes, and watches.

The interface is a part of ZooKeeper's. A caller may rely on these promises:

- Every change is compare-and-set, and all sessions see all changes in one order.
- `AnswerLost` means that nobody knows whether a change was made. The caller must read back before it draws a
  conclusion.
- A read is at least as new as every change that this session has seen. A read with `fresh=True` is at least as new as
  every change that any session had seen before the read began.
- A watch is called on the loop after its node or the list of the node's children has changed. The call may come late,
  repeatedly, or without need, but it always comes. After a failure of the session, all watches are called.
- A tree watch is called with the path of each node below its own that was created, changed or removed, under the same
  terms. When it begins, and after a failure of the session, it is called with its own path: anything below may have
  changed.
- A new session follows on an ended one without a call. The ephemeral nodes of the old session are gone by then or soon
  after, and their owners must create them again (`on_session`).
- `certain_until_ns` is on the monotonic clock. Until then no other session can have seen this one end, whatever the
  network does. A caller that acts by right of an ephemeral node stops there.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from fairway.errors import FairwayError


class Node(NamedTuple):
    """A node at the time of the read."""

    path: str
    value: bytes
    version: int  # 0 when created, one more with each change
    owner: int  # the session whose end removes it; 0: it stays


class RegistryError(FairwayError):
    """Base of all registry errors; the sentence names the node."""


class Exists(RegistryError):
    """The node exists already. Nothing was changed."""


class Missing(RegistryError):
    """The node does not exist. Nothing was changed."""


class VersionMismatch(RegistryError):
    """The node has another version than expected. Nothing was changed."""


class NotAllowed(RegistryError):
    """The tree does not allow the change: a node with children cannot be removed, and an ephemeral node has no
    children. Nothing was changed."""


class AnswerLost(RegistryError):
    """No answer came: nobody knows whether the change was made."""


class SessionOver(RegistryError):
    """The session ended before the request. The change was not made."""


class Unsupported(RegistryError):
    """The servers of the registry are too old for the request. Nothing was changed."""


class SessionState(enum.Enum):
    OPEN = "open"  # connected; after OVER this is a new session
    SUSPENDED = "suspended"  # no connection: the session may be ending
    OVER = "over"  # its ephemeral nodes are gone


class Watch(Protocol):
    def cancel(self) -> None: ...


class Registry(Protocol):
    """One session at a registry. Lives on one loop. Paths look like `/fairway/groups/g1`."""

    on_session: Callable[[SessionState], None]

    @property
    def session_id(self) -> int:
        """The number of the session; 0 while there is none."""

    def certain_until_ns(self) -> int:
        """Until when this session certainly lives; in the past while there is none."""

    async def get(self, path: str, *, fresh: bool = False) -> Node | None: ...

    async def get_many(self, paths: Sequence[str]) -> list[Node | None]:
        """Do as `get`, for many nodes in few requests. The nodes need not be of one moment."""

    async def children(self, path: str) -> list[str]:
        """The names of the children, sorted; empty if the node does not exist."""

    async def create(
        self, path: str, value: bytes = b"", *, is_ephemeral: bool = False, is_numbered: bool = False
    ) -> Node:
        """Create a node, and missing nodes above it; raises `Exists`. A numbered node gets ten digits after its
        name."""

    async def put(self, path: str, value: bytes, version: int) -> Node:
        """Change a node; raises `Missing`, `VersionMismatch`."""

    async def remove(self, path: str, version: int | None = None) -> None:
        """Remove a node without children; raises `Missing`, `VersionMismatch`. None: whatever its version."""

    def watch(self, path: str, changed: Callable[[], None]) -> Watch: ...

    def watch_tree(self, path: str, changed: Callable[[str], None]) -> Watch:
        """Watch everything below a node. The cost does not depend on how many nodes there are."""

    async def close(self) -> None:
        """End the session, which removes its ephemeral nodes."""
