"""A stretch of time as people write it: `90s`, `15m`, `2h`, `3d`."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Final

from fairway.errors import Misuse

HELP: Final = "90s, 15m, 2h, 3d"
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_SPAN: Final = re.compile(r"(\d+(?:\.\d+)?)([smhd])", re.ASCII)


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
        raise Misuse(f"{text!r} is no stretch of time: write {HELP}")
    return found
