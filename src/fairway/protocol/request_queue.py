"""Single requests on a line: the session that sends them, and settles each once.

Producers, consumers and routes are sessions with a conversation of their own. Everything else that a program asks of a
server is one request with one answer, and goes through a `RequestQueue`: the commands of clients (`client.commands`),
and the requests of servers and tools to other servers (`lookup.registries`).

A request waits until the line is open and has room. `repeats` decides whether to ask again after an outcome that is no
answer:

    the connection was lost      ask again on the next connection
    NOT_MASTER, DRAINING         ask the next server
    any other refusal            ask again after the time that the server names

Without `repeats`, every outcome is the end of its request. Whoever waits for a request sets `is_abandoned` when the
wait is over; the request is not asked again after that.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from typing import TypeVar

from fairway.errors import InvariantViolated, Refused
from fairway.protocol.line import ELSEWHERE, NS_PER_MS, Answer, Ask, ConnectionLost, RequestOutcome
from fairway.protocol.messages import ControlMessage


class PendingRequest:
    """One request, and its outcome."""

    __slots__ = ("_on_settled", "is_abandoned", "message", "outcome", "refused")

    def __init__(self, message: ControlMessage, on_settled: Callable[[], None] | None = None) -> None:
        """`on_settled` is called in the line's thread when the outcome is known."""
        self.message = message
        self.is_abandoned = False  # the caller waits no longer: do not ask again
        self.refused: Refused | None = None  # the last refusal after which the request is repeated
        self.outcome: RequestOutcome | None = None
        self._on_settled = on_settled

    def is_answered(self) -> bool:
        return self.outcome is not None

    def settle(self, outcome: RequestOutcome) -> None:
        self.outcome = outcome
        if self._on_settled is not None:
            self._on_settled()


RequestT = TypeVar("RequestT", bound=PendingRequest)


class RequestQueue:
    """The session of single requests."""

    def __init__(
        self,
        repeats: Callable[[ControlMessage, Refused | ConnectionLost], bool] | None = None,
        *,
        on_open: Callable[[], None] | None = None,
    ) -> None:
        """`on_open` is called for each new connection, before any request goes there."""
        self._repeats = repeats
        self._on_open = on_open
        self._waiting: deque[PendingRequest] = deque()
        self._later: list[tuple[int, int, PendingRequest]] = []  # a heap, by when to ask again
        self._numbers = count()

    def put(self, request: RequestT) -> RequestT:
        """Send the request as soon as possible."""
        self._waiting.append(request)
        return request

    def put_first(self, request: PendingRequest) -> None:
        """Send the request before all that wait."""
        self._waiting.appendleft(request)

    @property
    def is_idle(self) -> bool:
        """Whether no request waits to be sent. Requests that were sent may still be in flight."""
        return all(each.is_abandoned for each in (*self._waiting, *(later[2] for later in self._later)))

    # --- the session -------------------------------------------------------------------------------------------------

    def opened(self, now_ns: int) -> None:
        if self._on_open is not None:
            self._on_open()

    def asks(self, room: int, now_ns: int) -> Iterator[Ask]:
        while self._later and self._later[0][0] <= now_ns:
            self._waiting.append(heapq.heappop(self._later)[2])
        while room and self._waiting:
            request = self._waiting.popleft()
            if not request.is_abandoned:
                room -= 1
                yield Ask(request.message, (), request)

    def answered(self, token: object, outcome: RequestOutcome, now_ns: int) -> None:
        if not isinstance(token, PendingRequest):
            raise InvariantViolated(f"an answer to {token!r}, which is no request of this queue")
        if isinstance(outcome, Answer) or self._repeats is None or not self._repeats(token.message, outcome):
            token.settle(outcome)
        elif isinstance(outcome, ConnectionLost):
            self._waiting.append(token)
        else:
            token.refused = outcome
            if outcome.code in ELSEWHERE:
                self._waiting.append(token)  # the line gives no room until it has found another server
            else:
                due_ns = now_ns + (outcome.retry_after_ms or 0) * NS_PER_MS
                heapq.heappush(self._later, (due_ns, next(self._numbers), token))

    def next_deadline(self) -> int | None:
        return self._later[0][0] if self._later else None
