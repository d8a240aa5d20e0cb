"""Settles messages by the end of their handler, and the two exceptions by which a handler decides itself.

    the handler                          its messages
    returns                              ack
    raises Retry                         retry after the time that it names, or after the group's own backoff
    raises Reject                        dead letter at once
    raises any other Exception           retry after the group's own backoff; the error is the reason
    is cut off by the program's end      released: that does not count as an attempt

A message that the handler has settled itself stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from fairway.protocol.delivery import After, Message, ack_all, after_ms_of


class Retry(Exception):
    """A handler raises this to get the message again later. Any consumer of the group may get the message."""

    def __init__(self, reason: str = "", *, after: After | None = None) -> None:
        after_ms_of(after)  # raises at once if `after` is wrong
        super().__init__(reason)
        self.reason = reason
        self.after = after


class Reject(Exception):
    """A handler raises this to send the message to the group's dead letters at once."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


def settle(messages: Sequence[Message], error: BaseException | None) -> None:
    """Settle these messages by the end of their handler."""
    if error is None:
        # All at once: after the first of a thousand single acks, the consumer would pull one message alone.
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
    """Whether to log the error: the handler did not raise it on purpose."""
    return not isinstance(error, Retry | Reject)


def reason_of(error: BaseException) -> str:
    """The reason for the message's history: the type of the error and its text."""
    return f"{type(error).__name__}: {error}"
