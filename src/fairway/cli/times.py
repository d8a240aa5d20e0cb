"""Times as people write them: how long (`90s`, `15m`, `2h`, `3d`), and when (`2027-01-01T00:00Z`)."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from fairway.errors import Misuse
from fairway.world.clock import Clock, RealClock

SPAN_HELP = "90s, 15m, 2h, 3d"
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)([smhd])")


def as_span(text: str) -> timedelta | None:
    """A stretch of time; None: it is not one."""
    found = _SPAN.fullmatch(text)
    try:
        return None if found is None else timedelta(**{_UNITS[found[2]]: float(found[1])})
    except OverflowError:
        raise Misuse(f"{text} is longer than there is time") from None


def span(text: str) -> timedelta:
    """`Misuse` says what can be written."""
    found = as_span(text)
    if found is None:
        raise Misuse(f"{text!r} is no stretch of time: write {SPAN_HELP}")
    return found


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
