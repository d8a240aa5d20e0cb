"""Lets the effect of a handler happen once, however often its message comes: inboxes, and their parts.

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

import enum
import hashlib
import inspect
import json
import re
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

from fairway import limits
from fairway.client.core import Duration, seconds_of
from fairway.client.handler_results import Reject, Retry
from fairway.errors import Misuse
from fairway.protocol.delivery import After, Message, ack_all, after_ms_of
from fairway.runtime.clock import Clock, RealClock
from fairway.runtime.rng import RealRng
from fairway.runtime.threads import Latch, Lock

_ACKED: Final = "acked"


class Held(Message, gc=False, eq=False):
    """A message whose settlement waits until the effect is certain."""

    _word: str = ""  # how the handler has settled the message
    _settlement: Callable[[Message], None] | None = None  # the same, for the real message

    @classmethod
    def of(cls, message: Message) -> Held:
        return cls(message.payload, message.sequence, message._lot, message._page)

    @property
    def is_settled(self) -> bool:
        """Whether the handler has settled the message."""
        return self._settlement is not None

    @property
    def is_handed_back(self) -> bool:
        """Whether the message is not done: the handler has retried, rejected or released it."""
        return self.is_settled and self._word != _ACKED

    def ack(self) -> None:
        """Ack the message once the effect is committed."""
        self._keep(_ACKED, Message.ack)

    def retry(self, after: After | None = None, reason: str = "") -> None:
        """Get the message again after a time. The inbox does not remember it as done."""
        after_ms_of(after)  # raises at once if `after` is wrong
        self._keep("retried", lambda message: message.retry(after, reason))

    def reject(self, reason: str = "") -> None:
        """Send the message to the dead letters. The inbox does not remember it as done."""
        self._keep("rejected", lambda message: message.reject(reason))

    def release(self) -> None:
        """Hand the message back untouched."""
        self._keep("released", Message.release)

    def settle(self, message: Message) -> None:
        """Settle the real message as the handler has decided, unless it did not decide or the message is settled."""
        if self._settlement is not None and not message.is_settled:
            self._settlement(message)

    def _keep(self, word: str, settlement: Callable[[Message], None]) -> None:
        if self.is_settled:
            raise Misuse(f"{self!r} was {self._word} before: settle each message once")
        self._word, self._settlement = word, settlement


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


class NamedMessages:
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


# --- inboxes that claim a message before its handler runs -------------------------------------------------------------
#
# `ExpiringInbox` keeps its entries in a store whose entries expire, such as Redis or memcached, for effects that no
# transaction can hold. The inbox writes a claim before the handler runs, and turns the claim into `done` afterwards. If
# the program dies in between, nobody can tell whether the effect has happened. The claim runs out after `hold`, and the
# message is handled again: only then can the effect happen twice. While a claim stands, other consumers that get the
# message retry it later.
#
# `MemoryInbox` keeps its entries in memory, for effects that live in this process: a cache, a table of prices, a
# running sum. When the process dies, effect and record are lost together, and the messages that were not acked come
# again.


class Claims(ABC):
    """Claims a message before its handler runs, and remembers the message afterwards.

    A key is the message's name with its subject and group:

        absent ──claim──► in process ──finish──► done ──(kept for a time)──► absent
                  ▲            │
                  └────drop────┘    the handler failed, or its claim ran out
    """

    def __init__(self, by: By, *, replays: bool) -> None:
        self._naming = Naming(by, replays=replays)
        self._rng = RealRng()

    # --- for subclasses: the second of each pair serves `async def` handlers

    @abstractmethod
    def _claim(self, key: str, holder: str) -> bool:
        """Claim a key; False: it was done before. Waits or raises while another call holds the key."""

    @abstractmethod
    async def _claim_async(self, key: str, holder: str) -> bool: ...

    @abstractmethod
    def _finish(self, key: str) -> None:
        """Remember the key as done."""

    async def _finish_async(self, key: str) -> None:
        self._finish(key)

    @abstractmethod
    def _drop(self, key: str, holder: str) -> None:
        """Give up the claim: the key is not done, and any call may claim it."""

    async def _drop_async(self, key: str, holder: str) -> None:
        self._drop(key, holder)

    async def close_async(self) -> None:  # noqa: B027  nothing here is of a loop
        """Nothing to close."""

    # --- around the handler

    def guard(self, handler: Handler, *, is_async: bool, is_batch: bool) -> Guarded:
        taken = parameters_of(handler)
        if len(taken) != 1:
            raise Misuse(
                f"{name_of(handler)} takes ({', '.join(taken)}): with {type(self).__name__} there is no transaction to "
                "hand over, so it takes the message alone. fairway.sql.SqlInbox has one"
            )
        return partial(self._handle_async if is_async else self._handle, handler, is_batch)

    def _handle(self, handler: Handler, is_batch: bool, messages: Sequence[Message]) -> None:
        named = NamedMessages(messages, self._naming)
        key = _keys(messages)
        holder = f"{self._rng.bits(64):016x}"  # this call, and no other
        claimed: set[str] = set()
        try:
            claimed.update(name for name in named.names if self._claim(key(name), holder))
            if held := named.sift(claimed):
                handler(held if is_batch else held[0])
        except BaseException:
            for name in claimed:
                self._drop(key(name), holder)
            raise
        handed_back = set(named.handed_back)
        for name in claimed:
            self._drop(key(name), holder) if name in handed_back else self._finish(key(name))
        named.settle()

    async def _handle_async(self, handler: Handler, is_batch: bool, messages: Sequence[Message]) -> None:
        named = NamedMessages(messages, self._naming)
        key = _keys(messages)
        holder = f"{self._rng.bits(64):016x}"  # this call, and no other
        claimed: set[str] = set()
        try:
            for name in named.names:
                if await self._claim_async(key(name), holder):
                    claimed.add(name)
            if held := named.sift(claimed):
                await handler(held if is_batch else held[0])
        except BaseException:
            for name in claimed:
                await self._drop_async(key(name), holder)
            raise
        handed_back = set(named.handed_back)
        for name in claimed:
            await (self._drop_async(key(name), holder) if name in handed_back else self._finish_async(key(name)))
        named.settle()


def _keys(messages: Sequence[Message]) -> Callable[[str], str]:
    """The function from names to keys. All messages of a call have one subject and group."""
    place = f"{messages[0].subject}/{messages[0].group}"
    return lambda name: f"{place}/{name}"


HOLD: Final = timedelta(minutes=5)
STORE_KEEP: Final = timedelta(days=7)
_LOOKS: Final = 4  # retries until another's claim runs out; each is an attempt of the message


class ClaimState(enum.Enum):
    """The answer of a store to a claim."""

    MINE = "mine"
    """The entry was absent, and is now in process for this holder."""
    BUSY = "busy"
    """The entry is in process for another holder."""
    DONE = "done"


class ExpiringStore(Protocol):
    """The interface of a store. Every call is atomic, and durable enough for the user when it returns.

    An entry is absent, in process (with its holder, for a time) or done (for a time). An entry that expires is absent.
    """

    def claim(self, key: str, holder: str, hold_ms: int) -> ClaimState:
        """If the entry is absent, make it in process for this holder, for `hold_ms`."""

    def finish(self, key: str, keep_ms: int) -> None:
        """Make the entry done for `keep_ms`, whatever its state: the effect has happened."""

    def drop(self, key: str, holder: str) -> None:
        """Make the entry absent if it is in process for this holder; otherwise leave it alone."""


class AsyncExpiringStore(Protocol):
    """The interface of a store for `async def` handlers."""

    async def claim(self, key: str, holder: str, hold_ms: int) -> ClaimState: ...

    async def finish(self, key: str, keep_ms: int) -> None: ...

    async def drop(self, key: str, holder: str) -> None: ...


class ExpiringInbox(Claims):
    """An inbox in a store whose entries expire.

    Choose `hold` longer than any handler takes, and `keep` longer than any message is on its way.
    """

    def __init__(
        self,
        store: ExpiringStore | AsyncExpiringStore,
        *,
        hold: Duration = HOLD,
        keep: Duration = STORE_KEEP,
        by: By = None,
        replays: bool = True,
    ) -> None:
        super().__init__(by, replays=replays)
        self._store: Any = store
        self._hold_ms = round(seconds_of(hold) * 1_000)
        self._keep_ms = round(seconds_of(keep) * 1_000)
        if not 1 <= self._hold_ms <= limits.RETRY_AFTER_MS_MAX or self._keep_ms < 1:
            raise Misuse(f"hold={hold}, keep={keep}: hold is at most a day, and both are more than nothing")

    def guard(self, handler: Handler, *, is_async: bool, is_batch: bool) -> Guarded:
        if is_async is not inspect.iscoroutinefunction(self._store.claim):
            kind, wanted = ("async def", "AsyncExpiringStore") if is_async else ("def", "ExpiringStore")
            raise Misuse(f"{name_of(handler)} is `{kind}`: its inbox takes a store that is an {wanted}")
        return super().guard(handler, is_async=is_async, is_batch=is_batch)

    def _claim(self, key: str, holder: str) -> bool:
        return self._is_mine(self._store.claim(key, holder, self._hold_ms))

    async def _claim_async(self, key: str, holder: str) -> bool:
        return self._is_mine(await self._store.claim(key, holder, self._hold_ms))

    def _is_mine(self, claim: ClaimState) -> bool:
        if claim is ClaimState.BUSY:
            raise Retry("another consumer is at it, or has died over it", after=self._hold_ms / 1_000 / _LOOKS)
        return claim is ClaimState.MINE

    def _finish(self, key: str) -> None:
        self._store.finish(key, self._keep_ms)

    async def _finish_async(self, key: str) -> None:
        await self._store.finish(key, self._keep_ms)

    def _drop(self, key: str, holder: str) -> None:
        self._store.drop(key, holder)

    async def _drop_async(self, key: str, holder: str) -> None:
        await self._store.drop(key, holder)


MESSAGES_MAX: Final = 100_000  # about 20 MB
MEMORY_KEEP: Final = timedelta(hours=1)


class MemoryInbox(Claims):
    """An inbox in memory: remembers the last `messages_max` messages for `keep`.

    A call waits while another thread or task handles the same message. If that handler fails, this call handles it.
    """

    def __init__(
        self,
        messages_max: int = MESSAGES_MAX,
        keep: Duration = MEMORY_KEEP,
        *,
        by: By = None,
        replays: bool = True,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(by, replays=replays)
        if messages_max < 1:
            raise Misuse(f"MemoryInbox(messages_max={messages_max}): at least 1")
        self._messages_max = messages_max
        self._keep_ns = int(seconds_of(keep) * 1e9)
        self._clock = clock or RealClock()
        self._lock = Lock()
        self._in_process: dict[str, Latch] = {}
        self._done: OrderedDict[str, int] = OrderedDict()  # the end of each record, in ns, earliest first

    def __len__(self) -> int:
        """The number of messages that are remembered as done."""
        return len(self._done)

    def _claim(self, key: str, holder: str) -> bool:
        while isinstance(found := self._look(key), Latch):
            found.wait()
        return found

    async def _claim_async(self, key: str, holder: str) -> bool:
        while isinstance(found := self._look(key), Latch):
            await found.wait_async()
        return found

    def _look(self, key: str) -> Latch | bool:
        """True: the key is ours now. False: it is done. A latch: another call holds the key until the latch opens."""
        with self._lock:
            self._forget()
            if key in self._done:
                return False
            if key in self._in_process:
                return self._in_process[key]
            self._in_process[key] = Latch()
            return True

    def _finish(self, key: str) -> None:
        with self._lock:
            self._done[key] = self._clock.monotonic_ns() + self._keep_ns
            latch = self._in_process.pop(key)
        latch.open()

    def _drop(self, key: str, holder: str) -> None:
        with self._lock:
            latch = self._in_process.pop(key)
        latch.open()

    def _forget(self) -> None:
        now_ns = self._clock.monotonic_ns()
        while self._done:
            key, until_ns = next(iter(self._done.items()))
            if until_ns > now_ns and len(self._done) <= self._messages_max:
                return
            del self._done[key]
