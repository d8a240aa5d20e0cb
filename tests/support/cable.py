"""A cable to a server on loopback, that can be cut or frozen: what lies between a program and the rest of the world."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self


class Cable:
    """Listens on a port of its own and passes on to another. `cut`: connections break and none are made; `freeze`:
    they stay, and nothing gets through, or nothing in one direction, so that either side only notices by waiting. What
    was sent meanwhile arrives when it is mended, as it does where packets are lost and sent again."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._to_port = port
        self._listening = socket.create_server((host, 0))
        self.port: int = self._listening.getsockname()[1]
        self._ends: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._is_whole = True
        self._there = _flowing()  # from who dials to who listens
        self._back = _flowing()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        with self._lock:
            self._is_whole = False
            for end in self._ends:
                _shut(end)
        self._thaw()

    def freeze(self, *, there: bool = True, back: bool = True) -> None:
        if there:
            self._there.clear()
        if back:
            self._back.clear()

    def mend(self) -> None:
        with self._lock:
            self._is_whole = True
        self._thaw()

    def _thaw(self) -> None:
        self._there.set()
        self._back.set()

    def close(self) -> None:
        self._listening.close()
        self.cut()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return  # closed
            self._there.wait()  # to connect takes both directions
            self._back.wait()
            self._join(near)

    def _join(self, near: socket.socket) -> None:
        far = socket.socket()
        with self._lock:
            try:
                if not self._is_whole:
                    raise ConnectionRefusedError
                far.connect(("127.0.0.1", self._to_port))
            except OSError:
                far.close()
                near.close()
                return
            self._ends |= {near, far}
        for source, target, flows in ((near, far, self._there), (far, near, self._back)):
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._pass, args=(source, target, flows), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, flows: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                flows.wait()
                target.sendall(data)
        _shut(target)
        with self._lock:
            self._ends.discard(source)
        source.close()


def _flowing() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
