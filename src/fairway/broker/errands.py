"""Work of the broker's own in an actor's mailbox: it has its share of the time like every request, and nobody waits for
an answer."""

from __future__ import annotations

_NEVER_NS = 1 << 62


class BackgroundTask:
    """A request that is never late and never given up."""

    deadline_ns = _NEVER_NS
    wait_until_ns = 0
    is_cancelled = False
    account = None
