"""Times as people write them: how long (`90s`, `15m`, `2h`, `3d`), and when (`2027-01-01T00:00Z`)."""

from __future__ import annotations

from datetime import UTC, datetime

from fairway.client import spans
from fairway.errors import Misuse
from fairway.world.clock import Clock, RealClock

SPAN_HELP = spans.HELP
as_span, span = spans.as_span, spans.span


def instant(text: str) -> datetime | None:
    """A time with its zone; None: it is not one. `Misuse` if it does not say which zone."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    if found.tzinfo is None:
        raise Misuse(f"{text} says no time zone: write {text}Z for UTC, or {text}+02:00")
    return found


def due(text: str) -> datetime:
    """`--at`."""
    found = instant(text)
    if found is None:
        raise Misuse(f"{text!r} is no time: write 2027-01-01T00:00:00Z, or 2027-01-01T00:00:00+02:00")
    return found


def ahead(text: str, clock: Clock | None = None) -> datetime:
    """A time, or how long from now."""
    wait = as_span(text)
    if wait is not None:
        return datetime.fromtimestamp((clock or RealClock()).wall_ms() / 1_000, UTC) + wait
    found = instant(text)
    if found is None:
        raise Misuse(f"{text!r} is no time: write 2027-01-01T00:00Z, or how long from now ({SPAN_HELP})")
    return found
