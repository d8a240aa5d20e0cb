"""The machine that a command runs on, for the command line: its environment, its patience, its bounds.

Nothing here is needed by a server, and all of it works where only the client does.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from fairway.world.workers import Ending

_KEY_LOOK_S = 0.1  # between two looks at whether anybody still listens to keys


def environment() -> Mapping[str, str]:
    """The environment variables."""
    return os.environ


def suggest(name: str, value: str) -> None:
    """An environment variable for the programs that this one starts, unless somebody has set it."""
    os.environ.setdefault(name, value)


def sleep(seconds: float) -> None:
    """Wait; Ctrl-C ends it."""
    time.sleep(max(seconds, 0.0))


@contextmanager
def asked_to_end() -> Iterator[Ending]:
    """Ctrl-C, SIGTERM and a terminal that is closed, as something to ask for: a client that is cut off in the middle of
    a write has lost it. A second Ctrl-C or SIGTERM has its usual effect."""
    ending = Ending()
    restore = ending.on_signals()
    hangup = getattr(signal, "SIGHUP", None)  # Windows knows none
    before = None if hangup is None else signal.signal(hangup, lambda _number, _frame: ending.ask())
    try:
        yield ending
    finally:
        restore()
        if hangup is not None:
            signal.signal(hangup, before)


@contextmanager
def ended_by_key(ending: Ending, key: str) -> Iterator[None]:
    """A key that asks the program to end, where it is in the foreground of a terminal. Ctrl-C does as before."""
    descriptor = _keyboard()
    if descriptor is None:
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(descriptor)
    is_over = threading.Event()
    reading = threading.Thread(target=_watch_keys, args=(descriptor, key, ending, is_over), daemon=True)
    try:
        tty.setcbreak(descriptor)
        reading.start()
        yield
    finally:
        is_over.set()
        reading.join()
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _keyboard() -> int | None:
    """The descriptor of a terminal that this process may read; a job in the background would be stopped by that."""
    if sys.platform == "win32" or not sys.stdin.isatty():
        return None
    descriptor = sys.stdin.fileno()
    return descriptor if os.tcgetpgrp(descriptor) == os.getpgrp() else None


def _watch_keys(descriptor: int, key: str, ending: Ending, is_over: threading.Event) -> None:
    while not is_over.is_set():
        ready, _, _ = select.select([descriptor], [], [], _KEY_LOOK_S)
        if ready:
            pressed = os.read(descriptor, 1)
            if not pressed:
                return
            if pressed.decode(errors="replace").lower() == key:
                ending.ask()


def free_bytes(path: str | Path) -> int:
    """Room on the disk that holds the path, or would: of the nearest directory that exists."""
    return shutil.disk_usage(_nearest(path)).free


def may_write(path: str | Path) -> bool:
    """Whether this user may write there, or make it."""
    place = _nearest(path)
    return place.is_dir() and os.access(place, os.W_OK | os.X_OK)


def _nearest(path: str | Path) -> Path:
    """The path itself, or the nearest above it that exists, as far as this user may see."""
    place = Path(path).absolute()
    for each in (place, *place.parents):
        with suppress(OSError):  # a directory above it that this user may not enter, or a name that is too long
            if each.exists():
                return each
    return Path(place.anchor)


def descriptors_max() -> int | None:
    """How many descriptors a process may have in the end; None: this system does not say."""
    if sys.platform == "win32":
        return None
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def can_serve() -> bool:
    """Whether a broker runs here: it needs what Linux and macOS have."""
    return sys.platform != "win32"


def python_version() -> tuple[int, int, int]:
    return sys.version_info[0], sys.version_info[1], sys.version_info[2]
