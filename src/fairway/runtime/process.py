"""A child process: a Python module that runs on its own, writes lines, and can be killed at any instant.

For demonstrations and crash campaigns, which show how a process dies. The child sees the modules that this process
sees, has no stdin, and shares stderr, unless that goes to a file. Its lines come through a pipe. So lines that it wrote
whole are still read after a kill; half a line is not.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import Self

from fairway.errors import FairwayError

_CHUNK_BYTES = 1 << 16


class ChildSilent(FairwayError):
    """The child wrote nothing for longer than its caller waits."""


class Child:
    """A Python module in a process of its own. Leaving its `with` kills the process."""

    def __init__(self, module: str, *arguments: str, errors_to: Path | None = None) -> None:
        """`errors_to`: the file that gets the child's stderr, appended."""
        path = os.pathsep.join(entry for entry in sys.path if entry)
        with nullcontext() if errors_to is None else errors_to.open("ab") as errors:
            self._process = subprocess.Popen(  # noqa: S603  our own interpreter, and no shell
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # Ctrl-C is for this process; leaving the `with` ends the child
            )
        stdout = self._process.stdout
        self._fd = stdout.fileno() if stdout is not None else -1
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._fd, selectors.EVENT_READ)
        self._unread = b""
        self._is_at_end = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def line(self, *, timeout_s: float) -> str | None:
        """The next whole line, without its end; None when there are no more. `ChildSilent` if none comes in time."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._unread and not self._is_at_end:
            if not self._selector.select(max(deadline - time.monotonic(), 0)):
                raise ChildSilent(f"process {self.pid} said nothing for {timeout_s:g} s: see its messages above")
            data = os.read(self._fd, _CHUNK_BYTES)
            self._unread += data
            self._is_at_end = not data
        line, newline, rest = self._unread.partition(b"\n")
        if not newline:
            return None
        self._unread = rest
        return line.decode("utf-8", "replace")

    def kill(self) -> None:
        """Send SIGKILL, and wait for the end: no handler runs, nothing is flushed, the child's locks are free."""
        self._process.kill()
        self._process.wait()

    def terminate(self) -> None:
        """Send SIGTERM. A child that has ended already is fine."""
        self._process.terminate()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait(self, *, timeout_s: float) -> int:
        """The exit status, once the child has ended by itself; negative is the signal that ended it."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise ChildSilent(f"process {self.pid} has not ended after {timeout_s:g} s") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()
        self._selector.close()
        if self._process.stdout is not None:
            self._process.stdout.close()
