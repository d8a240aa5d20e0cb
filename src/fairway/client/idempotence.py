"""Lets the effect of a handler happen once, however often its message comes: the interface of inboxes, and their parts.

    @app.listener("order.paid", group="ledger", idempotent=SqlInbox(engine))
    def on_paid(message, session): ...

An inbox remembers the messages that were handled, by subject, group and the message's name. The record and the effect
must come and go together, so the place of the effect decides which inbox fits:

    the effect is in     inbox                    the record
    a database           fairway.sql.SqlInbox     is in the same transaction: exactly once
    this process         MemoryInbox              is lost together with the effect when the process dies
    any other place      ExpiringInbox            is in a store such as Redis: once, except after a crash in between

A message's name is its id, which all its copies share: a message that is delivered again, sent again by a relay or
redriven from the dead letters is the same message. A replay is meant to be handled again, so the replay's id becomes a
part of the name.

`Held` is a message whose effect is not certain yet. `Held` keeps the handler's settlement (`ack`, `retry`, `reject`,
`release`) until the effect is committed: if an earlier ack went out and the program died, the effect would be lost.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from fairway.client.handler_results import Reject
from fairway.errors import Misuse
from fairway.protocol.delivery import After, Message, ack_all, after_ms_of

_ACK: Final = "acked"
_RETRY: Final = "retried"
_REJECT: Final = "rejected"
_RELEASE: Final = "released"


class _Said(NamedTuple):
    word: str
    after: After | None = None
    reason: str = ""


class Held(Message, gc=False, eq=False):
    """A message whose settlement waits until the effect is certain."""

    _said: _Said | None = None

    @classmethod
    def of(cls, message: Message) -> Held:
        return cls(message.payload, message.sequence, message._lot, message._page)

    @property
    def is_settled(self) -> bool:
        """Whether the handler has settled the message."""
        return self._said is not None

    @property
    def is_handed_back(self) -> bool:
        """Whether the message is not done: the handler has retried, rejected or released it."""
        return self._said is not None and self._said.word != _ACK

    def ack(self) -> None:
        """Ack the message once the effect is committed."""
        self._say(_Said(_ACK))

    def retry(self, after: After | None = None, reason: str = "") -> None:
        """Get the message again after a time. The inbox does not remember it as done."""
        after_ms_of(after)  # raises at once if `after` is wrong
        self._say(_Said(_RETRY, after, reason))

    def reject(self, reason: str = "") -> None:
        """Send the message to the dead letters. The inbox does not remember it as done."""
        self._say(_Said(_REJECT, None, reason))

    def release(self) -> None:
        """Hand the message back untouched."""
        self._say(_Said(_RELEASE))

    def settle(self, message: Message) -> None:
        """Settle the real message as the handler has decided, unless it did not decide or the message is settled."""
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


REPLAY_ID: Final = "fairway.replay.id"  # the header of messages that `fairway pipeline replay` has sent
NAME_CHARS_MAX: Final = 255

By: TypeAlias = Callable[[Message], str | None] | str | None
Handler: TypeAlias = Callable[..., Any]
Guarded: TypeAlias = Callable[[Sequence[Message]], Any]  # returns an awaitable if the handler is `async def`

_PLAIN = re.compile(r"[!-~](?:[ -~]*[!-~])?", re.ASCII)  # no space at either end: some databases ignore it there
_DIGEST = "sha256:"


class Idempotence(Protocol):
    """The interface of an inbox, as a listener uses it."""

    def guard(self, handler: Handler, *, is_async: bool, is_batch: bool) -> Guarded:
        """Wrap a handler. Raises `Misuse` if the handler does not fit.

        The wrapper returns when the handler has done its work, or all messages were done before; then the listener acks
        the messages that are not settled yet. The wrapper raises the handler's error, and then remembers nothing.
        """

    async def close_async(self) -> None:
        """Close what belongs to the handlers' loop, which is about to end."""


# --- names -----------------------------------------------------------------------------------------------------------


class Naming:
    """Names messages for an inbox: by their id, by their key, or by a function of the user's."""

    def __init__(self, by: By, *, replays: bool) -> None:
        if isinstance(by, str) and by != "key":
            raise Misuse(f"by={by!r}: it is 'key', or a function of the message that returns a str")
        self._by: Callable[[Message], str | None] | None = _key_of if isinstance(by, str) else by
        self._replays = replays

    def of(self, message: Message) -> str:
        """The name of a message: at most 255 visible ASCII characters, whatever the key is."""
        if self._by is None:
            name = str(message.id)
        else:
            told = self._by(message)
            if not isinstance(told, str) or not told:
                raise Reject(f"{message!r} has no key to tell it apart by: `by` gave {told!r}")
            name = told
        return plain(name, message.headers.get(REPLAY_ID) if self._replays else None)


def plain(name: str, replay: str | None = None) -> str:
    """`name` or `name+replay`, if every database stores and compares that exactly and the text is unambiguous.

    Otherwise a digest.
    """
    text = name if replay is None else f"{name}+{replay}"
    is_exact = len(text) <= NAME_CHARS_MAX and _PLAIN.fullmatch(text) is not None
    if is_exact and not text.startswith(_DIGEST) and text.count("+") == (replay is not None):
        return text
    return _DIGEST + hashlib.sha256(json.dumps([name, replay]).encode()).hexdigest()


def _key_of(message: Message) -> str | None:
    return message.key


# --- messages --------------------------------------------------------------------------------------------------------


class Sheaf:
    """The messages of one call, by their names. The first message of a name stands for all of that name."""

    def __init__(self, messages: Sequence[Message], naming: Naming) -> None:
        self._named: dict[str, list[Message]] = {}
        self._held: dict[str, Held] = {}
        for message in messages:
            try:
                name = naming.of(message)
            except Reject as reject:
                message.reject(reject.reason)  # this one alone: the others are sound
            else:
                self._named.setdefault(name, []).append(message)

    @property
    def names(self) -> list[str]:
        """The names, sorted. All calls claim names in this order, so no two wait for each other."""
        return sorted(self._named)

    def sift(self, fresh: set[str]) -> list[Held]:
        """Ack the messages that were done before; return the others for the handler, one for each name."""
        for name, messages in self._named.items():
            if name in fresh:
                self._held[name] = Held.of(messages[0])
            else:
                ack_all([message for message in messages if not message.is_settled])
        return list(self._held.values())

    @property
    def held_names(self) -> list[str]:
        """The names of the messages that the handler has got."""
        return list(self._held)

    @property
    def handed_back(self) -> list[str]:
        """The names of messages that the handler has retried, rejected or released: they are not done."""
        return [name for name, held in self._held.items() if held.is_handed_back]

    def settle(self) -> None:
        """Settle as the handler has decided: the effect is certain now. The listener acks the undecided messages."""
        for name, held in self._held.items():
            first, *others = self._named[name]
            held.settle(first)
            if held.is_handed_back:
                for message in others:
                    message.release()


# --- handlers --------------------------------------------------------------------------------------------------------


def parameters_of(handler: Handler) -> list[str]:
    """The names of a handler's parameters, without those that have defaults."""
    return [
        each.name
        for each in inspect.signature(handler).parameters.values()
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]


def name_of(handler: Handler) -> str:
    return str(getattr(handler, "__qualname__", repr(handler)))
