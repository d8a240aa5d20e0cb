"""Where subjects are, kept fresh: a session on a line to a meta server.

Whoever wants to know of a subject says so once. Names that are new are looked up at once; all of them together are in
one long poll, which the meta server answers when something about one of them has changed. So there are at most two
questions on their way, however many subjects there are. After a connection that was lost everything is looked up anew,
perhaps at another meta server; what was known stays in force until then, for brokers do not stop when meta servers do.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fairway.errors import InvariantViolated, Refused
from fairway.protocol.attempts import Attempts
from fairway.protocol.backoff import NS_PER_MS
from fairway.protocol.routing import Asker, GroupRoute, Route, Routed, SubjectRoute
from fairway.protocol.session import Answer, Ask, Outcome
from fairway.world.rng import Rng

WAIT_MS = 30_000  # of a long poll; a change is told at once, so this only says how often nothing is told
GROW_MS_PER_SUBJECT = 0.2  # between two polls of which the second names more
GROW_FREELY = 50  # subjects
GROW_MS_MAX = 500  # a change of a route is still known within a second
LOOK_SUBJECTS_MAX = 500  # at a time: with the longest names and several groups each, a control message holds the answer
DOUBT_MS = 100  # between two looks at the same thing because somebody doubts it


class _Kind(enum.Enum):
    LOOK = "look"  # at names that are new or in doubt: answered at once
    POLL = "poll"  # all of them: answered when something has changed


@dataclass(frozen=True, slots=True)
class _Token:
    kind: _Kind
    life: int  # of the connection
    subjects: frozenset[str]


class Routes:
    """What one asker knows. `changed` is called, in the line's thread, when any of it has become otherwise."""

    def __init__(
        self,
        asker: Asker,
        rng: Rng,
        changed: Callable[[], None],
        *,
        may_create: bool = False,
        wait_ms: int = WAIT_MS,
    ) -> None:
        self.asker = asker
        self.refused: Refused | None = None  # the last answer, if it was a refusal: why nothing is known, for people
        self._changed = changed
        self._may_create = may_create
        self._wait_ms = wait_ms
        self._subjects: dict[str, SubjectRoute | None] = {}  # wanted; None: not answered yet
        self._groups: dict[str, GroupRoute] = {}
        self._unseen: dict[str, None] = {}  # to be looked up; in order
        self._known = 0  # version of the last answer about all that is wanted; 0: this connection has given none
        self._life = 0
        self._now_ns = 0  # when it was last asked what it wants
        self._doubt_at_ns = 0  # not before then is anything looked up again because of a doubt
        self._doubted: dict[str, None] = {}
        self._look = Attempts(rng)
        self._poll = Attempts(rng)
        self._polled: frozenset[str] = frozenset()  # what the poll that is on its way asks for
        self._polled_ns = 0  # and when it left

    # --- for its owner; under the line's lock, or on its loop ---------------------------------------------------------

    def want(self, subject: str) -> None:
        """Know of this subject from now on; `stir` the link afterwards."""
        if subject not in self._subjects:
            self._subjects[subject] = None
            self._unseen[subject] = None

    def forget(self, subject: str) -> None:
        """No longer."""
        if self._subjects.pop(subject, None) is not None:
            self._prune()
        self._unseen.pop(subject, None)
        self._doubted.pop(subject, None)

    def subject(self, name: str) -> SubjectRoute | None:
        """What is known of it. None: nothing yet. Without groups: it does not exist, and `why` says more."""
        return self._subjects.get(name)

    def group(self, name: str) -> GroupRoute | None:
        """A group that some subject names."""
        return self._groups.get(name)

    @property
    def groups(self) -> dict[str, GroupRoute]:
        """All groups that the subjects name."""
        return dict(self._groups)

    def doubt(self, group: str) -> None:
        """Somebody was told NOT_MASTER there, or lost it: look again, soon."""
        for name, route in self._subjects.items():
            if route is not None and group in route.groups:
                self._doubted[name] = None

    # --- the session -------------------------------------------------------------------------------------------------

    def opened(self, now_ns: int) -> None:
        """Perhaps another meta server, which counts its versions by itself."""
        self._life += 1
        self._known = 0
        self._look.abandon()
        self._poll.abandon()
        self._doubted.clear()
        self._unseen = dict.fromkeys(self._subjects)

    def asks(self, room: int, now_ns: int) -> Iterator[Ask]:
        self._now_ns = now_ns
        if self._doubted and now_ns >= self._doubt_at_ns:
            self._doubt_at_ns = now_ns + DOUBT_MS * NS_PER_MS
            self._unseen.update(self._doubted)
            self._doubted.clear()
        if room and self._unseen and self._look.may_ask(now_ns):
            room -= 1
            names = [*self._unseen][:LOOK_SUBJECTS_MAX]
            for name in names:
                del self._unseen[name]
            self._look.is_in_flight = True
            yield self._ask(_Kind.LOOK, names, 0, 0)
        if room and self._is_poll_due() and self._poll_due_ns() <= now_ns:
            self._polled = frozenset(self._subjects)
            self._polled_ns = now_ns
            self._poll.is_in_flight = True
            yield self._ask(_Kind.POLL, [*self._subjects], self._known, self._wait_ms)

    def answered(self, token: object, outcome: Outcome, now_ns: int) -> None:
        if not isinstance(token, _Token):
            raise InvariantViolated(f"an answer to {token!r}, which no routes asked for")
        if token.life != self._life:
            return
        if isinstance(outcome, Answer) and isinstance(outcome.message, Routed):
            self._granted(token, outcome.message)
            return
        attempts = self._attempts(token)
        if token.kind is _Kind.LOOK:
            self._unseen = dict.fromkeys(name for name in (*token.subjects, *self._unseen) if name in self._subjects)
        if attempts is not None:
            attempts.put_off(now_ns, outcome.retry_after_ms if isinstance(outcome, Refused) else None)
        if isinstance(outcome, Refused):
            self.refused = outcome
            self._changed()

    def next_deadline(self) -> int | None:
        """Only what lies ahead: whatever could have left already waits for room or for a connection, not for time."""
        dues_ns = [
            self._look.due_ns(0 if self._unseen else None),
            self._poll_due_ns() if self._is_poll_due() else None,
            self._doubt_at_ns if self._doubted else None,
        ]
        return min((due_ns for due_ns in dues_ns if due_ns is not None and due_ns > self._now_ns), default=None)

    # --- within ------------------------------------------------------------------------------------------------------

    def _is_poll_due(self) -> bool:
        """Whether all that is wanted has been looked up and is not in a poll; one with fewer names gives way."""
        if not self._known or not self._subjects or self._unseen or self._look.is_in_flight:
            return False
        return not (self._poll.is_in_flight and self._polled >= self._subjects.keys())

    def _poll_due_ns(self) -> int:
        """A poll names all subjects. Where one is on its way, the next waits the longer the more it names: otherwise a
        program that begins with one subject after another would name all of them for each."""
        if not self._poll.is_in_flight:
            return self._poll.not_before_ns
        gap_ms = min(max(len(self._polled) - GROW_FREELY, 0) * GROW_MS_PER_SUBJECT, GROW_MS_MAX)
        return max(self._poll.not_before_ns, self._polled_ns + int(gap_ms * NS_PER_MS))

    def _ask(self, kind: _Kind, names: list[str], known: int, wait_ms: int) -> Ask:
        message = Route(self.asker, names, known, wait_ms, self._may_create)
        return Ask(message, (), _Token(kind, self._life, frozenset(names)))

    def _attempts(self, token: _Token) -> Attempts | None:
        """None: a poll that another has taken the place of."""
        if token.kind is _Kind.LOOK:
            return self._look
        return self._poll if token.subjects == self._polled else None

    def _granted(self, token: _Token, routed: Routed) -> None:
        attempts = self._attempts(token)
        if attempts is not None:
            attempts.granted()
        is_about_all = token.kind is _Kind.POLL and token.subjects >= self._subjects.keys()
        if is_about_all or not self._known:  # else what is new may have changed since it was looked up
            self._known = routed.version
        had_trouble, self.refused = self.refused is not None, None
        if self._take(routed) or had_trouble:
            self._changed()

    def _take(self, routed: Routed) -> bool:
        """Whether anything has become otherwise."""
        before = (dict(self._subjects), dict(self._groups))
        for subject in routed.subjects:
            if subject.name in self._subjects:
                self._subjects[subject.name] = subject
        for group in routed.groups:
            self._groups[group.name] = group
        self._prune()
        return before != (self._subjects, self._groups)

    def _prune(self) -> None:
        named = {group for route in self._subjects.values() if route is not None for group in route.groups}
        self._groups = {name: group for name, group in self._groups.items() if name in named}
