"""Routes of subjects, kept fresh: a session on a line to a meta server. Also the broker group of each key.

The owner names each subject once with `want`. The session looks up new names at once. Every name that was looked up
belongs to a poll: a long poll that the meta server answers when one of its subjects has changed. The look-up itself
joins a new name to the last poll, so a new name costs the meta server nothing more, however many names there are. A
poll holds up to `POLL_SUBJECTS` names, so that the meta server answers and repeats each poll in a few milliseconds.

An older meta server knows one poll per client, and says so by `polls_max` 0 in its answers. Then one poll holds all
names, and each new name makes the session send that poll again.

After a lost connection the session looks up every name again, perhaps at another meta server. Known routes stay in
force meanwhile, because brokers do not stop when meta servers do.

`home` assigns a key of an ordered subject to a broker group, the same for every sender.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from fairway.errors import Refused
from fairway.protocol.consumer_lease import Attempts
from fairway.protocol.line import NS_PER_MS, Answer, Ask, RequestOutcome
from fairway.protocol.route_messages import ClientRole, GroupRoute, Route, Routed, SubjectRoute
from fairway.runtime.rng import Rng


def home(key: str, names: Sequence[str]) -> int:
    """The index of the group that a key belongs to. Each group ranks the key, and the highest rank wins (rendezvous
    hashing). A new group takes its share from all others, a removed group leaves its share to them, and no other key
    moves."""
    ranks = [blake2b(f"{name}\0{key}".encode(), digest_size=8).digest() for name in names]
    return ranks.index(max(ranks))


WAIT_MS = 30_000  # of a long poll; changes are answered at once, so this only bounds how long a poll stays silent
GROW_MS_PER_SUBJECT = 0.2  # between two polls, if the second names more subjects
GROW_FREELY = 50  # subjects
GROW_MS_MAX = 500  # a change of a route is still known within a second
LOOK_SUBJECTS_MAX = 500  # at a time: even with the longest names and several groups each, the answer fits
POLL_SUBJECTS = 500  # per poll: repeating it, twice a minute, costs the meta server about 10 µs per name
DOUBT_MS = 100  # between two look-ups because of a doubt


class _RoutePoll:
    """Some of the names, in one long poll."""

    __slots__ = ("asked_ns", "attempts", "known", "names", "number", "serial", "uncovered")

    def __init__(self, number: int, rng: Rng) -> None:
        self.number = number
        self.names: dict[str, None] = {}
        self.uncovered: dict[str, None] = {}  # of the names: those that the poll in flight does not name
        self.known = 0  # the version of the meta server that all names are known at, or later; 0: none
        self.serial = 0  # of the last poll request: earlier ones are replaced
        self.asked_ns = 0
        self.attempts = Attempts(rng)

    @property
    def is_wanted(self) -> bool:
        """Whether no poll in flight names all the subjects."""
        return bool(self.names) and (not self.attempts.is_in_flight or bool(self.uncovered))

    def due_ns(self) -> int:
        """When to send the poll. A poll in flight is replaced by one with more names, but more rarely the more names
        there are. Otherwise a program that adds subjects one by one would send all its names for each."""
        if not self.attempts.is_in_flight:
            return self.attempts.not_before_ns
        gap_ms = min(max(len(self.names) - GROW_FREELY, 0) * GROW_MS_PER_SUBJECT, GROW_MS_MAX)
        return max(self.attempts.not_before_ns, self.asked_ns + int(gap_ms * NS_PER_MS))


@dataclass(frozen=True, slots=True)
class _Token:
    """A look-up of names that are new or in doubt, answered at once; or a poll, answered when something has changed."""

    life: int  # of the connection
    poll: _RoutePoll | None  # the poll itself, or the poll that the names of a look-up join
    serial: int = 0
    subjects: list[str] = field(default_factory=list)  # of a look-up; empty: it is a poll


class Routes:
    """The routes that one client knows. `changed` is called in the line's thread when a route has changed."""

    def __init__(self, asker: ClientRole, rng: Rng, changed: Callable[[], None], *, may_create: bool = False) -> None:
        self.asker = asker
        self.refused: Refused | None = None  # the last answer, if it was a refusal: tells people why nothing is known
        self._changed = changed
        self._rng = rng
        self._may_create = may_create
        self._subjects: dict[str, SubjectRoute | None] = {}  # wanted; None: not answered yet
        self._groups: dict[str, GroupRoute] = {}
        self._named: Counter[str] = Counter()  # by group: how many subjects name it
        self._news: dict[str, None] = {}  # subjects whose routes have changed since `take_news`
        self._unseen: dict[str, None] = {}  # to be looked up, in order
        self._polls_max = 0  # as this meta server says; 0: an older one, which knows one poll
        self._polls: list[_RoutePoll] = []
        self._poll_of: dict[str, _RoutePoll] = {}  # by subject, from its look-up on
        self._life = 0
        self._now_ns = 0  # the time of the last `asks`
        self._doubt_at_ns = 0  # earliest time of the next look-up because of a doubt
        self._doubted: dict[str, None] = {}
        self._look = Attempts(rng)

    # --- for its owner; under the line's lock, or on its loop ---------------------------------------------------------

    def want(self, subject: str) -> None:
        """Follow this subject from now on. Call `stir` on the link afterwards."""
        if subject not in self._subjects:
            self._subjects[subject] = None
            self._unseen[subject] = None

    def forget(self, subject: str) -> None:
        """Follow this subject no longer."""
        self._count(self._subjects.pop(subject, None), None)
        self._news.pop(subject, None)
        self._unseen.pop(subject, None)
        self._doubted.pop(subject, None)
        poll = self._poll_of.pop(subject, None)
        if poll is not None:
            poll.names.pop(subject, None)
            poll.uncovered.pop(subject, None)

    def subject(self, name: str) -> SubjectRoute | None:
        """The route of a subject. None: unknown yet. Without groups: the subject does not exist, and `why` says
        more."""
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
        """A client got NOT_MASTER from this group, or lost its connection: look up one of the group's subjects again.
        One is enough: its answer says where the group is, and the polls report other changes."""
        found = (name for name, route in self._subjects.items() if route is not None and group in route.groups)
        name = next(found, None)
        if name is not None:
            self._doubted[name] = None

    # --- the session -------------------------------------------------------------------------------------------------

    def opened(self, now_ns: int) -> None:
        """The connection may be to another meta server, which has version numbers of its own."""
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
        asked: _Token = token  # type: ignore[assignment]
        if asked.life != self._life:
            return
        if isinstance(outcome, Answer) and isinstance(outcome.message, Routed):
            self._granted(asked, outcome.message)
            return
        attempts = self._attempts(asked)
        if asked.subjects:
            self._unseen = dict.fromkeys(name for name in (*asked.subjects, *self._unseen) if name in self._subjects)
        if attempts is not None:
            attempts.put_off(now_ns, outcome.retry_after_ms if isinstance(outcome, Refused) else None)
        if isinstance(outcome, Refused):
            self.refused = outcome
            self._changed()

    def next_deadline(self) -> int | None:
        """The next due time that lies ahead. A request that is due already waits for room or for a connection, not for
        time."""
        dues_ns = [
            self._look.due_ns(0 if self._unseen else None),
            self._doubt_at_ns if self._doubted else None,
            *(poll.due_ns() for poll in self._due_polls()),
        ]
        return min((due_ns for due_ns in dues_ns if due_ns is not None and due_ns > self._now_ns), default=None)

    # --- internals ---------------------------------------------------------------------------------------------------

    def _due_polls(self) -> list[_RoutePoll]:
        """The polls to send, once every wanted name was looked up."""
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
        return Ask(message, (), _Token(self._life, poll, 0, names))

    def _ask_poll(self, poll: _RoutePoll, now_ns: int) -> Ask:
        poll.uncovered.clear()
        poll.asked_ns = now_ns
        poll.serial += 1
        poll.attempts.is_in_flight = True
        number = poll.number if self._polls_max else 0
        message = Route(self.asker, [*poll.names], poll.known, WAIT_MS, self._may_create, poll=number)
        return Ask(message, (), _Token(self._life, poll, poll.serial))

    def _open_poll(self, more: int) -> _RoutePoll:
        """The poll that so many new names join."""
        last = self._polls[-1] if self._polls else None
        is_full = last is not None and len(last.names) + more > POLL_SUBJECTS and len(self._polls) < self._polls_max
        if last is None or is_full:
            last = _RoutePoll(len(self._polls) + 1, self._rng)
            self._polls.append(last)
        return last

    def _attempts(self, token: _Token) -> Attempts | None:
        """The retry state of a request; None: of a poll that was replaced."""
        if token.subjects:
            return self._look
        return token.poll.attempts if token.poll is not None and token.poll.serial == token.serial else None

    def _granted(self, token: _Token, routed: Routed) -> None:
        attempts = self._attempts(token)
        if attempts is not None:
            attempts.granted()
        self._polls_max = routed.polls_max
        if token.subjects:
            self._found(token, routed)
        elif attempts is not None and token.poll is not None and not token.poll.uncovered:
            token.poll.known = (
                routed.version
            )  # else a name that it did not ask for may have changed before this version
        had_trouble, self.refused = self.refused is not None, None
        if self._take(routed) or had_trouble:
            self._changed()

    def _found(self, token: _Token, routed: Routed) -> None:
        """Names were looked up: their poll reports changes from here on."""
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
        """Return whether anything has changed."""
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
        """Count the subjects that name a group. A group goes with its last subject."""
        self._named.update(() if after is None else after.groups)
        for name in () if before is None else before.groups:
            self._named[name] -= 1
            if not self._named[name]:
                del self._named[name]
                self._groups.pop(name, None)
