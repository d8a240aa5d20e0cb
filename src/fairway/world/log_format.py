"""Lines of Python's logging as servers and apps write them: the time in UTC, the logger, the sentence."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

from fairway.world import terminal


def stamp(wall_ms: int) -> str:
    """Such as 2026-11-18T01:42:03.123Z."""
    return datetime.fromtimestamp(wall_ms / 1_000, UTC).strftime("%Y-%m-%dT%H:%M:%S.") + f"{wall_ms % 1_000:03d}Z"


class EscapingFormatter(logging.Formatter):
    """For a handler that writes to stderr: a terminal shows what a record quotes, and obeys none of it. A sentence
    stays on its line; a traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (the name is logging's)
        return terminal.shown(super().formatMessage(record), err=True)

    def format(self, record: logging.LogRecord) -> str:
        return terminal.shown(super().format(record), err=True, keep=terminal.LINES)


class TimedFormatter(EscapingFormatter):
    """`TIME LOGGER: SENTENCE`."""

    def __init__(self) -> None:
        super().__init__("%(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return f"{stamp(int(record.created * 1_000))} {super().format(record)}"
