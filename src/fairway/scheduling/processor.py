"""The port of the scheduler: what a request is, who handles it, and every way in which it can end.

    dispatch ──► refused (`Refused` is raised)
            └──► process ──► DONE                                        answered, or handed on
                    ▲   ├──► raises ──► fail
                    │   ├──► AGAIN ──► first in the actor's next turn ──► process …
                    │   └──► WAIT  ──► waits beside the mailbox ──► woken ──► process …
                    │                       └──► its wait ends ──► expire(WAITED)
                    └── in any queue: expire(LATE), expire(GONE), expire(STOPPED)

Every request ends in exactly one of: refused, DONE, fail, expire.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from fairway.scheduling.account import Account
    from fairway.scheduling.actor import Actor


class TurnResult(enum.Enum):
    """What a processor made of a request."""

    DONE = "done"  # answered, or handed on to whoever will answer it: the scheduler forgets it
    WAIT = "wait"  # the actor has nothing for anybody: keep it until `Scheduler.wake`, or until its wait ends
    AGAIN = "again"  # not finished (more to scan, a read under way): the slice ends, it comes first in the next one


class Expiry(enum.Enum):
    """Why a request ends without having been served."""

    LATE = "late"  # an answer would not leave before its deadline: say BUSY, with a retry-after
    WAITED = "waited"  # it waited as long as it wanted, and nothing came: the empty answer
    GONE = "gone"  # its sender is gone: nothing to send, release what it holds
    STOPPED = "stopped"  # the scheduler was closed


class Request(Protocol):
    """What lies in a mailbox. Times are monotonic."""

    @property
    def deadline_ns(self) -> int:
        """When its sender gives up: an answer that cannot leave before is not worth working for."""

    @property
    def wait_until_ns(self) -> int:
        """How long WAIT may keep it; in the past (0, say) for a request that wants its answer at once."""

    @property
    def is_cancelled(self) -> bool:
        """Whether its sender is gone. Asked often: keep it cheap."""

    @property
    def account(self) -> Account | None:
        """Who pays for it beside the actor; None: nobody."""


RequestT_contra = TypeVar("RequestT_contra", bound=Request, contravariant=True)


class Processor(Protocol[RequestT_contra]):
    """Whoever handles one kind of request. None of these may block; what they raise harms nobody else.

    A long poll registers for news, looks again, and returns WAIT: whatever comes from then on ends in `wake`.
    """

    def process(self, request: RequestT_contra, actor: Actor) -> TurnResult:
        """Handle it. Called again for the same request after AGAIN, and after WAIT when the actor was woken."""

    def expire(self, request: RequestT_contra, expiry: Expiry) -> None:
        """It ends unserved: tell its sender."""

    def fail(self, request: RequestT_contra, error: Exception) -> None:
        """`process` raised: tell its sender. The request is out, the actor goes on."""
