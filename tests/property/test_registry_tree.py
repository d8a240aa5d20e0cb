"""The tree of the registry against a model that is too simple to be wrong: a flat table of paths."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fairway.registry.port import Exists, Missing, Node, NotAllowed, RegistryError, VersionMismatch
from fairway.registry.tree import NodeChange, Tree, touched

NAMES = ("a", "b", "n-")
PATHS = [f"/{one}" for one in NAMES] + [f"/{one}/{two}" for one in NAMES for two in NAMES]
PATHS += [f"{path}/deep" for path in PATHS]
paths = st.sampled_from(PATHS)
values = st.binary(max_size=3)
sessions = st.integers(1, 3)


def above(path: str) -> str:
    return "/".join(path.split("/")[:-1]) or "/"


class TreeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tree = Tree()
        self.rows: dict[str, Node] = {"/": Node("/", b"", 0, 0)}
        self.given: dict[str, int] = {}  # the last number below a node

    def both(self, decide: Callable[[], list[NodeChange]], model: Callable[[], Node | None]) -> list[NodeChange]:
        """The tree and the model do the same, or refuse for the same reason; watches hear of all that differs."""
        before = dict(self.rows)
        try:
            expected: Node | type[RegistryError] | None = model()
        except RegistryError as error:
            expected = type(error)
        if isinstance(expected, type):
            with pytest.raises(expected):
                decide()
            assert self.rows == before
            return []
        changes = decide()
        assert changes[-1].node == expected
        self.tree.apply(changes)
        differing = {path for path in before.keys() | self.rows.keys() if before.get(path) != self.rows.get(path)}
        listed = {above(path) for path in before.keys() ^ self.rows.keys()}
        assert set(touched(changes)) == differing | listed
        return changes

    def make(self, path: str, value: bytes, owner: int) -> Node:
        missing = []
        place = above(path)
        while place not in self.rows:
            missing.append(place)
            place = above(place)
        if self.rows[place].owner:
            raise NotAllowed
        if path in self.rows:
            raise Exists
        for each in missing:
            self.rows[each] = Node(each, b"", 0, 0)
        node = self.rows[path] = Node(path, value, 0, owner)
        return node

    def below(self, path: str) -> list[str]:
        return [each for each in self.rows if each != "/" and above(each) == path]

    @rule(path=paths, value=values, owner=st.one_of(st.just(0), sessions))
    def create(self, path: str, value: bytes, owner: int) -> None:
        self.both(lambda: self.tree.create(path, value, owner=owner), lambda: self.make(path, value, owner))

    @rule(path=paths, owner=st.one_of(st.just(0), sessions))
    def create_numbered(self, path: str, owner: int) -> None:
        number = self.given.get(above(path), 0)
        while f"{path}{number:010d}" in self.rows:
            number += 1
        name = f"{path}{number:010d}"
        changes = self.both(
            lambda: self.tree.create(path, owner=owner, is_numbered=True), lambda: self.make(name, b"", owner)
        )
        if changes:
            self.given[above(path)] = number + 1

    @rule(path=paths, value=values, version=st.integers(0, 3))
    def put(self, path: str, value: bytes, version: int) -> None:
        def model() -> Node:
            if path not in self.rows:
                raise Missing
            if self.rows[path].version != version:
                raise VersionMismatch
            node = self.rows[path] = Node(path, value, version + 1, self.rows[path].owner)
            return node

        self.both(lambda: self.tree.put(path, value, version), model)

    @rule(path=paths, version=st.one_of(st.none(), st.integers(0, 2)))
    def remove(self, path: str, version: int | None) -> None:
        def model() -> None:
            if path not in self.rows:
                raise Missing
            if version is not None and self.rows[path].version != version:
                raise VersionMismatch
            if self.below(path):
                raise NotAllowed
            del self.rows[path]
            self.given.pop(path, None)

        self.both(lambda: self.tree.remove(path, version), model)

    @rule(session=sessions)
    def end(self, session: int) -> None:
        going = [path for path, node in self.rows.items() if node.owner == session]
        if not going:
            assert self.tree.end(session) == []
            return

        def model() -> None:
            for path in going:
                del self.rows[path]

        self.both(lambda: self.tree.end(session), model)

    @rule()
    def copy(self) -> None:
        """As a restart does."""
        self.tree = self.tree.copy()

    @invariant()
    def same(self) -> None:
        for path in {*PATHS, *self.rows}:
            assert self.tree.get(path) == self.rows.get(path)
            assert self.tree.children(path) == sorted(each.rpartition("/")[2] for each in self.below(path))
        for session in (1, 2, 3):
            owned = [path for path, node in self.rows.items() if node.owner == session]
            assert sorted(self.tree.owned(session)) == sorted(owned)


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=60, stateful_step_count=30)
