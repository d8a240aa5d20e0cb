"""Single requests on a loop: a line to one of several servers, and one outcome to wait for per request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import TypeVar

from fairway.errors import RemoteProtocolError, Unreachable
from fairway.protocol import ConnectionOptions
from fairway.protocol.line import Answer, ConnectionLost, Line, ReconnectOptions, RequestOutcome
from fairway.protocol.messages import ControlMessage
from fairway.protocol.request_queue import PendingRequest, RequestQueue
from fairway.runtime.clock import Clock
from fairway.runtime.loop_link import LoopLink
from fairway.runtime.net import Address, Net
from fairway.runtime.rng import Rng

AnswerT = TypeVar("AnswerT", bound=ControlMessage)

_GOODBYE_S = 1.0


class Inquirer:
    """A line with a `RequestQueue`, and its link. Create it on the loop that it lives on.

    Each request is sent once. If its answer is lost, the caller decides.
    """

    def __init__(
        self,
        net: Net,
        clock: Clock,
        rng: Rng,
        addresses: Sequence[Address],
        *,
        name: str = "fairway",
        features: tuple[str, ...] = (),
        opened: Callable[[], None] | None = None,
        on_trouble: Callable[[str, int], None] | None = None,
    ) -> None:
        options = ReconnectOptions(hello=ConnectionOptions(name=name, features=features), backoff_most_ms=1_000)
        self.line = Line(rng, options, now_ns=clock.monotonic_ns(), on_trouble=on_trouble)
        self._requests = RequestQueue(on_open=opened)
        self.line.add(self._requests, clock.monotonic_ns())
        self._link = LoopLink(self.line, addresses, net, clock)

    async def connected(self, patience_s: float, first_s: float) -> bool:
        """Wait until the line is open, for at most `patience_s`. With 0, wait until the first attempt has failed."""
        line = self.line
        if patience_s:
            return await self._link.wait(lambda: line.is_open, patience_s)
        await self._link.wait(lambda: line.is_open or line.trouble is not None, first_s)
        return line.is_open

    async def outcome(self, message: ControlMessage, timeout_s: float) -> RequestOutcome:
        """How the request ended. `ConnectionLost` also if nobody answered in time."""
        settled = asyncio.Event()
        request = self._requests.put(PendingRequest(message, settled.set))
        self._link.stir()
        with contextlib.suppress(TimeoutError):
            try:
                async with asyncio.timeout(timeout_s):
                    await settled.wait()
            finally:
                request.is_abandoned = True
        return request.outcome or ConnectionLost(self.line.trouble or f"no answer within {timeout_s:g} s")

    def ask_first(self, message: ControlMessage) -> None:
        """Send this request before all that wait, and ignore the answer. For `opened`."""
        self._requests.put_first(PendingRequest(message))

    async def ask(self, message: ControlMessage, kind: type[AnswerT], timeout_s: float) -> AnswerT:
        """The answer. Raises `Refused`, or `Unreachable` if no answer came."""
        outcome = await self.outcome(message, timeout_s)
        if isinstance(outcome, Answer):
            if not isinstance(outcome.message, kind):
                raise RemoteProtocolError(f"{type(message).__name__} was answered with {outcome.message!r}")
            return outcome.message
        if isinstance(outcome, ConnectionLost):
            raise Unreachable(outcome.sentence)
        raise outcome

    async def close(self) -> None:
        await self._link.close(_GOODBYE_S)

    def abort(self) -> None:
        self._link.abort()
