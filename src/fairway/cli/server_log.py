"""The log of a server: lines on stderr, each with the time in UTC, for all roles.

The line that says a server is ready goes to stdout alone, without a time and as its first line: programs that start
servers wait for it, and a person at a terminal reads it once. A sentence about why a server does not start is an answer
to whoever typed the command, and has no time; from the moment that the server is ready everything on stderr has one.
"""

from __future__ import annotations

import logging

from fairway.world import terminal
from fairway.world.clock import RealClock
from fairway.world.log_format import TimedFormatter, stamp

_state = {"is_on": False}


def ready(sentence: str) -> None:
    """The server is ready: say so on stdout, and begin the log."""
    terminal.say(sentence)
    begin()


def begin() -> None:
    """From now on warnings of the libraries, and the error that ends the process, have a time, too."""
    if not _state["is_on"]:
        _state["is_on"] = True
        handler = logging.StreamHandler()
        handler.setFormatter(TimedFormatter())
        logging.getLogger("fairway").addHandler(handler)


def is_on() -> bool:
    """Whether a server of this process has become ready."""
    return _state["is_on"]


def line(sentence: str) -> None:
    """One event, with the time."""
    terminal.say(f"{stamp(RealClock().wall_ms())} {sentence}", err=True)
