"""Questions of operators and tools, as one session of a line: each is asked once the line is open, and answered once.

A question whose answer was lost with the connection is asked again where that can do no harm; otherwise its caller is
told that nobody knows. A refusal is for the caller to judge, but for two: a delay server that has just been started and
reads its files says when to ask again, and is asked again; and what one who does not lead refuses, the next one is
asked.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Generic, TypeVar

from fairway.errors import Code, InvariantViolated, OutcomeUnknown, Refused
from fairway.protocol import codec
from fairway.protocol.admin import Describe, Redrive, RemoveGroup, RemoveSubject, Scan, Seek, Switch, Weigh
from fairway.protocol.backoff import NS_PER_MS
from fairway.protocol.delaying import Cancel, DelayTally, PendingListed, Reschedule, Resend
from fairway.protocol.messages import ControlMessage
from fairway.protocol.routing import Govern, Route
from fairway.protocol.session import Answer, Ask, ConnectionLost, RequestOutcome
from fairway.protocol.tracing import Index, Names, Retrace
from fairway.world.buffers import Bytes

AnswerT = TypeVar("AnswerT", bound=ControlMessage)

# Asked twice, these leave things as if they had been asked once. CONFIGURE is not among them: its second time would be
# refused because of the first.
ABOUT_DELAYED: frozenset[type[ControlMessage]] = frozenset({Cancel, Reschedule, PendingListed, DelayTally, Resend})
HARMLESS_TWICE: frozenset[type[ControlMessage]] = ABOUT_DELAYED | {
    Describe, Scan, Seek, Switch, Weigh, Redrive, Retrace, Index, Names, Route, Govern, RemoveSubject, RemoveGroup,
}  # fmt: skip


class Command(Generic[AnswerT]):
    """What to ask, and the kind of answer that belongs to it."""

    __slots__ = ("answer_type", "message")

    def __init__(self, message: ControlMessage, answer_type: type[AnswerT]) -> None:
        self.message = message
        self.answer_type = answer_type


class CommandRequest(Generic[AnswerT]):
    """One command that was given, and what came of it."""

    __slots__ = ("_answer_type", "_outcome", "_told", "is_abandoned", "message", "refused")

    def __init__(self, command: Command[AnswerT], told: Callable[[], None] | None) -> None:
        self.message = command.message
        self.is_abandoned = False  # whoever asked has gone: do not ask any more
        self.refused: Refused | None = None  # the last time, by who is to be asked again
        self._answer_type = command.answer_type
        self._outcome: RequestOutcome | None = None
        self._told = told

    def is_answered(self) -> bool:
        return self._outcome is not None

    def settle(self, outcome: RequestOutcome) -> None:
        self._outcome = outcome
        if self._told is not None:
            self._told()

    def answer(self) -> tuple[AnswerT, Sequence[Bytes]]:
        """The answer and what was attached; raises `Refused`, or `OutcomeUnknown` where the answer was lost."""
        outcome = self._outcome
        if isinstance(outcome, Answer) and isinstance(outcome.message, self._answer_type):
            return outcome.message, outcome.attachments
        if isinstance(outcome, Refused):
            raise outcome
        if isinstance(outcome, ConnectionLost):
            kind = type(self.message).__name__
            raise OutcomeUnknown(f"{kind} was asked and no answer came: {outcome.sentence}; look before asking again")
        raise InvariantViolated(f"{type(self.message).__name__} was answered with {outcome!r}")


class Questions:
    """The session."""

    def __init__(self) -> None:
        self._waiting: deque[CommandRequest[ControlMessage]] = deque()
        self._later: list[tuple[int, int, CommandRequest[ControlMessage]]] = []  # a heap, by when to ask again
        self._numbers = count()

    def put(self, command: Command[AnswerT], told: Callable[[], None] | None = None) -> CommandRequest[AnswerT]:
        """Ask as soon as possible; `told` is called, in the line's thread, when the outcome is there."""
        codec.encode(command.message)  # what cannot be written is its caller's mistake: now, not in the line's thread
        question = CommandRequest(command, told)
        self._waiting.append(question)  # type: ignore[arg-type]
        return question

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits to be asked something; what was asked may be on its way."""
        return all(each.is_abandoned for each in (*self._waiting, *(later[2] for later in self._later)))

    def opened(self, now_ns: int) -> None:
        """Nothing to say first."""

    def asks(self, room: int, now_ns: int) -> Iterator[Ask]:
        while self._later and self._later[0][0] <= now_ns:
            self._waiting.append(heapq.heappop(self._later)[2])
        while room and self._waiting:
            question = self._waiting.popleft()
            if not question.is_abandoned:
                room -= 1
                yield Ask(question.message, (), question)

    def answered(self, token: object, outcome: RequestOutcome, now_ns: int) -> None:
        if not isinstance(token, CommandRequest):
            raise InvariantViolated(f"an answer to {token!r}, which is not a question")
        if isinstance(outcome, ConnectionLost) and type(token.message) in HARMLESS_TWICE:
            self._waiting.append(token)
        elif isinstance(outcome, Refused) and outcome.code in _ELSEWHERE:
            token.refused = outcome
            self._waiting.append(token)  # there is no room until the line has found another
        elif isinstance(outcome, Refused) and _is_passing(token, outcome):
            token.refused = outcome
            heapq.heappush(
                self._later, (now_ns + (outcome.retry_after_ms or 0) * NS_PER_MS, next(self._numbers), token)
            )
        else:
            token.settle(outcome)

    def next_deadline(self) -> int | None:
        return self._later[0][0] if self._later else None


_ELSEWHERE = frozenset({Code.NOT_MASTER, Code.DRAINING})  # nothing was done: the line looks for another


def _is_passing(question: CommandRequest[ControlMessage], refused: Refused) -> bool:
    return type(question.message) in ABOUT_DELAYED and refused.code is Code.BUSY and bool(refused.retry_after_ms)
