"""numpy if it is installed and pays, otherwise the standard library.

A core install of the client has no numpy, so no function here may need it. If numpy is installed it is imported on
first use, because the import takes longer than encoding ten thousand batches.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Final

from fairway.runtime.buffers import Bytes

# 64 items: below it a list is faster than an ndarray (1 against 5 µs for 16 offsets), above it slower (23 against 3 µs
# for 1,000).
NUMPY_FROM_ITEMS = 64


@functools.cache
def numpy_or_none() -> ModuleType | None:
    """numpy, or None if it is not installed."""
    try:
        import numpy
    except ImportError:
        return None
    return numpy


def numpy_for(items: int) -> ModuleType | None:
    """numpy, if it is installed and pays for that many items."""
    return numpy_or_none() if items >= NUMPY_FROM_ITEMS else None


def byte_view(data: Bytes) -> memoryview:
    """A flat view of the bytes, whatever type holds them."""
    view = memoryview(data)
    return view if view.format == "B" and view.ndim == 1 and view.contiguous else view.cast("B")


PADDING: Final = [bytes(-length % 8) for length in range(8)]  # to append to a buffer, by its length modulo 8


def padded(length: int) -> int:
    """The next multiple of 8."""
    return (length + 7) & -8
