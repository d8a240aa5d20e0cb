"""Options of a delay server: what an operator may set."""

from __future__ import annotations

from dataclasses import dataclass, field

from fairway import limits
from fairway.storage import retention
from fairway.storage.store import StoreOptions


def _store_options() -> StoreOptions:
    """Defaults for the store. Messages in buckets may leave the message log; `owed_from` names the first that is not in
    one. Part of both logs is kept for `DelayHistory`."""
    return StoreOptions(
        segment_bytes=limits.DELAY_SEGMENT_BYTES,
        retention=retention.Policy(bytes_max=limits.DELAY_HISTORY_BYTES),
        keeps_actions=False,
        actions_kept_bytes=limits.DELAY_HISTORY_BYTES,
    )


@dataclass(frozen=True, slots=True)
class DelayOptions:
    """Bounds of one delay server, and the options of its logs."""

    horizon_ms: int = limits.DELAY_HORIZON_MS
    pending_max: int = limits.DELAY_PENDING_MAX
    messages_per_step: int = limits.DELAY_STEP_MESSAGES
    hold_ms: int = 1_000  # how long small parts wait to enter their bucket together; the message log has them
    remembered_max: int = limits.DELAY_REMEMBERED_MAX
    catalogue_messages: int = 8_192  # in one catalogue of a bucket: 330 KB
    housekeeping_ms: int | None = None  # between two rounds of maintenance, at most an hour; None: a minute
    has_heartbeat: bool = True  # on connections to brokers; False for an in-memory net, which reports their end
    store: StoreOptions = field(default_factory=_store_options)

    @property
    def rows_max(self) -> int:
        """Messages with a row in memory: pending ones, and finished ones that are still remembered."""
        return self.pending_max + self.remembered_max
