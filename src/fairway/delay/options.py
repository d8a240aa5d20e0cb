"""What an operator may set."""

from __future__ import annotations

from dataclasses import dataclass, field

from fairway import limits
from fairway.storage import retention
from fairway.storage.store import StoreOptions


def _store_options() -> StoreOptions:
    """Whatever is in buckets may go from the message log at once: `owed_from` says what is not."""
    return StoreOptions(segment_bytes=limits.DELAY_SEGMENT_BYTES, retention=retention.Policy(bytes_max=0))


@dataclass(frozen=True, slots=True)
class DelayOptions:
    """Bounds of one delay server, and the options of its logs."""

    horizon_ms: int = limits.DELAY_HORIZON_MS
    pending_max: int = limits.DELAY_PENDING_MAX
    messages_per_step: int = limits.DELAY_STEP_MESSAGES
    store: StoreOptions = field(default_factory=_store_options)
