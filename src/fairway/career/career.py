"""Career: the class that a user writes, in three parts. One instance in the whole cluster leads at a time.

    class Billing(fairway.Career):
        name = "billing"

        def inaugurate(self) -> None: ...           begin to lead: open what is needed
        def execute(self, token: int) -> bool: ...  one piece of work, again and again
        def hand_over(self) -> None: ...            stop leading in order

`execute` returns True to be called again at once; with nothing to do, it waits a little itself. It returns False to let
another candidate have a turn. `token` grows with every term. `execute` shows the token to a fence in the same
transaction as its effect (`fairway.sql.Fence`), and the fence refuses a deposed leader. Nothing else can promise that:
a process may be paused between any check and its effect.

`in_hand` says what happens to the work in hand when the leadership is suspended or about to end while `execute` runs.
With "finish" the work is finished, since a fence protects its effect, and the next leader waits. With "abort" the work
is aborted, and the leadership changes at once; this is right for work in one transaction. A plain function cannot be
interrupted: it calls `self.leadership.check()` where it can stop, and that raises `Deposed`. A coroutine is cancelled.

If a part raises an error, the candidate hands over and resigns, and `elect` raises the error. `Deposed` is not such an
error: it ends the term, and the candidate campaigns again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fairway.career.state_machine import InHand
from fairway.errors import Misuse

if TYPE_CHECKING:
    from fairway.career.candidate import Leadership


class _Named:
    name: ClassVar[str] = ""
    """The name of the career, not of the candidate. All candidates of one career share the name, and a fence knows them
    by it."""
    in_hand: ClassVar[InHand] = "finish"
    """What happens to the work in hand when the leadership is in doubt or about to end."""

    _leadership: Leadership | None = None

    @property
    def leadership(self) -> Leadership:
        """The leadership of this term, from `inaugurate` to the end of `hand_over`."""
        if self._leadership is None:
            raise Misuse(f"career {self.name or type(self).__name__} is not in office: only its three parts may ask")
        return self._leadership


class Career(_Named):
    """A career of plain functions. `fairway.elect` runs it in the calling thread."""

    def inaugurate(self) -> None:
        """Begin to lead. Nobody else leads: every earlier leader has handed over or is deposed."""

    def execute(self, token: int) -> bool:
        """Do one piece of work. True: call again; False: let another candidate have a turn."""
        raise NotImplementedError(f"{type(self).__name__}.execute(token) is what a career is for")

    def hand_over(self) -> None:
        """Stop leading. Called after every `inaugurate` that succeeded, even if the leadership is lost already."""


class AioCareer(_Named):
    """A career of coroutines. `fairway.aio.elect` runs it on the calling loop."""

    async def inaugurate(self) -> None:
        """Begin to lead. Nobody else leads: every earlier leader has handed over or is deposed."""

    async def execute(self, token: int) -> bool:
        """Do one piece of work. True: call again; False: let another candidate have a turn."""
        raise NotImplementedError(f"{type(self).__name__}.execute(token) is what a career is for")

    async def hand_over(self) -> None:
        """Stop leading. Called after every `inaugurate` that succeeded, even if the leadership is lost already."""


def name_of(career: Career | AioCareer) -> str:
    if not career.name:
        raise Misuse(f'{type(career).__name__} has no name: give the class one, as in name = "billing"')
    return career.name


def checked(career: Career | AioCareer, is_more: object) -> bool:
    """Check the result of `execute`. None would silently end every term after one piece of work."""
    if not isinstance(is_more, bool):
        raise Misuse(f"{type(career).__name__}.execute returned {is_more!r}: it says True to go on, or False")
    return is_more
