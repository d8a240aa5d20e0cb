"""Subjects that were made on first use and never used: they go after an hour.

Whoever joins a subject, configures a group on it or makes it read-only makes it, and so does a first batch that never
came to be. Such a subject goes if it has no message, no group and no switch, and was so whenever anybody looked for an
hour of this life. A restart begins the hour again: a subject never goes early, and goes at last where a broker lives
for an hour. The hour counts by the clock that never jumps.

A round looks at some subjects per turn; only those that are unused are remembered.
"""

from __future__ import annotations

from fairway import limits
from fairway.broker.desk import GroupCoordinator
from fairway.errors import Refused
from fairway.storage.subjects import SubjectState

_LOOKED_AT_ONCE = 2_000  # a millisecond of the loop
_MS_NS = 1_000_000


class UnusedSubjects:
    """Of one broker. `look` once in a while."""

    def __init__(self, desk: GroupCoordinator) -> None:
        self._desk = desk
        self._since_ns: dict[int, int] = {}  # by number: unused since then, as far as this life has seen
        self._pending: list[SubjectState] | None = None  # to be looked at in this round; None: none is under way
        self.removed = 0

    def look(self) -> bool:
        """A step of a round; whether that was the last. Removes what has been unused for long enough."""
        subjects = self._desk.store.messages.views.subjects
        if self._pending is None:
            self._pending = [*subjects]
        now_ns = self._desk.clock.monotonic_ns()
        step, self._pending = self._pending[-_LOOKED_AT_ONCE:], self._pending[:-_LOOKED_AT_ONCE]
        gone: list[SubjectState] = []
        for state in step:
            if state.id not in subjects or not self._is_unused(state):
                self._since_ns.pop(state.id, None)
            elif now_ns - self._since_ns.setdefault(state.id, now_ns) >= limits.SUBJECT_UNUSED_MS * _MS_NS:
                gone.append(state)
        if gone:
            self._remove(gone)
        if self._pending:
            return False
        self._pending = None
        self._since_ns = {each: since for each, since in self._since_ns.items() if each in subjects}
        return True

    def _is_unused(self, state: SubjectState) -> bool:
        groups = self._desk.groups
        return (
            state.is_unwritten
            and state.removed_end is None
            and not groups.of_subject(state.id)
            and state.id not in groups.read_only
            and self._desk.store.messages.views.entries.first_sequence(state.id) is None
        )

    def _remove(self, gone: list[SubjectState]) -> None:
        try:
            self._desk.store.remove_subjects(gone)
        except Refused:
            return  # no room now: in the next round
        self.removed += len(gone)
        for state in gone:
            self._since_ns.pop(state.id, None)
