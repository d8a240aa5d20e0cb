"""Handlers whose effect happens once, however often their message comes: the port, and what all its forms share.

    @app.listener("order.paid", group="ledger", idempotent=SqlInbox(engine))
    def on_paid(message, session): ...

An inbox remembers what was done, by subject, group and the message's name. Which form fits is a question of where the
effect lives, because record and effect must come and go together:

    in a database                   fairway.sql.SqlInbox     one transaction for both: exactly once
    in this process                 MemoryInbox              gone together when the process dies
    anywhere else                   ExpiringInbox            a store such as Redis: once, but for a crash in between

A message's name is its id, which all its copies share: what is delivered again, sent again by a relay or redriven from
dead letter is the same message. A replay is wanted, so its id becomes a part of the name.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias

from fairway.client.handling import Reject
from fairway.client.held import Held
from fairway.errors import Misuse
from fairway.protocol.delivery import Message, ack_all

REPLAY_ID: Final = "fairway.replay.id"  # the header that marks what `fairway pipeline replay` has sent
NAME_CHARS_MAX: Final = 255

By: TypeAlias = Callable[[Message], str | None] | str | None
Handler: TypeAlias = Callable[..., Any]
Guarded: TypeAlias = Callable[[Sequence[Message]], Any]  # for a handler that is `async def`, it returns an awaitable

_PLAIN = re.compile(r"[!-~](?:[ -~]*[!-~])?", re.ASCII)  # no space at an end: some databases do not see it there
_DIGEST = "sha256:"


class Idempotence(Protocol):
    """What a listener asks of its inbox."""

    def guard(self, handler: Handler, *, is_async: bool, is_batch: bool) -> Guarded:
        """What is to be called with the messages in the handler's place; `Misuse` if the handler does not fit.

        It returns when the handler has done its work, or all of it was done before: then what is not settled yet is
        acked. It raises what the handler raises, and nothing is remembered.
        """

    async def close_async(self) -> None:
        """The loop on which handlers ran is about to end."""


# --- names -----------------------------------------------------------------------------------------------------------


class Naming:
    """How an inbox tells messages apart: by their id, by their key, or by what a function of the user's says."""

    def __init__(self, by: By, *, replays: bool) -> None:
        if isinstance(by, str) and by != "key":
            raise Misuse(f"by={by!r}: it is 'key', or a function of the message that returns a str")
        self._by: Callable[[Message], str | None] | None = _key_of if isinstance(by, str) else by
        self._replays = replays

    def of(self, message: Message) -> str:
        """At most 255 visible characters of ASCII, whatever the key is."""
        if self._by is None:
            name = str(message.id)
        else:
            told = self._by(message)
            if not isinstance(told, str) or not told:
                raise Reject(f"{message!r} has no key to tell it apart by: `by` gave {told!r}")
            name = told
        return plain(name, message.headers.get(REPLAY_ID) if self._replays else None)


def plain(name: str, replay: str | None = None) -> str:
    """`name` or `name+replay` where every database stores and compares that exactly, and it can mean nothing else;
    otherwise a digest."""
    text = name if replay is None else f"{name}+{replay}"
    is_exact = len(text) <= NAME_CHARS_MAX and _PLAIN.fullmatch(text) is not None
    if is_exact and not text.startswith(_DIGEST) and text.count("+") == (replay is not None):
        return text
    return _DIGEST + hashlib.sha256(json.dumps([name, replay]).encode()).hexdigest()


def _key_of(message: Message) -> str | None:
    return message.key


# --- messages --------------------------------------------------------------------------------------------------------


class Sheaf:
    """The messages of one call by their names; of several with one name, the first stands for all of them."""

    def __init__(self, messages: Sequence[Message], naming: Naming) -> None:
        self._named: dict[str, list[Message]] = {}
        self._held: dict[str, Held] = {}
        for message in messages:
            try:
                name = naming.of(message)
            except Reject as reject:
                message.reject(reject.reason)  # that is no fault of the others
            else:
                self._named.setdefault(name, []).append(message)

    @property
    def names(self) -> list[str]:
        """In one order for everybody: whoever takes them one after the other waits for nobody that waits for him."""
        return sorted(self._named)

    def sift(self, fresh: set[str]) -> list[Held]:
        """Ack what was done before; the others as they came, one for each name, for the handler."""
        for name, messages in self._named.items():
            if name in fresh:
                self._held[name] = Held.of(messages[0])
            else:
                ack_all([message for message in messages if not message.is_settled])
        return list(self._held.values())

    @property
    def held_names(self) -> list[str]:
        """The names of those that the handler has got."""
        return list(self._held)

    @property
    def handed_back(self) -> list[str]:
        """The names of those that the handler has retried, rejected or released: they are not done."""
        return [name for name, held in self._held.items() if held.is_handed_back]

    def settle(self) -> None:
        """It is certain now: say what the handler said. What it said nothing about is for the listener to ack."""
        for name, held in self._held.items():
            first, *others = self._named[name]
            held.settle(first)
            if held.is_handed_back:
                for message in others:
                    message.release()


# --- handlers --------------------------------------------------------------------------------------------------------


def parameters_of(handler: Handler) -> list[str]:
    """The names of what a handler takes, those with defaults left out."""
    return [
        each.name
        for each in inspect.signature(handler).parameters.values()
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]


def name_of(handler: Handler) -> str:
    return str(getattr(handler, "__qualname__", repr(handler)))
