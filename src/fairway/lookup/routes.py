"""Where subjects are, kept fresh: a session on a line to a meta server.

Whoever wants to know of a subject says so once. The session looks up new names at once. Every name that was looked up
belongs to a poll: a question that the meta server answers when something about one of its subjects has changed. A new
name joins the last poll by the look-up itself, so it costs the meta server nothing more, however many names there are.
A poll holds up to `POLL_SUBJECTS` names, so that the meta server answers and repeats each in a few milliseconds.

An older meta server knows one poll per asker, and its answers say so by `polls_max` 0. There one poll holds all names,
and a new name makes the session ask that poll again.

After a lost connection the session looks up everything again, perhaps at another meta server. Known routes stay in
force until then, because brokers do not stop when meta servers do.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from fairway.errors import InvariantViolated, Refused
from fairway.protocol.attempts import Attempts
from fairway.protocol.backoff import NS_PER_MS
from fairway.protocol.routing import ClientRole, GroupRoute, Route, Routed, SubjectRoute
from fairway.protocol.session import Answer, Ask, RequestOutcome
from fairway.world.rng import Rng

WAIT_MS = 30_000  # of a long poll; a change is told at once, so this only says how often nothing is told
GROW_MS_PER_SUBJECT = 0.2  # between two polls of which the second names more
GROW_FREELY = 50  # subjects
GROW_MS_MAX = 500  # a change of a route is still known within a second
LOOK_SUBJECTS_MAX = 500  # at a time: with the longest names and several groups each, a control message holds the answer
POLL_SUBJECTS = 500  # in one poll: the meta server takes some 10 µs for each when it is repeated, twice a minute
DOUBT_MS = 100  # between two looks at the same thing because somebody doubts it


class _Kind(enum.Enum):
    LOOK = "look"  # at names that are new or in doubt: answered at once
    POLL = "poll"  # for changes: answered when something has changed


class _RoutePoll:
    """A part of the names, in one question that waits for changes."""

    __slots__ = ("asked_ns", "attempts", "known", "names", "number", "serial", "uncovered")

    def __init__(self, number: int, rng: Rng) -> None:
        self.number = number
        self.names: dict[str, None] = {}
        self.uncovered: dict[str, None] = {}  # of the names: those that the question in flight does not ask for
        self.known = 0  # the meta server's version that all of the names are known at, or a later one; 0: none
        self.serial = 0  # of the last question: an earlier one has given way to it
        self.asked_ns = 0
        self.attempts = Attempts(rng)

    @property
    def is_wanted(self) -> bool:
        """Whether no question in flight asks for all of the names."""
        return bool(self.names) and (not self.attempts.is_in_flight or bool(self.uncovered))

    def due_ns(self) -> int:
        """A question that is in flight gives way to one with more names, but the more there are the less often:
        otherwise a program that begins with one subject after another would name all of them for each."""
        if not self.attempts.is_in_flight:
            return self.attempts.not_before_ns
        gap_ms = min(max(len(self.names) - GROW_FREELY, 0) * GROW_MS_PER_SUBJECT, GROW_MS_MAX)
        return max(self.attempts.not_before_ns, self.asked_ns + int(gap_ms * NS_PER_MS))


@dataclass(frozen=True, slots=True)
class _Token:
    kind: _Kind
    life: int  # of the connection
    poll: _RoutePoll | None  # that asks; or that the names of a look-up are to join, if there is one
    serial: int = 0
    subjects: list[str] = field(default_factory=list)  # of a look-up


class Routes:
    """What one asker knows. `changed` is called, in the line's thread, when any of it has become otherwise."""

    def __init__(
        self,
        asker: ClientRole,
        rng: Rng,
        changed: Callable[[], None],
        *,
        may_create: bool = False,
        wait_ms: int = WAIT_MS,
    ) -> None:
        self.asker = asker
        self.refused: Refused | None = None  # the last answer, if it was a refusal: why nothing is known, for people
        self._changed = changed
        self._rng = rng
        self._may_create = may_create
        self._wait_ms = wait_ms
        self._subjects: dict[str, SubjectRoute | None] = {}  # wanted; None: not answered yet
        self._groups: dict[str, GroupRoute] = {}
        self._named: Counter[str] = Counter()  # by group: the subjects that name it
        self._news: dict[str, None] = {}  # subjects whose routes have changed since `take_news`
        self._unseen: dict[str, None] = {}  # to be looked up; in order
        self._polls_max = 0  # as this connection's meta server says; 0: older ones, which know one poll
        self._polls: list[_RoutePoll] = []
        self._poll_of: dict[str, _RoutePoll] = {}  # by subject, from its look-up on
        self._life = 0
        self._now_ns = 0  # when it was last asked what it wants
        self._doubt_at_ns = 0  # not before then is anything looked up again because of a doubt
        self._doubted: dict[str, None] = {}
        self._look = Attempts(rng)

    # --- for its owner; under the line's lock, or on its loop ---------------------------------------------------------

    def want(self, subject: str) -> None:
        """Know of this subject from now on; `stir` the link afterwards."""
        if subject not in self._subjects:
            self._subjects[subject] = None
            self._unseen[subject] = None

    def forget(self, subject: str) -> None:
        """No longer."""
        self._count(self._subjects.pop(subject, None), None)
        self._news.pop(subject, None)
        self._unseen.pop(subject, None)
        self._doubted.pop(subject, None)
        poll = self._poll_of.pop(subject, None)
        if poll is not None:
            poll.names.pop(subject, None)
            poll.uncovered.pop(subject, None)

    def subject(self, name: str) -> SubjectRoute | None:
        """What is known of it. None: nothing yet. Without groups: it does not exist, and `why` says more."""
        return self._subjects.get(name)

    def take_news(self) -> list[str]:
        """The subjects whose routes have changed since the last call."""
        news, self._news = self._news, {}
        return [*news]

    def group(self, name: str) -> GroupRoute | None:
        """A group that some subject names."""
        return self._groups.get(name)

    @property
    def groups(self) -> dict[str, GroupRoute]:
        """All groups that the subjects name."""
        return dict(self._groups)

    def doubt(self, group: str) -> None:
        """Somebody was told NOT_MASTER there, or lost it: look again, soon. One of its subjects is enough: the answer
        says where the group is, and the polls tell what else has changed."""
        found = (name for name, route in self._subjects.items() if route is not None and group in route.groups)
        name = next(found, None)
        if name is not None:
            self._doubted[name] = None

    # --- the session -------------------------------------------------------------------------------------------------

    def opened(self, now_ns: int) -> None:
        """Perhaps another meta server, which counts its versions by itself."""
        self._life += 1
        self._look.abandon()
        self._doubted.clear()
        self._polls_max = 0
        self._polls.clear()
        self._poll_of.clear()
        self._unseen = dict.fromkeys(self._subjects)

    def asks(self, room: int, now_ns: int) -> Iterator[Ask]:
        self._now_ns = now_ns
        if self._doubted and now_ns >= self._doubt_at_ns:
            self._doubt_at_ns = now_ns + DOUBT_MS * NS_PER_MS
            self._unseen.update(self._doubted)
            self._doubted.clear()
        if room and self._unseen and self._look.may_ask(now_ns):
            room -= 1
            yield self._ask_look()
        for poll in self._due_polls():
            if room and poll.due_ns() <= now_ns:
                room -= 1
                yield self._ask_poll(poll, now_ns)

    def answered(self, token: object, outcome: RequestOutcome, now_ns: int) -> None:
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
            self._doubt_at_ns if self._doubted else None,
            *(poll.due_ns() for poll in self._due_polls()),
        ]
        return min((due_ns for due_ns in dues_ns if due_ns is not None and due_ns > self._now_ns), default=None)

    # --- within ------------------------------------------------------------------------------------------------------

    def _due_polls(self) -> list[_RoutePoll]:
        """Those to be asked, once all that is wanted has been looked up."""
        if self._unseen or self._look.is_in_flight:
            return []
        return [poll for poll in self._polls if poll.is_wanted]

    def _ask_look(self) -> Ask:
        names = [*self._unseen][:LOOK_SUBJECTS_MAX]
        for name in names:
            del self._unseen[name]
        self._look.is_in_flight = True
        fresh = sum(name not in self._poll_of for name in names)
        poll = self._open_poll(fresh) if fresh and self._polls_max else None
        message = Route(self.asker, names, may_create=self._may_create, poll=0 if poll is None else poll.number)
        return Ask(message, (), _Token(_Kind.LOOK, self._life, poll, 0, names))

    def _ask_poll(self, poll: _RoutePoll, now_ns: int) -> Ask:
        poll.uncovered.clear()
        poll.asked_ns = now_ns
        poll.serial += 1
        poll.attempts.is_in_flight = True
        number = poll.number if self._polls_max else 0
        message = Route(self.asker, [*poll.names], poll.known, self._wait_ms, self._may_create, poll=number)
        return Ask(message, (), _Token(_Kind.POLL, self._life, poll, poll.serial))

    def _open_poll(self, more: int) -> _RoutePoll:
        """The poll that so many more names belong to."""
        last = self._polls[-1] if self._polls else None
        is_full = last is not None and len(last.names) + more > POLL_SUBJECTS and len(self._polls) < self._polls_max
        if last is None or is_full:
            last = _RoutePoll(len(self._polls) + 1, self._rng)
            self._polls.append(last)
        return last

    def _attempts(self, token: _Token) -> Attempts | None:
        """None: a poll that another has taken the place of."""
        if token.kind is _Kind.LOOK:
            return self._look
        return token.poll.attempts if token.poll is not None and token.poll.serial == token.serial else None

    def _granted(self, token: _Token, routed: Routed) -> None:
        attempts = self._attempts(token)
        if attempts is not None:
            attempts.granted()
        self._polls_max = routed.polls_max
        if token.kind is _Kind.LOOK:
            self._found(token, routed)
        elif attempts is not None and token.poll is not None and not token.poll.uncovered:
            token.poll.known = (
                routed.version
            )  # else a name that it did not ask for may have changed before this version
        had_trouble, self.refused = self.refused is not None, None
        if self._take(routed) or had_trouble:
            self._changed()

    def _found(self, token: _Token, routed: Routed) -> None:
        """Names were looked up: their poll tells of changes from here on."""
        fresh = [name for name in token.subjects if name in self._subjects and name not in self._poll_of]
        poll = (token.poll or self._open_poll(len(fresh))) if fresh else None
        if poll is None:
            return
        poll.known = poll.known or routed.version
        for name in fresh:
            poll.names[name] = None
            self._poll_of[name] = poll
            if routed.joined != poll.number or not poll.attempts.is_in_flight:
                poll.uncovered[name] = None

    def _take(self, routed: Routed) -> bool:
        """Whether anything has become otherwise."""
        is_new = False
        for subject in routed.subjects:
            name = subject.name
            if name in self._subjects and self._subjects[name] != subject:
                self._count(self._subjects[name], subject)
                self._subjects[name] = subject
                self._news[name] = None
                is_new = True
        for group in routed.groups:
            if self._named[group.name] and self._groups.get(group.name) != group:
                self._groups[group.name] = group
                is_new = True
        return is_new

    def _count(self, before: SubjectRoute | None, after: SubjectRoute | None) -> None:
        """A group goes with the last subject that names it."""
        self._named.update(() if after is None else after.groups)
        for name in () if before is None else before.groups:
            self._named[name] -= 1
            if not self._named[name]:
                del self._named[name]
                self._groups.pop(name, None)
