"""Request handler for ROUTE: answers at once, or when a route has changed; creates subjects on first use.

A request that waits for a change is a poll. The handler registers a poll before it compares versions, so no change is
missed. After a change, the handler answers up to 100 of the affected polls in each turn of the loop: the failover of
one broker group may affect thousands of polls, and other clients need turns meanwhile.

A client that uses one subject after another adds each to a poll that waits: the answer about the new subject says that
the poll covers the subject from now on. Otherwise the client would repeat a poll with all its subjects for each new
one. Its n-th subject would cost the meta server n times as much as the first (bench/subjects).

`SubjectCreator` creates subjects on first use, at a limited rate. It retries a creation request until the subject
exists, or until 60 s after the last request for the subject.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakKeyDictionary

import msgspec

from fairway import limits
from fairway.errors import Code, FairwayError, Refused
from fairway.meta.admin import ClusterAdmin
from fairway.meta.cluster_state import ClusterState, Key, base_of, subject_key
from fairway.names import Subject
from fairway.protocol.route_messages import ClientRole, Route
from fairway.runtime.clock import Clock
from fairway.runtime.service import cancel
from fairway.serving.memory_budget import Allowance
from fairway.serving.rates import CreationRate
from fairway.serving.requests import Requester as Session
from fairway.serving.requests import ServedRequest

CREATIONS_MAX = 1_000  # for subjects that cannot be created now; beyond it, clients must ask again
CREATION_S = 60  # a client's poll renews the request every 30 s
_AGAIN_S = 1.0
_NS = 1_000_000_000
_SHORT_WAIT_S = 0.1  # below this delay, the client waits; else it gets a refusal now and a change later


@dataclass(slots=True)
class _CreationRequest:
    expires_ns: int
    connection: object  # the first that asked; the creation counts for its rate
    trouble: str = ""  # why the subject does not exist yet
    decided: asyncio.Event = field(default_factory=asyncio.Event)  # set after the first attempt
    task: asyncio.Task[None] | None = None


class SubjectCreator:
    """Creates requested subjects, with one task per subject."""

    def __init__(self, admin: ClusterAdmin, clock: Clock, rate: CreationRate) -> None:
        self._admin = admin
        self._rate = rate
        self._counts: WeakKeyDictionary[object, int] = WeakKeyDictionary()  # creation requests by connection
        self._turns: WeakKeyDictionary[object, asyncio.Lock] = WeakKeyDictionary()  # one connection's in turn
        self._clock = clock
        self._creations: dict[str, _CreationRequest] = {}
        self._chance = asyncio.Event()  # something has changed: another attempt may succeed

    def trouble_of(self, subject: str) -> str:
        """Why the subject does not exist yet; empty: nobody has tried, or the first attempt is under way."""
        creation = self._creations.get(subject)
        return "" if creation is None else creation.trouble

    def request(self, subject: str, connection: object) -> asyncio.Event | None:
        """Create a subject, now or later. Return an event for the end of the first attempt. None: there are too many
        creation requests, or this connection has half of them."""
        creation = self._creations.get(subject)
        expires_ns = self._clock.monotonic_ns() + CREATION_S * _NS
        if creation is not None:
            creation.expires_ns = expires_ns
            return creation.decided
        of_connection = self._counts.get(connection, 0)
        if len(self._creations) >= CREATIONS_MAX or of_connection >= CREATIONS_MAX // 2:
            return None
        self._counts[connection] = of_connection + 1
        creation = self._creations[subject] = _CreationRequest(expires_ns, connection)
        creation.task = asyncio.get_running_loop().create_task(
            self._make(subject, creation), name="fairway-meta-creator"
        )
        return creation.decided

    def try_again(self) -> None:
        """Groups have changed: try again at once."""
        chance, self._chance = self._chance, asyncio.Event()
        chance.set()

    async def stop(self) -> None:
        await cancel([creation.task for creation in self._creations.values()])

    async def _make(self, subject: str, creation: _CreationRequest) -> None:
        try:
            await self._take_turn(creation)
            while self._clock.monotonic_ns() < creation.expires_ns:
                chance = self._chance
                try:
                    await self._admin.create(subject, is_on_first_use=True)
                except FairwayError as error:
                    creation.trouble = error.sentence if isinstance(error, Refused) else str(error)
                else:
                    return
                creation.decided.set()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_AGAIN_S):
                        await chance.wait()
        finally:
            creation.decided.set()
            del self._creations[subject]
            self._counts[creation.connection] -= 1

    async def _take_turn(self, creation: _CreationRequest) -> None:
        """Return when the creation rate allows another subject, or when the request has expired."""
        turn = self._turns.setdefault(creation.connection, asyncio.Lock())
        async with turn:
            while self._clock.monotonic_ns() < creation.expires_ns:
                try:
                    self._rate.check(creation.connection)
                except Refused as refused:
                    wait_s = (refused.retry_after_ms or 0) / 1_000
                    creation.trouble = refused.sentence
                    if wait_s > _SHORT_WAIT_S:
                        creation.decided.set()
                    await asyncio.sleep(wait_s)
                else:
                    self._rate.note(creation.connection)
                    return


WAIT_MS_MAX = 60_000
_ANSWERS_PER_TURN = 100  # about 3 ms
_SUBJECTS_PER_TURN = 500  # in the polls answered in one turn, also about 3 ms; a single poll may exceed it
_FOUND_S = 5.0  # for a subject to be created, before its client learns that it does not exist yet

RouteRequest = ServedRequest[Route]


PollKey = tuple[Session, ClientRole, int]


def _key(request: RouteRequest) -> PollKey:
    return request.session, request.message.asker, request.message.poll


class _WaitingPoll:
    """A request that waits for a change."""

    __slots__ = ("joined_bytes", "keys", "known", "request", "timer")

    def __init__(self, request: RouteRequest, keys: set[Key]) -> None:
        route = request.message
        self.request = request
        self.keys = keys
        self.known = dict.fromkeys(route.subjects, route.known)  # by subject: the version that the client knows
        self.joined_bytes = 0  # of the allowance, for subjects that joined later
        self.timer: asyncio.TimerHandle | None = None


class RouteRequestHandler:
    """All ROUTE requests of all sessions. `is_old`: whether the cluster state may be old."""

    def __init__(
        self,
        cluster_state: ClusterState,
        subject_creator: SubjectCreator,
        is_old: Callable[[], bool],
        allowance: Allowance[Session],
        *,
        policy: bool,
    ) -> None:
        """`allowance`: the memory of all waiting requests."""
        self.policy = policy
        self.answered = 0
        self._cluster_state = cluster_state
        self._subject_creator = subject_creator
        self._is_old = is_old
        self._allowance = allowance
        self._loop = asyncio.get_running_loop()
        self._polls: dict[PollKey, _WaitingPoll] = {}
        self._by_key: dict[Key, dict[_WaitingPoll, None]] = {}
        self._ready: deque[_WaitingPoll] = deque()
        self._is_called = False
        self._waiters: dict[asyncio.Task[None], None] = {}

    def __len__(self) -> int:
        """How many polls wait."""
        return len(self._polls)

    def is_awaited(self, subject: str) -> bool:
        """Whether a poll waits for a change of this subject."""
        return subject_key(subject) in self._by_key

    # --- requests ----------------------------------------------------------------------------------------------------

    def take(self, request: RouteRequest) -> None:
        """Answer the request, or keep it until something has changed."""
        route = request.message
        if route.wait_ms or not route.poll:
            self._release(_key(request))
        creations = self._request_creations(route, request.session)
        if creations and not route.known:
            task = self._loop.create_task(self._answer_when_made(request, creations), name="fairway-meta-route")
            request.wait_at(task.cancel)
            self._waiters[task] = None
            task.add_done_callback(self._waiters.pop)
        elif not route.known or not route.wait_ms:
            self._answer(request)
        else:
            self._park(request)

    def _request_creations(self, route: Route, session: Session) -> list[asyncio.Event]:
        """Request the creation of missing subjects, if the client wants that."""
        if not route.may_create or not self.policy or route.asker not in {ClientRole.PRODUCER, ClientRole.SCHEDULER}:
            return []
        events = [self._subject_creator.request(name, session) for name in self._cluster_state.missing(route)]
        return [event for event in events if event is not None]

    async def _answer_when_made(self, request: RouteRequest, made: list[asyncio.Event]) -> None:
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FOUND_S):
                    for event in made:
                        await event.wait()
        finally:
            self._answer(request)

    def _answer(self, request: RouteRequest) -> None:
        if request.is_cancelled:
            request.end()
            return
        route = request.message
        joined = route.poll if route.poll and not route.wait_ms and self._join(request) else 0
        self._respond(request, joined=joined)

    def _respond(self, request: RouteRequest, changed: list[str] | None = None, *, joined: int = 0) -> None:
        """`changed`: the subjects for the answer, if the caller knows them."""
        self.answered += 1
        routed = self._cluster_state.answer(
            request.message,
            changed,
            policy=self.policy,
            is_old=self._is_old(),
            trouble_of=self._subject_creator.trouble_of,
        )
        request.respond(msgspec.structs.replace(routed, joined=joined, polls_max=limits.ROUTE_POLLS_MAX))

    # --- waiting -----------------------------------------------------------------------------------------------------

    def _park(self, request: RouteRequest) -> None:
        route = request.message
        poll = _WaitingPoll(request, self._cluster_state.keys_of(route.asker, route.subjects))
        self._polls[_key(request)] = poll
        request.wait_at(partial(self._finish, poll))
        self._register(poll, poll.keys)
        if self._cluster_state.has_news(route):
            self._finish(poll)
            return
        wait_ms = min(route.wait_ms, WAIT_MS_MAX)
        poll.timer = self._loop.call_later(wait_ms / 1_000, self._finish, poll)

    def _join(self, request: RouteRequest) -> bool:
        """Add these subjects to the waiting poll. False: no such poll waits, or it has no room.

        The caller answers the request in the same turn of the loop, so the poll misses no change after that answer."""
        poll = self._polls.get(_key(request))
        route = request.message
        if poll is None or route.asker is ClientRole.TOOL:
            return False
        fresh = [name for name in dict.fromkeys(route.subjects) if name not in poll.known]
        if len(poll.known) + len(fresh) > limits.ROUTE_SUBJECTS_MAX:
            return False
        size = sum(map(poll_bytes, fresh))
        try:
            self._allowance.take(request.session, size, is_patient=True)
        except Refused:
            return False
        poll.joined_bytes += size
        poll.known.update(dict.fromkeys(fresh, self._cluster_state.version))
        keys = self._cluster_state.keys_of(route.asker, fresh) - poll.keys
        poll.keys |= keys
        self._register(poll, keys)
        return True

    def _register(self, poll: _WaitingPoll, keys: set[Key]) -> None:
        for key in keys:
            self._by_key.setdefault(key, {})[poll] = None

    def _release(self, key: PollKey) -> None:
        """Answer the previous poll of this key, if there is one."""
        before = self._polls.get(key)
        if before is not None:
            self._finish(before)

    def _finish(self, poll: _WaitingPoll) -> None:
        """Answer a poll, unless it was answered already."""
        request = poll.request
        if self._polls.get(_key(request)) is not poll:
            return
        del self._polls[_key(request)]
        if poll.timer is not None:
            poll.timer.cancel()
        for key in poll.keys:
            waiting = self._by_key[key]
            del waiting[poll]
            if not waiting:
                del self._by_key[key]
        if poll.joined_bytes:
            self._allowance.give_back(request.session, poll.joined_bytes)
        if request.is_cancelled:
            request.end()
        elif request.message.asker is ClientRole.TOOL:
            self._respond(request)
        else:
            self._respond(request, self._changed(poll))

    def _changed(self, poll: _WaitingPoll) -> list[str]:
        """The subjects of a poll that have changed since its client's version."""
        asker, has_changed = poll.request.message.asker, self._cluster_state.has_changed
        return [name for name, known in poll.known.items() if has_changed(asker, base_of(name), known)]

    def tell(self, keys: list[Key]) -> None:
        """Answer the polls that wait for these keys."""
        if any(kind == "group" for kind, _ in keys):
            self._subject_creator.try_again()
        for key in keys:
            self._ready.extend(self._by_key.get(key, ()))
        if self._ready and not self._is_called:
            self._is_called = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._is_called = False
        answers = subjects = 0
        while self._ready and answers < _ANSWERS_PER_TURN and subjects < _SUBJECTS_PER_TURN:
            poll = self._ready.popleft()
            self._finish(poll)
            answers += 1
            subjects += len(poll.known)
        if self._ready:
            self._is_called = True
            self._loop.call_soon(self._turn)

    async def stop(self) -> None:
        """Answer all polls."""
        for poll in [*self._polls.values()]:
            self._finish(poll)
        await cancel(self._waiters)


def poll_bytes(name: str) -> int:
    """Memory of a poll for one of its subjects."""
    return len(name) + limits.ROUTE_SUBJECT_BYTES


def check(route: Route) -> None:
    """Raise `Refused` or `BadName` if the request can never be answered."""
    if route.poll > limits.ROUTE_POLLS_MAX:
        raise Refused(Code.BAD_REQUEST, f"poll {route.poll}: their numbers go to {limits.ROUTE_POLLS_MAX}")
    if len(route.subjects) > limits.ROUTE_SUBJECTS_MAX:
        raise Refused(
            Code.TOO_LARGE, f"{len(route.subjects)} subjects in one question: at most {limits.ROUTE_SUBJECTS_MAX}"
        )
    if not route.subjects and route.asker is not ClientRole.TOOL:
        raise Refused(Code.BAD_REQUEST, "no subject is named: only tools may ask for all of them")
    for name in route.subjects:
        Subject.parse_any(name)
