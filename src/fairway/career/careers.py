"""What a user writes: a career, in three parts. One instance in the whole cluster has it at a time.

    class Billing(fairway.Career):
        name = "billing"

        def inaugurate(self) -> None: ...           take up office: open what is needed
        def execute(self, token: int) -> bool: ...  one piece of work, again and again
        def hand_over(self) -> None: ...            leave it in order

`execute` returns True to be called again at once (where there is nothing to do, it waits a little itself), and False to
let another candidate have its turn. `token` grows with every reign: what `execute` brings about shows it to a fence, in
the same transaction (`fairway.sql.Fence`), and nothing of a deposed leader is accepted. Nothing else can promise that:
whatever a process looks at before it acts, it may be paused between the look and the act.

Where the office is suspended or to be given up while `execute` runs, `in_hand` says what becomes of the message in
hand. "finish": it is finished (its effect is fenced), and the next leader waits. "abort": it is broken off, which is
right where it is one transaction; the office changes hands at once. A plain function cannot be broken off from outside:
it calls `self.mandate.check()` where it may be, which raises `Deposed`. A coroutine is cancelled.

What `execute` or another part raises ends the candidacy: the office is handed over, and `elect` raises it. `Deposed` is
no failure: it ends the reign, and the candidate stands in line again.
"""

from __future__ import annotations

from typing import ClassVar

from fairway.career.law import InHand
from fairway.career.office import Leadership
from fairway.errors import Misuse


class _Named:
    name: ClassVar[str] = ""
    """Of the career, not of the candidate: all candidates of one career have the same, and a fence knows it by it."""
    in_hand: ClassVar[InHand] = "finish"
    """What becomes of the message in hand when the office is in doubt or to be given up."""

    _mandate: Leadership | None = None

    @property
    def mandate(self) -> Leadership:
        """The right to rule, while there is one: from `inaugurate` to the end of `hand_over`."""
        if self._mandate is None:
            raise Misuse(f"career {self.name or type(self).__name__} is not in office: only its three parts may ask")
        return self._mandate


class Career(_Named):
    """A career of plain functions, run by `fairway.elect`, in the thread that called it."""

    def inaugurate(self) -> None:
        """Take up office. Nobody else rules, and everybody before has handed over or is deposed."""

    def execute(self, token: int) -> bool:
        """One piece of work; True: call it again, False: let another one have its turn."""
        raise NotImplementedError(f"{type(self).__name__}.execute(token) is what a career is for")

    def hand_over(self) -> None:
        """Leave office: called whenever `inaugurate` had ended, also when the office is lost already."""


class AioCareer(_Named):
    """A career of coroutines, run by `fairway.aio.elect`, on the loop that called it."""

    async def inaugurate(self) -> None:
        """Take up office. Nobody else rules, and everybody before has handed over or is deposed."""

    async def execute(self, token: int) -> bool:
        """One piece of work; True: call it again, False: let another one have its turn."""
        raise NotImplementedError(f"{type(self).__name__}.execute(token) is what a career is for")

    async def hand_over(self) -> None:
        """Leave office: called whenever `inaugurate` had ended, also when the office is lost already."""


def name_of(career: Career | AioCareer) -> str:
    if not career.name:
        raise Misuse(f'{type(career).__name__} has no name: give the class one, as in name = "billing"')
    return career.name


def checked(career: Career | AioCareer, is_more: object) -> bool:
    """What `execute` returned. None would end every reign after one piece of work, in silence."""
    if not isinstance(is_more, bool):
        raise Misuse(f"{type(career).__name__}.execute returned {is_more!r}: it says True to go on, or False")
    return is_more
