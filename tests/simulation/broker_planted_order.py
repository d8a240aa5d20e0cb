"""Bugs that a broker might have in groups that keep an order or merge requests. As in `broker_planted`, which gathers
them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from fairway.group_events import Range
from fairway.groups import pull, snapshot
from fairway.groups.config import GroupConfig
from fairway.groups.keys import Keys
from fairway.groups.lots import Lot
from fairway.groups.members import Roster
from fairway.groups.pull import OrderedSelection, Room
from fairway.groups.runs import Runs
from fairway.groups.state import GroupState
from tests.simulation.planted import swapped


def keys_forgotten_in_the_picture() -> AbstractContextManager[None]:
    def order(state: GroupState) -> object:
        return snapshot._Order(state.number, state.is_mixed)

    return swapped(snapshot, "_order", order)


def retry_frees_its_key() -> AbstractContextManager[None]:
    right = GroupState._fail

    def fail(
        self: GroupState,
        lot: Lot,
        attempt: int,
        attempts: int,
        due_ms: int,
        reason: bytes = b"",
        *,
        is_said: bool = False,
    ) -> None:
        right(self, lot, attempt, attempts, due_ms, reason, is_said=is_said)
        if self.keys is not None:
            self._free(self.keys._advance(self.keys.keys_of(lot.ranges)), 0)

    return swapped(GroupState, "_fail", fail)


def key_sees_no_one_before_it() -> AbstractContextManager[None]:
    right = pull.choose

    def choose(
        keys: Keys, first: int, fresh: Sequence[int], room: Room, config: GroupConfig, *rest: object
    ) -> OrderedSelection:
        return right(Keys(), first, fresh, room, config, (), 0, Runs(Keys(), 0))

    return swapped(pull, "choose", choose)


@contextmanager
def run_comes_back_loose() -> Iterator[None]:
    def begun(self: GroupState, lot: Lot) -> int:
        return lot.mask

    def hold_back(self: Keys, ranges: Iterable[Range]) -> None:
        """Nothing."""

    with swapped(GroupState, "begun", begun), swapped(Keys, "hold_back", hold_back):
        yield


def youngest_is_active() -> AbstractContextManager[None]:
    return swapped(Roster, "eldest_id", property(lambda self: max(self._by_id, default=0)))
