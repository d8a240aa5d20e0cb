"""Answers ROUTE: at once, or when what was asked for has changed.

A question that waits is registered first, and the picture is looked at after that, so no change is missed. When
something changes, those who wait for it are answered a few in each turn of the loop: a broker group that fails over may
interest thousands at once, and others have questions meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from functools import partial

from fairway import limits
from fairway.errors import Code, Refused
from fairway.meta.founder import Founder
from fairway.meta.picture import Key, Picture, subject_key
from fairway.names import Subject
from fairway.protocol.routing import Asker, Route
from fairway.serving.requests import Asker as Session
from fairway.serving.requests import ServedRequest

WAIT_MS_MAX = 60_000
_ANSWERS_PER_TURN = 100  # about 3 ms
_FOUND_S = 5.0  # for a subject to be made before its asker is told that it is not there yet

RouteRequest = ServedRequest[Route]


class _Poll:
    """A question that waits."""

    __slots__ = ("keys", "request", "timer")

    def __init__(self, request: RouteRequest, keys: set[Key]) -> None:
        self.request = request
        self.keys = keys
        self.timer: asyncio.TimerHandle | None = None


class RouteDesk:
    """All questions of all sessions; `is_old` says whether the picture may be."""

    def __init__(self, picture: Picture, founder: Founder, is_old: Callable[[], bool], *, policy: bool) -> None:
        self.policy = policy
        self.answered = 0
        self._picture = picture
        self._founder = founder
        self._is_old = is_old
        self._loop = asyncio.get_running_loop()
        self._polls: dict[tuple[Session, Asker], _Poll] = {}  # by session and kind of asker: one each
        self._by_key: dict[Key, dict[_Poll, None]] = {}
        self._ready: deque[_Poll] = deque()
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
        self._release(request.session, route.asker)
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
        if not route.may_create or not self.policy or route.asker not in {Asker.PRODUCER, Asker.SCHEDULER}:
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
        self.answered += 1
        routed = self._picture.answer(
            request.message, policy=self.policy, is_old=self._is_old(), trouble_of=self._founder.trouble_of
        )
        request.respond(routed)

    # --- waiting -----------------------------------------------------------------------------------------------------

    def _park(self, request: RouteRequest) -> None:
        poll = _Poll(request, self._picture.keys_of(request.message))
        self._polls[request.session, request.message.asker] = poll
        request.wait_at(partial(self._finish, poll))
        for key in poll.keys:
            self._by_key.setdefault(key, {})[poll] = None
        if self._picture.has_news(request.message):
            self._finish(poll)
            return
        wait_ms = min(request.message.wait_ms, WAIT_MS_MAX)
        poll.timer = self._loop.call_later(wait_ms / 1_000, self._finish, poll)

    def _release(self, session: Session, asker: Asker) -> None:
        """Its poll before this one, if it has one."""
        before = self._polls.get((session, asker))
        if before is not None:
            self._finish(before)

    def _finish(self, poll: _Poll) -> None:
        """Answer it, unless it has been."""
        name = (poll.request.session, poll.request.message.asker)
        if self._polls.get(name) is not poll:
            return
        del self._polls[name]
        if poll.timer is not None:
            poll.timer.cancel()
        for key in poll.keys:
            waiting = self._by_key[key]
            del waiting[poll]
            if not waiting:
                del self._by_key[key]
        self._answer(poll.request)

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
        for _ in range(min(_ANSWERS_PER_TURN, len(self._ready))):
            self._finish(self._ready.popleft())
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


def check(route: Route) -> None:
    """`Refused` and `BadName` where it can never be answered."""
    if len(route.subjects) > limits.ROUTE_SUBJECTS_MAX:
        raise Refused(
            Code.TOO_LARGE, f"{len(route.subjects)} subjects in one question: at most {limits.ROUTE_SUBJECTS_MAX}"
        )
    if not route.subjects and route.asker is not Asker.TOOL:
        raise Refused(Code.BAD_REQUEST, "no subject is named: only tools may ask for all of them")
    for name in route.subjects:
        Subject.parse_any(name)
