"""A broker in a process of its own, and the command line, called as a user calls it.

Verbs run in this process, which saves a start of Python for each; where the process itself matters (signals, a blocked
import) `spawn` gives one.
"""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

import fairway
from fairway.__main__ import app
from fairway.runtime.process import Child
from tests.tidy.source import ROOT

READY_S = 60.0


@dataclass(frozen=True)
class Cli:
    """The command line, with a broker to speak to."""

    url: str

    def run(self, *arguments: str, status: int = 0, stdin: bytes = b"", **variables: str) -> str:
        """What it printed on stdout; the status is checked."""
        return self.both(*arguments, status=status, stdin=stdin, **variables)[0]

    def fails(self, *arguments: str, status: int) -> str:
        """What it said on stderr."""
        return self.both(*arguments, status=status)[1]

    def both(self, *arguments: str, status: int = 0, stdin: bytes = b"", **variables: str) -> tuple[str, str]:
        environment = {"FAIRWAY_URL": self.url, "COLUMNS": "160", "TERM": "dumb", **variables}
        result = CliRunner().invoke(app, list(arguments), input=stdin, env=environment)
        assert result.exit_code == status, f"exit {result.exit_code}\n{result.stdout}\n{result.stderr}"
        return result.stdout, result.stderr

    def json(self, *arguments: str, status: int = 0) -> Any:
        return json.loads(self.run(*arguments, "--json", status=status))

    def lines(self, *arguments: str) -> list[Any]:
        """A line of JSON for each message."""
        return [json.loads(line) for line in self.run(*arguments, "--json").splitlines()]

    @contextmanager
    def client(self) -> Iterator[fairway.Client]:
        with fairway.connect(self.url) as client:
            yield client


@contextmanager
def up(data: Path, *options: str) -> Iterator[tuple[Child, str]]:
    """`fairway up`, ready: the process and its URL."""
    with Child("fairway", "up", "--data", str(data), "--port", "0", *options) as child:
        ready = re.search(r"ready at (fairway://[\d.]+:\d+)", child.line(timeout_s=READY_S) or "")
        assert ready
        yield child, ready[1]


@contextmanager
def spawn(url: str, *arguments: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """The command as a process of its own, with pipes."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fairway", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "FAIRWAY_URL": url, "PYTHONUNBUFFERED": "1", **variables},
    )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def on_terminal(url: str, *arguments: str, status: int = 0, columns: int = 200, **variables: str) -> str:
    """What the command writes to a terminal that is its stdout and its stderr."""
    master, slave = pty.openpty()
    variables = {
        "PYTHONPATH": str(ROOT / "src"),
        "FAIRWAY_URL": url,
        "TERM": "xterm",
        "COLUMNS": str(columns),
        **variables,
    }
    command = [sys.executable, "-m", "fairway", *arguments]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=slave, stderr=slave, env={**os.environ, **variables}
    )
    os.close(slave)
    written = bytearray()
    with process:
        while True:
            try:
                data = os.read(master, 65_536)
            except OSError:  # so Linux says that nobody has the other end any more
                break
            if not data:
                break
            written += data
        os.close(master)
    shown = written.decode("utf-8", "surrogateescape")
    assert process.returncode == status, f"exit {process.returncode}\n{shown!r}"
    return shown
