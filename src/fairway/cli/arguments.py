"""What several verbs take: their options, each declared once; times and positions, as people write them.

The options of settings are in `settings`; the options of verbs that ask a server are gathered by `connections`.

A span is `90s`, `15m`, `2h` or `3d`; a time is `2027-01-01T00:00Z`. A position in a subject is `earliest`, `latest`, a
sequence, a time, or a span before now.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from fairway.client import core
from fairway.client.commands import SeekTarget
from fairway.errors import Misuse
from fairway.runtime.clock import Clock, RealClock

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, for programs.")]
Subject = Annotated[str, typer.Argument(metavar="SUBJECT", help="The subject.", show_default=False)]
Group = Annotated[str, typer.Argument(metavar="GROUP", help="The group.", show_default=False)]
OnlySubject = Annotated[str | None, typer.Argument(metavar="SUBJECT", help="Only this subject.", show_default=False)]
Limit = Annotated[int, typer.Option("--limit", min=1, metavar="N", help="Show at most N.")]
Interval = Annotated[
    float, typer.Option("--interval-s", min=0.1, metavar="SECONDS", help="Time between two refreshes.")
]
Seconds = Annotated[
    float | None, typer.Option("--seconds", min=1, metavar="N", help="Stop after N seconds; unset: at Ctrl-C.")
]
KeptDirectory = Annotated[
    Path | None, typer.Option("--data", metavar="DIR", help="Use and keep this directory; unset: a temporary one.")
]

SPAN_HELP = core.SPAN_HELP
as_span, span = core.as_span, core.span


def instant(text: str) -> datetime | None:
    """A time with its zone; None for a text that is not a time. `Misuse` for a time without a zone."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    if found.tzinfo is None:
        raise Misuse(f"{text} has no time zone: write {text}Z for UTC, or {text}+02:00")
    return found


def due(text: str) -> datetime:
    """The time of `--at`."""
    found = instant(text)
    if found is None:
        raise Misuse(f"{text!r} is not a time: write 2027-01-01T00:00:00Z, or 2027-01-01T00:00:00+02:00")
    return found


def ahead(text: str, clock: Clock | None = None) -> datetime:
    """A time, or a span from now."""
    wait = as_span(text)
    if wait is not None:
        return datetime.fromtimestamp((clock or RealClock()).wall_ms() / 1_000, UTC) + wait
    found = instant(text)
    if found is None:
        raise Misuse(f"{text!r} is not a time: write 2027-01-01T00:00Z, or how long from now ({SPAN_HELP})")
    return found


HELP = f"earliest, latest, a sequence, a time (2026-03-01T12:00Z), or how long ago ({SPAN_HELP})."


def parse(text: str, clock: Clock | None = None) -> SeekTarget:
    """A position in a subject; `Misuse` lists the forms of a position."""
    match text:
        case "earliest" | "latest":
            return text
    if text.isascii() and text.isdigit():
        return int(text)
    ago = as_span(text)
    if ago is not None:
        return datetime.fromtimestamp((clock or RealClock()).wall_ms() / 1_000, UTC) - ago
    moment = instant(text)
    if moment is None:
        raise Misuse(f"{text!r} is not a position in a subject: write {HELP}")
    return moment
