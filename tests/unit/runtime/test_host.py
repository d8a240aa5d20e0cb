"""The machine as the command line sees it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from fairway.runtime import host


def test_room_and_permission_of_what_is_not_there_yet(tmp_path: Path) -> None:
    there = host.free_bytes(tmp_path)
    assert abs(host.free_bytes(tmp_path / "a" / "b") - there) < 1 << 30
    assert host.may_write(tmp_path / "a" / "b")
    (tmp_path / "file").write_text("")
    assert not host.may_write(tmp_path / "file")
    assert not host.may_write(tmp_path / "file" / "below")


def test_bounds_and_versions() -> None:
    most = host.descriptors_max()
    assert most is None or most > 0
    assert host.python_version() >= (3, 11)
    assert host.environment()["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_asks_for_the_end_and_is_itself_again_afterwards(number: int) -> None:
    before = signal.getsignal(number)
    with host.asked_to_end() as ending:
        assert not ending.wait(0)
        os.kill(os.getpid(), number)
        assert ending.wait(10)
    assert signal.getsignal(number) == before
