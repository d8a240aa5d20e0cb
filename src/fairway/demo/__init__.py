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

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    Update: TypeAlias = Callable[[RenderableType, bool], None]


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
