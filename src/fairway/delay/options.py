"""What an operator may set."""

from __future__ import annotations

from dataclasses import dataclass, field

from fairway import limits
from fairway.storage import retention
from fairway.storage.store import StoreOptions


def _store_options() -> StoreOptions:
    """Whatever is in buckets may go from the message log: `owed_from` says what is not. A while of it is kept, and of
    the dispatch log, so that it can be told what happened (`history`)."""
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
    hold_ms: int = 1_000  # how long small parts may wait to go into their bucket together; the message log has them
    remembered_max: int = limits.DELAY_REMEMBERED_MAX
    catalogue_messages: int = 8_192  # in one catalogue of a bucket: 330 KB
    housekeeping_ms: int | None = None  # between two looks at the buckets, at most an hour; None: a minute
    has_heartbeat: bool = True  # on the connections to brokers; False for a net in memory, which reports their end
    store: StoreOptions = field(default_factory=_store_options)

    @property
    def rows_max(self) -> int:
        """Messages with a row in memory: those that are pending, and those of which it is remembered what became."""
        return self.pending_max + self.remembered_max
