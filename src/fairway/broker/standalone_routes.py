"""Route requests to a broker that runs alone: it answers like a meta server that everything is here.

So `meta://HOST:PORT` works with `fairway up`, too, and a program for a cluster runs on a laptop. The answer never
changes: a long poll waits until its time is up, or until its client polls again.
"""

from __future__ import annotations

from collections.abc import Callable

from fairway import limits
from fairway.broker.descriptions import SubjectIndex
from fairway.errors import Code, Refused
from fairway.names import Subject
from fairway.protocol.admin_messages import BrokerState
from fairway.protocol.messages import ControlMessage
from fairway.protocol.route_messages import ClientRole, Copy, Govern, GroupRoute, Register, Route, Routed, SubjectRoute
from fairway.scheduling import Actor, Expiry, Scheduler, TurnResult
from fairway.serving.requests import Requester as Session
from fairway.serving.requests import ServedRequest

HERE = "here"  # the broker group that this broker is
VERSION = 1  # of a route table that never changes
OF_META = (Route, Govern, Register)  # a union written where it is needed costs 1 µs
_PAGE = 1_000
_NOT_META = Refused(
    Code.UNSUPPORTED,
    "this is a broker, which knows of nobody else: in a cluster ask a meta server (`fairway meta`), meta://HOST:PORT; "
    "a broker alone has its subjects from their first message on",
)
_NO_DELAY = "this broker keeps no delayed messages: run `fairway up`"

Asked = ServedRequest[ControlMessage]


class StandaloneRoutes:
    """A processor for the broker's scheduler. `key_of` names one of two actors for a request."""

    def __init__(
        self,
        scheduler: Scheduler,
        state: Callable[[], BrokerState],
        subjects: SubjectIndex,
        where: Callable[[], str],
        *,
        has_delay: bool,
        is_alone: bool,
    ) -> None:
        """`where`: the address for clients whose own view of the address is not known. One of several copies is not
        alone: it answers no route request."""
        self._scheduler = scheduler
        self._state = state
        self._subjects = subjects
        self._where = where
        self._has_delay = has_delay
        self._is_alone = is_alone
        # the waiting requests, by the number of the poll
        self._latest: dict[tuple[Session, ClientRole, int], Asked] = {}

    def key_of(self, message: ControlMessage) -> tuple[str, ...]:
        """The key of the actor; `Refused` where this broker does not answer the request."""
        if not isinstance(message, Route) or not self._is_alone:
            raise _NOT_META
        for name in message.subjects:
            Subject.parse_any(name)
        return ("route", "wait") if message.known >= VERSION and message.wait_ms else ("route",)

    def process(self, request: Asked, actor: Actor) -> TurnResult:
        route = request.message
        if not isinstance(route, Route):
            raise _NOT_META
        if route.known < VERSION or not route.wait_ms:
            if not self._subjects.refresh():
                return TurnResult.AGAIN
            request.respond(self._answer(request, route))
            return TurnResult.DONE
        poll = (request.session, route.asker, route.poll)
        before = self._latest.get(poll)
        if before is not None and before.correlation > request.correlation:
            request.respond(Routed(VERSION, [], []))
            return TurnResult.DONE
        if before is not request:
            self._latest[poll] = request
            if before is not None:
                self._scheduler.wake(actor.key)
        return TurnResult.WAIT

    def expire(self, request: Asked, expiry: Expiry) -> None:
        route = request.message
        if isinstance(route, Route):
            poll = (request.session, route.asker, route.poll)
            if self._latest.get(poll) is request:
                del self._latest[poll]
        if expiry is Expiry.WAITED:
            request.respond(Routed(VERSION, [], []))
        else:
            request.expire(expiry)

    def fail(self, request: Asked, error: Exception) -> None:
        request.fail(error)

    def _answer(self, request: Asked, route: Route) -> Routed:
        if route.known >= VERSION:
            return Routed(VERSION, [], [])
        is_tool = route.asker is ClientRole.TOOL
        names = list(dict.fromkeys(route.subjects))
        if is_tool and not names:
            names = list(self._subjects.plain_after(route.after, _PAGE + 1))
        is_delay_missing = route.asker is ClientRole.SCHEDULER and not self._has_delay
        groups, why = ([], _NO_DELAY) if is_delay_missing else ([HERE], "")
        subjects = [SubjectRoute(name, groups, groups, why=why) for name in names[:_PAGE]]
        here = request.session.here or self._where()
        group = self._group(here, is_tool=is_tool)
        return Routed(
            VERSION,
            subjects,
            [group],
            metas=[here] if is_tool else [],
            has_more=len(names) > _PAGE,
            joined=route.poll,  # nothing ever changes, so every poll covers all changes
            polls_max=limits.ROUTE_POLLS_MAX,
        )

    def _group(self, here: str, *, is_tool: bool) -> GroupRoute:
        state = self._state()
        copy = Copy(f"{state.log_id:016x}", here, "master", state.epoch, [], is_in_sync=True, program=state.server)
        why = "its disk is nearly full, or has failed" if state.is_read_only else ""
        copies = [copy] if is_tool else []
        return GroupRoute(HERE, "broker", state.epoch, here, [], is_writable=not why, why=why, copies=copies)
