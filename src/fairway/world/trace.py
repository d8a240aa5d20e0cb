"""What a simulated run did, as one hash: the same seed must give the same hash on every machine, in every process.

Every step adds its virtual time and a label. A label is made of qualified names and of the numbers that the loop itself
gives to tasks: never `id()`, `hash()` or a `repr`, which differ from one process to the next. When two runs that should
agree do not, listen to the events of both and compare: the first difference is the culprit.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeAlias

EVENTS_AT_ONCE = 256  # hashed together: one by one costs as much again as noting them
RECENT_EVENTS = 16  # kept for the message of an error: enough to see the cycle that a run is caught in

TraceListener: TypeAlias = Callable[[int, str], None]


class Trace:
    """A running hash over (virtual nanoseconds, label)."""

    def __init__(self, listener: TraceListener | None = None) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._listener = listener
        self._recent: deque[tuple[int, str]] = deque(maxlen=RECENT_EVENTS)
        self._unhashed: list[str] = []

    def add(self, now_ns: int, label: str) -> None:
        self._unhashed.append(f"{now_ns} {label}\n")
        self._recent.append((now_ns, label))
        if len(self._unhashed) == EVENTS_AT_ONCE:
            self._digest()
        if self._listener is not None:
            self._listener(now_ns, label)

    def hexdigest(self) -> str:
        self._digest()
        return self._hash.hexdigest()

    def recent(self) -> str:
        """The last events, one per line, for an error that has to say what went on."""
        return "\n".join(f"  {now_ns} ns  {label}" for now_ns, label in self._recent)

    def _digest(self) -> None:
        self._hash.update("".join(self._unhashed).encode())
        self._unhashed.clear()


def label_of(callback: Callable[..., object]) -> str:
    """A name for a callback that is the same in every process."""
    while isinstance(callback, functools.partial):
        callback = callback.func
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return f"{owner.get_name()} {_qualified_name(owner.get_coro())}"
    return _qualified_name(callback)


def describe_task(task: asyncio.Task[Any]) -> str:
    """The task's name and the chain of awaits in which it is suspended, innermost last."""
    chain = []
    awaited: Any = task.get_coro()
    while (frame := _frame_of(awaited)) is not None:
        chain.append(f"{_qualified_name(awaited)}:{frame.f_lineno}")
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "ag_await", None)
    return f"{task.get_name()} in {' > '.join(chain) or _qualified_name(task.get_coro())}"


def _qualified_name(thing: object) -> str:
    name = getattr(thing, "__qualname__", None)
    return name if isinstance(name, str) else type(thing).__qualname__


def _frame_of(awaited: object) -> FrameType | None:
    frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "ag_frame", None)
    return frame if isinstance(frame, FrameType) else None
