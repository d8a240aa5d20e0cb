"""`fairway top` on narrow terminals, and its key."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from contextlib import suppress
from itertools import pairwise

import pytest
from rich.console import Console

from fairway.cli import top
from fairway.cli.top import GroupRow
from tests.tidy.source import ROOT
from tests.unit.cli.running import Cli

NUMBERS = ("in/s", "rate/s", "lag", "held", "wait", "oldest", "dead", "share", "cold")
WAIT_S = 60


def drawn(width: int, *rows: GroupRow) -> list[str]:
    console = Console(width=width, highlight=False, emoji=False)
    with console.capture() as capture:
        console.print(top.table("a broker", rows, width))
    return capture.get().splitlines()


def heading(lines: list[str]) -> list[str]:
    return lines[2].split()


def a_row(subject: str, group: str) -> GroupRow:
    return GroupRow(
        subject,
        group,
        consumers=1,
        rate_in=0.0,
        rate=0.0,
        lag=4_990,
        in_flight=0,
        waiting=0,
        dead=0,
        oldest_s=0.0,
        share=0.0,
        cold_share=0.0,
        weight=1.0,
        is_paused=False,
    )


LONG = a_row("flight.ticket.order.changed", "international-billing")


def test_a_wide_terminal_shows_everything() -> None:
    lines = drawn(160, LONG)
    assert heading(lines) == ["subject", "group", *NUMBERS]
    assert "wider" not in lines[-1]


@pytest.mark.parametrize("width", [80, 100, 120])
def test_a_narrow_terminal_has_whole_names_and_fewer_columns(width: int) -> None:
    lines = drawn(width, LONG, a_row("s", "g"))
    assert all(len(line) <= width for line in lines)
    assert "flight.ticket.order.changed  international-billing" in lines[4]
    assert "4,990" in lines[4]
    shown = heading(lines)[2:]
    assert "lag" in shown
    hidden = [name for name in NUMBERS if name not in shown]
    assert (f"a wider terminal shows {', '.join(hidden)}" in lines[-1]) == bool(hidden)


def test_the_least_important_columns_go_first() -> None:
    shown = [heading(drawn(width, LONG))[2:] for width in range(130, 40, -1)]
    for wide, narrow in pairwise(shown):
        assert set(narrow) <= set(wide)
    order = [name for wide, narrow in pairwise(shown) for name in wide if name not in narrow]
    assert order == ["cold", "share", "in/s", "wait", "held", "dead", "oldest", "rate/s"][-len(order) :]


def test_names_are_cut_only_where_no_column_is_left_to_leave_out() -> None:
    lines = drawn(50, LONG)
    assert heading(lines) == ["subject", "group", "lag"]
    assert "…" in lines[4]
    assert "4,990" in lines[4]


@pytest.mark.parametrize("key", ["q", "Q"])
def test_a_key_ends_it(cli: Cli, key: str) -> None:
    outer, inner = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "fairway", "top", "--interval-s", "0.1"],
        stdin=inner,
        stdout=inner,
        stderr=inner,
        preexec_fn=lambda: os.login_tty(inner),  # noqa: PLW1509  the terminal's foreground, as in a shell
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "FAIRWAY_URL": cli.url, "TERM": "xterm", "COLUMNS": "80"},
    )
    os.close(inner)
    try:
        said = b""
        while b"sync" not in said:
            said += os.read(outer, 4_096)
        os.write(outer, b"x")
        os.write(outer, key.encode())
        with suppress(OSError):  # how Linux says that the other side has closed it
            while os.read(outer, 4_096):
                pass
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(outer)


def test_a_terminal_that_is_not_its_own_has_no_key(cli: Cli) -> None:
    """As after `setsid`, or below a supervisor: the process has no foreground to be in. A signal ends it."""
    outer, inner = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "fairway", "top", "--interval-s", "0.1"],
        stdin=inner,
        stdout=inner,
        stderr=inner,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "FAIRWAY_URL": cli.url, "TERM": "xterm", "COLUMNS": "80"},
    )
    os.close(inner)
    try:
        said = b""
        with suppress(OSError):  # the other side has closed it
            while b"sync" not in said:
                said += os.read(outer, 4_096)
        assert b"sync" in said, said.decode()
        process.terminate()
        with suppress(OSError):
            while os.read(outer, 4_096):
                pass
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(outer)
