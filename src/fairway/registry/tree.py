"""Tree of the registry: which changes are allowed, and what they do. No I/O and no clock.

`create`, `put`, `remove` and `end` return the changes, or raise; `apply` makes the changes. A registry on disk writes
the changes between the two. The root always exists.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from fairway import limits
from fairway.errors import Misuse, invariant
from fairway.registry.port import Exists, Missing, Node, NotAllowed, VersionMismatch

ROOT_PATH = "/"
VALUE_BYTES_MAX = 1_000_000  # ZooKeeper drops the connection of a client that sends a frame of more than 1 MiB
PATH_CHARS_MAX = 1_000
_NAME = r"(?!\.{1,2}(?:/|$))[^/\x00-\x1f\x7f-\x9f\ud800-\uf8ff\ufff0-\uffff]+"  # the names that ZooKeeper accepts
_PATH = re.compile(rf"/|(?:/{_NAME})+")


class NodeChange(NamedTuple):
    """The change of one node."""

    path: str
    node: Node | None  # None: the node is removed
    numbered: int = 0  # the number that the next numbered node below it gets
    is_news: bool = True  # False: only the counter changes, which nobody can see


def checked_path(path: str) -> str:
    """The path, if every implementation can have a node there."""
    if len(path) > PATH_CHARS_MAX or _PATH.fullmatch(path) is None:
        raise Misuse(f"bad path {path[:100]!r} of a registry node: write it like /fairway/groups/g1")
    return path


def checked_value(path: str, value: bytes) -> bytes:
    if len(value) > VALUE_BYTES_MAX:
        raise Misuse(f"{len(value)} bytes are too many for registry node {path}: at most {VALUE_BYTES_MAX}")
    return value


def checked_version(path: str, version: int | None) -> int | None:
    if version is not None and version < 0:
        raise Misuse(f"version {version} of registry node {path}: versions begin with 0")
    return version


def above(path: str) -> str:
    return path.rpartition("/")[0] or ROOT_PATH


def is_below(path: str, root: str) -> bool:
    """Whether a node is in the tree of another node, and not that node itself."""
    return path.startswith(root if root == ROOT_PATH else f"{root}/") and path != root


def changed(changes: Iterable[NodeChange]) -> list[str]:
    """The changed nodes, in order, without the nodes above them."""
    return [change.path for change in changes if change.is_news]


def touched(changes: Iterable[NodeChange]) -> list[str]:
    """The nodes whose watches must be called, in order: changed nodes, and nodes whose list of children has changed."""
    paths: dict[str, None] = {}
    for change in changes:
        if change.is_news:
            paths[change.path] = None
            if change.node is None or change.node.version == 0:
                paths[above(change.path)] = None
    return list(paths)


def node_bytes(path: str, node: Node | None) -> int:
    """Memory of a node, as an estimate; 0 if the node is gone."""
    return 0 if node is None else limits.NODE_BYTES + len(path) + len(node.value)


@dataclass(slots=True, eq=False)
class _TreeNode:
    node: Node
    numbered: int
    children: set[str] = field(default_factory=set)


class Tree:
    """All nodes, as they are now."""

    def __init__(self) -> None:
        self._entries = {ROOT_PATH: _TreeNode(Node(ROOT_PATH, b"", 0, 0), 0)}
        self._owned: dict[int, dict[str, None]] = {}  # by session: its ephemeral nodes, in order of creation
        self.held_bytes = 0  # memory of all nodes, as an estimate

    def copy(self) -> Tree:
        twin = Tree()
        twin.apply(NodeChange(path, entry.node, entry.numbered) for path, entry in sorted(self._entries.items()))
        return twin

    # --- looking -----------------------------------------------------------------------------------------------------

    def get(self, path: str) -> Node | None:
        entry = self._entries.get(path)
        return None if entry is None else entry.node

    def children(self, path: str) -> list[str]:
        entry = self._entries.get(path)
        return [] if entry is None else sorted(entry.children)

    def owned(self, session: int) -> list[str]:
        return list(self._owned.get(session, ()))

    # --- deciding ----------------------------------------------------------------------------------------------------

    def create(self, path: str, value: bytes = b"", *, owner: int = 0, is_numbered: bool = False) -> list[NodeChange]:
        """Create a node. The last of the changes is the new node."""
        if path == ROOT_PATH:
            raise Exists("the root of the registry is always there")
        changes = self._make_above(path)
        if is_numbered:
            changes = [change for change in changes if change.path != above(path)]
            numbered, counted = self._number(path)
            changes.append(counted)
            path = numbered
        if path in self._entries:
            raise Exists(f"there is a registry node {path} already")
        return [*changes, NodeChange(path, Node(path, value, 0, owner))]

    def _make_above(self, path: str) -> list[NodeChange]:
        """Create the missing nodes above it, the highest first."""
        missing = []
        place = above(path)
        while place not in self._entries:
            missing.append(NodeChange(place, Node(place, b"", 0, 0)))
            place = above(place)
        if self._entries[place].node.owner:
            raise NotAllowed(f"no registry node {path}: {place} goes with a session, and has no nodes below it")
        return missing[::-1]

    def _number(self, path: str) -> tuple[str, NodeChange]:
        """The path with the first free number after it, and the parent with its new counter."""
        place = above(path)
        entry = self._entries.get(place)
        number = 0 if entry is None else entry.numbered
        while f"{path}{number:010d}" in self._entries:
            number += 1
        node = Node(place, b"", 0, 0) if entry is None else entry.node
        return f"{path}{number:010d}", NodeChange(place, node, number + 1, is_news=entry is None)

    def put(self, path: str, value: bytes, version: int) -> list[NodeChange]:
        entry = self._expect(path, version)
        node = entry.node._replace(value=value, version=version + 1)
        return [NodeChange(path, node, entry.numbered)]

    def remove(self, path: str, version: int | None = None) -> list[NodeChange]:
        if path == ROOT_PATH:
            raise NotAllowed("the root of the registry stays")
        if self._expect(path, version).children:
            raise NotAllowed(f"registry node {path} has nodes below it: remove them first")
        return [NodeChange(path, None)]

    def end(self, session: int) -> list[NodeChange]:
        """A session is over: remove its ephemeral nodes."""
        return [NodeChange(path, None) for path in self.owned(session)]

    def _expect(self, path: str, version: int | None) -> _TreeNode:
        entry = self._entries.get(path)
        if entry is None:
            raise Missing(f"there is no registry node {path}")
        if version is not None and version != entry.node.version:
            raise VersionMismatch(f"registry node {path} has version {entry.node.version}, not {version}")
        return entry

    def growth_bytes(self, changes: Iterable[NodeChange]) -> int:
        """How much more memory the nodes take after these changes; negative: less."""
        return sum(node_bytes(change.path, change.node) - self._bytes_at(change.path) for change in changes)

    def _bytes_at(self, path: str) -> int:
        entry = self._entries.get(path)
        return 0 if entry is None else node_bytes(path, entry.node)

    # --- acting ------------------------------------------------------------------------------------------------------

    def apply(self, changes: Iterable[NodeChange]) -> None:
        for change in changes:
            self.held_bytes += self.growth_bytes([change])
            if change.node is None:
                self._drop(change.path)
            else:
                self._set(change.path, change.node, change.numbered)

    def _set(self, path: str, node: Node, numbered: int) -> None:
        entry = self._entries.get(path)
        if entry is not None:
            entry.node, entry.numbered = node, numbered
            return
        parent = self._entries.get(above(path))
        invariant(parent is not None, f"registry node {path} has nothing above it")
        if parent is not None:
            parent.children.add(path.rpartition("/")[2])
        self._entries[path] = _TreeNode(node, numbered)
        if node.owner:
            self._owned.setdefault(node.owner, {})[path] = None

    def _drop(self, path: str) -> None:
        entry = self._entries.pop(path)
        invariant(not entry.children, f"registry node {path} went before the nodes below it")
        self._entries[above(path)].children.discard(path.rpartition("/")[2])
        if entry.node.owner:
            mine = self._owned[entry.node.owner]
            del mine[path]
            if not mine:
                del self._owned[entry.node.owner]
