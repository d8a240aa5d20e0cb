"""The action log of a broker, for the driver and for tasks: `fairway.client.trail` over their conversation, with words
that name Spark's options."""

from __future__ import annotations

from typing import Final

from fairway.client import trail
from fairway.client.trail import Answer
from fairway.client.trail_names import AskNames
from fairway.errors import FairwayError, Refused
from fairway.protocol.tracing import Named, Names, Retrace, Retraced
from fairway.spark.calling import BlockingClient
from fairway.spark.reading import DataLoss, cut_short, other_log

WHAT: Final = "actions"
_ACCEPT: Final = 'or accept the loss with option("failOnDataLoss", "false")'


class SparkActionLogReader(trail.ActionLogReader):
    """Reads the action log in order. Strict: what is missing or damaged is an error, else it is passed over."""

    def __init__(self, caller: BlockingClient, log_id: int | None, *, is_strict: bool) -> None:
        self._caller = caller
        super().__init__(self._put, log_id, is_strict=is_strict)

    def _put(self, asked: Retrace) -> Answer:
        ticket = self._caller.put(asked)
        return lambda: self._caller.take(ticket, Retraced)[0]

    def other_log(self) -> FairwayError:
        return other_log(WHAT, self._caller.where)

    def refused(self, refused: Refused) -> FairwayError:
        return FairwayError(f"the broker at {self._caller.where} will not show its actions: {refused}")

    def cut_short(self, at: int, end: int) -> FairwayError:
        return cut_short(WHAT, at, end)

    def damaged(self, position: int, why: str) -> FairwayError:
        return DataLoss(
            f"the action log is damaged at position {position} ({why}): `fairway verify` shows how much is. Begin "
            f"later (option starting), {_ACCEPT}"
        )


def asking(caller: BlockingClient) -> AskNames:
    """How a task asks for names."""

    def ask(asked: Names) -> Named:
        return caller.ask(asked, Named)

    return ask
