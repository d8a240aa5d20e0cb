"""A child process: its lines, its end, its death."""

from __future__ import annotations

import signal

import pytest

from fairway.runtime.process import Child, ChildSilent


def test_lines_come_whole_and_end() -> None:
    with Child("base64", "-t") as child:
        lines = []
        while (line := child.line(timeout_s=30)) is not None:
            lines.append(line)
        assert lines
        assert child.wait(timeout_s=30) == 0


def test_silence_is_an_error() -> None:
    with Child("http.server", "--bind", "127.0.0.1", "0") as child:
        child.line(timeout_s=30)
        with pytest.raises(ChildSilent, match=f"process {child.pid} said nothing for 0.01 s"):
            child.line(timeout_s=0.01)
        with pytest.raises(ChildSilent, match=f"process {child.pid} has not ended"):
            child.wait(timeout_s=0.01)
        child.kill()
        assert child.line(timeout_s=30) is None
        assert child.wait(timeout_s=30) == -signal.SIGKILL


def test_a_child_that_is_asked_to_end_ends() -> None:
    with Child("http.server", "--bind", "127.0.0.1", "0") as child:
        child.line(timeout_s=30)
        lives = [child.is_alive]
        child.terminate()
        assert child.wait(timeout_s=30) == -signal.SIGTERM
        lives.append(child.is_alive)
        assert lives == [True, False]
        child.terminate()
