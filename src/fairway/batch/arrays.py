"""numpy where it is installed and pays, the standard library where not.

A client has no numpy in its core install, so nothing here may need it. Where it is present it is imported on first use:
importing it takes longer than encoding ten thousand batches.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Final

from fairway.world.buffers import Bytes

# 64 items: below it a list is faster than an ndarray (1 against 5 µs for 16 offsets), above it slower (23 against 3
# µs for 1,000).
NUMPY_FROM_ITEMS = 64


@functools.cache
def numpy_or_none() -> ModuleType | None:
    """numpy, or None where it is not installed."""
    try:
        import numpy
    except ImportError:
        return None
    return numpy


def numpy_for(items: int) -> ModuleType | None:
    """numpy, if it is installed and that many items are enough for it to pay."""
    return numpy_or_none() if items >= NUMPY_FROM_ITEMS else None


def byte_view(data: Bytes) -> memoryview:
    """A flat view of the bytes, whatever they came in."""
    view = memoryview(data)
    return view if view.format == "B" and view.ndim == 1 and view.contiguous else view.cast("B")


PADDING: Final = [bytes(-length % 8) for length in range(8)]  # behind a buffer, by its length modulo 8


def padded(length: int) -> int:
    """The next multiple of 8."""
    return (length + 7) & -8
