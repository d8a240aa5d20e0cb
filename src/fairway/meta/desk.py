"""Answers ROUTE: at once, or when what was asked for has changed.

A question that waits for a change is a poll. The desk registers a poll first and looks at the picture after that, so no
change is missed. After a change, the desk answers a few of the polls that wait for it in each turn of the loop: the
failover of one broker group may concern thousands of polls, and other clients have questions meanwhile.

A client that begins with one subject after another adds each to a poll that waits: the answer about the new subject
says that the poll covers it from now on. Otherwise the client would have to repeat a poll with all of its subjects for
each new one, and its n-th subject would cost the meta server n times as much as the first (bench.subjects).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from functools import partial

import msgspec

from fairway import limits
from fairway.errors import Code, Refused
from fairway.meta.founder import SubjectCreator
from fairway.meta.picture import ClusterState, Key, subject_key
from fairway.meta.routing import base_of
from fairway.names import Subject
from fairway.protocol.routing import ClientRole, Route
from fairway.serving.budget import Allowance
from fairway.serving.requests import Requester as Session
from fairway.serving.requests import ServedRequest

WAIT_MS_MAX = 60_000
_ANSWERS_PER_TURN = 100  # about 3 ms
_SUBJECTS_PER_TURN = 500  # of the polls answered in one turn, also about 3 ms; one poll may exceed it
_FOUND_S = 5.0  # for a subject to be made before its asker is told that it is not there yet

RouteRequest = ServedRequest[Route]


PollKey = tuple[Session, ClientRole, int]


def _key(request: RouteRequest) -> PollKey:
    return request.session, request.message.asker, request.message.poll


class _WaitingPoll:
    """A question that waits."""

    __slots__ = ("joined_bytes", "keys", "known", "request", "timer")

    def __init__(self, request: RouteRequest, keys: set[Key]) -> None:
        route = request.message
        self.request = request
        self.keys = keys
        self.known = dict.fromkeys(route.subjects, route.known)  # by subject: the version that the asker knows
        self.joined_bytes = 0  # of the allowance, for subjects that joined it later
        self.timer: asyncio.TimerHandle | None = None


class RouteRequestHandler:
    """All questions of all sessions; `is_old` says whether the picture may be."""

    def __init__(
        self,
        picture: ClusterState,
        founder: SubjectCreator,
        is_old: Callable[[], bool],
        allowance: Allowance[Session],
        *,
        policy: bool,
    ) -> None:
        """`allowance`: of the memory of all requests that wait."""
        self.policy = policy
        self.answered = 0
        self._picture = picture
        self._founder = founder
        self._is_old = is_old
        self._allowance = allowance
        self._loop = asyncio.get_running_loop()
        self._polls: dict[PollKey, _WaitingPoll] = {}
        self._by_key: dict[Key, dict[_WaitingPoll, None]] = {}
        self._ready: deque[_WaitingPoll] = deque()
        self._is_called = False
        self._waiters: dict[asyncio.Task[None], None] = {}

    def __len__(self) -> int:
        """Questions that wait."""
        return len(self._polls)

    def is_awaited(self, subject: str) -> bool:
        """Whether a question waits for a change of this subject."""
        return subject_key(subject) in self._by_key

    # --- questions ---------------------------------------------------------------------------------------------------

    def take(self, request: RouteRequest) -> None:
        """Answer it, or keep it until there is something to say."""
        route = request.message
        if route.wait_ms or not route.poll:
            self._release(_key(request))
        wished = self._wish(route, request.session)
        if wished and not route.known:
            task = self._loop.create_task(self._answer_when_made(request, wished), name="fairway-meta-route")
            request.wait_at(task.cancel)
            self._waiters[task] = None
            task.add_done_callback(self._waiters.pop)
        elif not route.known or not route.wait_ms:
            self._answer(request)
        else:
            self._park(request)

    def _wish(self, route: Route, session: Session) -> list[asyncio.Event]:
        """Have what is missing made, where that is what the asker wants."""
        if not route.may_create or not self.policy or route.asker not in {ClientRole.PRODUCER, ClientRole.SCHEDULER}:
            return []
        events = [self._founder.wish(name, session) for name in self._picture.missing(route)]
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
        """`changed`: the subjects to tell of, where the caller knows them."""
        self.answered += 1
        routed = self._picture.answer(
            request.message, changed, policy=self.policy, is_old=self._is_old(), trouble_of=self._founder.trouble_of
        )
        request.respond(msgspec.structs.replace(routed, joined=joined, polls_max=limits.ROUTE_POLLS_MAX))

    # --- waiting -----------------------------------------------------------------------------------------------------

    def _park(self, request: RouteRequest) -> None:
        route = request.message
        poll = _WaitingPoll(request, self._picture.keys_of(route.asker, route.subjects))
        self._polls[_key(request)] = poll
        request.wait_at(partial(self._finish, poll))
        self._register(poll, poll.keys)
        if self._picture.has_news(route):
            self._finish(poll)
            return
        wait_ms = min(route.wait_ms, WAIT_MS_MAX)
        poll.timer = self._loop.call_later(wait_ms / 1_000, self._finish, poll)

    def _join(self, request: RouteRequest) -> bool:
        """Let the poll that waits tell of these subjects, too. False: no such poll waits, or it has no room.

        The caller answers the request in the same turn of the loop, so the poll misses no change after that answer.
        """
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
        poll.known.update(dict.fromkeys(fresh, self._picture.version))
        keys = self._picture.keys_of(route.asker, fresh) - poll.keys
        poll.keys |= keys
        self._register(poll, keys)
        return True

    def _register(self, poll: _WaitingPoll, keys: set[Key]) -> None:
        for key in keys:
            self._by_key.setdefault(key, {})[poll] = None

    def _release(self, key: PollKey) -> None:
        """Answer the poll before this one, if there is one."""
        before = self._polls.get(key)
        if before is not None:
            self._finish(before)

    def _finish(self, poll: _WaitingPoll) -> None:
        """Answer it, unless it has been."""
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
        """The subjects of a poll that are otherwise than its asker knows."""
        asker, has_changed = poll.request.message.asker, self._picture.has_changed
        return [name for name, known in poll.known.items() if has_changed(asker, base_of(name), known)]

    def tell(self, keys: list[Key]) -> None:
        """This has changed."""
        if any(kind == "group" for kind, _ in keys):
            self._founder.try_again()
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
        """Answer all."""
        for poll in [*self._polls.values()]:
            self._finish(poll)
        for task in [*self._waiters]:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def poll_bytes(name: str) -> int:
    """What a poll holds in memory for one of its subjects."""
    return len(name) + limits.ROUTE_SUBJECT_BYTES


def check(route: Route) -> None:
    """`Refused` and `BadName` where it can never be answered."""
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
