"""A message in the hands of a handler whose effect is not certain yet.

What the handler says of it (`ack`, `retry`, `reject`, `release`) is kept, and told when the effect is committed: an ack
that went out before would lose the effect if the program died in between.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from fairway.errors import Misuse
from fairway.protocol.delivery import After, Message, after_ms_of

_ACK: Final = "acked"
_RETRY: Final = "retried"
_REJECT: Final = "rejected"
_RELEASE: Final = "released"


class _Said(NamedTuple):
    word: str
    after: After | None = None
    reason: str = ""


class Held(Message, gc=False, eq=False):
    """A message whose settlement waits."""

    _said: _Said | None = None

    @classmethod
    def of(cls, message: Message) -> Held:
        return cls(message.payload, message.sequence, message._lot, message._page)

    @property
    def is_settled(self) -> bool:
        """Whether the handler has said what became of it."""
        return self._said is not None

    @property
    def is_handed_back(self) -> bool:
        """Whether it is not done: it is to come again, or was rejected."""
        return self._said is not None and self._said.word != _ACK

    def ack(self) -> None:
        """Done, when the effect is committed."""
        self._say(_Said(_ACK))

    def retry(self, after: After | None = None, reason: str = "") -> None:
        """Failed: again after so many seconds (or a timedelta), and it is not remembered as done."""
        after_ms_of(after)  # says at once what is wrong with it
        self._say(_Said(_RETRY, after, reason))

    def reject(self, reason: str = "") -> None:
        """Never again: to dead letter, and it is not remembered as done."""
        self._say(_Said(_REJECT, None, reason))

    def release(self) -> None:
        """Hand it back untouched."""
        self._say(_Said(_RELEASE))

    def settle(self, message: Message) -> None:
        """Tell the message itself what was said; nothing if that was nothing, or nobody can settle it any more."""
        if self._said is None or message.is_settled:
            return
        word, after, reason = self._said
        if word == _ACK:
            message.ack()
        elif word == _RETRY:
            message.retry(after, reason)
        elif word == _REJECT:
            message.reject(reason)
        else:
            message.release()

    def _say(self, said: _Said) -> None:
        if self._said is not None:
            raise Misuse(f"{self!r} was {self._said.word} before: settle each message once")
        self._said = said
