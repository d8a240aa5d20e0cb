"""The real loops that code has to work on: asyncio's own, and uvloop's."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import pytest

T = TypeVar("T")

LOOPS: Final = ("asyncio", "uvloop")


def on_loop(kind: str, main: Coroutine[Any, Any, T]) -> T:
    """Run to the end on a new loop of this kind."""
    with loops_of(kind):
        return asyncio.run(main)


@contextmanager
def loops_of(kind: str) -> Iterator[None]:
    """`asyncio.run` makes loops of this kind meanwhile; skips the test where uvloop is not installed."""
    before = asyncio.get_event_loop_policy()
    if kind == "uvloop":
        asyncio.set_event_loop_policy(pytest.importorskip("uvloop").EventLoopPolicy())
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(before)
