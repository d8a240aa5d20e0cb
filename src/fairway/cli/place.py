"""A place in a subject, as people write it: `earliest`, `latest`, a sequence, a time, or how long ago."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from fairway.errors import Misuse
from fairway.world.clock import Clock, RealClock

if TYPE_CHECKING:
    from fairway.client.commands import Place

HELP = "earliest, latest, a sequence, a time (2026-03-01T12:00Z), or how long ago (90s, 15m, 2h, 3d)."
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhd])")


def parse(text: str, clock: Clock | None = None) -> Place:
    """`Misuse` says what can be written."""
    match text:
        case "earliest" | "latest":
            return text
    if text.isascii() and text.isdigit():
        return int(text)
    ago = _AGO.fullmatch(text)
    if ago is not None:
        now = datetime.fromtimestamp((clock or RealClock()).wall_ms() / 1_000, UTC)
        return now - timedelta(**{_UNITS[ago[2]]: float(ago[1])})
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise Misuse(f"{text!r} is no place in a subject: write {HELP}") from error
    if moment.tzinfo is None:
        raise Misuse(f"{text} says no time zone: write {text}Z for UTC, or {text}+02:00")
    return moment
