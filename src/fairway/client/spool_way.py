"""Which way batches go, to the broker or to the spool: by time, by count, by absence, or because the buffer is full."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from fairway.protocol.backoff import NS_PER_MS
from fairway.protocol.diversion import Buffer, SendPath

if TYPE_CHECKING:
    from fairway.client.spool import SpoolOptions

_GRACE_NS = 1_000 * NS_PER_MS  # for the direct way, after a drain, although too many wait


class SpoolStatus(Protocol):
    """How it stands with what was kept, and with the broker."""

    @property
    def is_connected(self) -> bool: ...

    @property
    def must_divert(self) -> bool:
        """Whether something is kept that must arrive first, and that nobody knew of before."""

    @property
    def may_hold(self) -> bool:
        """Whether all that was kept is on its way."""

    @property
    def may_go(self) -> bool:
        """Whether nothing is left of what must arrive before the next message."""


class SpoolPolicy:
    """Of one producer; `standing` is asked when it matters."""

    def __init__(self, options: SpoolOptions, standing: SpoolStatus) -> None:
        self.way = SendPath.HOLD  # until it is known what dead processes left behind
        self._options = options
        self._standing = standing
        self._after_ns = options.after_ms * NS_PER_MS
        self._has_diverted = False
        self._look_ns: int | None = None  # when some batch may have waited too long
        self._direct_ns = -self._after_ns  # since when batches go to the broker, after they did not

    def look(self, buffer: Buffer, now_ns: int) -> None:
        """Choose the way: see `diversion`."""
        standing = self._standing
        if self.way is SendPath.DIVERT:
            if standing.is_connected and standing.may_hold:
                self.way = SendPath.HOLD
                self._look_ns = None
        elif self.way is SendPath.HOLD and standing.is_connected and standing.may_go:
            self.way = SendPath.DIRECT
            if self._has_diverted:
                self._direct_ns = now_ns
        elif standing.must_divert or self._must_divert(buffer, now_ns):
            self.way = SendPath.DIVERT
            self._has_diverted = True

    def _must_divert(self, buffer: Buffer, now_ns: int) -> bool:
        """By absence, count or time. After a drain the direct way is tried for a while, whatever waits: a batch that is
        too large for the spool must get through some day."""
        if not buffer.messages:
            self._look_ns = None
            return False
        if buffer.is_failing and not self._standing.is_connected:
            return True
        if buffer.is_crammed or buffer.messages > self._options.buffer_messages:
            self._look_ns = self._direct_ns + min(self._after_ns, _GRACE_NS)
        elif self._look_ns is None or now_ns >= self._look_ns:
            oldest_ns = buffer.oldest_ns()
            self._look_ns = None if oldest_ns is None else max(oldest_ns, self._direct_ns) + self._after_ns
        return self._look_ns is not None and now_ns >= self._look_ns

    def next_look_ns(self) -> int | None:
        """When to look again, unless the spool itself is waited for."""
        return None if self.way is SendPath.DIVERT else self._look_ns
