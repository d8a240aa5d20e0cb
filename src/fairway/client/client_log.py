"""The log of clients: outages of connections, dead letters, and JOINs that have to wait.

A client tries to connect for ever. The log reports an outage at once with the reason, then at growing intervals, and
again when the reason is new. A connection that is lost again and again is reported in the same way, so no broker can
make an app flood its log. The end of an outage is reported if its beginning was.

Several clients may share one log: an app with both kinds of handlers has two connections to one broker, and one log
line for both is enough. Log lines are written without a client's lock: a handler of Python's logging may itself use a
client.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

from fairway.client.core import Goal, ServerConnection
from fairway.protocol.consumer_options import ConsumerOptions, ConsumingEvent, DeadLettered, JoinDelayed
from fairway.protocol.consumer_session import ConsumerSession
from fairway.protocol.delivery import DecodedBatches
from fairway.protocol.line import Line
from fairway.runtime.clock import Clock
from fairway.runtime.rng import Rng
from fairway.runtime.service import TimedFormatter
from fairway.runtime.threads import Lock

NS: Final = 1_000_000_000
AGAIN_FIRST_NS: Final = 10 * NS  # until the same reason is reported once more; doubles each time
AGAIN_MOST_NS: Final = 600 * NS
CHANGED_NS: Final = 1 * NS  # at least, between two log lines
REASONS_MAX: Final = 8  # new reasons reported at once in one outage; a reason may contain a number that always changes
_LOGGER: Final = logging.getLogger("fairway.client")  # of clients outside an app
QUIET_NS: Final = 60 * NS  # a JOIN that is delayed after so long a pause begins a new wait
STEADY_NS: Final = 60 * NS  # a connection that has held so long ends the outage before it


class Outages:
    """Decides which changes of one connection are worth a log line. Pure: the caller has the clock and the log."""

    def __init__(self, goal: Goal) -> None:
        self._goal = goal
        self._is_up = False  # according to the last log line
        self._has_been_up = False
        self._opened_ns: int | None = None  # None: the connection is not open
        self._down_ns: int | None = None  # start of the outage
        self._reasons: set[frozenset[str]] = set()  # reported in this outage
        self._reported_ns = 0
        self._again_ns = AGAIN_FIRST_NS

    def trouble(self, reason: str, now_ns: int) -> str | None:
        """The connection could not be made, or was lost: the sentence to report, or None."""
        if self._opened_ns is not None and now_ns - self._opened_ns >= STEADY_NS:
            self._reasons.clear()
            self._again_ns, self._down_ns = AGAIN_FIRST_NS, None
        self._opened_ns = None
        if self._down_ns is None:
            self._down_ns = now_ns
        parts = _parts(reason)
        is_new = parts not in self._reasons and len(self._reasons) < REASONS_MAX
        if self._reasons and now_ns < self._reported_ns + (CHANGED_NS if is_new else self._again_ns):
            return None
        sentence = self._sentence(reason, now_ns - self._down_ns)
        if not is_new:
            self._again_ns = min(2 * self._again_ns, AGAIN_MOST_NS)
        else:
            self._reasons.add(parts)
        self._reported_ns = now_ns
        self._is_up = False
        return sentence

    def opened(self, now_ns: int) -> str | None:
        """The connection was made: the sentence to report, or None."""
        self._opened_ns = now_ns
        self._has_been_up = True
        if self._is_up:
            return None
        self._is_up = True
        return f"connected to the {self._goal.place}"

    def _sentence(self, reason: str, down_ns: int) -> str:
        place = self._goal.place
        if self._is_up:
            return f"lost the connection to the {place}: {reason}; connecting again"
        if self._reasons:
            return f"still waiting for the {place}, after {down_ns / NS:.0f} s: {reason}"
        return f"waiting for the {place}: {reason}. {'' if self._has_been_up else self._goal.remedy}".rstrip(". ")


def _parts(reason: str) -> frozenset[str]:
    """The parts of a reason, as a set: the same trouble may list the addresses in another order."""
    return frozenset(reason.replace("cannot connect to ", "").split("; "))


class ConnectionLog:
    """Reports the connections to one server, of all clients that share a log."""

    def __init__(self, goal: Goal, logger: logging.Logger) -> None:
        self._outages = Outages(goal)
        self._logger = logger
        self._lock = Lock()  # blocking and asyncio clients share this object

    def trouble(self, reason: str, now_ns: int) -> None:
        with self._lock:
            sentence = self._outages.trouble(reason, now_ns)
        if sentence is not None:
            self._logger.warning("%s", sentence)

    def opened(self, now_ns: int) -> None:
        with self._lock:
            sentence = self._outages.opened(now_ns)
        if sentence is not None:
            self._logger.info("%s", sentence)


class ClientLog:
    """The log of one or several clients, in one logger."""

    def __init__(self, logger: logging.Logger) -> None:
        self.logger = logger
        self._lock = Lock()
        self._connections: dict[Goal, ConnectionLog] = {}

    def connection(self, goal: Goal) -> ConnectionLog:
        """The `ConnectionLog` of a server."""
        with self._lock:
            return self._connections.setdefault(goal, ConnectionLog(goal, self.logger))

    def listener(self, line: Line) -> Callable[[ConsumingEvent], None]:
        """The `on_event` of a session on this line. The session calls under the lock; the log is written without."""
        return partial(self._on_event, line)

    def _on_event(self, line: Line, event: ConsumingEvent) -> None:
        if isinstance(event, DeadLettered):
            line.run_later(partial(self._dead, event))

    def _dead(self, event: DeadLettered) -> None:
        name = f"message {event.sequence}" if event.id is None else f"message {event.id} (sequence {event.sequence})"
        where = f"{event.subject} on {event.broker_group}" if event.broker_group else event.subject
        what = "was rejected on attempt" if event.is_rejected else "failed on its last attempt,"
        doubt = "" if event.is_certain else "; unless its lease had run out: see `fairway dead list`"
        self.logger.warning(
            "dead letter: %s of %s in group %s %s %d: %s%s",
            *(name, where, event.group, what, event.attempt, event.reason or "no reason was given", doubt),
        )


class JoinLog:
    """Reports the delayed JOINs of one consumer at one broker: the first at once, later ones at growing intervals.

    Every client reports them, also outside an app: a program that gets no messages must say why.
    """

    def __init__(self, line: Line, log: ClientLog | None) -> None:
        self._line = line
        self._logger = _LOGGER if log is None else log.logger
        self._delayed_ns = -QUIET_NS
        self._report_at_ns = 0
        self._again_ns = AGAIN_FIRST_NS

    def __call__(self, delayed: JoinDelayed) -> None:
        """Report a delayed JOIN. Called under the client's lock; the log is written without it."""
        now_ns = delayed.now_ns
        if now_ns - self._delayed_ns >= QUIET_NS:
            self._report_at_ns, self._again_ns = now_ns, AGAIN_FIRST_NS
        self._delayed_ns = now_ns
        if now_ns < self._report_at_ns:
            return
        self._report_at_ns = now_ns + self._again_ns
        self._again_ns = min(2 * self._again_ns, AGAIN_MOST_NS)
        self._line.run_later(partial(self._report, delayed))

    def _report(self, delayed: JoinDelayed) -> None:
        self._logger.warning(
            "consumer %s cannot join group %s on %s yet: %s",
            *(delayed.consumer, delayed.group, delayed.subject, delayed.sentence),
        )


def logged_session(
    options: ConsumerOptions,
    connection: ServerConnection,
    clock: Clock,
    rng: Rng,
    log: ClientLog | None,
    *,
    broker_group: str = "",
    on_news: Callable[[], None],
    decoded: DecodedBatches | None = None,
) -> ConsumerSession:
    """A consumer's session for this connection, on call, which reports to the log, if there is one."""
    line = connection.core.line
    return ConsumerSession(
        options,
        clock,
        rng,
        on_event=None if log is None else log.listener(line),
        on_change=connection.link.stir,
        call=line.call,
        on_news=on_news,
        on_join_delayed=JoinLog(line, log),
        broker_group=broker_group,
        decoded=decoded,
    )


@contextmanager
def shown_on_stderr() -> Iterator[None]:
    """Show the log of Fairway on stderr, unless the program has set up Python's logging itself."""
    logger, root = logging.getLogger("fairway"), logging.getLogger()
    if logger.hasHandlers() or logging.lastResort is None:
        yield
        return
    handler = logging.StreamHandler()
    handler.setFormatter(TimedFormatter())
    handler.addFilter(lambda _record: not root.handlers)  # the program may set it up later
    level = logger.level
    logger.addHandler(handler)
    if level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
