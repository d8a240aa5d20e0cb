"""Buffers: the type of everything that holds bytes, and a large buffer that takes memory only as bytes are written.

Frames of a MiB and more are gathered in a `LazyBuffer` (`protocol.frames`): each piece is copied once, in the turn of
the loop that brings it. The alternative, to join 63 MiB of pieces, copy the batch out of them and free both, held up a
broker's loop for 76 ms (bench/hostile).

The memory is an anonymous mapping of the process. The system provides a page at the first write to it, so a header that
announces 66 MiB costs nothing until the bytes come.

The buffer is not freed while there is a view of it. To return 63 MiB to the system at once takes 5 to 17 ms. So
`on_unused` tells the owner when the last view is gone, and the owner frees the buffer in steps.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import TypeAlias

from fairway.limits import MIB

Bytes: TypeAlias = bytes | bytearray | memoryview

_STEP_BYTES = MIB  # 0.1 ms
_DONTNEED: int | None = getattr(mmap, "MADV_DONTNEED", None)  # absent where the platform has no madvise


class LazyBuffer(mmap.mmap):
    """Zeros, until bytes are written. `on_unused` is called once, on the thread that drops the last reference, and may
    keep the buffer. OSError: the process has no addresses left for it."""

    _freed_bytes = 0
    _on_unused: OnUnused | None = None

    def __new__(cls, size: int, on_unused: OnUnused | None = None) -> LazyBuffer:
        # Private: a shared mapping would be a file in memory, with pages that `free_some` could not free.
        buffer = super().__new__(cls, -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        buffer._on_unused = on_unused
        return buffer

    def __del__(self) -> None:
        on_unused, self._on_unused = self._on_unused, None
        if on_unused is not None:
            on_unused(self)

    def free_some(self) -> bool:
        """Return a part of the memory to the system, for a buffer without views; True if there may be more."""
        size = min(len(self) - self._freed_bytes, _STEP_BYTES)
        if _DONTNEED is None or size <= 0:
            return False
        self.madvise(_DONTNEED, self._freed_bytes, size)
        self._freed_bytes += size
        return True


OnUnused: TypeAlias = Callable[[LazyBuffer], None]
