"""What a handler's end means for its messages: a table, and the two exceptions by which a handler says it itself.

    it returns                            ack
    it raises Retry                       retry, after the time it names or the group's own backoff
    it raises Reject                      dead letter at once
    it raises anything else               retry with the group's own backoff; the error is the reason
    it is cut off by the program's end    released: that is no attempt

What the handler has settled itself stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from fairway.protocol.delivery import After, Message, ack_all, after_ms_of


class Retry(Exception):
    """Raised by a handler: not now. The message comes again, to any consumer of the group."""

    def __init__(self, reason: str = "", *, after: After | None = None) -> None:
        after_ms_of(after)  # says at once what is wrong with it
        super().__init__(reason)
        self.reason = reason
        self.after = after


class Reject(Exception):
    """Raised by a handler: never. The message goes to the group's dead letters."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


def settle(messages: Sequence[Message], error: BaseException | None) -> None:
    """Say of these messages what the end of their handler means."""
    if (
        error is None
    ):  # all at once: after the first of a thousand single acks one message would be pulled, and come alone
        ack_all([message for message in messages if not message.is_settled])
        return
    for message in messages:
        if message.is_settled:
            continue
        if isinstance(error, Retry):
            message.retry(error.after, error.reason)
        elif isinstance(error, Reject):
            message.reject(error.reason)
        elif isinstance(error, Exception):
            message.retry(reason=reason_of(error))
        else:
            message.release()


def is_surprise(error: BaseException) -> bool:
    """Whether it deserves a line in the log: the handler did not mean it."""
    return not isinstance(error, Retry | Reject)


def reason_of(error: BaseException) -> str:
    """For the message's history: the kind of error and its sentence."""
    return f"{type(error).__name__}: {error}"
