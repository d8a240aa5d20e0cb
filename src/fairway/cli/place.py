"""A place in a subject, as people write it: `earliest`, `latest`, a sequence, a time, or how long ago."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from fairway.cli import times
from fairway.errors import Misuse
from fairway.world.clock import Clock, RealClock

if TYPE_CHECKING:
    from fairway.client.commands import SeekTarget

HELP = f"earliest, latest, a sequence, a time (2026-03-01T12:00Z), or how long ago ({times.SPAN_HELP})."


def parse(text: str, clock: Clock | None = None) -> SeekTarget:
    """`Misuse` says what can be written."""
    match text:
        case "earliest" | "latest":
            return text
    if text.isascii() and text.isdigit():
        return int(text)
    ago = times.as_span(text)
    if ago is not None:
        return datetime.fromtimestamp((clock or RealClock()).wall_ms() / 1_000, UTC) - ago
    moment = times.instant(text)
    if moment is None:
        raise Misuse(f"{text!r} is no place in a subject: write {HELP}")
    return moment
