"""The machine that a program runs on: its environment, its signals, its free ports, its keyboard, its limits.

Programs that handle messages use this module, and so do the command line, the outbox and the Spark jobs. It works
wherever the client works, and servers do not need it.

`Ending` is the request to end: by a signal, or by a call. `forks` tells a forked child from its parent, whose work the
child must not continue. `free_port` finds a port for a server that needs the same one after a restart, or whose address
others get beforehand.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final

from fairway.errors import FairwayError


class _Lineage:
    """How often this process and its ancestors have forked since the first process."""

    __slots__ = ("forks",)

    def __init__(self) -> None:
        self.forks = 0

    def fork(self) -> None:
        self.forks += 1


_lineage = _Lineage()


def forks() -> int:
    """A number that changes with every fork. Cheap: callers ask with every message."""
    return _lineage.forks


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_lineage.fork)


@functools.cache
def spare_the_collector() -> None:
    """Take all objects that exist so far out of the garbage collector's work; once.

    A Python worker of Spark forks for every task slot and collects at the end of each. With its imported modules, that
    costs 30 ms of a task.
    """
    gc.freeze()


# Below the ports that kernels give to connections: a port from there may be taken by anybody's next connection.
_FIRST, _LAST = 10_000, 30_000
_ATTEMPTS_MAX = 1_000
_RESERVED_MAX = 64  # ports that a process keeps reserved; a server listens long before so many others are reserved

_reserved: Final[deque[int]] = deque()  # file descriptors of bound sockets


def free_port() -> int:
    """Return a port where nobody listens, and that no other call returns, in this process or another.

    The port stays bound by a socket that permits the address to be reused. A server that permits reuse too can listen
    there. Another `free_port` cannot take the port, because it permits reuse only after it has bound one.
    """
    for _ in range(_ATTEMPTS_MAX):
        with socket.socket() as probe:
            port = random.randint(_FIRST, _LAST)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _reserved.append(probe.detach())
            if len(_reserved) > _RESERVED_MAX:
                os.close(_reserved.popleft())
            return port
    raise FairwayError(f"no free port was found between {_FIRST} and {_LAST}")


_KEY_LOOK_S = 0.1  # between two checks whether anybody still listens to keys


def environment() -> Mapping[str, str]:
    """The environment variables."""
    return os.environ


def suggest(name: str, value: str) -> None:
    """Set an environment variable for child processes, unless it is set already."""
    os.environ.setdefault(name, value)


def sleep(seconds: float) -> None:
    """Wait; Ctrl-C ends the wait."""
    time.sleep(max(seconds, 0.0))


_ENDING = (signal.SIGTERM, signal.SIGINT)
_listening: list[Ending] = []
_handlers: dict[signal.Signals, Any] = {}  # as they were before the first listener


def _ask_all(_number: int, _frame: FrameType | None) -> None:
    _restore_handlers()
    for ending in _listening:
        ending.ask()


def _restore_handlers() -> None:
    for number, handler in _handlers.items():
        signal.signal(number, handler)
    _handlers.clear()


class Ending:
    """Whether the program is asked to end: by a signal, or by `ask`. A second signal has its usual effect."""

    def __init__(self) -> None:
        self._asked = threading.Event()

    @property
    def is_asked(self) -> bool:
        return self._asked.is_set()

    def ask(self) -> None:
        self._asked.set()

    def wait(self, timeout_s: float) -> bool:
        """Whether the program was asked to end within the timeout."""
        return self._asked.wait(timeout_s)

    def on_signals(self) -> Callable[[], None]:
        """Listen to SIGTERM and SIGINT; call the returned function to stop. Outside the main thread this does nothing:
        signals belong to the main thread.

        One signal reaches all that listen, such as candidates on one loop. The first listener changes the signal
        handlers. They are restored when the last one has left, or when a signal came. So the order in which listeners
        end does not matter.
        """
        if threading.current_thread() is not threading.main_thread():
            return lambda: None
        if not _handlers and not _listening:
            _handlers.update({number: signal.getsignal(number) for number in _ENDING})
            for number in _ENDING:
                signal.signal(number, _ask_all)
        _listening.append(self)

        def leave() -> None:
            _listening.remove(self)
            if not _listening:
                _restore_handlers()

        return leave


@contextmanager
def asked_to_end() -> Iterator[Ending]:
    """Turn Ctrl-C, SIGTERM and a closed terminal into a request to end: a client that dies in the middle of a write
    loses that write. A second Ctrl-C or SIGTERM has its usual effect."""
    ending = Ending()
    restore = ending.on_signals()
    hangup = getattr(signal, "SIGHUP", None)  # absent on Windows
    before = None if hangup is None else signal.signal(hangup, lambda _number, _frame: ending.ask())
    try:
        yield ending
    finally:
        restore()
        if hangup is not None:
            signal.signal(hangup, before)


@contextmanager
def ended_by_key(ending: Ending, key: str) -> Iterator[None]:
    """Let a key ask the program to end, if it is in the foreground of a terminal. Ctrl-C works as before."""
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
    """The descriptor of a terminal that this process may read; reading would stop a job in the background."""
    if sys.platform == "win32" or not sys.stdin.isatty():
        return None
    descriptor = sys.stdin.fileno()
    try:
        return descriptor if os.tcgetpgrp(descriptor) == os.getpgrp() else None
    except OSError:  # a terminal of another session, as after `setsid`: it has no foreground for this process
        return None


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
    """Free space on the disk of the path, or of its nearest existing parent."""
    return shutil.disk_usage(_nearest(path)).free


def may_write(path: str | Path) -> bool:
    """Whether this user may write to the directory, or make it."""
    place = _nearest(path)
    return place.is_dir() and os.access(place, os.W_OK | os.X_OK)


def _nearest(path: str | Path) -> Path:
    """The path itself, or its nearest existing parent, as far as this user may see."""
    place = Path(path).absolute()
    for each in (place, *place.parents):
        with suppress(OSError):  # a parent that this user may not enter, or a name that is too long
            if each.exists():
                return each
    return Path(place.anchor)


def descriptors_max() -> int | None:
    """The hard limit of descriptors of a process; None: this system does not say."""
    if sys.platform == "win32":
        return None
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def can_serve() -> bool:
    """Whether a broker runs here: it needs Linux or macOS."""
    return sys.platform != "win32"


def python_version() -> tuple[int, int, int]:
    return sys.version_info[0], sys.version_info[1], sys.version_info[2]
