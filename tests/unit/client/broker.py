"""A broker in a process of its own, that tests may stop, kill and start again at the same address."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fairway.runtime.process import Child
from tests.tidy.source import ROOT

READY_S = 60.0
WAIT_S = 30.0  # for anything that should take a moment: a failing test ends, a slow machine does not fail it
READY = re.compile(r"ready (\d+)")


class Running:
    """One data directory and one port, through as many lives as a test wants."""

    def __init__(self, data: Path, keep_bytes: int | None = None) -> None:
        self._data = data
        self._keeping = [] if keep_bytes is None else [str(keep_bytes)]
        self.port = 0
        self.url = ""
        self._child: Child | None = None

    def start(self) -> None:
        self._child = Child("tests.crash.broker_server", str(self._data), str(self.port), *self._keeping)
        ready = READY.fullmatch(self._child.line(timeout_s=READY_S) or "")
        assert ready
        self.port = int(ready[1])
        self.url = f"fairway://127.0.0.1:{self.port}"

    @property
    def is_running(self) -> bool:
        return self._child is not None

    def stop(self) -> None:
        """Cleanly."""
        assert self._child is not None
        os.kill(self._child.pid, signal.SIGTERM)
        assert self._child.wait(timeout_s=WAIT_S) == 0
        self.kill()

    def kill(self) -> None:
        """`kill -9`."""
        if self._child is not None:
            self._child.__exit__(None, None, None)
            self._child = None

    def suspend(self) -> None:
        """It lives, and does nothing."""
        assert self._child is not None
        os.kill(self._child.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._child is not None
        os.kill(self._child.pid, signal.SIGCONT)


@contextmanager
def running(data: Path, keep_bytes: int | None = None) -> Iterator[Running]:
    broker = Running(data, keep_bytes)
    try:
        broker.start()
        yield broker
    finally:
        broker.kill()


def run_program(source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A program of a user's, from its beginning to the interpreter's end."""
    return subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", source, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
