"""The console script `fairway`: Ctrl-C ends it quietly from its first moment on.

To import the command line takes up to half a second. A KeyboardInterrupt meanwhile would show a traceback of whichever
import is under way. So the script is a package of its own, which imports nothing of Fairway before Ctrl-C is seen to.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

INTERRUPTED = 130  # what a shell says of a program that SIGINT has ended


def main() -> None:
    """What the console script calls."""
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a job in the background ignores it
    if is_ours:
        signal.signal(signal.SIGINT, _end)
    from fairway.__main__ import main as run

    if is_ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run()
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


def _end(_number: int, _frame: FrameType | None) -> None:
    """Nothing has begun that would have to be finished."""
    os._exit(INTERRUPTED)
