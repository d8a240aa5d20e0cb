"""The demonstrations: `fairway demo`, `fairway demo cluster`, `fairway demo log`; and the two things that they share.

broker    a broker, a shop and a stream of orders
cluster   a cluster with ZooKeeper, and masters that are killed
log       a store that is killed, recovered, damaged and verified
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from fairway.runtime.clock import RealClock
from fairway.runtime.host import Ending

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    Update: TypeAlias = Callable[[RenderableType, bool], None]

TICK_S = 0.05
_SAY_S = 5.0  # between two tables, without a terminal


@contextmanager
def directory(data: Path | None) -> Iterator[Path]:
    """The directory that the user names, or a temporary one."""
    if data is not None:
        yield data
        return
    with tempfile.TemporaryDirectory(prefix="fairway-", ignore_cleanup_errors=True) as made:
        yield Path(made) / "data"


@contextmanager
def screen(out: Console) -> Iterator[Update]:
    """Yields a function of a view and whether it is due. A terminal draws each view over the last one; elsewhere only
    views that are due are printed."""
    from rich.live import Live

    if not out.is_terminal:
        yield lambda view, is_due: out.print(view) if is_due else None
        return
    with Live(console=out, auto_refresh=False) as live:
        yield lambda view, _is_due: live.update(view, refresh=True)


def say_tries(out: Console, sentence: str, tries: dict[str, str]) -> None:
    """Print what to try in another shell: commands, and what each does."""
    out.print(f"{sentence} In another shell:")
    for command, what in tries.items():
        out.print(f"  {command:48} # {what}" if what else f"  {command}", soft_wrap=True)
    out.print()


def rounds(ending: Ending, seconds: float | None, look_s: float) -> Iterator[tuple[float, bool, bool]]:
    """Until asked to end, or for `seconds`: the seconds so far, whether to look at the servers, and whether what is
    seen is due to be printed where there is no terminal."""
    clock = RealClock()
    start_ns = looked_ns = said_ns = clock.monotonic_ns()
    while not ending.wait(TICK_S):
        now_ns = clock.monotonic_ns()
        elapsed_s = (now_ns - start_ns) / 1e9
        if seconds is not None and elapsed_s >= seconds:
            return
        is_look = now_ns - looked_ns >= look_s * 1e9
        looked_ns = now_ns if is_look else looked_ns
        is_due = is_look and now_ns - said_ns >= _SAY_S * 1e9
        said_ns = now_ns if is_due else said_ns
        yield elapsed_s, is_look, is_due
