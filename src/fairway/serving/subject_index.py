"""The names of all subjects in order, for answers that list them page by page.

A sort of 100,000 names takes tens of milliseconds, in which the loop serves no client. So the index keeps the order.
`refresh` takes in a bounded number of new names, and a page begins with a binary search. The broker builds the index
before it listens, so that a refresh finds few new names.

Subjects go where they are removed, or where a log is cut back. The subject table remembers the last deletions. Where
more subjects have gone since the last refresh, or where a repair has inserted a subject, the index starts over.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from itertools import islice

from fairway.names import Subject
from fairway.storage.subjects import SubjectState, SubjectTable

_STEP = 2_000  # names taken in at a time: a fifth of a millisecond, and the merge of both runs
_FEW = 50  # so few names are inserted one by one, 20 µs each among 100,000
_DEAD, _PAST_DEAD = "dead:", "dead;"  # the prefix of dead-letter subjects, and a string behind all of them


class SubjectIndex:
    """All subjects of one log, without inboxes, by name."""

    def __init__(self, subjects: SubjectTable) -> None:
        self._subjects = subjects
        self._names: list[str] = []
        self._pending: dict[int, SubjectState] = {}  # subjects from the last start, still to be taken in
        self._next_id = 0  # subjects from this number on are newer than that start
        self._seen = (0, 0)  # counts of the table: insertions and deletions
        self._begin_again()
        while not self.refresh():
            pass

    def refresh(self) -> bool:
        """Take in some of the new names. Returns whether those were all."""
        self._take_deletions()
        new = self._next()
        names = [str(state.name) for state in new if not state.name.is_inbox]
        if len(names) <= _FEW:
            for name in names:
                insort(self._names, name)
        else:
            self._names += sorted(names)
            self._names.sort()  # two runs, which are merged
        return not self._pending and self._next_id >= self._subjects.next_id

    def _next(self) -> list[SubjectState]:
        """The next subjects to take in, a bounded number of them."""
        if self._pending:
            new = [*islice(self._pending.values(), _STEP)]
            for state in new:
                del self._pending[state.id]
            return new
        first, end = self._next_id, min(self._next_id + _STEP, self._subjects.next_id)
        self._next_id = max(first, end)
        return [self._subjects.by_id(each) for each in range(first, end) if each in self._subjects]

    def _take_deletions(self) -> None:
        inserted, deleted = self._subjects.inserted, self._subjects.deletions
        gone = self._subjects.last_deleted(deleted - self._seen[1])
        if inserted != self._seen[0] or gone is None:
            self._begin_again()
            return
        self._seen = inserted, deleted
        for state in gone:
            if self._pending.pop(state.id, None) is None and state.id < self._next_id and not state.name.is_inbox:
                at = bisect_left(self._names, state.name)
                if at < len(self._names) and self._names[at] == state.name:
                    del self._names[at]

    def _begin_again(self) -> None:
        self._names = []
        self._pending = {state.id: state for state in self._subjects}
        self._next_id = self._subjects.next_id
        self._seen = self._subjects.inserted, self._subjects.deletions

    def find(self, name: str) -> SubjectState | None:
        """The subject; None: it is gone."""
        found = self._subjects.find(Subject(name))
        if found is None:
            self._begin_again()
        return found

    def following(self, name: str, *, is_included: bool = False) -> str | None:
        """The next name, or `name` itself if it is included."""
        at = (bisect_left if is_included else bisect_right)(self._names, name)
        return self._names[at] if at < len(self._names) else None

    def plain_after(self, name: str, number: int) -> Sequence[str]:
        """The next names of subjects that clients have created, at most `number`: dead letters are left out."""
        names = self._names
        first = bisect_right(names, name)
        dead, past = bisect_left(names, _DEAD), bisect_left(names, _PAST_DEAD)
        found = names[first : min(first + number, dead)] if first < dead else []
        behind = max(first, past)
        return [*found, *names[behind : behind + number - len(found)]]
